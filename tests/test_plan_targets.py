"""What a GPU or a TPU would run is compiled for it, where the compilers are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "launch" / "configs"
pytestmark = pytest.mark.slow

GPU = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
    reason="the compiler for GPUs is not installed; `make plan-gpu` installs it",
)
TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the compiler for TPUs is not installed; `make plan-tpu` installs it",
)

# Each shipped config of a paper, and the devices that it is for.
PAPERS = {
    "attnsr_ppo_7b": "h200x8",
    "attnsr_ppo_3b": "h200x8",
    "attnsr_grpo_3b": "h200x8",
    "attnsr_ppo_qwen3_4b": "h200x8",
    "relace_1_5b": "h100x8",
    "relace_7b": "h100x8",
    "procredit_grpo_4b": "h100x8",
}


def run(tmp_path, config, topology, *options, status=0):
    """The command in a process of its own, as a user calls it; returns its JSON and its output."""
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "launch", "plan", str(CONFIGS / f"{config}.yaml")]
    command += ["--topology", topology, "--out", str(out), *options]
    # The tests' own flags are for the CPU.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    (found,) = json.loads(out.read_text())
    return found, done.stdout


def attention(found):
    return {p["name"]: p["attention"] for p in found["programs"] if p["attention"]}


def test_every_config_of_a_paper_is_planned():
    named = {p.stem for p in CONFIGS.glob("*.yaml") if "arXiv" in p.read_text()}
    assert named == set(PAPERS)


@GPU
@pytest.mark.parametrize("config", PAPERS)
def test_a_papers_config_fits_its_gpus(tmp_path, config):
    found, text = run(tmp_path, config, PAPERS[config])
    assert found["fits"] is True and ": fits" in text
    for name, chosen in attention(found).items():
        assert chosen == ("xla" if name.startswith("rollout") else "cudnn"), name
    by_phase = {p["name"].partition(":")[0] for p in found["programs"]}
    assert by_phase == {"rollout", "score", "update"}
    assert all(p["flops"] > 0 for p in found["programs"] if p["rows"])


@TPU
def test_the_7b_run_fits_a_slice_of_v5p(tmp_path):
    found, _ = run(tmp_path, "attnsr_ppo_7b", "v5p:2x2x2", "--phase", "score", "--phase", "update")
    assert found["fits"] is True
    assert set(attention(found).values()) == {"splash"}


@GPU
def test_a_run_that_cannot_fit_is_told_its_three_largest_consumers(tmp_path):
    found, text = run(
        tmp_path,
        "attnsr_ppo_7b",
        "a100x8",
        *("--phase", "update", "--set", "policy.remat=none", "--set", "policy.lora=null"),
        status=2,
    )
    assert found["fits"] is False and len(found["largest"]) == 3
    assert found["largest"][0]["consumer"] == "activations"
    assert "policy.remat=full" in text


@GPU
def test_memory_grows_linearly_with_the_context(tmp_path):
    peaks = {}
    for tokens in (8192, 16384, 32768):
        found, _ = run(
            tmp_path,
            "attnsr_ppo_7b",
            "h200x8",
            *("--phase", "update", "--set", f"prompt.max_context={tokens}"),
            *("--set", f"optimizer.microbatch_tokens={2 * tokens}"),
        )
        peaks[tokens] = found["peak_bytes"]
    # Twice the tokens add twice what the last doubling added; T x T would add four times as much.
    growth = (peaks[32768] - peaks[16384]) / (peaks[16384] - peaks[8192])
    assert 1.6 < growth < 2.4


@GPU
def test_two_nodes_send_over_the_network_between_them(tmp_path):
    found, _ = run(
        tmp_path,
        "attnsr_grpo_3b",
        "h100x16",
        *("--phase", "update", "--set", "mesh={data: 4, tensor: 4}"),
    )
    exchanges = found["programs"][0]["collectives"]
    assert sum(e["between_nodes_bytes"] for e in exchanges.values()) > 0
    assert sum(e["sent_bytes"] - e["between_nodes_bytes"] for e in exchanges.values()) > 0


def test_the_benchmark_for_gpus_runs_anywhere(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--rounds", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["kernels"]["output_error"] < 0.01
    assert set(found["programs"]) >= {"rollout: decode", "update: accumulate", "update: apply"}
    assert all(p["seconds"] > 0 for p in found["programs"].values())
