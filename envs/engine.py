"""A policy behind an HTTP server, played like a sampler in this process.

Speaks ``POST URL/completions`` of the OpenAI API with the extensions that vLLM (0.10.2 and later)
and SGLang (from its pull request 30917 on) share: ``prompt`` is a list of token ids, and
``return_token_ids`` asks for the ids of the response. Nothing is tokenized on the way, so an
episode holds exactly the ids that were read and sampled. Fields and their meaning are taken from
the documentation and source of both servers; neither was run.

A turn sends the whole row of ids: which prefix of it is still cached is the server's business.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import numpy as np

from envs.rollout import Key

_PASSING = frozenset({408, 429, 500, 502, 503, 504})  # HTTP statuses worth another attempt


class EngineError(Exception):
    """The server cannot be reached, refuses, or answers with something that cannot be played."""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Where the server is and how it samples.

    Attributes:
      url: address that ``/completions`` is appended to, such as ``http://localhost:8000/v1``.
      model: the name under which the server knows the policy.
      waves, slots: slot groups and slots per group, as of any sampler.
      stop_ids: ids that end a response.
      temperature, top_p, top_k: as of ``models.sampler.SamplerConfig``; 0, 1.0 and 0 are greedy
        and no filters.
      key: sent as a bearer token, if there is one.
      deadline_s: seconds for one response, further attempts included.
      concurrency: requests at once; None is all of a wave.
      pauses: seconds before each further attempt.
    """

    url: str
    model: str
    waves: int
    slots: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    key: str | None = dataclasses.field(default=None, repr=False)
    deadline_s: float = 120.0
    concurrency: int | None = None
    pauses: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)

    @property
    def address(self) -> str:
        return f"{self.url.rstrip('/')}/completions"


@dataclasses.dataclass(frozen=True)
class Response:
    """A sampled response: its ids, the server's log-probabilities, and "stop" or "length"."""

    ids: np.ndarray
    logp: np.ndarray
    stop: str


def request_seed(seed: int, key: Key) -> int:
    """A seed in [0, 2^31) from the run's seed and (iteration, group, replica, turn)."""
    return int(np.random.SeedSequence((seed, *key)).generate_state(1)[0] >> 1)


