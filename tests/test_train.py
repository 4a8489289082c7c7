"""``python -m launch`` as a user runs it: resume, a killed run, every method, every mistake."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from envs.meter import Meter
from launch.__main__ import main

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
        "--xla_cpu_enable_concurrency_optimized_scheduler=false"
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


# Name -> the losses of the step heads that it trains.
METHODS = {
    "ppo": (),
    "gigpo": (),
    "attnsr": (),
    "attnsr_grpo": (),
    "linear": (),
    "procredit": (),
    "relace": (),
    "poad": (),
    "archer": ("q_value_loss", "v_value_loss"),
    "rudder": ("predicted_return_loss",),
    "spa_rl": ("predicted_progress_loss",),
    "agentprm": ("promise_loss",),
    "vineppo": (),
    "istar": (),
}


@pytest.fixture(scope="session")
def every_method(workplace, whole):
    """One process for all of them, so that what they share is compiled once."""
    script = (
        "import sys, launch.__main__ as m; sys.exit(max(m.main(a.split()) for a in sys.argv[1:]))"
    )
    jobs = [
        f"train {workplace}/tiny.yaml --set run={workplace}/method-{method} "
        f"--set credit={method} --set iterations=1 --set rollout.value_attempts=2"
        for method in METHODS
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *jobs],
        cwd=ROOT,
        env=environment(workplace),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_every_method_runs_the_same_job(workplace, every_method):
    assert every_method.stdout.count("digest: ") == len(METHODS)
    for method, losses in METHODS.items():
        (line,) = (workplace / f"method-{method}" / "metrics.jsonl").read_text().splitlines()
        row = json.loads(line)
        assert row["update/grad_norm"] > 0, method
        assert all(row[f"update/{loss}"] >= 0 for loss in losses), method


def test_step_heads_are_stored_and_a_resumed_run_ends_in_the_same_weights(workplace, every_method):
    settings = ("credit=archer", "iterations=2", "rollout.value_attempts=2")
    unbroken = train(workplace, "archer", *settings)
    rest = train(workplace, "method-archer", *settings)
    assert "go on after iteration 1" in rest.stdout
    assert digest(rest) == digest(unbroken)


def test_a_run_asks_its_judge(workplace, whole):
    """TARL through a chat endpoint: every episode is judged, and its scores reach the credit."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            turns = len(json.loads(body["messages"][-1]["content"])["turns"])
            asked.append(turns)
            scores = json.dumps({"scores": [-1, *[1] * (turns - 1)]})
            reply = json.dumps({"choices": [{"message": {"content": scores}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = f"judge={{url: 'http://127.0.0.1:{server.server_port}/v1', model: small}}"
        train(workplace, "judged", "credit=tarl", judge, "iterations=2")
        server.shutdown()
    episodes = [
        json.loads(x) for x in (workplace / "judged" / "episodes.jsonl").read_text().splitlines()
    ]
    assert sorted(asked) == sorted(e["steps"] for e in episodes)
    assert len(episodes) == 8
    assert any(len(set(e["credit"])) > 1 for e in episodes), "the judge's scores changed nothing"


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
