"""The judge behind HTTP, against a small server of our own; and the signal it fills."""

from __future__ import annotations

import dataclasses
import http.server
import json
import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from episode_cases import random_episodes

from jaxcredit.episodes import Status
from launch.config import TrainConfig
from launch.errors import UserError
from launch.judge import (
    JudgeError,
    Turn,
    chat_judge,
    judge_of,
    judge_scores,
    scripted_judge,
    transcript_of,
)
from launch.loading import validate

TURNS = [Turn("a room", "go to desk 1", "a desk"), Turn("a desk", "(no action)", "Try again.")]
KEY = "sk-a-secret-that-nobody-may-see"


def completion(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


GOOD = completion('{"scores": [1, -1]}')


@dataclasses.dataclass
class Endpoint:
    """Gives its replies one after the other, the last one for ever; keeps what it was asked."""

    url: str
    replies: list[tuple[int, str]]
    asked: list[dict] = dataclasses.field(default_factory=list)
    keys: list[str | None] = dataclasses.field(default_factory=list)
    trickle: bool = False


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("NO_PROXY", "*")
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            with lock:
                length = int(self.headers["Content-Length"])
                found.asked.append(json.loads(self.rfile.read(length)))
                found.keys.append(self.headers["Authorization"])
                reply = found.replies.pop(0) if len(found.replies) > 1 else found.replies[0]
            status, body = reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            for byte in body.encode() if found.trickle else [body.encode()]:
                try:
                    self.wfile.write(bytes([byte]) if found.trickle else byte)
                    self.wfile.flush()
                except OSError:
                    return  # the client has hung up
                if found.trickle:
                    time.sleep(0.05)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Endpoint(f"http://127.0.0.1:{server.server_address[1]}/v1", [GOOD])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


def test_a_judge_is_asked_once_and_answers_in_order(endpoint: Endpoint) -> None:
    assert chat_judge(endpoint.url + "/", "wise")(TURNS, "put a pen away") == [1, -1]
    (asked,) = endpoint.asked
    assert (asked["model"], asked["temperature"]) == ("wise", 0)
    material = json.loads(asked["messages"][-1]["content"])
    assert material["goal"] == "put a pen away"
    assert material["turns"][1] == {
        "seen": "a desk",
        "action": "(no action)",
        "answer": "Try again.",
    }
    assert endpoint.keys == [None]
    assert chat_judge(endpoint.url, "wise")([], "nothing was done") == []
    assert len(endpoint.asked) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('The scores are {"scores": [0, 1]}', "not JSON"),
        ('```json\n{"scores": [0, 1]}\n```', "not JSON"),
        ("[0, 1]", 'the one key "scores"'),
        ('{"scores": [0, 1], "why": "so"}', 'the one key "scores"'),
        ('{"scores": [0]}', "1 scores for 2 turns"),
        ('{"scores": {"0": 1}}', "no list of scores"),
        ('{"scores": [0, 2]}', "the score 2 is not"),
        ('{"scores": [0, 1.0]}', "the score 1.0 is not"),
        ('{"scores": [true, 0]}', "the score true is not"),
        ('{"scores": ["1", 0]}', 'the score "1" is not'),
        ('{"scores": [-1, -1]}', "2 turns got -1"),
    ],
)
def test_an_answer_against_the_rules_is_sent_back(
    endpoint: Endpoint, text: str, problem: str
) -> None:
    endpoint.replies = [completion(text), GOOD]
    assert chat_judge(endpoint.url, "wise", pause_s=0.01)(TURNS, "goal") == [1, -1]
    first, second = endpoint.asked
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2] == {"role": "assistant", "content": text}
    assert problem in second["messages"][3]["content"]

    endpoint.replies = [completion(text)]
    with pytest.raises(JudgeError) as caught:
        chat_judge(endpoint.url, "wise", pause_s=0.01, tries=2)(TURNS, "goal")
    for words in ("judge: wise at http://127.0.0.1", problem, "tried 2 times"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ((503, "down"), "status 503"),
        ((429, "slow down"), "status 429"),
        ((200, "no json"), "no chat completion"),
        ((200, '{"choices": []}'), "no chat completion"),
        ((200, '{"choices": [{"message": {"content": null}}]}'), "no chat completion"),
        ((200, '{"choices": [{"message": {"content": "' + 2**20 * "x" + '"}}]}'), "mebibyte"),
    ],
    ids=lambda x: x if isinstance(x, str) else str(x[0]),
)
def test_faults_that_may_pass_are_tried_again(
    endpoint: Endpoint, reply: tuple[int, str], problem: str
) -> None:
    judge = chat_judge(endpoint.url, "wise", tries=3, pause_s=0.01)
    endpoint.replies = [reply, reply, GOOD]
    assert judge(TURNS, "goal") == [1, -1]
    assert endpoint.asked[2]["messages"] == endpoint.asked[0]["messages"]
    endpoint.replies = [reply]
    with pytest.raises(JudgeError, match=f"{problem}.*tried 3 times"):
        judge(TURNS, "goal")


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refusal_is_not_tried_again(endpoint: Endpoint, status: int) -> None:
    endpoint.replies = [(status, "no")]
    with pytest.raises(JudgeError, match=rf"refused with status {status}.*judge\.url"):
        chat_judge(endpoint.url, "wise")(TURNS, "goal")
    assert len(endpoint.asked) == 1


