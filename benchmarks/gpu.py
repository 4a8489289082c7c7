"""What only a GPU can tell: kernels against float32, tokens per second, memory against the plan.

    python benchmarks/gpu.py --out gpu.json          # on a machine with a GPU, a few minutes
    python benchmarks/gpu.py --tiny                  # the same steps on any machine, in seconds

Three parts, each printed as it is done. *Kernels*: the attention that the device chooses in
bfloat16 against plain XLA in float32: output, gradients and the mass on messages. *Speed*: scoring
with step graphs, the update's gradient, prefill and decode, on random weights of a known size.
*Memory*: the most that the device held, against what ``launch plan`` predicts for the same
programs. Weights are random: no model is needed. One device is used.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcredit import batching
from jaxcredit.episodes import Episode, Status, Step
from launch.config import TrainConfig
from launch.loading import validate
from launch.plan.compile import plan_program
from launch.plan.hardware import GIB, Topology
from launch.plan.programs import Program, abstract_setup, programs
from models import attention
from models.attention import plain
from models.attention.case import Case, Messages

TINY = {"tokens": 256, "heads": (4, 2, 64), "policy": "tests/golden/tied", "rank": 2, "slots": 2}
FULL = {
    "tokens": 8192,
    "heads": (28, 4, 128),
    "policy": "Qwen2.5-1.5B-Instruct",
    "rank": 64,
    "slots": 8,
}


def seconds(call: Callable[..., Any], prepare: Callable[[], Any], rounds: int) -> float:
    """Median seconds of ``call(*prepare())`` after one that compiles; preparing is not timed."""
    times = []
    for _ in range(rounds + 1):
        args = jax.block_until_ready(prepare())
        started = time.perf_counter()
        jax.block_until_ready(call(*args))
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def kernels(tokens: int, heads: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """The chosen bfloat16 attention against plain float32 on the same rounded inputs.

    Errors are relative: the norm of the difference over the norm of the float32 result. The plain
    one holds [heads, tokens, tokens], so it is compared on at most 2,048 tokens; times are of all.
    """
    H, G, h = heads
    steps = 50
    backend = jax.default_backend()

    def inputs(T: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(1, T, H, h), (1, T, G, h), (1, T, G, h), (1, T, H, h)]
        q, k, v, w = (
            jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)
        )
        segments = jnp.where(jnp.arange(T) < T - T // 8, 1, 0)[None]
        ids = (jnp.arange(T) * 2 * steps // T)[None]
        return q, k, v, w, segments, Messages(ids, jnp.full(H, 1 / H), 2 * steps)

    def run(attend: Any, messages: Messages | None) -> Callable[..., Any]:
        def f(q: Any, k: Any, v: Any, w: Any, segments: Any) -> Any:
            case = Case(q.shape, G, q.dtype, backend, packed=False, n_messages=2 * steps)
            out, mass = attend(case, q, k, v, segments, messages)
            return jnp.sum((out * w).astype(jnp.float32)), (out, mass)

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))

    case = Case((1, tokens, H, h), G, jnp.bfloat16, backend, packed=False)
    chosen = attention.select(case)
    *arrays, messages = inputs(min(tokens, 2048))
    (_, (out, mass)), grads = run(chosen.attend, messages)(*arrays)
    *exact, segments = arrays
    exact = [x.astype(jnp.float32) for x in exact]
    with jax.default_matmul_precision("highest"):
        (_, (want, want_mass)), want_grads = run(plain.attend, messages)(*exact, segments)

    def error(a: Any, b: Any) -> float:
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    *arrays, messages = inputs(tokens)
    with_graph, without = run(chosen.attend, messages), run(chosen.attend, None)
    return {
        "attention": chosen.name,
        "output_error": error(out, want),
        "gradient_errors": [error(a, b) for a, b in zip(grads, want_grads, strict=True)],
        "mass_error": error(mass, want_mass),
        "mass_largest_difference": float(jnp.abs(mass - want_mass).max()),
        "seconds": seconds(without, lambda: arrays, rounds),
        "seconds_with_step_graph": seconds(with_graph, lambda: arrays, rounds),
    }


def run_config(chosen: dict[str, Any]) -> TrainConfig:
    """An AttnSR run of one row per call on one device."""
    tokens = chosen["tokens"]
    data = {
        "run": "unused",
        "policy": {
            "path": chosen["policy"],
            "lora": {"rank": chosen["rank"], "alpha": float(chosen["rank"])},
            "dtype": "bfloat16",
            "remat": "full",
        },
        "env": {"max_steps": 50},
        "prompt": {"context": "conversation", "max_context": tokens},
        "rollout": {"slots": chosen["slots"], "waves": 1, "max_response_tokens": tokens // 4},
        "credit": "attnsr",
        "optimizer": {"microbatch_tokens": tokens},
    }
    return validate(TrainConfig, data, "benchmark")


def filled(program: Program) -> tuple[Any, ...]:
    """Arguments with small random weights and rows of one full conversation."""
    names = {} if program.phase == "rollout" else {id(x): n for n, x in _row_leaves(program)}
    keys = iter(jax.random.split(jax.random.key(1), 10_000))
    episode = _conversation(program.shape[1], 50) if names else {}

    def fill(x: Any) -> Any:
        if id(x) in names:
            value = np.broadcast_to(episode[names[id(x)]], x.shape).astype(x.dtype)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            value = 0.02 * jax.random.normal(next(keys), x.shape, x.dtype)
        else:
            value = np.ones(x.shape, x.dtype)
        return value if x.sharding is None else jax.device_put(value, x.sharding)

    return jax.tree.map(fill, program.args)


def _row_leaves(program: Program) -> list[tuple[str, Any]]:
    """The named [rows, tokens] arrays among a program's last argument."""
    rows = program.args[-1]
    found = rows.items() if isinstance(rows, dict) else vars(rows).items()
    return [(name, x) for name, x in found if getattr(x, "shape", None) == program.shape]


