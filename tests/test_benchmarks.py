"""The benchmark scripts run at a size that takes a moment, on the jaxcredit side alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, out: Path, *arguments: str) -> dict:
    command = [sys.executable, ROOT / "benchmarks" / script, "--size", "tiny", "--out", out]
    done = subprocess.run(
        [*command, "--repetitions", "2", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_step_graph(tmp_path):
    found = run("step_graph.py", tmp_path / "a" / "x.json", "--lengths", "64")
    assert [row["tokens"] for row in found["rows"]] == [64]
    for row in found["rows"]:
        for name in ("without", "with"):
            seconds = row[name]["seconds"]
            assert len(seconds) == 2 and min(seconds) > 0
            assert row[name]["median_seconds"] == pytest.approx(np.mean(seconds))
        ratio = row["with"]["median_seconds"] / row["without"]["median_seconds"]
        assert row["ratio_with_to_without"] == pytest.approx(ratio)
    side = found["sides"]["jaxcredit"]
    assert side["layers"] == [2, 3, 4, 5]  # of 8
    assert side["shape"]["num_hidden_layers"] == 8
    assert set(side["temporary_bytes"]) == {"without-64", "with-64"}
    assert {"jax", "numpy"} <= set(side["versions"])
    assert found["machine"]["cores"] >= 1


def test_model(tmp_path):
    found = run("model.py", tmp_path / "x.json", "--length", "64")
    row = found["rows"]["jaxcredit"]
    assert row["tokens_per_second"] == pytest.approx(64 / np.mean(row["seconds"]))
    assert found["sides"]["jaxcredit"]["temporary_bytes"]["step"] > 0
    assert found["ratios"] == {}


def test_the_row_is_a_quarter_sampled(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from measure import agent_row

    for length, steps in ((128, 4), (2048, 30), (512, 64)):
        row = agent_row(length, steps, 100, seed=1)
        kind, step = row["kind"][0], row["step"][0]
        assert row["trainable"].mean() == pytest.approx(0.25, abs=0.02)
        assert (row["trainable"][0] == (kind == 2)).all()
        for k in range(steps):  # every step is one message and then one observation
            (mine,) = np.nonzero(step == k)
            assert (np.diff(mine) == 1).all()
            assert (np.diff(kind[mine]) >= 0).all() and set(kind[mine]) == {2, 3}
        assert (kind[step < 0] == 1).all()
    with pytest.raises(SystemExit, match="--steps 20 do not fit a row of 64 tokens"):
        agent_row(64, 20, 100, seed=0)
