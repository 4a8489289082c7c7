"""Run folders, append-only rows, metrics, statistics and the doctor's checks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from launch import doctor
from launch.config import TrainConfig
from launch.errors import UserError
from launch.loading import validate
from launch.metrics import learning_curve, open_metrics
from launch.runs import append_rows, check_same_run, open_run, read_rows, resume_rows
from launch.statistics import mcnemar, paired, paired_bootstrap, wilson

ROOT = Path(__file__).resolve().parent.parent


def config(run: Path, **changes: object) -> TrainConfig:
    data = {"run": str(run), "policy": {"init": {}}, "credit": "grpo", **changes}
    return validate(TrainConfig, data, "test")


# Runs


def test_a_run_is_opened_again_by_the_same_config_only(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    run = open_run(config(folder), folder)
    assert not run.resumed
    run.close()
    before = (folder / "config.yaml").read_bytes()

    again = open_run(config(folder), folder)
    assert again.resumed
    again.close()
    assert (folder / "config.yaml").read_bytes() == before

    with pytest.raises(UserError) as caught:
        open_run(config(folder, seed=3, credit={"method": "gigpo"}), folder)
    message = str(caught.value)
    for word in ("seed: 0", "now says 3", "--set run=", "--set seed=0"):
        assert word in message
    assert (folder / "config.yaml").read_bytes() == before

    with pytest.raises(UserError, match=r"credit\.omega: \(absent\), the config now says 2"):
        open_run(config(folder, credit={"method": "grpo", "omega": 2}), folder)
    with pytest.raises(UserError, match=r'policy\.path: null, the config now says "p"'):
        open_run(config(folder, policy={"path": "p"}), folder)


def test_iterations_may_grow_but_not_shrink(tmp_path: Path) -> None:
    open_run(config(tmp_path / "a", iterations=5), tmp_path / "a").close()
    open_run(config(tmp_path / "a", iterations=7), tmp_path / "a").close()
    with pytest.raises(UserError, match="iterations: 7, the config now says 5; it may only grow"):
        open_run(config(tmp_path / "a", iterations=5), tmp_path / "a")


def test_operational_keys_and_the_folders_place_may_change(tmp_path: Path) -> None:
    open_run(config(tmp_path / "a"), tmp_path / "a").close()
    (tmp_path / "a").rename(tmp_path / "b")
    changed = config(tmp_path / "b", env={"workers": 7, "deadline_s": 3}, checkpoint={"keep": 9})
    assert open_run(changed, tmp_path / "b").resumed


def test_a_key_that_is_younger_than_the_run_may_be_off_but_not_on(tmp_path: Path) -> None:
    open_run(config(tmp_path / "a"), tmp_path / "a").close()
    stored = tmp_path / "a" / "config.yaml"
    text = stored.read_text(encoding="utf-8")
    stored.write_text(text.replace("judge: null\n", ""), encoding="utf-8")
    check_same_run(config(tmp_path / "a"), stored)
    asks = config(tmp_path / "a", judge={"url": "http://host/v1", "model": "wise"})
    with pytest.raises(UserError, match=r'judge\.model: \(absent\), the config now says "wise"'):
        check_same_run(asks, stored)
    with pytest.raises(UserError, match=r"credit\.std: \(absent\), the config now says null"):
        check_same_run(config(tmp_path / "a", credit={"method": "grpo", "std": None}), stored)


def test_a_free_section_may_differ(tmp_path: Path) -> None:
    open_run(config(tmp_path / "a"), tmp_path / "a").close()
    stored = tmp_path / "a" / "config.yaml"
    greedy = config(tmp_path / "a", evaluate={"temperature": 0.4})
    with pytest.raises(UserError, match=r"evaluate\.temperature"):
        check_same_run(greedy, stored)
    check_same_run(greedy, stored, free=["evaluate"])
    with pytest.raises(UserError, match="seed"):
        check_same_run(config(tmp_path / "a", seed=1), stored, free=["evaluate"])


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        open_run(config(tmp_path), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]
    with pytest.raises(UserError, match="cannot be made a folder"):
        open_run(config(tmp_path / "thesis.tex"), tmp_path / "thesis.tex")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = open_run(config(tmp_path / "a"), tmp_path / "a")
    with pytest.raises(UserError, match="open in another process"):
        open_run(config(tmp_path / "a"), tmp_path / "a")
    run.close()
    open_run(config(tmp_path / "a"), tmp_path / "a").close()


# Rows


def test_rows_hold_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "rows.jsonl"
    row = {
        "iteration": 0,
        "a": np.float32(0.5),
        "b": np.arange(2),
        "c": float("nan"),
        "d": (Path("x"), True),
        "e": np.array([np.inf, 1.0]),
    }
    append_rows(path, [row])
    append_rows(path, [{"iteration": 1}, {"iteration": 2}])
    first, *rest = path.read_text().splitlines()
    assert json.loads(first) == {
        "iteration": 0, "a": 0.5, "b": [0, 1], "c": None, "d": ["x", True], "e": [None, 1.0]
    }  # fmt: skip
    assert len(rest) == 2


def test_resume_cuts_a_torn_line_and_drops_later_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"iteration": i, "k": k} for i in range(3) for k in range(2)])
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"iteration": 3, "k"')
    assert len(list(read_rows(path))) == 6
    assert resume_rows(path, 3) == 0
    assert path.read_bytes() == whole
    assert resume_rows(path, 1) == 4
    assert list(read_rows(path)) == [{"iteration": 0, "k": 0}, {"iteration": 0, "k": 1}]
    assert resume_rows(path, 0) == 2
    assert path.read_bytes() == b""
    assert resume_rows(tmp_path / "none.jsonl", 0) == 0


def test_a_broken_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"iteration": 0}\nnot json\n{"iteration": 1}\n')
    with pytest.raises(UserError, match="line 2"):
        resume_rows(path, 5)
    assert "not json" in path.read_text()


def test_rows_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    code = (
        "import itertools, pathlib, sys\n"
        "from launch.runs import append_rows\n"
        "for i in itertools.count():\n"
        "    append_rows(pathlib.Path(sys.argv[1]), [{'iteration': i, 'pad': 'x' * 5000}])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if path.exists() and path.stat().st_size > 100_000:
                break
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    rows = list(read_rows(path))
    assert len(rows) >= 19
    assert [row["iteration"] for row in rows] == list(range(len(rows)))
    resume_rows(path, 10)
    append_rows(path, [{"iteration": 10}])
    assert [row["iteration"] for row in read_rows(path)] == list(range(11))


# Metrics


def test_metrics_resume_and_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = open_metrics(path, 0)
    for i in range(4):
        log.record(i, {"success": i / 4, "success_low": 0.0, "success_high": 1.0, "note": "a"})
    log.close()
    log = open_metrics(path, 2)
    log.record(2, {"success": np.float32(0.75), "loss": float("nan")})
    log.close()
    rows = list(read_rows(path))
    assert [(row["iteration"], row["success"]) for row in rows] == [(0, 0.0), (1, 0.25), (2, 0.75)]
    assert rows[2]["loss"] is None
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2
    learning_curve(path, tmp_path / "curve.png", {"success": "training", "never": "never"})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "curve.png.partial").exists()


# Statistics


def test_wilson_by_hand() -> None:
    z, n, p = 1.959963984540054, 20, 0.75
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    found = wilson(15, 20)
    np.testing.assert_allclose(
        [found.estimate, found.low, found.high], [p, centre - half, centre + half], rtol=1e-9
    )
    assert wilson(0, 10).low == 0
    assert wilson(0, 10).high == pytest.approx(z * z / (10 + z * z))
    for successes, trials in [(3, 2), (-1, 2), (0, 0)]:
        with pytest.raises(ValueError, match="not a rate"):
            wilson(successes, trials)


def test_paired_bootstrap() -> None:
    rng = np.random.default_rng(1)
    a = (rng.random(200) < 0.4).astype(float)
    b = np.maximum(a, rng.random(200) < 0.3)
    found = paired_bootstrap(a, b)
    assert found == paired_bootstrap(a, b)
    assert found.low <= found.estimate <= found.high
    # With this many tasks the interval is close to the normal one.
    error = (b - a).std() / np.sqrt(200)
    assert found.estimate == pytest.approx((b - a).mean())
    assert found.low == pytest.approx(found.estimate - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.estimate + 1.96 * error, abs=0.15 * error)
    # The pairing matters: a constant shift has no spread at all.
    shifted = paired_bootstrap(a, a + 0.25)
    assert (shifted.low, shifted.high) == pytest.approx((0.25, 0.25))
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        paired_bootstrap([1, 0], [1, 0, 1])


def test_mcnemar_by_hand() -> None:
    a = [True] * 1 + [False] * 7 + [True] * 5 + [False] * 5
    b = [False] * 1 + [True] * 7 + [True] * 5 + [False] * 5
    # 1 against 7 discordant tasks: 2 (C(8,0) + C(8,1)) / 2^8
    assert mcnemar(a, b) == pytest.approx(2 * 9 / 256)
    assert mcnemar(a, a) == 1.0
    with pytest.raises(ValueError, match="equal shapes"):
        mcnemar([True], [True, False])


def test_pairing_refuses_different_tasks() -> None:
    a, b = paired({"x": 1.0, "y": 0.0}, {"y": 1.0, "x": 0.5})
    assert (a.tolist(), b.tolist()) == ([1.0, 0.0], [0.5, 1.0])
    with pytest.raises(ValueError, match=r"2 tasks .*'x' .*first"):
        paired({"x": 1.0}, {"y": 1.0})


# Doctor


def test_doctor_checks_name_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_python((3, 11)).ok
    assert not doctor.check_python((3, 14)).ok
    wrong = [Requirement("numpy<1"), Requirement("no-such-package>=2"), Requirement("numpy>=1")]
    old, absent, summary = doctor.check_packages(wrong)
    assert "needed <1" in old.detail
    assert "not installed" in absent.detail
    assert "make install" in absent.fix
    assert "1 of 3" in summary.detail
    broken = doctor.check_alfworld(str(tmp_path / "python"))
    assert not broken.ok
    assert "env.python" in broken.fix
    assert not doctor.check_policy(tmp_path).ok
    assert not doctor.check_disk(tmp_path / "not" / "yet", least_gib=1e9).ok
    assert doctor.check_disk(tmp_path / "not" / "yet", least_gib=0).ok
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1048576 kB\n")
    assert "1.0 GiB" in doctor.check_memory(meminfo).detail
    assert not doctor.check_memory(meminfo, least_gib=1.5).ok

    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    assert not doctor.check_data(config(tmp_path)).ok
    games = config(tmp_path, env={"data": str(tmp_path)})
    assert not doctor.check_data(games).ok
    planned = config(tmp_path, env={"data": str(tmp_path), "generate": {}})
    assert "will be generated" in doctor.check_data(planned).detail
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    assert "train" in doctor.check_data(games).detail


def test_doctor_reports_a_process_that_hangs_or_fails() -> None:
    ok, text = doctor._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert (ok, text) == (False, "no answer within 0.2 s")
    ok, text = doctor._run([sys.executable, "-c", "print(1); raise SystemExit('bad')"], 30)
    assert (ok, text) == (False, "bad")


def test_doctor_exits_2_when_something_needed_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.__main__ import main

    found = [doctor.Check("java", False, "none", needed=False), doctor.Check("x", True, "fine")]
    monkeypatch.setattr(doctor, "checks", lambda _: iter(found))
    assert main(["doctor"]) == 0
    found.append(doctor.Check("data", False, "no folder", "make one"))
    assert main(["doctor"]) == 2
    printed = capsys.readouterr()
    assert "missing data          no folder -> make one" in printed.out
    assert printed.err == "error: doctor: missing data; the lines above say the fixes\n"
