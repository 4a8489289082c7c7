"""A served policy: episodes through HTTP equal those sampled in this process; every refusal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from test_rollout import CHAT, LIMITS, PROMPT, TOKENIZER, Scripted, jobs_for

from envs.engine import Engine, EngineError, EngineSettings, Response, request_seed
from envs.pool import Pool
from envs.protocol import EnvSpec
from envs.rollout import Player
from jaxcredit.episodes import Status
from launch.__main__ import main
from models import hf
from models.config import QwenConfig
from models.params import init_params
from models.sampler import Sampler, SamplerConfig

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # workers find test_rollout.py
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Server:
    """A completions server on a free port.

    ``answer(body)`` gives a status and an object, or None to drop the connection. ``bodies`` and
    ``headers`` keep what was asked.
    """

    def __init__(self, answer):
        self.answer, self.bodies, self.headers, self.paths = answer, [], [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                outer.paths.append(self.path)
                found = outer.answer(body)
                if found is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, content = found
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(ConnectionError):  # a client that gave up
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def completion(body, ids, logp, reason, **changes):
    """An answer as vLLM and SGLang lay it out, as far as it is read."""
    choice = {
        "index": 0,
        "text": "not what an episode is made of",
        "logprobs": {"tokens": ["?"] * len(ids), "token_logprobs": [float(x) for x in logp]},
        "finish_reason": reason,
        "token_ids": [int(i) for i in ids],
        "prompt_token_ids": body["prompt"],
    }
    return 200, {"object": "text_completion", "choices": [choice | changes]}


def settings(server, **changes):
    options = {"slots": 6, "stop_ids": (CHAT.end_id,), "pauses": (0.01,) * 4}
    return EngineSettings(server.url, "served", **{"deadline_s": 300, **options, **changes})


def collect(sampler, jobs, prompt=PROMPT, limits=LIMITS):
    with Pool(EnvSpec("test_rollout:make"), 2, deadline_s=300) as pool:
        return Player(CHAT, prompt, limits).collect(sampler, pool, jobs, iteration=5)


def plain(value):
    """Plain data that compares by value, arrays with their types included."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value


def respond(row):
    """A policy that is a function of the row: mostly climbs, at times babbles or is cut short."""
    number = sum(int(i) * (k + 1) for k, i in enumerate(row))
    text, stop = [
        ("<action> go up </action>", "stop"),
        ("<action> go up </action>", "stop"),
        ("up up", "stop"),
        ("go up go up go up go up", "length"),
    ][number % 4]
    ids = CHAT.encode(text)
    ids = np.append(ids, CHAT.end_id) if stop == "stop" else ids
    logp = -np.arange(1, len(ids) + 1, dtype=np.float32) / (1 + number % 7)
    return ids, logp, stop


class Local(Scripted):
    """``respond`` without a server in between."""

    def respond(self, slot, key, most):
        return Response(*respond(self.cache[slot]))


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_episodes_equal_those_of_the_same_policy_without_a_server(context):
    prompt = dataclasses.replace(PROMPT, context=context)
    jobs = jobs_for(2, 3, 1, 6, replicas=3)
    want = collect(Local(None), jobs, prompt)
    with (
        Server(lambda body: completion(body, *respond(body["prompt"]))) as server,
        Engine(settings(server), seed=9) as engine,
    ):
        found = collect(engine, jobs, prompt)
    assert plain(found) == plain(want)
    steps = [step for e in found for step in e.steps]
    assert {e.status for e in found} >= {Status.SUCCESS, Status.STEP_LIMIT}
    assert {step.stop for step in steps} == {"stop", "length"}
    assert len(server.bodies) == len(steps)
    keys = [(5, e.group, e.replica, turn) for e in found for turn in range(len(e.steps))]
    assert sorted(b["seed"] for b in server.bodies) == sorted(request_seed(9, k) for k in keys)


