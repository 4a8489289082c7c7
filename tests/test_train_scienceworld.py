"""``python -m launch`` on ScienceWorld: the shipped smoke configs, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.scienceworld.jvm import find_java

pytest.importorskip("scienceworld", reason="the scienceworld extra is not installed")
if find_java() is None:
    pytest.skip("there is no java", allow_module_level=True)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "launch" / "configs"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("scienceworld")


def launch(place, command, config, *overrides):
    sets = [x for o in overrides for x in ("--set", o)]
    plain = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "launch", command, str(CONFIGS / config), *sets],
        cwd=ROOT,
        env={**plain, "JAX_COMPILATION_CACHE_DIR": str(place / "xla")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def digest(output):
    return output.rsplit("digest: ", 1)[1].strip()


@pytest.mark.parametrize("credit", ["procredit", "gigpo", "relace"])
def test_two_iterations_with_random_weights(place, credit):
    run = place / credit
    output = launch(place, "train", "scienceworld_smoke.yaml", f"credit={credit}", f"run={run}")
    metrics = rows(run / "metrics.jsonl")
    assert len(metrics) == 2
    for row in metrics:
        assert row["rollout/episodes_retried"] == row["rollout/env_error"] == 0
        assert row["rollout/steps"] == 4
        assert row["update/grad_norm"] > 0
    assert len(digest(output)) == 64
    splits = {row["split"] for row in rows(run / "evaluations.jsonl")}
    assert splits == {"dev"}
    words = json.loads((run / "policy" / "tokenizer.json").read_text())["model"]["vocab"]
    assert {"thermometer", "kitchen"} <= set(words)


def test_a_warm_policy_acts_earns_progress_and_repeats_itself(place):
    gold = f"env.scienceworld.gold={place / 'gold'}"
    warm = place / "warm"
    output = launch(
        place, "sft", "scienceworld_sft.yaml", gold, f"run={place / 'sft'}", f"output={warm}"
    )
    assert "16 of 16 games won" in output
    found = set()
    for workers in (1, 2):
        run = place / f"workers{workers}"
        output = launch(
            place,
            "train",
            "scienceworld_smoke.yaml",
            "credit=procredit",
            "invalid_penalty=0",
            f"policy={{path: {warm}}}",
            f"env.workers={workers}",
            "env.max_steps=8",  # in 4 steps all attempts at a task may get equally far
            "rollout.group_size=8",
            f"run={run}",
        )
        found.add(digest(output))
    assert len(found) == 1, "the engine answers alike in other processes"
    episodes = rows(run / "episodes.jsonl")
    assert len({e["progress"] for e in episodes}) > 1
    assert any(x != 0 for e in episodes for x in e["credit"])
