"""The pool: interleaving, reuse, and faults that cost only their own episodes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from envs.pool import Pool, TaskMismatch
from envs.protocol import EnvFailure, EnvSpec, Observation

SPEC = EnvSpec("tests.test_envs_fake:make")


def children() -> set[int]:
    me = os.getpid()
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == me:
            found.add(int(path.parent.name))
    return found


def seen(answer: Observation | EnvFailure) -> Observation:
    assert isinstance(answer, Observation), answer
    return answer


def test_interleaved_episodes_and_no_jax_in_workers() -> None:
    before = children()
    with Pool(SPEC, 2) as pool:
        for ticket in range(6):
            pool.reset(ticket, f"task {ticket}")
        first = pool.wait(range(6))
        assert all("jax False" in seen(o).text for o in first.values())
        for n in (1, 2, 3):
            for ticket in range(0, 6, n):
                pool.step(ticket, "go")
            for ticket, answer in pool.wait(range(0, 6, n)).items():
                assert seen(answer).info.task_id == f"task {ticket}"
        assert seen(answer).text == "task 3 step 2"
        assert len(children() - before) == 2
    assert children() == before


def test_poll_gives_what_is_ready() -> None:
    with Pool(SPEC, 2) as pool:
        pool.reset(0, "a")
        pool.reset(1, "b")
        got: dict[int, Observation | EnvFailure] = {}
        until = time.monotonic() + 20
        while len(got) < 2 and time.monotonic() < until:
            got |= pool.poll(0.5)
        assert sorted(got) == [0, 1]
        assert pool.poll(0.0) == {}


def test_same_task_same_worker_and_tasks_spread() -> None:
    with Pool(SPEC, 2) as pool:
        for ticket in range(8):
            pool.reset(ticket, f"task {ticket // 4}")
        pids = [pool.worker_of(t) for t in range(8)]
        assert len(set(pids[:4])) == 1
        assert len(set(pids[4:])) == 1
        assert pids[0] != pids[4]
        pool.wait(range(8))


@pytest.mark.parametrize("fault", ["hang", "die", "kill"])
def test_a_lost_worker_costs_only_its_episodes(fault: str) -> None:
    before = children()
    with Pool(SPEC, 2, deadline_s=20) as pool:
        for ticket, task in enumerate(["a", "a", "b"]):
            pool.reset(ticket, task)
        pool.wait(range(3))
        pool._deadline = 0.7  # the start of an interpreter may be slow, the fault need not be
        if fault == "kill":
            pid = pool.worker_of(0)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            pool.step(0, "go")
        else:
            pool.step(0, fault)
        lost = pool.wait([0])[0]
        assert isinstance(lost, EnvFailure)
        assert lost.ticket == 0
        assert ("within 0.7 s" if fault == "hang" else "worker died") in lost.reason
        assert ("a last word" in lost.reason) == (fault == "die")
        pool._deadline = 20
        pool.step(1, "go")  # idle at the time of the fault, in the same worker
        pool.step(2, "go")
        answers = pool.wait([1, 2])
        assert isinstance(answers[1], EnvFailure)
        assert seen(answers[2]).text == "b step 1"
        pool.reset(0, "a")  # the replacement plays on
        assert seen(pool.wait([0])[0]).info.task_id == "a"
        assert len(pool.pids) == 2
    assert children() == before


def test_an_error_in_an_environment_spoils_one_episode() -> None:
    with Pool(SPEC, 1) as pool:
        pool.reset(0, "a")
        pool.reset(1, "a")
        pool.wait([0, 1])
        pids = pool.pids
        pool.step(0, "raise")
        pool.step(1, "go")
        answers = pool.wait([0, 1])
        assert answers[0] == EnvFailure(0, "OSError: out of order")
        assert seen(answers[1]).text == "a step 1"
        pool.step(0, "go")
        assert isinstance(pool.wait([0])[0], EnvFailure)
        pool.reset(0, "c")
        assert seen(pool.wait([0])[0]).info.task_id == "c"
        assert pool.pids == pids


def test_chatter_on_stdout_never_reaches_the_protocol() -> None:
    with Pool(SPEC, 1) as pool:
        pool.reset(0, "a")
        pool.wait([0])
        for n in (1, 2):
            pool.step(0, "chatter")
            assert seen(pool.wait([0])[0]).text == f"a step {n}"


def test_another_task_than_asked_for_is_an_error() -> None:
    with Pool(EnvSpec(SPEC.name, {"identity": "b"}), 1) as pool:
        pool.reset(0, "a")
        with pytest.raises(TaskMismatch, match=r"asked for task 'a'.*plays 'b'"):
            pool.wait([0])


def test_workers_are_replaced_by_age_and_memory() -> None:
    with Pool(SPEC, 1, max_episodes_per_worker=2) as pool:
        first = pool.pids
        pool.reset(0, "a")
        pool.reset(1, "a")
        pool.wait([0, 1])
        assert first[0] in pool.pids
        assert len(pool.pids) == 2
        pool.step(0, "go")
        assert seen(pool.wait([0])[0]).text == "a step 1"
        pool.close(0)
        pool.close(1)
        assert len(pool.pids) == 1
        assert pool.pids != first
    with Pool(SPEC, 1, max_rss_mb=70) as pool:
        first = pool.pids
        pool.reset(0, "a")
        pool.wait([0])
        assert pool.pids == first
        pool.step(0, "fat")
        pool.wait([0])
        pool.close(0)
        pool.reset(0, "a")
        assert seen(pool.wait([0])[0]).info.task_id == "a"
        assert len(pool.pids) == 1
        assert pool.pids != first


def test_wrong_use_is_told() -> None:
    with pytest.raises(ValueError, match="workers = 0"):
        Pool(SPEC, 0)
    with Pool(SPEC, 1) as pool:
        with pytest.raises(ValueError, match="call reset"):
            pool.step(0, "go")
        with pytest.raises(ValueError, match="waits for nothing"):
            pool.wait([4])
        pool.reset(0, "a")
        with pytest.raises(ValueError, match="still waits"):
            pool.step(0, "go")
        pool.close(0)
        assert pool.poll(0.2) == {}


def test_an_environment_that_cannot_be_built() -> None:
    with Pool(EnvSpec("nosuch"), 1) as pool:
        pool.reset(0, "a")
        answer = pool.wait([0])[0]
    assert isinstance(answer, EnvFailure)
    assert "neither built in (alfworld, scienceworld)" in answer.reason


def test_workers_that_cannot_start_end_the_run(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    broken.chmod(0o755)
    before = children()

    def insist() -> None:
        with Pool(EnvSpec(SPEC.name, {}, str(broken)), 1) as pool:
            for ticket in range(50):
                pool.reset(ticket, "a")
                pool.wait([ticket])

    with pytest.raises(RuntimeError, match="no such module"):
        insist()
    assert children() == before
