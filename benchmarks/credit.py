"""Times every credit method, compiled, against a plain loop over the same arrays.

    python benchmarks/credit.py
    python benchmarks/credit.py --methods gigpo ppo --out runs/some.json

The loop is the method's oracle in ``tests/``: Python and NumPy over ragged lists, in float64. It
starts from the same padded arrays and ends with the same padded arrays, so reading them into lists
and writing them back belongs to it; what the oracle alone takes is shown beside it. Both answers
are compared. Twice: with one token per step, which is the estimator itself, and with rows of 40
tokens per step, as the household configs have, of which a third are action tokens. With these the
compiled method is also timed over N and over K, T growing with K, and exponents are fitted: time
~ N^a, time ~ K^b. A time is the median of repeated calls after a warm-up, each waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxcredit.credit import METHODS, CreditEstimator, make
from jaxcredit.episodes import SIGNAL_AXES, EpisodeBatch, Kind, Signals, Status

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from credit_cases import STEP_SIGNALS, TOKEN_SIGNALS
from oracles import ORACLES, Result, Trial

LIMIT_MS, FASTER, LINEAR = 5.0, 50.0, 1.15
EPISODES, STEPS, GROUP, LAYERS = 128, 50, 8, 6
MANY_EPISODES, MANY_STEPS = (32, 128, 512), (12, 25, 50, 100)
QUADRATIC = "reads a step graph: its input has K x K numbers per episode and layer"
ON_TOKENS = "a recurrence over the action tokens, not over the steps"
REASONS = {
    "attnsr": f"{QUADRATIC}; {ON_TOKENS}",
    "attnsr_async": f"{QUADRATIC}; {ON_TOKENS}",
    "attnsr_grpo": QUADRATIC,
    "flowtracer": "ranks the tokens of each episode, which takes a sort of all token slots",
    "flowtracer_step": QUADRATIC,
    "graphgpo": "relaxes the graph of all transitions until no path gets shorter",
    "linear": ON_TOKENS,
    "poad": ON_TOKENS,
    "ppo": ON_TOKENS,
}


def random_batch(n: int, k: int, width: int, seed: int = 0) -> tuple[EpisodeBatch, Signals]:
    """N conversations of K/2 to K steps in groups of 8, ``width`` tokens per step, a third of them
    (at least one) actions; and every signal."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers((k + 1) // 2, k + 1, n)
    shape = (n, k * width)
    within, step = np.arange(k * width) % width, np.arange(k * width) // width
    real = step < lengths[:, None]
    action = real & (within < max(width // 3, 1))
    sizes = {"B": n, "T": k * width, "N": n, "K": k, "K+1": k + 1, "2": 2, "L": LAYERS}

    def draw(axes: str) -> jax.Array:
        return jnp.asarray(rng.random([sizes[a] for a in axes.split()]), jnp.float32)

    signals = {name: draw(axes) for name, axes in SIGNAL_AXES.items()}
    signals |= {name: -signals[name] for name in ("logp", "ref_logp", "reward_logp")}
    signals["hindsight_logp"] = -signals["hindsight_logp"]
    signals["step_graph"] = signals["step_graph"] / k
    signals["judge_score"] = jnp.asarray(rng.integers(-1, 2, (n, k)), jnp.float32)
    outcome = rng.random(n) < 0.5
    kind = np.where(action, int(Kind.ACTION), np.where(real, int(Kind.OBSERVATION), int(Kind.PAD)))
    batch = EpisodeBatch(
        tokens=jnp.zeros(shape, jnp.int32),
        kind=jnp.asarray(kind, jnp.int32),
        step=jnp.asarray(np.where(real, step, -1), jnp.int32),
        episode=jnp.asarray(np.where(real, np.arange(n)[:, None], -1), jnp.int32),
        position=jnp.zeros(shape, jnp.int32),
        segment=jnp.asarray(real, jnp.int32),
        behaviour_logp=-draw("B T"),
        trainable=jnp.asarray(action),
        step_mask=jnp.asarray(np.arange(k) < lengths[:, None]),
        step_reward=draw("N K"),
        progress=jnp.asarray(rng.integers(0, 5, (n, k + 1)) / 4, jnp.float32),
        state=jnp.asarray(rng.integers(0, k, (n, k)), jnp.int32),
        action=jnp.asarray(rng.integers(0, 5, (n, k)), jnp.int32),
        action_valid=jnp.asarray(rng.random((n, k)) < 0.9),
        task=jnp.asarray(np.arange(n) // GROUP, jnp.int32),
        outcome=jnp.asarray(outcome, jnp.float32),
        success=jnp.asarray(outcome),
        status=jnp.full(n, int(Status.FAILURE), jnp.int32),
        n_steps=jnp.asarray(lengths, jnp.int32),
        weight=jnp.ones(n),
    )
    return batch, Signals(**signals)


def needed(method: CreditEstimator, signals: Signals) -> Signals:
    """The signals that the method asks for; the others absent."""
    return Signals(**{k: getattr(signals, k) for k in SIGNAL_AXES if k in method.needs})


def read(batch: EpisodeBatch, signals: Signals) -> tuple[list[Trial], list]:
    """The arrays as ragged lists, token by token, and where each token came from."""
    lengths = batch.n_steps.tolist()
    names = [x for x in TOKEN_SIGNALS if getattr(signals, x) is not None]
    arrays = {x: getattr(signals, x).tolist() for x in names}
    arrays["behaviour"] = batch.behaviour_logp.tolist()
    lists = {x: [[[] for _ in range(s)] for s in lengths] for x in (*arrays, "tokens", "place")}
    kind, step, episode = batch.kind.tolist(), batch.step.tolist(), batch.episode.tolist()
    trainable = batch.trainable.tolist()
    for b, row in enumerate(kind):
        for t, what in enumerate(row):
            if what == Kind.ACTION:
                i, k = episode[b][t], step[b][t]
                lists["tokens"][i][k].append(trainable[b][t])
                lists["place"][i][k].append((b, t))
                for x, values in arrays.items():
                    lists[x][i][k].append(values[b][t])
    tables = {
        "rewards": batch.step_reward,
        "states": batch.state,
        "actions": batch.action,
        "accepted": batch.action_valid,
        **{own: getattr(signals, x) for x, own in STEP_SIGNALS.items()},
    }
    tables = {x: table.tolist() for x, table in tables.items() if table is not None}
    moments = {"progress": batch.progress.tolist()}
    if signals.mc_value is not None:
        moments["mc_value"] = signals.mc_value.tolist()
    graph = None if signals.step_graph is None else np.asarray(signals.step_graph, np.float64)
    task, outcome, success = batch.task.tolist(), batch.outcome.tolist(), batch.success.tolist()
    weight = batch.weight.tolist()
    absent = dict.fromkeys((*TOKEN_SIGNALS, *STEP_SIGNALS.values(), "mc_value", "graph"))
    trials = []
    for i, s in enumerate(lengths):
        fields = {
            **absent,
            **{x: values[i] for x, values in lists.items() if x != "place"},
            **{x: table[i][:s] for x, table in tables.items()},
            **{x: table[i][: s + 1] for x, table in moments.items()},
        }
        if graph is not None:
            fields["graph"] = graph[i, :, :, :s, :s]
        trials.append(
            Trial(task=task[i], outcome=outcome[i], success=success[i], weight=weight[i], **fields)
        )
    return trials, lists["place"]


def write(result: Result, place: list, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The oracle's lists as arrays of the batch's shape, token by token."""
    lists = {"token_advantage": result.advantage}
    lists |= {"token_target": result.target} if result.target else {}
    lists |= {"token_weight": result.weight} if result.weight else {}
    found = {}
    for name, episodes in lists.items():
        array = found[name] = np.zeros(shape, np.float32)
        for steps, places in zip(episodes, place):
            for numbers, where in zip(steps, places):
                for x, (b, t) in zip(numbers, where):
                    array[b, t] = x
    return found


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    jax.block_until_ready(call())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - started)
    return float(np.median(taken)) * 1e3


def compiled_ms(name: str, batch: EpisodeBatch, signals: Signals, repeats: int) -> float:
    method = make(name)
    estimate, state, signals = jax.jit(method.estimate), method.init(), needed(method, signals)
    return milliseconds(lambda: estimate(batch, signals, state), repeats)


def against_the_loop(name: str, batch: EpisodeBatch, signals: Signals) -> dict[str, float]:
    """Milliseconds compiled and looped, and the largest difference of what they answer."""
    method = make(name)
    signals = needed(method, signals)
    credit, _ = jax.jit(method.estimate)(batch, signals, method.init())
    fast = compiled_ms(name, batch, signals, 25)
    started = time.perf_counter()
    trials, place = read(batch, signals)
    ready = time.perf_counter()
    result = ORACLES[name](trials)
    answered = time.perf_counter()
    arrays = write(result, place, batch.tokens.shape)
    done = time.perf_counter()
    apart = max(float(np.abs(getattr(credit, k) - x).max()) for k, x in arrays.items())
    loop = 1e3 * (done - started)
    return {
        "ms": fast,
        "loop_ms": loop,
        "oracle_ms": 1e3 * (answered - ready),
        "ratio": loop / fast,
        "difference": apart,
    }


def exponent(sizes: tuple[int, ...], times: list[float]) -> float:
    """Slope of log time over log size, least squares."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def growth(name: str, width: int, cases: dict) -> dict[str, object]:
    """Times over N at 50 steps and over K at 128 episodes, and their exponents."""

    def times(sizes: list[tuple[int, int]]) -> list[float]:
        for n, k in sizes:
            if (n, k, width) not in cases:
                cases[n, k, width] = random_batch(n, k, width)
        return [compiled_ms(name, *cases[n, k, width], repeats=7) for n, k in sizes]

    by_n = times([(n, STEPS) for n in MANY_EPISODES])
    by_k = times([(EPISODES, k) for k in MANY_STEPS])
    return {
        "ms_by_n": dict(zip(map(str, MANY_EPISODES), by_n)),
        "ms_by_k": dict(zip(map(str, MANY_STEPS), by_k)),
        "n_exponent": exponent(MANY_EPISODES, by_n),
        "k_exponent": exponent(MANY_STEPS, by_k),
    }


def verdicts(row: dict) -> list[str]:
    """What of the three limits the row misses."""
    missed = []
    if row["ms"] >= LIMIT_MS:
        missed.append(f"{LIMIT_MS:.0f} ms")
    if row["ratio"] < FASTER:
        missed.append(f"{FASTER:.0f} x")
    if "n_exponent" in row and max(row["n_exponent"], row["k_exponent"]) > LINEAR:
        missed.append("linear")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=sorted(METHODS), choices=sorted(METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 40], help="per step")
    parser.add_argument("--no-growth", action="store_true", help="leave out the exponents")
    parser.add_argument("--out", type=Path, default=Path("runs/credit_benchmark.json"))
    options = parser.parse_args()
    device = f"{jax.devices()[0].platform}, {os.cpu_count()} cores, {platform.machine()}"
    print(f"{EPISODES} episodes x {STEPS} steps; jax {jax.__version__} on {device}")
    rows, cases = [], {}
    for width in options.tokens:
        batch, signals = random_batch(EPISODES, STEPS, width)
        print(f"\n{width} tokens per step: token arrays of {list(batch.tokens.shape)}")
        print("method              ms jit  ms loop  oracle   ratio   N^a   K^b   misses")
        for name in options.methods:
            row = {"method": name, "tokens": width, **against_the_loop(name, batch, signals)}
            if width == max(options.tokens) and not options.no_growth:
                row |= growth(name, width, cases)
            row["misses"] = missed = verdicts(row)
            rows.append(row)
            slopes = [f"{row.get(key, np.nan):5.2f}" for key in ("n_exponent", "k_exponent")]
            slopes = [x.replace("nan", "  -") for x in slopes]
            numbers = f"{row['ms']:7.2f}  {row['loop_ms']:7.0f}  {row['oracle_ms']:6.0f}"
            why = f" ({REASONS[name]})" if missed and name in REASONS else ""
            print(
                f"{name:<18} {numbers}  {row['ratio']:6.0f}  {slopes[0]} {slopes[1]}   "
                f"{', '.join(missed) or '-'}{why}",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    head = {"device": device, "jax": jax.__version__, "episodes": EPISODES, "steps": STEPS}
    options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
