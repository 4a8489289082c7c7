"""ScienceWorld's engine behind the protocol; the stock wrapper is the reference."""

from __future__ import annotations

import json
import os
import signal
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("scienceworld", reason="the scienceworld extra is not installed")
from envs.scienceworld.jvm import find_java

if find_java() is None:
    pytest.skip("there is no java", allow_module_level=True)

from envs.chat import chat_format
from envs.meter import Meter
from envs.pool import Pool
from envs.prompts import Prompt
from envs.protocol import EnvFailure, EnvSpec, Observation, Task
from envs.rollout import Job, Limits, Player
from envs.scienceworld import gold, jvm, tasks, vocabulary
from envs.scienceworld.engine import ScienceWorld, make
from envs.tokenizer import word_tokenizer
from jaxcredit import credit
from jaxcredit.batching import batch_episodes
from jaxcredit.episodes import Signals, Status
from models.sampler import Work

# One solution of each task, as the engine gave it.
GOLD: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "golden" / "scienceworld_gold.json").read_text()
)
# Seconds: Java starts slowly on a busy machine, and only one test is about deadlines.
PATIENT = 600.0
SOME = ["find-animal/0", "identify-life-stages-2/0", "power-component/0"]


@pytest.fixture(scope="module")
def env() -> ScienceWorld:
    return make({})