class Engine:
    """Implements ``envs.rollout.Sampler``. Its slots are rows of ids on this side of the line.

    Args:
      settings: server and sampling.
      seed: the run's seed. Responses repeat as far as the server honours seeds.
    """

    def __init__(self, settings: EngineSettings, *, seed: int = 0) -> None:
        self.settings, self.seed = settings, seed
        self._rows: list[list[list[int]]] = [
            [[] for _ in range(settings.slots)] for _ in range(settings.waves)
        ]
        self._tls = httpx2.create_ssl_context()  # slow to make, so once
        self._headers = {} if settings.key is None else {"Authorization": f"Bearer {settings.key}"}

    def lengths(self, wave: int) -> np.ndarray:
        """Tokens per slot."""
        return np.array([len(row) for row in self._rows[wave]])

    def reset(self, wave: int, slot: int) -> None:
        """Forgets a slot's tokens."""
        self._rows[wave][slot] = []

    def extend(self, wave: int, requests: Mapping[int, np.ndarray]) -> None:
        """Appends ids to slots."""
        for slot, ids in requests.items():
            self._rows[wave][slot].extend(int(i) for i in ids)

    def generate(self, wave: int, requests: Mapping[int, tuple[Key, int]]) -> dict[int, Response]:
        """Asks for one response per requested slot, all at once, and appends them to the slots.

        Args:
          wave: which wave.
          requests: slot -> ((iteration, group, replica, turn), largest number of tokens).

        Raises:
          EngineError: see there. The message is one line.
        """
        bodies = {
            slot: self._body(self._rows[wave][slot], key, most)
            for slot, (key, most) in requests.items()
        }
        try:
            responses = asyncio.run(self._ask_all(bodies))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first failure cancelled the others
        for slot, response in responses.items():
            self._rows[wave][slot].extend(response.ids.tolist())
        return responses

    def _body(self, prompt: Sequence[int], key: Key, most: int) -> dict[str, Any]:
        """The request. Every sampling option is spelt out.

        Both servers fill gaps from the model's generation_config.json, and Qwen's has filters and
        a penalty for repetition.
        """
        return {
            "model": self.settings.model,
            "prompt": list(prompt),
            "max_tokens": most,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "top_k": self.settings.top_k or -1,  # what both servers take for "off"
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(self.settings.stop_ids),
            "seed": request_seed(self.seed, key),
            "logprobs": 1,
            "return_token_ids": True,
        }

    async def _ask_all(self, bodies: Mapping[int, dict[str, Any]]) -> dict[int, Response]:
        gate = asyncio.Semaphore(self.settings.concurrency or max(len(bodies), 1))
        # Fresh connections each turn: while environments step, servers close idle ones.
        async with (
            httpx2.AsyncClient(
                verify=self._tls,
                headers=self._headers,
                timeout=None,
                limits=httpx2.Limits(max_connections=None),
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            tasks = {
                slot: group.create_task(self._ask(client, gate, body))
                for slot, body in bodies.items()
            }
        return {slot: task.result() for slot, task in tasks.items()}

    async def _ask(
        self, client: httpx2.AsyncClient, gate: asyncio.Semaphore, body: dict[str, Any]
    ) -> Response:
        """One response, with further attempts after trouble that may pass."""
        settings, trouble = self.settings, ""
        async with gate:
            try:
                async with asyncio.timeout(settings.deadline_s):
                    for pause in (0.0, *settings.pauses):
                        await asyncio.sleep(pause)
                        try:
                            answer = await client.post(settings.address, json=body)
                        except httpx2.HTTPError as error:
                            trouble = f"{type(error).__name__}: {_short(str(error))}"
                            continue
                        if answer.status_code == 200:
                            return read_answer(answer, body)
                        trouble = f"HTTP {answer.status_code}: {_short(answer.text)}"
                        if answer.status_code not in _PASSING:
                            raise EngineError(f"{settings.address}: {trouble}")
            except httpx2.InvalidURL as error:
                raise EngineError(f"{settings.address} is no address: {error}") from None
            except TimeoutError:
                earlier = f" (attempts before it: {trouble})" if trouble else ""
                raise EngineError(
                    f"{settings.address}: no answer within {settings.deadline_s:g} s{earlier}; "
                    "raise engine.deadline_s, or send fewer requests at once (engine.concurrency)"
                ) from None
        raise EngineError(
            f"{settings.address}: {len(settings.pauses) + 1} attempts failed, the last with "
            f"{trouble}; check that the server runs and that engine.url is its address"
        )


def read_answer(answer: httpx2.Response, body: Mapping[str, Any]) -> Response:
    """Takes the response out of an answer, if it is one to the request ``body``.

    Raises:
      EngineError: the server gave no token ids or no log-probabilities, read another prompt than
        was sent, or ended the response elsewhere than at a stop id or the length limit.
    """

    def refuse(what: str) -> EngineError:
        return EngineError(f"{answer.url}: {what}")

    try:
        choice = answer.json()["choices"][0]
        ids, logprobs, reason = (choice.get(k) for k in ("token_ids", "logprobs", "finish_reason"))
        logp = logprobs.get("token_logprobs") if logprobs else None
        read = choice.get("prompt_token_ids")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise refuse(f"the answer is no completion: {_short(answer.text)}") from None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise refuse(
            "the answer holds no token ids (token_ids); use a server that knows return_token_ids, "
            "such as vLLM 0.10.2 or later"
        )
    if not ids:
        raise refuse(f"the response is empty (finish_reason {reason!r}); a stop id is part of it")
    if not isinstance(logp, list) or len(logp) != len(ids) or None in logp:
        count = sum(x is not None for x in logp) if isinstance(logp, list) else 0
        raise refuse(f"{len(ids)} token ids came with {count} log-probabilities (token_logprobs)")
    if read is not None and read != body["prompt"]:
        raise refuse(
            f"the server read another prompt ({len(read)} ids) than was sent "
            f"({len(body['prompt'])} ids); switch off its truncation and prompt templates"
        )
    stops = set(body["stop_token_ids"])
    early = next((i for i in ids[:-1] if i in stops), None)
    if early is not None or len(ids) > body["max_tokens"]:
        ignored = "max_tokens" if early is None else f"stop_token_ids (it went on after {early})"
        raise refuse(f"the server ignores {ignored}; use one that knows it")
    if ids[-1] not in stops and reason != "length":
        raise refuse(
            f"a response ended with {ids[-1]} (finish_reason {reason!r}), which is no stop id "
            f"({sorted(stops)}); --policy must name the served model, and the server keep stop ids"
        )
    return Response(
        ids=np.asarray(ids, np.int32),
        logp=np.asarray(logp, np.float32),
        stop="stop" if ids[-1] in stops else "length",
    )


def _short(text: str, most: int = 300) -> str:
    """The beginning of a server's text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."