CONFIG = QwenConfig(
    vocab_size=len(TOKENIZER),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def test_greedy_episodes_equal_those_of_the_sampler_token_for_token():
    """The server holds the same weights and reads each row from its beginning."""
    params = jax.tree.map(
        lambda x: x * 3 if x.ndim > 1 else x, init_params(CONFIG, jax.random.key(3))
    )
    options = SamplerConfig(
        slots=6, capacity=256, max_response=8, stop_ids=(CHAT.end_id,), temperature=0.0
    )
    jobs = jobs_for(2, 3, 4, replicas=2)
    want = collect(Sampler(params, CONFIG, options), jobs)
    alone = dataclasses.replace(options, slots=1)
    backend, lock = Sampler(params, CONFIG, alone), threading.Lock()
    sent = []

    def answer(body):
        with lock:
            backend.reset(0)
            backend.extend({0: np.asarray(body["prompt"])})
            out = backend.generate({0: ((0, 0, 0, 0), body["max_tokens"])})[0]
            sent.append(out.logp.tolist())
        return completion(body, out.ids, out.logp, out.stop)

    with Server(answer) as server:
        found = collect(Engine(settings(server, temperature=0.0)), jobs)
    pairs = [(a, b) for e, w in zip(found, want, strict=True) for a, b in zip(e.steps, w.steps)]
    assert [len(e.steps) for e in found] == [len(e.steps) for e in want]
    assert len({a.response_ids.tobytes() for a, _ in pairs}) > 3, "the model says one thing"
    for a, b in pairs:
        np.testing.assert_array_equal(a.context_ids, b.context_ids)
        np.testing.assert_array_equal(a.response_ids, b.response_ids)
        np.testing.assert_allclose(a.behaviour_logp, b.behaviour_logp, atol=1e-4)
        assert (a.stop, a.action) == (b.stop, b.action)
    passed = [a.behaviour_logp[a.sampled].tolist() for a, _ in pairs]
    assert sorted(passed) == sorted(sent), "log-probabilities are the server's, bit for bit"


def ask(engine, prompt=(5, 6, 7), most=4, slot=0):
    engine.extend({slot: np.asarray(prompt)})
    return engine.generate({slot: ((0, 1, 2, 3), most)})[slot]


def test_a_request_spells_out_every_option():
    with Server(lambda body: completion(body, [8, CHAT.end_id], [-1, -2], "stop")) as server:
        engine = Engine(settings(server, temperature=0.7, top_p=0.9, key="secret"), seed=4)
        ask(engine)
        ask(engine, prompt=[9])
        assert engine.lengths.tolist() == [8, 0, 0, 0, 0, 0]
        engine.reset(0)
        ask(Engine(dataclasses.replace(engine.settings, top_k=20, key=None)))
    first, second, third = server.bodies
    assert first == {
        "model": "served",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [CHAT.end_id],
        "seed": request_seed(4, (0, 1, 2, 3)),
        "logprobs": 1,
        "return_token_ids": True,
    }
    assert second["prompt"] == [5, 6, 7, 8, CHAT.end_id, 9], "the whole row"
    assert third["top_k"] == 20
    assert set(server.paths) == {"/v1/completions"}
    assert [h.get("Authorization") for h in server.headers] == ["Bearer secret"] * 2 + [None]
    assert engine.lengths.tolist() == [0] * 6
    assert "secret" not in repr(engine.settings)


def test_seeds_depend_on_every_part_of_the_key():
    keys = [(i, g, r, t) for i in range(4) for g in range(6) for r in range(6) for t in range(6)]
    seeds = {request_seed(seed, key) for seed in range(3) for key in keys}
    assert len(seeds) == 3 * len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(1, (2, 3, 4, 5)) == request_seed(1, (2, 3, 4, 5))


@pytest.mark.parametrize("concurrency", [None, 2])
def test_requests_are_sent_together(concurrency):
    """Every request waits until as many are there as may be; with one less none would end."""
    together = 4 if concurrency is None else concurrency
    barrier, lock, now, most = threading.Barrier(together), threading.Lock(), [0], [0]

    def answer(body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        barrier.wait(100)
        with lock:
            now[0] -= 1
        return completion(body, [CHAT.end_id], [-0.5], "stop")

    with Server(answer) as server:
        engine = Engine(settings(server, slots=4, concurrency=concurrency))
        engine.extend({slot: np.asarray([slot + 3]) for slot in range(4)})
        out = engine.generate({slot: ((0, slot, 0, 0), 8) for slot in range(4)})
    assert sorted(out) == [0, 1, 2, 3]
    assert most[0] == together
    assert sorted(b["prompt"] for b in server.bodies) == [[3], [4], [5], [6]]


def test_trouble_that_passes_costs_an_attempt():
    answers = iter([(500, {"error": "warming up"}), None, (429, {}), (503, {})])

    def answer(body):
        try:
            return next(answers)
        except StopIteration:
            return completion(body, [CHAT.end_id], [-0.5], "stop")

    with Server(answer) as server:
        assert ask(Engine(settings(server))).ids.tolist() == [CHAT.end_id]
        assert len(server.bodies) == 5
        assert len({json.dumps(body) for body in server.bodies}) == 1


def refusal(server, **changes):
    """The one line that a failed request ends in."""
    engine = Engine(settings(server, **changes))
    with pytest.raises(EngineError) as caught:
        ask(engine)
    assert engine.lengths.tolist() == [3, 0, 0, 0, 0, 0], "a failed response is not part of the row"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_trouble_that_stays_is_given_up():
    with Server(lambda body: (500, {"error": "out of\nmemory"})) as server:
        message = refusal(server, pauses=(0.01, 0.01))
        assert len(server.bodies) == 3
    for word in (server.url, "3 attempts", "HTTP 500", "out of", "engine.url"):
        assert word in message
    message = refusal(server)  # nobody listens any more
    for word in (server.url, "5 attempts", "ConnectError", "engine.url"):
        assert word in message


def test_a_request_that_is_wrong_is_not_repeated():
    with Server(lambda body: (400, {"message": "no model 'served'"})) as server:
        message = refusal(server)
        assert len(server.bodies) == 1
    assert "HTTP 400" in message
    assert "no model 'served'" in message


def test_the_deadline_covers_a_response_with_all_its_attempts():
    over = threading.Event()

    def answer(body):
        if len(server.bodies) == 1:
            return 503, {}
        over.wait(200)

    with Server(answer) as server:
        start = time.monotonic()
        message = refusal(server, deadline_s=3)
        assert 3 <= time.monotonic() - start < 100
        over.set()
    for word in ("no answer within 3 s", "HTTP 503", "engine.deadline_s", "engine.concurrency"):
        assert word in message


END = CHAT.end_id
ANSWERS = {
    "no token ids": ({"token_ids": None}, ["no token ids", "return_token_ids"]),
    "ids as text": ({"token_ids": ["token_id:8"]}, ["no token ids"]),
    "an empty response": ({"token_ids": []}, ["empty", "'stop'"]),
    "no log-probabilities": ({"logprobs": None}, ["2 token ids", "0 log-probabilities"]),
    "one id more": ({"token_ids": [7, 8, END]}, ["3 token ids", "2 log-probabilities"]),
    "a null": ({"logprobs": {"token_logprobs": [None, -1.0]}}, ["1 log-probabilities"]),
    "another prompt": ({"prompt_token_ids": [6, 7]}, ["2 ids", "3 ids", "truncation"]),
    "stop ids ignored": ({"token_ids": [END, 8]}, ["stop_token_ids", f"went on after {END}"]),
    "another stop id": ({"token_ids": [8, 9]}, ["ended with 9", f"[{END}]", "--policy"]),
    "aborted": ({"token_ids": [8, 9], "finish_reason": "abort"}, ["'abort'"]),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_cannot_be_played_is_one_line(case):
    changes, words = ANSWERS[case]
    with Server(lambda b: completion(b, [8, END], [-1, -2], "stop", **changes)) as server:
        message = refusal(server)
    assert message.startswith(server.url)
    for word in words:
        assert word in message


def test_other_refusals_of_an_answer():
    long = [8] * 5
    for answer, words in [
        (lambda b: completion(b, long, [-1.0] * 5, "length"), ["ignores max_tokens"]),
        (lambda b: (200, {"choices": []}), ["no completion", '"choices": []']),
        (lambda b: (200, b"<html>login</html>"), ["no completion", "<html>login"]),
    ]:
        with Server(answer) as server:
            message = refusal(server)
        for word in words:
            assert word in message


def test_a_stop_id_at_the_limit_and_a_server_that_keeps_the_prompt_to_itself():
    def answer(body):
        reason = "length" if body["max_tokens"] == 2 else "stop"
        return completion(body, [8, END], [-1, -2], reason, prompt_token_ids=None)

    with Server(answer) as server:
        assert ask(Engine(settings(server)), most=2).stop == "stop"
        assert ask(Engine(settings(server)), most=4).stop == "stop"


# The commands


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a config and the tokenizer, but not the weights, of a served policy."""
    from envs.alfworld.vocabulary import words
    from envs.tokenizer import word_tokenizer

    folder = tmp_path_factory.mktemp("engine")
    tokenizer = word_tokenizer(words())
    tokenizer.save_pretrained(folder / "policy")
    (folder / "policy" / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    config = {
        "run": str(folder / "run"),
        "seed": 3,
        "policy": {"init": {}},
        "env": {
            "data": str(folder / "games"),
            "generate": {"train": 1, "valid_seen": 1, "valid_unseen": 1, "distractors": 2},
            "max_steps": 3,
            "workers": 1,
        },
        "prompt": {
            "template": "bare",
            "context": "conversation",
            "think": False,
            "show_admissible": False,
            "max_context": 512,
        },
        "rollout": {"slots": 4, "max_response_tokens": 6},
        "credit": "grpo",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def command(place, name, url, *more):
    engine = f"engine={{url: '{url}', model: served}}"
    return main([name, str(place / "config.yaml"), "--set", engine, *map(str, more)])


def test_evaluate_and_play_a_served_policy(place, capfd, monkeypatch, tmp_path):
    from launch.assemble import load_tokenizer

    encode = load_tokenizer(place / "policy").encode
    ids = [*encode("<action> look </action>", add_special_tokens=False), 2]
    monkeypatch.setenv("SERVED_KEY", "secret")
    key = ("--set", "engine.key_variable=SERVED_KEY", "--policy", place / "policy")
    with Server(lambda body: completion(body, ids, [-0.1] * len(ids), "stop")) as server:
        assert command(place, "evaluate", server.url, *key) == 0
        printed = capfd.readouterr().out
        assert "served" in printed
        assert "0.0 % success" in printed
        assert "of 2 games, 3.0 steps, 100 % valid actions" in printed
        assert len(server.bodies) == 6
        assert {h["Authorization"] for h in server.headers} == {"Bearer secret"}
        assert all(b["temperature"] == 0 for b in server.bodies)
        assert all(b["stop_token_ids"] == [0, 2] for b in server.bodies)
        out = tmp_path / "played"
        assert command(place, "play", server.url, "--out", out, *key) == 0
        assert len(server.bodies) == 9
    assert [path.name for path in out.iterdir()] == ["transcript.md"]
    assert (out / "transcript.md").read_text().count("<action> look </action>") == 3
    assert not (place / "run").exists()


def test_mistakes_with_an_engine_are_one_line(place, capfd, monkeypatch):
    monkeypatch.delenv("SERVED_KEY", raising=False)
    with Server(lambda body: (200, {"choices": [{"text": "look"}]})) as server:
        policy = ("--policy", place / "policy")
        for name, url, more, words in [
            ("train", server.url, (), ["engine", "weights", "engine=null"]),
            ("evaluate", server.url, (), ["engine", "--policy FOLDER"]),
            ("evaluate", server.url, policy, ["engine", server.url, "no token ids"]),
            (
                "evaluate",
                server.url,
                ("--set", "engine.key_variable=SERVED_KEY", *policy),
                ["engine.key_variable", "SERVED_KEY is not set"],
            ),
            ("evaluate", "localhost:8000", policy, ["engine.url", "http://HOST/"]),
            ("evaluate", server.url, ("--set", "engine.modle=x", *policy), ["engine.model"]),
        ]:
            assert command(place, name, url, *more) == 2
            error = capfd.readouterr().err
            assert error.startswith("error: ")
            assert error.count("\n") == 1, error
            for word in words:
                assert word in error
    assert not (place / "run").exists()


def test_stop_ids_of_a_folder(tmp_path):
    assert hf.stop_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"model_type": "other", "eos_token_id": 7}')
    assert hf.stop_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert hf.stop_ids(tmp_path) == (7, 9)
