"""Measures the rollout engine against lock-step rollouts that read every conversation again.

    python benchmarks/rollout.py                              # the quick start's policy
    python benchmarks/rollout.py --policy FOLDER --slots 8    # another one
    python benchmarks/rollout.py --sides engine transformers  # needs torch

Scenarios: ``instant`` and ``latency`` play synthetic episodes whose turns, texts and response
lengths are drawn from the seed, in environments that answer at once or after 5 to 200 ms;
``household`` plays real games. Sides: ``engine``; ``lockstep``, the same sampler, but every turn
reads the whole conversation again, all episodes of a batch wait for the slowest environment, and
the next batch begins when the last episode has ended; ``transformers``, the same loop around
``generate`` on a batch padded on the left. Shapes are each side's own: long rows are read best in
wide calls, a turn's few tokens in narrow ones. All sides play the same episodes with the same
number of slots, one after the other in this process; every side plays a few of them first, untimed.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from envs.chat import chat_format
from envs.meter import Meter
from envs.pool import Pool
from envs.prompts import Prompt
from envs.protocol import EnvFailure, EnvSpec
from envs.schedule import Playable, Turn, play
from envs.turns import Job, Limits, Play
from jaxcredit.episodes import Status
from models import hf
from models.config import QwenConfig
from models.sampler import Generated, Sampler, SamplerConfig

Generate = Callable[[Mapping[int, list[int]], Mapping[int, Turn]], Mapping[int, Generated]]


# --- synthetic episodes -------------------------------------------------------------------------


@dataclasses.dataclass
class Synthetic:
    """An episode of drawn lengths; what is sampled decides nothing."""

    ticket: int
    options: argparse.Namespace
    vocabulary: int

    def __post_init__(self) -> None:
        self.restart()
        draw = np.random.default_rng((self.options.seed, self.ticket))
        few, many = self.options.turns
        self.turns = int(draw.integers(few, many + 1))
        lengths = draw.integers(*self.options.observation, self.turns, endpoint=True)
        lengths[0] = self.options.prompt
        self.texts = [draw.integers(4, self.vocabulary, n) for n in lengths]
        self.most = draw.integers(*self.options.response, self.turns, endpoint=True)

    @property
    def task_id(self) -> str:
        return str(self.ticket)

    def restart(self) -> None:
        self.turn = 0

    def observe(self, observation: Any) -> Turn | Status:
        turn = self.turn
        if turn == self.turns:
            return Status.SUCCESS
        return Turn(self.texts[turn], turn == 0, (0, self.ticket, 0, turn), int(self.most[turn]))

    def respond(self, generated: Generated) -> str:
        self.turn += 1
        return "go on"


class Delays:
    """Environments that do nothing but take their time, from a seed."""

    def __init__(self, seed: int, low: float, high: float) -> None:
        self.seed, self.low, self.high = seed, low, high
        self._due: list[tuple[float, int]] = []
        self._steps: dict[int, int] = {}

    def _ask(self, ticket: int) -> None:
        draw = np.random.default_rng((self.seed, ticket, self._steps[ticket]))
        latency = draw.uniform(self.low, self.high)
        heapq.heappush(self._due, (time.perf_counter() + latency, ticket))

    def reset(self, ticket: int, task_id: str) -> None:
        self._steps[ticket] = 0
        self._ask(ticket)

    def step(self, ticket: int, action: str) -> None:
        self._steps[ticket] += 1
        self._ask(ticket)

    def close(self, ticket: int) -> None:
        self._steps.pop(ticket)

    def poll(self, timeout: float = 0.0) -> dict[int, Any]:
        if self._due and timeout:
            time.sleep(min(timeout, max(0.0, self._due[0][0] - time.perf_counter())))
        ready = {}
        while self._due and self._due[0][0] <= time.perf_counter():
            ready[heapq.heappop(self._due)[1]] = None
        return ready


# --- sides --------------------------------------------------------------------------------------


def lockstep(episodes: Sequence[Any], slots: int, pool: Any, generate: Generate) -> None:
    """Batches of ``slots`` episodes; every turn reads whole rows and waits for every answer."""
    for first in range(0, len(episodes), slots):
        live = dict(enumerate(episodes[first : first + slots]))
        rows: dict[int, list[int]] = {}
        turns: dict[int, Turn] = {}
        asked = {}
        for slot, episode in live.items():
            pool.reset(episode.ticket, episode.task_id)
            asked[episode.ticket] = slot

        def take(slot: int, then: Any) -> None:
            if isinstance(then, Turn):
                old = [] if then.fresh else rows[slot]  # noqa: B023 (called within the loop)
                rows[slot] = old + then.ids.tolist()  # noqa: B023
                turns[slot] = then  # noqa: B023
            elif isinstance(then, Status):
                pool.close(live[slot].ticket)  # noqa: B023
                del live[slot]  # noqa: B023
            else:
                pool.step(live[slot].ticket, then)  # noqa: B023
                asked[live[slot].ticket] = slot  # noqa: B023

        while live:
            answers: dict[int, Any] = {}
            while len(answers) < len(asked):
                answers |= pool.poll(1.0)
            for ticket, slot in list(asked.items()):
                del asked[ticket]
                if isinstance(answers[ticket], EnvFailure):
                    take(slot, Status.ENV_ERROR)
                else:
                    take(slot, live[slot].observe(answers[ticket]))
            if turns:
                now = dict(turns)
                turns.clear()
                for slot, generated in generate(rows, now).items():
                    rows[slot] = rows[slot] + generated.ids.tolist()
                    take(slot, live[slot].respond(generated))


def again(sampler: Sampler) -> Generate:
    """Responses of a sampler that reads every row from its beginning."""

    def generate(
        rows: Mapping[int, list[int]], turns: Mapping[int, Turn]
    ) -> Mapping[int, Generated]:
        for slot in turns:
            sampler.reset(slot)
        sampler.extend({slot: np.asarray(rows[slot]) for slot in turns})
        return sampler.generate({slot: (turn.key, turn.most) for slot, turn in turns.items()})

    return generate


def transformers_generate(folder: Path, stop_ids: Sequence[int], temperature: float) -> Generate:
    """``generate`` of transformers on a batch padded on the left, its own cache within a turn."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(
        rows: Mapping[int, list[int]], turns: Mapping[int, Turn]
    ) -> Mapping[int, Generated]:
        width = max(len(rows[slot]) for slot in turns)
        ids = torch.tensor([[0] * (width - len(rows[s])) + rows[s] for s in turns])
        mask = torch.tensor([[0] * (width - len(rows[s])) + [1] * len(rows[s]) for s in turns])
        most = max(turn.most for turn in turns.values())
        model.generation_config = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0,
            max_new_tokens=most,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=0,
        )
        with torch.no_grad():
            found = model.generate(ids, attention_mask=mask)[:, width:].numpy()
        out = {}
        for (slot, turn), row in zip(turns.items(), found, strict=True):
            stop = next((i + 1 for i, t in enumerate(row) if t in stop_ids), None)
            ended = stop is not None and stop <= turn.most
            row = row[: stop if ended else turn.most]
            out[slot] = Generated(
                row, np.zeros(len(row), np.float32), "stop" if ended else "length"
            )
        return out

    return generate


