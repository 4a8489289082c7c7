"""A run small enough for tests, the commands to make it, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent

TINY = {
    "seed": 3,
    "iterations": 4,
    "policy": {
        "init": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    },
    "env": {
        "generate": {"train": 6, "valid_seen": 2, "valid_unseen": 2, "distractors": 2},
        "max_steps": 3,
        "workers": 1,
    },
    "prompt": {
        "template": "bare",
        "context": "conversation",
        "think": False,
        "show_admissible": False,
        "max_context": 256,
    },
    "rollout": {
        "tasks_per_iteration": 2,
        "group_size": 2,
        "slots": 4,
        "max_response_tokens": 6,
        "decode_block": 6,
    },
    "credit": "grpo",
    "invalid_penalty": 0.1,
    "loss": {"kl": 0.05},
    "optimizer": {"learning_rate": 1e-3, "minibatch_episodes": 2, "microbatch_tokens": 512},
    "checkpoint": {"every": 1, "keep": 2},
}


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder with the config, shared games and a compilation cache."""
    folder = tmp_path_factory.mktemp("train")
    config = {**TINY, "run": str(folder / "run"), "env": {**TINY["env"], "data": str(folder / "g")}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    return folder


def launch(workplace, *arguments, status=0, devices=1):
    """Runs a command; returns the finished process."""
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(workplace, devices),
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done


def command(*arguments):
    return [sys.executable, "-m", "launch", *map(str, arguments)]


def environment(workplace, devices=1):
    # Collectives of simulated devices wait for each other forever unless they keep one order.
    flags = (
        f"--xla_force_host_platform_device_count={devices} "
        "--xla_cpu_enable_concurrency_optimized_scheduler=false "
        "--xla_backend_optimization_level=0"  # compiling takes longer than running here
    )
    return {**os.environ, "XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(workplace / "xla")}


def train(workplace, run, *overrides, devices=1, status=0):
    sets = [x for o in (f"run={workplace / run}", *overrides) for x in ("--set", o)]
    return launch(
        workplace, "train", workplace / "tiny.yaml", *sets, devices=devices, status=status
    )


def digest(done):
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("digest: ")]
    assert len(line) == len("digest: ") + 64
    return line


@pytest.fixture(scope="session")
def whole(workplace):
    """An uninterrupted run."""
    return train(workplace, "whole")
