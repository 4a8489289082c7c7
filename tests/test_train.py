"""``python -m launch`` as a user runs it: resume, a killed run, every mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from small_run import ROOT, command, digest, environment, launch, train

from envs.meter import Meter
from launch.__main__ import main

MESHED = (
    "iterations=2",
    "credit=attnsr",
    "policy.lora={rank: 2, alpha: 4}",
    "policy.init.num_key_value_heads=2",
    "optimizer.microbatch_tokens=1024",
)


def test_a_run_on_a_mesh_learns_what_one_device_learns(workplace):
    """LoRA, critic and step graph on 2 x 2 x 2 devices, stopped and resumed in between."""
    mesh = "mesh={data: 2, tensor: 2, context: 2}"
    train(workplace, "alone", *MESHED)
    train(workplace, "meshed", *MESHED, mesh, "iterations=1", devices=8)
    done = train(workplace, "meshed", *MESHED, mesh, devices=8)
    assert "go on after iteration 1" in done.stdout
    alone, meshed = (
        [json.loads(x) for x in (workplace / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("alone", "meshed")
    )
    assert len(meshed) == 2
    counted = Meter().metrics()  # what the rollout took
    for want, got in zip(alone, meshed, strict=True):
        for name in want:
            if not name.startswith(("seconds/", "time", "agreement/")) and name not in counted:
                assert got[name] == pytest.approx(want[name], rel=2e-3, abs=2e-5), name
    assert played(workplace / "alone") == played(workplace / "meshed")
    assert (workplace / "meshed" / "policy" / "model.safetensors").is_file()
    assert (workplace / "meshed" / "adapters" / "adapter_model.safetensors").is_file()


def played(run):
    lines = (run / "episodes.jsonl").read_text().splitlines()
    return [json.loads(line)["actions"] for line in lines]


def test_a_mesh_of_too_many_devices_is_refused(workplace):
    done = train(workplace, "big", "mesh={data: 4, tensor: 3}", devices=8, status=2)
    assert "mesh: " in done.stderr
    assert "needs 12 devices and 8 are present" in done.stderr
    assert not (workplace / "big").exists()


def test_a_run_leaves_its_record(workplace, whole):
    folder = workplace / "whole"
    metrics = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in metrics] == [0, 1, 2, 3]
    for row in metrics:
        assert row["agreement/max_abs"] < 1e-4, "sampler and trainer disagree"
        assert row["update/first_max_abs_log_ratio"] < 1e-5, "the first update is off-policy"
        assert row["update/clip_fraction"] < 1
    episodes = [json.loads(x) for x in (folder / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 16
    assert all(len(e["credit"]) == len(e["actions"]) == e["steps"] for e in episodes)
    played = [json.loads(x) for x in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(r["iteration"], r["split"]) for r in played] == [
        (i, s) for i in (0, 4) for s in ("valid_seen",) * 2 + ("valid_unseen",) * 2
    ]
    assert (folder / "learning_curve.png").stat().st_size > 1000
    assert list((folder / "tensorboard").iterdir())
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / "policy" / name).exists()


def test_k_iterations_and_the_rest_equal_all_of_them(workplace, whole):
    train(workplace, "parts", "iterations=2")
    rest = train(workplace, "parts", "iterations=4")
    assert "go on after iteration 2" in rest.stdout
    assert digest(rest) == digest(whole)
    for name in ("episodes.jsonl",):
        assert (workplace / "parts" / name).read_text() == (workplace / "whole" / name).read_text()


def test_a_killed_run_ends_in_the_same_weights(workplace, whole):
    arguments = ["train", workplace / "tiny.yaml", "--set", f"run={workplace / 'killed'}"]
    process = subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=environment(workplace),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("iteration 2/"):
            time.sleep(0.05)  # somewhere in the third iteration or in a checkpoint
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    rest = train(workplace, "killed")
    assert digest(rest) == digest(whole)
    rows = (workplace / "killed" / "episodes.jsonl").read_text()
    assert rows == (workplace / "whole" / "episodes.jsonl").read_text()


def test_the_number_of_workers_changes_nothing(workplace, whole):
    assert digest(train(workplace, "workers", "env.workers=3")) == digest(whole)


def test_a_seed_changes_the_run(workplace, whole):
    assert digest(train(workplace, "seed", "seed=4")) != digest(whole)


def test_adapters_train_and_export_merged(workplace, whole):
    base = workplace / "whole" / "policy"
    lora = f"{{path: {base}, lora: {{rank: 4, alpha: 8, targets: [q, v]}}}}"
    train(workplace, "lora", f"policy={lora}", "iterations=2")
    text = "you are in the middle of a room"
    scores = [
        json.loads(launch(workplace, "score", folder, "--text", text).stdout)["logp"]
        for folder in (base, workplace / "lora" / "policy")
    ]
    assert scores[0] != scores[1], "the export equals its base"


MISTAKES = {
    "mistyped key": (["optimizer.learning_rat=1"], ["learning_rat", "optimizer.learning_rate"]),
    "unknown method": (["credit=gipo"], ["gipo", "gigpo"]),
    "unknown hyperparameter": (["credit={method: gigpo, gama: 1}"], ["gama", "gamma"]),
    "missing data": (
        ["env.generate=null", "env.data=/nowhere/games"],
        ["/nowhere/games", "launch games"],
    ),
    "missing policy": (["policy={path: /nowhere/policy}"], ["/nowhere/policy"]),
    "attention of other hardware": (["policy.attention=cudnn"], ["cudnn", "needs a GPU"]),
    "a mesh that does not divide": (["mesh={tensor: 3}"], ["mesh", "8 devices", "tensor=3"]),
    "a context that does not divide": (["mesh={context: 3}"], ["context is 3", "64"]),
    "filters in training": (["rollout.top_p=0.9"], ["top_p"]),
    "step graphs without conversations": (
        ["credit=attnsr", "prompt.context=window"],
        ["attnsr", "prompt.context=conversation"],
    ),
    "too many games asked for": (["evaluate.games=50"], ["50", "env.generate"]),
    "another config in the folder": (["loss.kl=0.5"], ["loss.kl", "0.05", "0.5", "run="]),
    "another shape in the checkpoint": (None, ["checkpoint", "(302, 32)", "(302, 64)"]),
}


def test_the_exit_status_reaches_the_shell(workplace):
    done = launch(workplace, "train", workplace / "tiny.yaml", "--set", "iteration=1", status=2)
    assert done.stderr == (
        f"error: {workplace}/tiny.yaml: unknown key iteration; did you mean iterations?\n"
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(workplace, whole, mistake, capfd):
    overrides, words = MISTAKES[mistake]
    run = workplace / "whole"
    if overrides is None:
        # The stored config is edited to agree, as someone would who copies a run folder.
        run = workplace / "shape"
        if not run.exists():
            subprocess.run(["cp", "-r", workplace / "whole", run], check=True)
        stored = run / "config.yaml"
        stored.write_text(stored.read_text().replace("hidden_size: 32", "hidden_size: 64"))
        overrides = ["policy.init.hidden_size=64", "iterations=5"]
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    sets = [x for o in (f"run={run}", *overrides) for x in ("--set", o)]
    capfd.readouterr()
    status = main(["train", str(workplace / "tiny.yaml"), *sets])
    error = capfd.readouterr().err
    assert status == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error
    after = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    assert before == after