def test_an_endpoint_that_is_not_there() -> None:
    with pytest.raises(JudgeError, match=r"ConnectError.*tried 2 times"):
        chat_judge("http://127.0.0.1:9/v1", "wise", tries=2, pause_s=0.01)(TURNS, "goal")


@pytest.mark.parametrize("trickle", [False, True])
def test_the_deadline_holds_for_all_tries_together(endpoint: Endpoint, trickle: bool) -> None:
    endpoint.replies, endpoint.trickle = [GOOD if trickle else (503, "down")], trickle
    start = time.monotonic()
    with pytest.raises(JudgeError, match=r"in 0\.5 s"):
        chat_judge(endpoint.url, "wise", deadline_s=0.5, tries=1000, pause_s=0.01)(TURNS, "goal")
    assert time.monotonic() - start < 10


def test_the_key_comes_from_the_environment_and_shows_nowhere(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    judge = chat_judge(endpoint.url, "wise", key_variable="JUDGE_KEY", tries=1)
    judge(TURNS, "goal")
    assert endpoint.keys == [f"Bearer {KEY}"]
    for reply in ((401, KEY), (500, KEY), completion(KEY), (302, KEY)):
        endpoint.replies = [reply]
        with pytest.raises(JudgeError) as caught:
            judge(TURNS, "goal")
        assert KEY not in str(caught.value)
    assert KEY not in caplog.text
    monkeypatch.setenv("JUDGE_KEY", "schlüssel")
    with pytest.raises(UserError) as refused:
        chat_judge(endpoint.url, "wise", key_variable="JUDGE_KEY")
    assert "schl" not in str(refused.value)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match=r"judge\.key_variable: .*JUDGE_KEY is not set"):
        chat_judge(endpoint.url, "wise", key_variable="JUDGE_KEY")


# ---------------------------------------------------------------------- the signal


def episodes():
    """Three short episodes whose actions say what to think of them."""
    out = []
    for episode, actions in zip(
        random_episodes(0, groups=1, size=3, steps=3),
        (["good", "idle", "bad"], ["idle", None, "good"], ["bad", "bad", "bad"]),
    ):
        steps = tuple(
            dataclasses.replace(step, action=action, observation=f"before {k}")
            for k, (step, action) in enumerate(zip(episode.steps, actions))
        )
        out.append(
            dataclasses.replace(episode, steps=steps, goal="a goal", final_observation="the end")
        )
    return out


def test_scores_fill_the_signal_and_spoiled_episodes_are_not_judged() -> None:
    judge = scripted_judge({"good": 1, "bad": -1})
    played = episodes()
    with pytest.raises(JudgeError, match=r"episode 2 \(task 0\): 3 turns got -1"):
        judge_scores(judge, played)
    played[2] = dataclasses.replace(played[2], status=Status.ENV_ERROR)
    scores = judge_scores(judge, played, max_steps=5)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, [[1, 0, -1, 0, 0], [0, 0, 1, 0, 0], [0] * 5])
    assert judge_scores(judge, played[:2]).shape == (2, 3)
    assert judge_scores(judge, []).shape == (0, 0)


def test_a_transcript_shows_what_was_seen_done_and_answered() -> None:
    assert transcript_of(episodes()[1]) == [
        Turn("before 0", "idle", "before 1"),
        Turn("before 1", "(no action)", "before 2"),
        Turn("before 2", "good", "the end"),
    ]


def test_a_failing_judge_stops_the_others() -> None:
    asked = []

    def judge(transcript, goal):
        asked.append(goal)
        time.sleep(0.01)
        raise JudgeError("judge: gone")

    with pytest.raises(JudgeError, match="gone"):
        judge_scores(judge, episodes()[:2] * 100)
    assert len(asked) < 100


def test_a_run_has_a_judge_exactly_if_its_method_asks_one(monkeypatch) -> None:
    def config(**changes) -> TrainConfig:
        plain = {"run": "r", "policy": {"init": {}}, "credit": "tarl"}
        return validate(TrainConfig, plain | changes, "test")

    section = {"url": "http://localhost:8000/v1", "model": "wise"}
    assert judge_of(config(judge=section), {"judge_score"}) is not None
    assert judge_of(config(credit="grpo"), set()) is None
    with pytest.raises(UserError, match=r"tarl needs judge_score.*add judge: \{url"):
        judge_of(config(), {"judge_score"})
    with pytest.raises(UserError, match="grpo asks no judge; remove the section"):
        judge_of(config(credit="grpo", judge=section), set())
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match="NO_SUCH_KEY is not set"):
        judge_of(config(judge=section | {"key_variable": "NO_SUCH_KEY"}), {"judge_score"})
    for url in ("localhost:8000", "http://me:secret@host/v1", "ftp://host"):
        with pytest.raises(UserError, match=r"judge\.url: expected http://HOST") as caught:
            config(judge=section | {"url": url})
        assert "secret" not in str(caught.value)