# --- scenarios ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Episodes from a number of them, environments, and how to sample."""

    episodes: Callable[[int], Sequence[Playable]]
    pool: Callable[[], AbstractContextManager[Any]]
    settings: SamplerConfig


def synthetic(
    options: argparse.Namespace, config: QwenConfig, latency: Sequence[float]
) -> Scenario:
    longest = options.prompt + options.turns[1] * (options.observation[1] + options.response[1])
    vocabulary = config.vocab_size
    return Scenario(
        lambda n: [Synthetic(i, options, vocabulary) for i in range(n)],
        lambda: nullcontext(Delays(options.seed, *latency)),
        settings(options, longest, stop_ids=()),
    )


def settings(
    options: argparse.Namespace, capacity: int, stop_ids: tuple[int, ...]
) -> SamplerConfig:
    return SamplerConfig(
        slots=options.slots,
        capacity=capacity,
        max_response=options.response[1],
        stop_ids=stop_ids,
        rows=options.rows,
        block=options.block,
        prefill=options.prefill,
    )


def household(options: argparse.Namespace, config: QwenConfig) -> Scenario:
    """Games of ``--data`` in worker processes, played by the policy at temperature 1."""
    from envs.alfworld.tasks import list_tasks
    from launch.assemble import load_tokenizer

    chat = chat_format(load_tokenizer(options.policy))
    bare = options.policy == HOUSEHOLD
    prompt = Prompt("bare" if bare else "household", "conversation", 2, not bare, not bare)
    limits = Limits(options.steps, options.max_context, 16 if bare else 96)
    tasks = list_tasks(options.data, "train", None)
    stop_ids = tuple(sorted({*config.eos_token_ids, chat.end_id}))
    spec = EnvSpec("alfworld", {"data": str(options.data)})
    return Scenario(
        lambda n: [
            Play(chat, prompt, limits, Job(tasks[i // 8 % len(tasks)], i // 8, i % 8), i, 0)
            for i in range(n)
        ],
        lambda: Pool(spec, options.workers),
        settings(options, options.max_context, stop_ids),
    )


HOUSEHOLD = Path("launch/policies/household")


@contextmanager
def clock() -> Iterator[list[float]]:
    spent = [time.perf_counter()]
    yield spent
    spent[0] = time.perf_counter() - spent[0]


def measure(
    side: str, scenario: Scenario, options: argparse.Namespace, config: QwenConfig, params: Any
) -> dict[str, float]:
    """Episodes per minute of one side, and what else is known of it."""
    dtype = jnp.dtype(options.cache_dtype)
    meter, marks = Meter(), []
    sampler = generate = None
    if side == "engine":
        sampler = Sampler(params, config, scenario.settings, dtype=dtype)
    elif side == "lockstep":
        whole = dataclasses.replace(
            scenario.settings, share=False, rows=None, prefill=options.whole_prefill
        )
        sampler = Sampler(params, config, whole, dtype=dtype)
        generate = again(sampler)
    else:
        generate = transformers_generate(options.policy, scenario.settings.stop_ids, 1.0)
    if sampler is not None:
        sampler.warm_up()

    def run(episodes: Sequence[Any], pool: Any) -> None:
        if side != "engine":
            assert generate is not None
            lockstep(episodes, options.slots, pool, generate)
            return
        assert sampler is not None
        meter.begin(len(episodes), options.slots, sampler.work)

        def finished(episode: Playable, status: Status) -> None:
            meter.done += 1
            marks.append((meter.held_s, meter.slot_s))

        play(episodes, sampler, pool, retries=1, meter=meter, finished=finished)

    with scenario.pool() as pool:
        run(scenario.episodes(options.slots), pool)
        meter, marks = Meter(), []
        before = dataclasses.asdict(sampler.work) if sampler is not None else {}
        with clock() as spent:
            run(scenario.episodes(options.episodes), pool)
    found = {"episodes_per_minute": 60 * options.episodes / spent[0], "seconds": spent[0]}
    if sampler is not None:
        after = dataclasses.asdict(sampler.work)
        found |= {name: after[name] - before[name] for name in after}
    if side == "engine":
        low, high = marks[len(marks) // 4], marks[3 * len(marks) // 4]
        found["middle_occupancy"] = (high[0] - low[0]) / (high[1] - low[1])
        found |= {k.removeprefix("rollout/"): v for k, v in meter.metrics().items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, default=HOUSEHOLD, help="folder with the weights")
    parser.add_argument(
        "--scenarios", nargs="+", default=["instant", "latency"], help="instant latency household"
    )
    parser.add_argument(
        "--sides", nargs="+", default=["engine", "lockstep"], help="engine lockstep transformers"
    )
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=96)
    parser.add_argument("--turns", type=int, nargs=2, default=[10, 30], metavar=("LEAST", "MOST"))
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the first prompt")
    parser.add_argument("--observation", type=int, nargs=2, default=[6, 24], help="tokens")
    parser.add_argument("--response", type=int, nargs=2, default=[4, 12], help="tokens")
    parser.add_argument("--latency", type=float, nargs=2, default=[0.005, 0.2], help="seconds")
    parser.add_argument("--rows", type=int, default=8, help="of the engine's decode block")
    parser.add_argument("--block", type=int, default=4, help="tokens of a decode block")
    parser.add_argument("--prefill", type=int, default=32, help="tokens of the engine's prefill")
    parser.add_argument(
        "--whole-prefill", type=int, default=128, help="tokens of lock-step's prefill calls"
    )
    parser.add_argument("--cache-dtype", default="float32")
    parser.add_argument("--data", type=Path, default=Path("data/household"), help="games")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of a household episode at most")
    parser.add_argument("--max-context", type=int, default=768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/rollout.json"))
    options = parser.parse_args()
    config, params = hf.load_policy(options.policy, jnp.float32)
    results: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    for name in options.scenarios:
        if name == "household":
            scenario = household(options, config)
        else:
            latency = options.latency if name == "latency" else (0.0, 0.0)
            scenario = synthetic(options, config, latency)
        found = {side: measure(side, scenario, options, config, params) for side in options.sides}
        results[name] = found
        rate = {side: row["episodes_per_minute"] for side, row in found.items()}
        for side in options.sides:
            ratio = rate["engine"] / rate[side] if "engine" in rate else float("nan")
            row = found[side]
            more = [
                f"{what} {row[key]:{form}}"
                for key, what, form in (
                    ("prefilled", "prefilled", ".0f"),
                    ("decoded", "sampled", ".0f"),
                    ("middle_occupancy", "occupancy", ".1%"),
                    ("prefill_s", "prefill s", ".2f"),
                    ("decode_s", "decode s", ".2f"),
                    ("environment_seconds", "environment s", ".2f"),
                    ("waiting_seconds", "waiting s", ".2f"),
                )
                if key in row
            ]
            print(
                f"{name:<10} {side:<13} {rate[side]:8.1f} episodes/min, engine is {ratio:5.2f} "
                f"times that; {', '.join(more)}",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
