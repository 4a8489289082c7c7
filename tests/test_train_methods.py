"""Every kind of credit method in a run of ``python -m launch train``."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading

import pytest
from small_run import ROOT, digest, environment, train

# Name -> the losses of the step heads that it trains.
METHODS = {
    "ppo": (),
    "attnsr": (),
    "procredit": (),
    "relace": (),
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
