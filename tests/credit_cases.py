"""Random ragged episodes, and their packing into padded batches with garbage under the masks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from oracles import Result, Trial

from jaxcredit.credit import CreditEstimator, make
from jaxcredit.episodes import Credit, EpisodeBatch, Kind, Signals

LAYERS = 3
TOKEN_SIGNALS = ("value", "logp", "entropy", "reward_logp", "token_flow")
STEP_SIGNALS = {  # signal -> the trial's name for it
    "hindsight_logp": "hindsight",
    "q_value": "q_value",
    "v_value": "v_value",
    "predicted_return": "predicted_return",
    "predicted_progress": "predicted_progress",
    "promise": "promise",
    "judge_score": "judge",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Padded sizes: episodes, steps, rows, tokens."""

    n: int = 16
    k: int = 6
    b: int = 48
    t: int = 56


@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch, its signals, and where response token (i, k, j) ended up."""

    batch: EpisodeBatch
    signals: Signals
    place: dict[tuple[int, int, int], tuple[int, int]]


def random_trial(
    rng: np.random.Generator,
    task: int,
    n: int | None = None,
    tokens: list[list[bool]] | None = None,
) -> Trial:
    """A trial of 1 to 5 steps with 1 to 4 response tokens each, some injected; or of ``n``
    steps, or with the given ``tokens``."""
    if tokens is None:
        n = int(rng.integers(1, 6)) if n is None else n
        tokens = [(rng.random(rng.integers(1, 5)) < 0.8).tolist() for _ in range(n)]
        for flags in tokens:
            if rng.random() < 0.9 and not any(flags):
                flags[0] = True
    n = len(tokens)
    checks = int(rng.integers(1, 4))
    graph = np.tril(rng.random((LAYERS, 2, n, n)), -1)
    graph *= rng.random((LAYERS, 1, 1, 1)) / max(n, 1)
    if rng.random() < 0.2:
        graph[int(rng.integers(LAYERS))] = 0.0
    return Trial(
        task=task,
        outcome=float(rng.choice([0.0, 0.25, 1.0])),
        success=bool(rng.random() < 0.5),
        rewards=rng.normal(size=n).tolist(),
        progress=(rng.integers(0, checks + 1, n + 1) / checks).tolist(),
        states=rng.integers(0, 3, n).tolist(),
        actions=rng.integers(0, 2, n).tolist(),
        accepted=(rng.random(n) < 0.7).tolist(),
        tokens=tokens,
        value=[rng.normal(size=len(flags)).tolist() for flags in tokens],
        logp=[(-rng.random(len(flags))).tolist() for flags in tokens],
        entropy=[rng.random(len(flags)).tolist() for flags in tokens],
        reward_logp=[(-rng.random(len(flags))).tolist() for flags in tokens],
        token_flow=[rng.random(len(flags)).tolist() for flags in tokens],
        hindsight=(-rng.random(n)).tolist(),
        mc_value=rng.random(n + 1).tolist(),
        q_value=rng.normal(size=(n, 2)).tolist(),
        v_value=rng.normal(size=(n, 2)).tolist(),
        predicted_return=rng.random(n).tolist(),
        predicted_progress=rng.normal(size=n).tolist(),
        promise=rng.random(n).tolist(),
        judge=rng.integers(-1, 2, n).tolist(),
        graph=graph,
        # A stream of its own leaves the other draws as they are.
        behaviour=[(-3 * rng.spawn(1)[0].random(len(flags))).tolist() for flags in tokens],
        weight=float(rng.random() < 0.85),
    )


def random_trials(seed: int) -> list[Trial]:
    """Nine trials of three tasks whose ids are arbitrary ints; the first one counts."""
    rng = np.random.default_rng(seed)
    tasks = rng.choice(10**6, 3, replace=False)
    trials = [random_trial(rng, int(rng.choice(tasks))) for _ in range(9)]
    trials[0].weight = 1.0
    return trials


def pack(
    trials: list[Trial],
    shape: Shape | None = None,
    *,
    window: bool = False,
    junk: float = np.nan,
    seed: int = 0,
) -> Packed:
    """Pads on the right; everything that no mask covers is ``junk``.

    In a conversation an episode is one row of context, response, observation, ...; in a
    window each step is a row, and the rows are shuffled.
    """
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    rows: list[list[tuple[int, int, int, int]]] = []  # (kind, episode, step, response index)
    for i, trial in enumerate(trials):
        row: list[tuple[int, int, int, int]] = []
        for k, flags in enumerate(trial.tokens):
            row += [(Kind.CONTEXT, -1, -1, -1)] * int(rng.integers(1, 3))
            row += [(Kind.ACTION, i, k, j) for j in range(len(flags))]
            row += [(Kind.OBSERVATION, i, k, -1)] * int(rng.integers(0, 3))
            if window:
                rows.append(row)
                row = []
        if not window:
            rows.append(row)
    if window:
        rng.shuffle(rows)
    return _fill(trials, shape, rows, junk)


def _fill(trials: list[Trial], shape: Shape, rows: list, junk: float) -> Packed:
    whole = int(np.clip(np.nan_to_num(junk, nan=-7), -(2**30), 2**30))
    token = {name: np.full((shape.b, shape.t), junk) for name in (*TOKEN_SIGNALS, "behaviour")}
    ids = {name: np.full((shape.b, shape.t), -1) for name in ("episode", "step")}
    kind = np.zeros((shape.b, shape.t), int)
    trainable = np.zeros((shape.b, shape.t), bool)
    place = {}
    for b, row in enumerate(rows):
        for t, (what, i, k, j) in enumerate(row):
            kind[b, t], ids["episode"][b, t], ids["step"][b, t] = what, i, k
            if what == Kind.ACTION:
                place[i, k, j] = (b, t)
                trainable[b, t] = trials[i].tokens[k][j]
                if trainable[b, t] and trials[i].weight > 0:
                    token["behaviour"][b, t] = trials[i].behaviour[k][j]
                    for name in TOKEN_SIGNALS:
                        token[name][b, t] = getattr(trials[i], name)[k][j]
            elif what == Kind.OBSERVATION:
                trainable[b, t] = True  # the kind alone must keep it out

    n, k_max = shape.n, shape.k
    step = {
        name: np.full((n, k_max, 2) if name in ("q_value", "v_value") else (n, k_max), junk)
        for name in ("reward", *STEP_SIGNALS)
    }
    progress, mc_value = np.full((n, k_max + 1), junk), np.full((n, k_max + 1), junk)
    state, action = np.full((n, k_max), whole), np.full((n, k_max), whole)
    accepted, mask = np.zeros((n, k_max), bool), np.zeros((n, k_max), bool)
    graph = np.full((n, LAYERS, 2, k_max, k_max), junk)
    task, outcome = np.full(n, trials[0].task), np.full(n, junk)
    success, n_steps, weight = np.ones(n, bool), np.full(n, whole), np.zeros(n)
    for i, trial in enumerate(trials):
        mask[i, : trial.n] = True
        task[i], n_steps[i], weight[i] = trial.task, trial.n, trial.weight
        if trial.weight == 0:
            continue
        outcome[i], success[i] = trial.outcome, trial.success
        step["reward"][i, : trial.n] = trial.rewards
        for name, own in STEP_SIGNALS.items():
            step[name][i, : trial.n] = getattr(trial, own)
        progress[i, : trial.n + 1], mc_value[i, : trial.n + 1] = trial.progress, trial.mc_value
        state[i, : trial.n], action[i, : trial.n] = trial.states, trial.actions
        accepted[i, : trial.n] = trial.accepted
        below = np.tri(trial.n, k=-1, dtype=bool)
        block = graph[i, :, :, : trial.n, : trial.n]
        block[:, :, below] = trial.graph[:, :, below]

    def real(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.float32)

    batch = EpisodeBatch(
        tokens=jnp.zeros((shape.b, shape.t), jnp.int32),
        kind=jnp.asarray(kind),
        step=jnp.asarray(ids["step"]),
        episode=jnp.asarray(ids["episode"]),
        position=jnp.zeros((shape.b, shape.t), jnp.int32),
        segment=jnp.zeros((shape.b, shape.t), jnp.int32),
        behaviour_logp=real(token["behaviour"]),
        trainable=jnp.asarray(trainable),
        step_mask=jnp.asarray(mask),
        step_reward=real(step["reward"]),
        progress=real(progress),
        state=jnp.asarray(state),
        action=jnp.asarray(action),
        action_valid=jnp.asarray(accepted),
        task=jnp.asarray(task),
        outcome=real(outcome),
        success=jnp.asarray(success),
        status=jnp.zeros(n, jnp.int32),
        n_steps=jnp.asarray(n_steps),
        weight=real(weight),
    )
    signals = Signals(
        step_graph=real(graph),
        mc_value=real(mc_value),
        **{name: real(token[name]) for name in TOKEN_SIGNALS},
        **{name: real(step[name]) for name in STEP_SIGNALS},
    )
    return Packed(batch, signals, place)


def nested(trials: list[Trial], packed: Packed, per_token: np.ndarray) -> list:
    """Token numbers by episode, step and response token."""
    rows = np.asarray(per_token).tolist()

    def at(i: int, k: int, j: int) -> float:
        b, t = packed.place[i, k, j]
        return rows[b][t]

    return [
        [[at(i, k, j) for j in range(len(flags))] for k, flags in enumerate(trial.tokens)]
        for i, trial in enumerate(trials)
    ]


def flatten(lists: list) -> np.ndarray:
    """All numbers of nested lists in order."""
    return np.array(list(_numbers(lists)))


def _numbers(lists: list | float) -> Iterator[float]:
    if isinstance(lists, list):
        for inner in lists:
            yield from _numbers(inner)
    else:
        yield lists


@pytest.fixture(autouse=True, scope="module")
def low_effort_compilation() -> Iterator[None]:
    """These programs run a few times each: compiling them well would take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def jitted(name: str) -> tuple[CreditEstimator, Callable]:
    """A method with its defaults and its compiled ``estimate``, shared by all tests."""
    method = make(name)
    return method, jax.jit(method.estimate)


