"""What every method must satisfy, whatever its formula. One parametrised test per property."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_batches import Draw, built, draws, trials_of
from credit_cases import (
    Shape,
    flatten,
    jitted,
    low_effort_compilation,  # noqa: F401
    nested,
    on_mesh,
    pack,
    random_trial,
    random_trials,
    run,
)
from hypothesis import given, settings
from jax.sharding import AxisType
from oracles import Trial

from jaxcredit.credit import METHODS, make
from jaxcredit.episodes import Credit
from jaxcredit.losses import clipped_policy_loss, loss_weights, weighted_sum

# Methods that compare discounted returns over all steps of a task: an early step and a late one
# differ, so only episodes of one step are alike.
AGE_COUNTS = {"hcapo"}
every_method = pytest.mark.parametrize("name", sorted(METHODS))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def drawn(test: Callable[[Draw], None]) -> Callable[[], None]:
    """The test on 10 drawn batches."""
    return settings(max_examples=10)(given(draws)(test))


def leaves(credit: Credit) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(credit)]


def assert_close(a: Credit, b: Credit) -> None:
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)


# Discounts under which a critic that is never wrong sees its values grow.
DISCOUNT = {"poad": 0.95}


def plain_trial(task: int, n: int, outcome: float = 0.1, gamma: float = 1.0) -> Trial:
    """A trial in which nothing distinguishes one episode, or one visit of a state, from another,
    and in which learned models know all."""
    trial = random_trial(np.random.default_rng(n), task, n)
    return dataclasses.replace(
        trial,
        outcome=outcome,
        success=True,
        weight=1.0,
        progress=[0.3] * (n + 1),
        states=list(range(n)),
        accepted=[True] * n,
        tokens=[[True]] * n,
        value=[[outcome * gamma ** (n - 1 - k)] for k in range(n)],
        logp=[[-0.5]] * n,
        hindsight=[-0.7] * n,
        reward_logp=[[-0.9]] * n,
        mc_value=[outcome] * n + [0.0],
        q_value=[[outcome, 1.0]] * n,
        v_value=[[1.0, outcome]] * n,
        predicted_return=[0.0] * (n - 1) + [outcome],
        predicted_progress=[outcome / n] * n,
        promise=[0.0] * n,
        judge=[0] * n,
    )


@every_method
def test_episode_order_does_not_matter(name: str):
    @drawn
    def holds(draw: Draw) -> None:
        trials, first = built(draw)
        order = np.random.default_rng(draw.seed).permutation(len(trials))
        shuffled = [trials[i] for i in order]
        second = pack(shuffled, window=draw.window)
        one = nested(trials, first, run(name, first).token_advantage)
        two = nested(shuffled, second, run(name, second).token_advantage)
        np.testing.assert_allclose(flatten([one[i] for i in order]), flatten(two), **CLOSE)

    holds()


@every_method
def test_how_rows_are_cut_and_ordered_does_not_matter(name: str):
    # One row per episode, or one per step in any order: micro-batches are made of such rows.
    @drawn
    def holds(draw: Draw) -> None:
        trials = trials_of(draw)
        whole, cut = pack(trials), pack(trials, window=True, seed=draw.seed)
        one, two = run(name, whole), run(name, cut)
        for field in ("token_advantage", "token_weight", "token_target"):
            if getattr(one, field) is not None:
                a = flatten(nested(trials, whole, getattr(one, field)))
                np.testing.assert_allclose(
                    a, flatten(nested(trials, cut, getattr(two, field))), **CLOSE
                )
        np.testing.assert_allclose(one.step_advantage, two.step_advantage, **CLOSE)

    holds()


@every_method
@pytest.mark.parametrize("reduce", ["token", "episode"])
def test_the_loss_is_the_sum_over_any_micro_batches(name: str, reduce: str):
    rng = np.random.default_rng(0)
    trials = random_trials(10)
    packed = pack(trials, window=True)
    credit = run(name, packed)
    everyone = np.arange(packed.batch.weight.shape[0])
    weight = loss_weights(packed.batch, np.asarray(credit.token_weight), everyone, reduce)
    log_ratio = rng.normal(size=weight.shape).astype(np.float32)
    loss = clipped_policy_loss(log_ratio, credit.token_advantage)
    whole = weighted_sum(weight, loss)
    parts = np.array_split(rng.permutation(len(weight)), 5)
    summed = sum(weighted_sum(weight[rows], loss[rows]) for rows in parts)
    np.testing.assert_allclose(summed, whole, **CLOSE)


@every_method
def test_token_ids_and_layout_are_not_looked_at(name: str):
    packed = pack(random_trials(11))
    rng = np.random.default_rng(0)

    def noise(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.integers(0, 1000, x.shape), x.dtype)

    batch = packed.batch
    other = {k: noise(getattr(batch, k)) for k in ("tokens", "position", "segment", "status")}
    changed = dataclasses.replace(packed, batch=dataclasses.replace(batch, **other))
    for a, b in zip(leaves(run(name, packed)), leaves(run(name, changed)), strict=True):
        np.testing.assert_array_equal(a, b)


@every_method
def test_padding_does_not_matter(name: str):
    trials = random_trials(3)
    small, large = pack(trials), pack(trials, Shape(n=19, k=9, b=53, t=70))
    one, two = run(name, small), run(name, large)
    for key, targets in (one.step_target or {}).items():
        n, k = targets.shape[:2]
        np.testing.assert_allclose(targets, two.step_target[key][:n, :k], **CLOSE)
    for field in ("token_advantage", "token_weight", "token_target", "reward_slope"):
        if getattr(one, field) is not None:
            a = flatten(nested(trials, small, getattr(one, field)))
            b = flatten(nested(trials, large, getattr(two, field)))
            np.testing.assert_allclose(a, b, **CLOSE)
    for key, value in one.diagnostics.items():
        np.testing.assert_allclose(value, two.diagnostics[key], **CLOSE)


@every_method
def test_garbage_under_the_masks_changes_nothing(name: str):
    trials = random_trials(4)
    nan, huge, zero = (leaves(run(name, pack(trials, junk=x))) for x in (np.nan, 1e30, 0.0))
    for a, b, c in zip(nan, huge, zero, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, c)


@every_method
def test_credit_lies_on_trainable_action_tokens_of_counted_steps_only(name: str):
    trials = random_trials(5)
    packed = pack(trials)
    credit = run(name, packed)
    earns = np.zeros(packed.batch.tokens.shape, bool)
    for (i, k, j), (b, t) in packed.place.items():
        earns[b, t] = trials[i].tokens[k][j] and trials[i].weight > 0
    weight = np.asarray(credit.token_weight)
    assert not weight[~earns].any()
    if "token_weight" not in make(name).stage.writes:
        np.testing.assert_array_equal(weight, earns)
    assert not np.asarray(credit.token_advantage)[~earns].any()
    counted = np.zeros(packed.batch.step_mask.shape, bool)
    for i, trial in enumerate(trials):
        counted[i, : trial.n] = trial.weight > 0
    assert not np.asarray(credit.step_advantage)[~counted].any()
    assert not np.asarray(credit.step_reward)[~counted].any()
    for target in (credit.step_target or {}).values():
        assert not np.asarray(target)[~counted].any()


@every_method
def test_step_advantage_is_the_mean_over_the_steps_tokens(name: str):
    trials = random_trials(6)
    packed = pack(trials)
    credit = run(name, packed)
    tokens = nested(trials, packed, credit.token_advantage)
    for i, trial in enumerate(trials):
        for k, flags in enumerate(trial.tokens):
            if any(flags):
                mean = np.mean([a for a, yes in zip(tokens[i][k], flags) if yes])
                np.testing.assert_allclose(credit.step_advantage[i, k], mean, **CLOSE)


@every_method
def test_spoiled_episodes_are_as_good_as_absent(name: str):
    trials = random_trials(7)
    trials[2].weight = trials[5].weight = 0.0
    kept = [trial for trial in trials if trial.weight > 0]
    both, alone = pack(trials), pack(kept)
    with_them = nested(trials, both, run(name, both).token_advantage)
    without = nested(kept, alone, run(name, alone).token_advantage)
    survivors = [x for x, trial in zip(with_them, trials) if trial.weight > 0]
    np.testing.assert_allclose(flatten(survivors), flatten(without), **CLOSE)


@every_method
@pytest.mark.parametrize(
    "case", ["one step", "groups of one", "one episode", "constant rewards", "zero attention"]
)
def test_finite_in_degenerate_batches(name: str, case: str):
    rng = np.random.default_rng(0)
    if case == "one step":
        trials = [random_trial(rng, 1, n=1) for _ in range(6)]
    elif case == "groups of one":
        trials = [random_trial(rng, task) for task in range(6)]
    elif case == "one episode":
        trials = [random_trial(rng, 1)]
    elif case == "zero attention":
        trials = [dataclasses.replace(t, graph=0 * t.graph) for t in random_trials(12)]
        trials = [
            dataclasses.replace(t, token_flow=[[0.0] * len(x) for x in t.tokens]) for t in trials
        ]
    else:
        trials = [dataclasses.replace(random_trial(rng, 1), outcome=0.3) for _ in range(6)]
    for x in leaves(run(name, pack(trials))):
        assert np.isfinite(x).all()


# What a method pays whatever the outcome is turned off where nothing else may be left.
OUTCOME_ALONE = {"empg": {"zeta": 0.0}}


@every_method
@pytest.mark.parametrize("outcome", [0.1, 0.0, 1.0])
def test_groups_without_spread_give_exactly_zero(name: str, outcome: float):
    # Three times 0.1 has a mean that is not 0.1 in floats: the test is of more than x - x.
    n, gamma = 1 if name in AGE_COUNTS else 4, DISCOUNT.get(name, 1.0)
    trials = [plain_trial(task, n, outcome, gamma) for task in (5, 5, 5, 8, 8, 8, 8)]
    packed = pack(trials)
    if name in OUTCOME_ALONE:
        method = make(name, **OUTCOME_ALONE[name])
        credit, _ = jax.jit(method.estimate)(packed.batch, packed.signals, method.init())
    else:
        credit = run(name, packed)
    assert not np.asarray(credit.token_advantage).any()
    assert not np.asarray(credit.step_advantage).any()


@every_method
def test_a_batch_without_episodes_gives_zero_and_leaves_the_state(name: str):
    method, estimate = jitted(name)
    trials = random_trials(8)
    packed = pack(trials)
    _, state = estimate(packed.batch, packed.signals, method.init())
    nothing = dataclasses.replace(packed.batch, weight=jnp.zeros_like(packed.batch.weight))
    credit, after = estimate(nothing, packed.signals, state)
    for x in leaves(credit):
        assert np.isfinite(x).all()
    assert not np.asarray(credit.token_advantage).any()
    for before, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before, now)


@pytest.mark.parametrize("name", ["archer", "attnsr", "relace"])
def test_the_same_on_an_explicit_mesh(name: str):
    # On automatic axes every method meets its oracle in test_credit_methods.py.
    packed = pack(random_trials(9), window=True)
    credit = on_mesh(name, packed, AxisType.Explicit)
    assert_close(credit, run(name, packed))
    assert jax.typeof(credit.token_advantage).sharding.spec == jax.P("data", None)