@pytest.fixture(scope="module", autouse=True)
def _quick_java() -> Iterator[None]:
    """Short lives do not repay the second compiler: less than half of Java's time without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")
        yield


@pytest.fixture(autouse=True)
def _workers_find_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def seen(answer: Observation | EnvFailure) -> Observation:
    assert isinstance(answer, Observation), answer
    return answer


def play(env: ScienceWorld, task: str, actions: list[str]) -> list[Observation]:
    found = [env.reset(task)]
    for action in actions:
        if found[-1].done:
            break
        found.append(env.step(action))
    return found


# What the engine says


@pytest.mark.slow
def test_the_table_of_tasks_is_the_engines() -> None:
    interface = jvm.shared(jvm.OPTIONS, "easy").interface()
    assert sorted(interface.call("getTaskNames")) == sorted(tasks.KINDS)
    for kind in tasks.KINDS:
        interface.call("load", kind, 0, "easy", False)
        for split, name in zip(tasks.SPLITS, ("Train", "Dev", "Test"), strict=True):
            listed = list(interface.call(f"getVariations{name}"))
            assert listed == list(tasks.variations(kind, split)), (kind, split)
    known = str(interface.call("getPossibleSimplifications")).split(", ")
    assert {*known, "easy"} == set(tasks.SIMPLIFICATIONS)


@pytest.mark.slow
def test_the_lean_step_agrees_with_the_stock_wrapper(
    env: ScienceWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scienceworld import ScienceWorldEnv

    java = jvm.find_java()
    assert java is not None
    monkeypatch.setenv("PATH", os.path.dirname(java), prepend=os.pathsep)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", " ".join(jvm.FIXED), prepend=" ")
    stock = ScienceWorldEnv("", envStepLimit=1000)
    for task in ("find-animal/0", "power-component/0"):  # it lists all actions every step: slow
        kind, variation = tasks.parse(task)
        stock.load(kind, variation, "easy")
        first = env.reset(task)
        assert first.text.split() == stock.look().split()
        assert first.info.goal == stock.get_task_description()
        for action in GOLD[task]:
            text, _, done, info = stock.step(action)
            mine = env.step(action)
            assert mine.text.split() == text.split()
            assert mine.done == done
            assert round(100 * mine.info.progress) == info["score"]
            if done:
                break
        assert mine.info.success
        assert mine.reward == 1.0
    stock.close()


def test_admissible_actions_are_listed_on_demand(env: ScienceWorld) -> None:
    assert env.reset("find-plant/0").info.admissible == []
    listed = make({"admissible": True}).reset("find-plant/0").info.admissible
    assert listed == sorted(listed)
    assert "go to kitchen" in listed or "teleport to kitchen" in listed
    assert len(listed) > 20


def test_a_lost_game_is_over_with_no_progress(env: ScienceWorld) -> None:
    for by in ("score", "subgoals"):
        lost = make({"progress": by})
        lost.reset("find-animal/0")
        lost.step("go to kitchen")
        end = lost.step("focus on agent")
        assert end.done
        assert not end.info.success
        assert (end.reward, end.info.progress) == (0.0, 0.0)
        assert end.info.valid
        with pytest.raises(RuntimeError, match="the episode is over"):
            lost.step("look around")
        assert not lost.reset("find-animal/0").done


@pytest.mark.parametrize("by", ["score", "subgoals"])
def test_progress_is_a_fraction_that_ends_at_1(by: str) -> None:
    for task in SOME:
        found = [o.info.progress for o in play(make({"progress": by}), task, GOLD[task])]
        assert all(0 <= x <= 1 for x in found)
        assert found == sorted(found), "gold play loses nothing"
        assert found[-1] == 1.0
        assert found[0] < 0.5
        assert len(set(found)) > 2 or by == "subgoals"


def test_input_that_cannot_be_read_is_not_valid(env: ScienceWorld) -> None:
    env = make({"simplifications": []})
    env.reset("chemistry-mix/0")
    assert not env.step("dance with the picture").info.valid
    asked = env.step("open door")
    assert asked.info.valid
    assert "0:\topen door" in asked.text
    assert not env.step("look around").info.valid  # a number was asked for
    env.step("open door")
    answer = env.step("1")
    assert (answer.info.valid, answer.text) == (True, "The door is now open.")
    assert not env.step("go").info.success


def test_state_keys(env: ScienceWorld) -> None:
    start = env.reset("boil/0").info.state
    away = env.step("go to kitchen").info.state
    back = env.step("go to hallway").info.state
    assert len({start, away}) == 2
    assert start == back
    taken = env.step("pick up picture")
    assert env.step("look around").info.state == taken.info.state, "the answer is no part of it"
    assert env.step("put down picture").info.state != taken.info.state
    assert env.reset("boil/0").info.state == start
    # The subgoals belong to the state: nothing else shows what the agent focused on.
    plain = play(env, "find-non-living-thing/0", GOLD["find-non-living-thing/0"])
    at = next(k for k, a in enumerate(GOLD["find-non-living-thing/0"]) if a.startswith("focus"))
    assert plain[at].info.state != plain[at + 1].info.state


def test_surroundings_are_shown_on_demand() -> None:
    env = make({"surroundings": True})
    first, then = env.reset("boil/0"), env.step("open door to kitchen")
    for text in (first.text, then.text):
        assert "called the hallway" in text
        assert "In your inventory" in text
    assert then.text.startswith("The door is already open.")


def test_wrong_use_is_told(env: ScienceWorld) -> None:
    with pytest.raises(ValueError, match="did you mean 'surroundings'"):
        make({"surounding": True})
    with pytest.raises(ValueError, match="score or subgoals"):
        make({"progress": "checks"})
    with pytest.raises(ValueError, match="boil has the variations 0 to 29"):
        env.reset("boil/30")
    with pytest.raises(RuntimeError, match="java did not start"):
        make({"jvm": ["-Xmx1"]}).reset("boil/0")


# Determinism, and several episodes in one process


# Tasks whose answers differ from process to process under default hashes: paint, animals, circuits,
# thermometers.
DELICATE = [
    f"{kind}/0"
    for kind in (
        "chemistry-mix-paint-tertiary-color",
        "identify-life-stages-2",
        "power-component",
        "use-thermometer",
    )
]


@pytest.mark.parametrize("chosen", [DELICATE, pytest.param([*GOLD], marks=pytest.mark.slow)])
def test_equal_actions_give_equal_answers_interleaved_and_in_another_process(
    chosen: list[str],
) -> None:
    alone = {task: play(make({}), task, GOLD[task]) for task in chosen}
    side_by_side = [make({"jvm": [*jvm.OPTIONS, "-Xss4m"]}) for _ in chosen]  # another process
    found = {task: [env.reset(task)] for env, task in zip(side_by_side, chosen, strict=True)}
    for turn in range(max(len(GOLD[task]) for task in chosen)):
        for env, task in reversed(list(zip(side_by_side, chosen, strict=True))):
            if turn < len(GOLD[task]) and not found[task][-1].done:
                found[task].append(env.step(GOLD[task][turn]))
    assert len({env.java_pid for env in side_by_side}) == 1
    assert found == alone
    assert all(rows[-1].info.success for rows in found.values())


# Gold paths


def test_a_gold_path_is_made_once(env: ScienceWorld, tmp_path: Path) -> None:
    java = jvm.shared(jvm.OPTIONS, "easy")
    running = env.reset("find-plant/0")
    first = gold.gold_path(java, "find-non-living-thing/0", "easy", tmp_path)
    assert env.step("look around").info.state == running.info.state, "no episode was disturbed"
    (file,) = tmp_path.rglob("0.json")
    assert file.parts[-3:] == ("easy", "find-non-living-thing", "0.json")
    file.write_text(json.dumps(["look around", *first]))
    again = gold.gold_path(java, "find-non-living-thing/0", "easy", tmp_path)
    assert again == ("look around", *first)
    shown = make({"gold": str(tmp_path)})
    now = shown.reset("find-non-living-thing/0", expert=True)
    while not now.done:
        assert now.info.expert is not None
        advice = now.info.expert
        assert shown.step("inventory").info.expert == advice, "a detour does not lose the path"
        now = shown.step(advice)
    assert now.info.success
    assert shown.reset("find-non-living-thing/0").info.expert is None


def replay(pool: Pool, paths: Mapping[str, list[str]]) -> dict[str, Observation]:
    live = dict(enumerate(paths))
    for ticket, task in live.items():
        pool.reset(ticket, task)
    answers = pool.wait(live)
    found, turn = {}, 0
    while live:
        for ticket, task in list(live.items()):
            found[task] = seen(answers[ticket])
            if found[task].done or turn == len(paths[task]):
                pool.close(ticket)
                del live[ticket]
            else:
                pool.step(ticket, paths[task][turn])
        answers = pool.wait(live)
        turn += 1
    return found


def test_gold_paths_win_through_the_pool() -> None:
    short = {task: path for task, path in GOLD.items() if len(path) <= 13}
    assert len(short) >= 9
    with Pool(EnvSpec("scienceworld"), 1, PATIENT) as pool:
        found = replay(pool, short)
    assert [
        t for t, end in found.items() if not (end.info.success and end.info.progress == 1)
    ] == []


@pytest.mark.slow
def test_30_of_30_gold_paths_made_here_win_through_the_pool(tmp_path: Path) -> None:
    options = {"gold": str(tmp_path), "progress": "subgoals"}
    with Pool(EnvSpec("scienceworld", options), 2, PATIENT) as pool:
        names = [f"{kind}/{tasks.variations(kind, 'dev')[0]}" for kind in tasks.KINDS]
        for ticket, name in enumerate(names):
            pool.reset(ticket, name, expert=True)
        answers = {t: seen(o) for t, o in pool.wait(range(30)).items()}
        won = set()
        while answers:
            for ticket, now in list(answers.items()):
                if now.done or now.info.expert is None:
                    won |= {names[ticket]} if now.info.success else set()
                    del answers[ticket]
                else:
                    pool.step(ticket, now.info.expert)
            answers = {t: seen(o) for t, o in pool.wait(answers).items()}
    assert won == set(names)
    assert len(list(tmp_path.rglob("*.json"))) == 30


@pytest.mark.slow
def test_few_words_of_development_games_are_unknown() -> None:
    known, env, met = set(vocabulary.words()), make({"surroundings": True}), []
    for kind in tasks.KINDS:
        answers = [env.reset(f"{kind}/{tasks.variations(kind, 'dev')[0]}")]
        for room in ("kitchen", "outside", "workshop", "art studio"):
            answers.append(env.step(f"teleport to {room}"))
        met += [w for o in answers for w in vocabulary.split(f"{o.text} {o.info.goal}")]
    assert len(met) > 20_000
    assert sum(word not in known for word in met) < 0.01 * len(met)


# Faults


SPOILED = EnvSpec("scienceworld_faults:make")


def test_garbage_costs_its_episode_alone() -> None:
    with Pool(SPOILED, 1, PATIENT) as pool:
        pool.reset(0, "find-plant/0")
        pool.wait([0])
        pids = pool.pids
        for count, word in enumerate(("getScore", "step", "getGoalProgressStr"), start=1):
            pool.reset(count, "boil/0")
            assert seen(pool.wait([count])[count]).info.task_id == "boil/0"
            pool.step(count, f"garbage {word}")
            pool.step(0, "go to kitchen" if count % 2 else "go to hallway")
            answers = pool.wait([0, count])
            assert isinstance(answers[count], EnvFailure)
            assert seen(answers[0]).text.startswith("You move to the ")
        assert pool.pids == pids


def java_children(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = path.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        if name == "java" and int(fields.split()[1]) == pid:
            found.add(int(path.parent.name))
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_hang_is_ended_by_the_deadline_and_java_goes_with_its_worker() -> None:
    with Pool(SPOILED, 2, PATIENT) as pool:
        pool.reset(0, "find-plant/0")
        pool.reset(1, "boil/0")
        pool.wait([0, 1])
        (hung,), (well,) = (java_children(pool.worker_of(t) or 0) for t in (0, 1))
        pool._deadline = 2  # nothing else is in flight
        pool.step(0, "stop java")
        assert "no answer within 2 s" in str(pool.wait([0])[0])
        os.kill(hung, signal.SIGCONT)  # stopped, it cannot notice that its worker is gone
        pool._deadline = PATIENT
        pool.step(1, "go to kitchen")
        assert seen(pool.wait([1])[1]).text == "You move to the kitchen."
        pool.reset(0, "find-plant/0")
        assert seen(pool.wait([0])[0]).info.task_id == "find-plant/0"
    until = time.monotonic() + 10
    while not (gone(hung) and gone(well)) and time.monotonic() < until:
        time.sleep(0.1)
    assert gone(hung)
    assert gone(well)


TOKENIZER = word_tokenizer(vocabulary.words())
CHAT = chat_format(TOKENIZER)


class Scripted:
    """Answers turn t of a job with ``reply(group, replica, t)``; knows no weights."""

    def __init__(self, reply: Any, slots: int) -> None:
        self.slots, self.reply, self.work = slots, reply, Work()
        self.growing: dict[int, Any] = {}

    def reset(self, slot: int) -> None:
        self.growing.pop(slot, None)

    def extend(self, requests: Any) -> None:
        pass

    def start(self, requests: Any) -> None:
        self.growing |= requests

    def launch(self) -> None:
        pass

    def collect(self) -> Any:
        out, self.growing = self.growing, {}
        return {slot: self.respond(*key) for slot, (key, _) in out.items()}

    def respond(self, _: int, group: int, replica: int, turn: int) -> Any:
        ids = CHAT.encode(f"<action> {self.reply(group, replica, turn)} </action>")
        ids = np.append(ids, CHAT.end_id)
        return types.SimpleNamespace(ids=ids, logp=np.zeros(len(ids)), stop="stop")


def test_a_killed_jvm_costs_its_episodes_one_retry() -> None:
    names = ["find-animal/0", "find-plant/0", "find-living-thing/0", "find-non-living-thing/0"]
    starts = dict.fromkeys(range(4), 0)
    killed: list[int] = []
    with Pool(EnvSpec("scienceworld"), 2, PATIENT) as pool:

        def reply(group: int, replica: int, turn: int) -> str:
            starts[group] += turn == 0
            if group == 0 and turn == 2 and not killed:
                (pid,) = java_children(pool.worker_of(0) or 0)
                killed.extend(t for t in range(4) if pool.worker_of(t) == pool.worker_of(0))
                os.kill(pid, signal.SIGKILL)
            return GOLD[names[group]][turn]

        player = Player(
            CHAT,
            Prompt(template="bare", context="window", think=False, show_admissible=False),
            Limits(max_steps=12, max_context=4096, max_response=40),
        )
        jobs = [Job(Task(name, name[:-2]), group) for group, name in enumerate(names)]
        workers = set(pool.pids)
        meter = Meter()
        episodes = player.collect(Scripted(reply, 4), pool, jobs, meter=meter)
        assert set(pool.pids) == workers, "the worker outlives its Java process"
    assert meter.failures == {"retried": 2}
    assert len(killed) == 2
    assert [e.status for e in episodes] == [Status.SUCCESS] * 4
    assert starts == {group: 2 if group in killed else 1 for group in range(4)}
    assert all(step.progress <= 1 and step.valid for e in episodes for step in e.steps)


def test_credit_reads_progress_and_states_of_real_episodes() -> None:
    # Three attempts at one task: all of the gold path, its first two actions, only looking.
    path = GOLD["find-non-living-thing/0"]
    assert len(path) == 5
    looking = ["look around"] * 5
    plans = [path, path[:2] + looking[2:], looking]

    def reply(group: int, replica: int, turn: int) -> str:
        return plans[replica][turn]

    player = Player(
        CHAT,
        Prompt(template="bare", context="window", think=False, show_admissible=False),
        Limits(max_steps=5, max_context=4096, max_response=40),
    )
    jobs = [Job(Task("find-non-living-thing/0", "find"), 0, replica) for replica in range(3)]
    with Pool(EnvSpec("scienceworld"), 1, PATIENT) as pool:
        episodes = player.collect(Scripted(reply, 3), pool, jobs)  # type: ignore[arg-type]
    batch = batch_episodes(episodes, max_steps=5)
    progress = np.asarray(batch.progress)
    assert np.asarray(batch.outcome).tolist() == [1, 0, 0]
    assert progress[0, -1] == 1.0
    assert progress[0, -1] > progress[1, -1] >= progress[2, -1]
    state = np.asarray(batch.state)
    assert len({*state[:, 0], *state[2]}) == 1, "whoever only looks stays in the first state"
    assert state[0, :3].tolist() == state[1, :3].tolist()
    assert state[0, 2] != state[0, 0]
    method = credit.make("procredit")
    found, _ = jax.jit(method.estimate)(batch, Signals(), method.init())
    expected = 0.5 * np.diff(progress, axis=1)
    last = len(episodes[0].steps) - 1
    expected[0, last] += 1.0  # the outcome is the reward of the last turn
    np.testing.assert_allclose(np.asarray(found.step_reward), expected, atol=1e-6)
    method = credit.make("gigpo")
    found, _ = jax.jit(method.estimate)(batch, Signals(), method.init())
    assert found.step_advantage[0, 0] > found.step_advantage[2, 0], "one state, a better return"


def test_a_full_heap_is_told() -> None:
    envs = [make({"jvm": ["-Xmx24m", "-XX:+UseSerialGC"]}) for _ in range(20)]

    def fill() -> None:
        for number, env in enumerate(envs):
            env.reset(f"use-thermometer/{number}")

    with pytest.raises(jvm.JvmDied, match="raise -Xmx"):
        fill()


# Long play


def rss_mb(pid: int) -> float:
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    )


@pytest.mark.slow
def test_2000_steps_at_flat_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_TOOL_OPTIONS")  # as a run has it
    tasks_in_turn = [task for task in GOLD if "mendelian" not in task]
    rows = []
    with Pool(EnvSpec("scienceworld"), 1, PATIENT) as pool:
        steps, index, start = 0, 0, time.monotonic()
        while steps < 2000:
            for ticket in range(4):
                task = tasks_in_turn[index % len(tasks_in_turn)]
                index += 1
                pool.reset(ticket, task)
                seen(pool.wait([ticket])[ticket])
                for action in GOLD[task]:
                    pool.step(ticket, action)
                    steps += 1
                    if seen(pool.wait([ticket])[ticket]).done:
                        break
                pool.close(ticket)
            (worker,) = pool.pids
            (java,) = java_children(worker)
            rows.append((steps, rss_mb(worker), rss_mb(java)))
        seconds = time.monotonic() - start
    half = next(row for row in rows if row[0] >= 1000)
    last = rows[-1]
    with capsys.disabled():
        print(
            f"\nScienceWorld: {steps} steps, {index} episodes, {steps / seconds:.0f} steps/s; "
            f"worker {half[1]:.0f} -> {last[1]:.0f} MB, java {half[2]:.0f} -> {last[2]:.0f} MB"
        )
    assert last[1] - half[1] < 10
    assert last[2] - half[2] < 100