def run(name: str | CreditEstimator, packed: Packed) -> Credit:
    """Credit under fresh state: compiled for a name, op by op for an estimator."""
    method, estimate = jitted(name) if isinstance(name, str) else (name, name.estimate)
    return estimate(packed.batch, packed.signals, method.init())[0]


def on_mesh(name: str, packed: Packed, axis_type: AxisType = AxisType.Auto) -> Credit:
    """Credit of a batch whose rows, and whose episodes, are spread over eight devices."""
    assert jax.device_count() == 8
    method, estimate = jitted(name)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, jax.P("data"))
        batch, signals = jax.device_put((packed.batch, packed.signals), split)
        return estimate(batch, signals, method.init())[0]


def credit_of(method: CreditEstimator, packed: Packed) -> Credit:
    """Credit under fresh state, compiled for this batch."""
    return jax.jit(method.estimate)(packed.batch, packed.signals, method.init())[0]


def agrees(method: CreditEstimator, trials: list[Trial], expected: Result, seed: int = 0) -> None:
    """Fails unless the token advantages are the oracle's within 1e-5."""
    packed = pack(trials, seed=seed)
    got = flatten(nested(trials, packed, credit_of(method, packed).token_advantage))
    np.testing.assert_allclose(got, flatten(expected.advantage), rtol=1e-5, atol=1e-5)
