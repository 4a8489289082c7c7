"""What every method must satisfy, whatever its formula. One parametrised test per property."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_cases import (
    Shape,
    flatten,
    jitted,
    low_effort_compilation,  # noqa: F401
    nested,
    pack,
    random_trial,
    random_trials,
    run,
)
from jax.sharding import AxisType, NamedSharding
from oracles import Trial

from jaxcredit.credit import METHODS, make
from jaxcredit.episodes import Credit

# Methods that compare discounted returns over all steps of a task: an early step and a late one
# differ, so only episodes of one step are alike.
AGE_COUNTS = {"hcapo"}
every_method = pytest.mark.parametrize("name", sorted(METHODS))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


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


# Step graphs take some 200 operations, which are compiled one by one outside jit.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith("attnsr") else name
        for name in sorted(METHODS)
    ],
)
def test_the_same_with_and_without_jit(name: str):
    # Small, because every operation of every size is compiled on its own here.
    rng = np.random.default_rng(1)
    trials = [random_trial(rng, 3, n=n) for n in (1, 2, 2)]
    packed = pack(trials, Shape(n=3, k=2, b=3, t=20))
    assert_close(run(name, packed), run(make(name), packed))


@every_method
def test_episode_order_does_not_matter(name: str):
    trials = random_trials(2)
    order = np.random.default_rng(0).permutation(len(trials))
    shuffled = [trials[i] for i in order]
    first, second = pack(trials), pack(shuffled)
    one = nested(trials, first, run(name, first).token_advantage)
    two = nested(shuffled, second, run(name, second).token_advantage)
    np.testing.assert_allclose(flatten([one[i] for i in order]), flatten(two), **CLOSE)


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
@pytest.mark.parametrize("case", ["one step", "groups of one", "one episode", "constant rewards"])
def test_finite_in_degenerate_batches(name: str, case: str):
    rng = np.random.default_rng(0)
    if case == "one step":
        trials = [random_trial(rng, 1, n=1) for _ in range(6)]
    elif case == "groups of one":
        trials = [random_trial(rng, task) for task in range(6)]
    elif case == "one episode":
        trials = [random_trial(rng, 1)]
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


@pytest.mark.parametrize(
    ("name", "axis_type"),
    [(name, AxisType.Auto) for name in sorted(METHODS)]
    + [(name, AxisType.Explicit) for name in ("archer", "attnsr", "relace")],
)
def test_the_same_on_a_mesh_of_eight_devices(name: str, axis_type: AxisType):
    assert jax.device_count() == 8
    packed = pack(random_trials(9), window=True)
    expected = run(name, packed)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    split = NamedSharding(mesh, jax.P("data"))
    method, estimate = jitted(name)
    with jax.set_mesh(mesh):
        batch, signals = jax.device_put((packed.batch, packed.signals), split)
        credit, _ = estimate(batch, signals, method.init())
    assert_close(credit, expected)
    if axis_type is AxisType.Explicit:
        assert jax.typeof(credit.token_advantage).sharding.spec == jax.P("data", None)