def _conversation(width: int, steps: int) -> dict[str, np.ndarray]:
    """The token arrays of one conversation of full width, and the update's numbers for it."""
    rng = np.random.default_rng(0)
    steps = min(steps, width // 16)
    ends = np.linspace(0, width, steps + 1).astype(int)

    def step(n: int) -> Step:
        ids, reply = rng.integers(1, 30, n).astype(np.int32), max(1, n // 3)
        blank = np.zeros(reply, np.float32)
        span = (0, n - reply)
        return Step(ids[:-reply], ids[-reply:], blank, blank == 0, "stop", observation_span=span)

    made = tuple(step(int(n)) for n in np.diff(ends))
    episode = Episode("", 0, 0, made, 1.0, True, Status.SUCCESS)
    batch = batching.batch_episodes([episode], max_steps=steps, length_multiple=1)
    (part,) = batching.length_slices(np.asarray([width]), tokens=width, buckets=[width])
    rows = batching.take_rows(batch, part)
    weight = rows["trainable"] / rows["trainable"].sum()
    zeros = np.zeros_like(rows["behaviour_logp"])
    names = ("old_logp", "ref_logp", "target", "old_value", "advantage")
    return {**rows, "weight": weight, **dict.fromkeys(names, zeros)}


def policy_part(chosen: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Every program of a run: tokens per second, and memory against its plan."""
    device = jax.devices()[0]
    here = Topology("here", jax.default_backend(), "here", (1,), None, None, {})
    setup = abstract_setup(run_config(chosen), here, [device])
    found: dict[str, Any] = {}
    expected = 0.0
    for program in programs(setup, [device]):
        planned = plan_program(program, here, setup.parts.policy)
        args = filled(program)
        donated = {"score": None, "rollout": 2, "update": 2}[program.phase]
        donated = 0 if program.name == "update: apply" else donated

        def fresh(args: Any = args, donated: int | None = donated) -> list[Any]:
            """What is donated is gone afterwards: a copy is given."""
            return [jax.tree.map(jnp.copy, a) if i == donated else a for i, a in enumerate(args)]

        call = functools.partial(program.function, **program.static)
        taken = seconds(call, fresh, rounds)
        # What is held here: the arguments, a second copy of what is donated, what the program adds.
        held = sum(x.nbytes for x in jax.tree.leaves(args))
        held += 0 if donated is None else sum(x.nbytes for x in jax.tree.leaves(args[donated]))
        added = sum(planned.live[k] for k in ("activations", "temporaries", "results"))
        expected = max(expected, held + added)
        tokens = program.shape[0] * program.shape[1]
        found[program.name] = {
            "tokens": tokens,
            "seconds": taken,
            "tokens_per_second": tokens / taken if tokens else None,
            "attention": planned.attention,
            "planned_so_far_gib": expected / GIB,
            "held_at_most_so_far_gib": _peak(device),
        }
        del args, fresh
    return found


def _peak(device: Any) -> float | None:
    """The most that the device has held in this process; None where it does not say."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else peak / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each program")
    parser.add_argument("--policy", help="name of a known size, such as Qwen2.5-7B-Instruct")
    parser.add_argument("--tokens", type=int, help="length of a row")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    chosen = dict(TINY if options.tiny else FULL)
    chosen |= {k: getattr(options, k) for k in ("policy", "tokens") if getattr(options, k)}
    device = jax.devices()[0]
    found: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "settings": {**chosen, "rounds": options.rounds},
    }
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    found["kernels"] = kernels(chosen["tokens"], chosen["heads"], options.rounds)
    for name, value in found["kernels"].items():
        print(f"  {name}: {value}", flush=True)
    found["programs"] = policy_part(chosen, options.rounds)
    for name, row in found["programs"].items():
        print(f"  {name}: " + ", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
