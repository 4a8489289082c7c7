"""Methods that learn a model of the task: by hand, their variants, and what their targets mean."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import oracles_learned
import pytest
from credit_cases import (
    low_effort_compilation,  # noqa: F401
    nested,
    pack,
    random_trial,
    random_trials,
)
from test_credit_methods import check

from jaxcredit import credit, preferences
from jaxcredit.credit import make, ppo
from jaxcredit.episodes import Signals

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ONE = {"task": [0], "outcome": [1.0], "n_steps": [3]}


def run(method: credit.CreditEstimator, packed):
    return jax.jit(method.estimate)(packed.batch, packed.signals, method.init())[0]


def random_signals(seed: int, n: int = 12, k: int = 5) -> dict[str, np.ndarray]:
    """Plain arrays for ``assign``, with every signal that this family reads."""
    rng = np.random.default_rng(seed)
    return {
        "task": rng.integers(0, 3, n),
        "outcome": rng.random(n),
        "n_steps": rng.integers(1, k + 1, n),
        "mc_value": rng.random((n, k + 1)),
        "q_value": rng.normal(size=(n, k, 2)),
        "v_value": rng.normal(size=(n, k, 2)),
        "predicted_return": rng.random((n, k)),
        "predicted_progress": rng.normal(size=(n, k)),
        "promise": rng.random((n, k)),
    }


def at_last(given: dict, name: str) -> np.ndarray:
    return given[name][np.arange(len(given["outcome"])), given["n_steps"] - 1]


VARIANTS = [
    ("rudder", {"baseline": "critic"}, {"baseline": "critic"}),
    ("rudder", {"exact": False, "early": 0.5}, {"exact": False, "early": 0.5}),
    ("spa_rl", {"baseline": "critic"}, {"baseline": "critic"}),
    ("archer", {"gamma": 0.9, "lam": 0.7}, {"gamma": 0.9, "lam": 0.7}),
    ("agentprm", {"baseline": "critic"}, {"baseline": "critic"}),
    (
        "agentprm",
        {"rewards": "progress", "td_gamma": 0.9},
        {"outcome": False, "td_gamma": 0.9},
    ),
]


@pytest.mark.parametrize(("name", "options", "same"), VARIANTS)
def test_variants_agree_with_the_oracle(name: str, options: dict, same: dict):
    method = make(name, **options)
    estimate = jax.jit(method.estimate)
    for seed in range(8):
        trials = random_trials(seed)
        packed = pack(trials, window=bool(seed % 2), seed=seed)
        found, _ = estimate(packed.batch, packed.signals, method.init())
        check(found, trials, packed, oracles_learned.ORACLES[name](trials, **same))


# ---------------------------------------------------------------------- POAD


def test_poad_by_hand():
    # Two steps of two tokens; V = .5 .2 | .4 .1, R = 1, gamma = .5, lam = .8.
    trial = dataclasses.replace(
        random_trial(np.random.default_rng(0), 0, tokens=[[True, True], [True, True]]),
        outcome=1.0,
        value=[[0.5, 0.2], [0.4, 0.1]],
        weight=1.0,
    )
    tokens = credit.gae(gamma=0.5, inner_gamma=1.0, lam=0.8)
    method = credit.estimator("raw", credit.outcome_reward(), credit.token_rewards(), tokens)
    packed = pack([trial])
    found = run(method, packed)
    a4 = 1 - 0.1
    a3 = 0.1 - 0.4 + 0.8 * a4
    a2 = 0.5 * 0.4 - 0.2 + 0.5 * 0.8 * a3
    a1 = 0.2 - 0.5 + 0.8 * a2
    advantage = nested([trial], packed, found.token_advantage)[0]
    np.testing.assert_allclose(advantage, [[a1, a2], [a3, a4]], **CLOSE)
    target = nested([trial], packed, found.token_target)[0]
    np.testing.assert_allclose(target, [[a1 + 0.5, a2 + 0.2], [a3 + 0.4, a4 + 0.1]], **CLOSE)


def test_poad_without_discount_is_ppo_and_so_is_poad_on_steps_of_one_token():
    packed = pack(random_trials(3))
    single = [
        dataclasses.replace(t, tokens=[[True]] * t.n, value=[row[:1] for row in t.value])
        for t in random_trials(4)
    ]
    for gamma, data, same in ((1.0, packed, True), (0.9, pack(single), True), (0.9, packed, False)):
        one, two = run(make("poad", gamma=gamma), data), run(ppo(gamma=gamma), data)
        close = np.allclose(one.token_advantage, two.token_advantage, **CLOSE)
        assert close == same
        assert np.allclose(one.token_target, two.token_target, **CLOSE) == same


# ---------------------------------------------------------------------- ArCHer


def test_archer_by_hand():
    found = credit.assign(
        credit.archer(gamma=0.5),
        **ONE,
        q_value=[[[0.2, 0.1], [0.5, 0.9], [0.8, 0.7]]],
        v_value=[[[0.3, 0.4], [0.6, 0.2], [0.1, 0.1]]],
    )
    np.testing.assert_allclose(found.step_advantage, [[0.1 - 0.3, 0.5 - 0.2, 0.7 - 0.1]], **CLOSE)
    np.testing.assert_allclose(
        found.step_target["q_value"], [[[0.3, 0.1], [0.05, 0.05], [1.0, 1.0]]], **CLOSE
    )
    np.testing.assert_allclose(
        found.step_target["v_value"], [[[0.2, 0.1], [0.5, 0.9], [0.8, 0.7]]], **CLOSE
    )


def test_archer_between_one_step_and_the_outcome():
    """V of 0.4 and 0.6 behind steps of R = 1; gamma = 0.5, lam = 0.5."""
    value = [[[0.9, 0.9], [0.4, 0.4], [0.6, 0.6]]]
    found = credit.assign(credit.archer(gamma=0.5, lam=0.5), **ONE, q_value=value, v_value=value)
    t2 = 0.5 * (0.5 * 0.6 + 0.5 * 1.0)
    t1 = 0.5 * (0.5 * 0.4 + 0.5 * t2)
    expected = [[[t, t] for t in (t1, t2, 1.0)]]
    np.testing.assert_allclose(found.step_target["q_value"], expected, **CLOSE)


def test_archer_with_true_critics_has_nothing_left_to_learn():
    """A chain of three steps that always ends in R = 1: the targets are the values themselves."""
    value = np.repeat(0.9 ** np.arange(2, -1, -1.0), 2).reshape(1, 3, 2)
    found = credit.assign(credit.archer(gamma=0.9), **ONE, q_value=value, v_value=value)
    assert not np.asarray(found.step_advantage).any()
    for target in found.step_target.values():
        np.testing.assert_allclose(target, value, **CLOSE)


# ---------------------------------------------------------------------- VinePPO


def test_vineppo_by_hand_and_telescoping():
    found = credit.assign(credit.vineppo(gamma=0.5), **ONE, mc_value=[[0.2, 0.6, 0.4, 0.0]])
    np.testing.assert_allclose(found.step_advantage, [[0.1, -0.4, 0.6]], **CLOSE)
    given = random_signals(0)
    found = credit.assign("vineppo", **given)
    end = given["mc_value"][np.arange(12), given["n_steps"]]
    total = given["outcome"] + end - given["mc_value"][:, 0]
    np.testing.assert_allclose(np.asarray(found.step_advantage).sum(axis=1), total, **CLOSE)


# ---------------------------------------------------------------------- RUDDER


def test_rudder_by_hand():
    # g = .3 .9 .6, R = 1: differences .3 .6 -.3, the rest .4 in three parts.
    found = credit.assign(credit.rudder(std=None), **ONE, predicted_return=[[0.3, 0.9, 0.6]])
    part = 0.4 / 3
    np.testing.assert_allclose(found.step_reward, [[0.3 + part, 0.6 + part, -0.3 + part]], **CLOSE)
    returns = np.array([1.0, 0.7 - part, 0.1 - 2 * part])
    np.testing.assert_allclose(found.step_advantage, [returns - returns.mean()], **CLOSE)
    np.testing.assert_allclose(
        found.step_target["predicted_return"], [[0.3 + 0.07, 0.9 + 0.01, 1.0]], **CLOSE
    )
    assert found.diagnostics["predicted_return_error"] == pytest.approx(0.4)


@pytest.mark.parametrize("exact", [True, False])
def test_rudder_rewards_telescope(exact: bool):
    given = random_signals(1)
    found = credit.assign(credit.rudder(exact=exact), **given)
    total = given["outcome"] if exact else at_last(given, "predicted_return")
    np.testing.assert_allclose(np.asarray(found.step_reward).sum(axis=1), total, **CLOSE)


def test_rudder_targets_have_the_gradient_of_its_loss():
    given = random_signals(2)
    found = credit.assign(credit.rudder(early=0.3), **given)
    steps, last = np.arange(5) < given["n_steps"][:, None], given["n_steps"][:, None] - 1

    def loss(g):
        weight = jnp.where(jnp.arange(5) == last, 1.0, 0.3)
        return jnp.where(steps, weight * (g - given["outcome"][:, None]) ** 2 / 2, 0.0).sum()

    assert_gradient(loss, given["predicted_return"], found.step_target["predicted_return"], steps)


def assert_gradient(loss, outputs, targets, steps):
    """The squared error to the targets moves the outputs as the loss does."""
    expected = jax.grad(loss)(jnp.asarray(outputs, jnp.float32))
    moved = np.where(steps, np.asarray(outputs) - np.asarray(targets), 0.0)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(moved, expected, **CLOSE)


# ---------------------------------------------------------------------- SPA-RL


def test_spa_rl_by_hand():
    found = credit.assign(
        credit.spa_rl(std=None),
        **ONE,
        predicted_progress=[[0.2, -0.1, 0.3]],
        action_valid=[[True, False, True]],
    )
    reward = np.array([0.7, -0.1, 0.8])
    np.testing.assert_allclose(found.step_reward, [reward], **CLOSE)
    np.testing.assert_allclose(found.step_advantage, [reward - reward.mean()], **CLOSE)
    np.testing.assert_allclose(found.step_target["predicted_progress"], [[0.4, 0.1, 0.5]], **CLOSE)
    assert found.diagnostics["predicted_progress_error"] == pytest.approx(0.6)


def test_spa_rl_targets_sum_to_the_outcome_and_have_the_gradient_of_its_loss():
    given = random_signals(3)
    target = np.asarray(credit.assign("spa_rl", **given).step_target["predicted_progress"])
    np.testing.assert_allclose(target.sum(axis=1), given["outcome"], **CLOSE)
    steps = np.arange(5) < given["n_steps"][:, None]

    def loss(c):
        short = jnp.where(steps, c, 0.0).sum(axis=1) - given["outcome"]
        return (short**2 / (2 * given["n_steps"])).sum()

    assert_gradient(loss, given["predicted_progress"], target, steps)


# ---------------------------------------------------------------------- AgentPRM


def test_agentprm_by_hand():
    found = credit.assign(
        credit.agentprm(weight=2.0, td_lam=0.5, std=None), **ONE, promise=[[0.2, 0.6, 0.5]]
    )
    np.testing.assert_allclose(found.step_reward, [[0.4, 0.8, -0.2 + 1]], **CLOSE)
    returns = np.array([2.0, 1.6, 0.8])
    np.testing.assert_allclose(found.step_advantage, [returns - returns.mean()], **CLOSE)
    # The lambda-returns from the end: 1; half of .5 and half of 1; half of .6 and half of .75.
    np.testing.assert_allclose(found.step_target["promise"], [[0.675, 0.75, 1.0]], **CLOSE)


def test_agentprm_progress_telescopes():
    given = random_signals(4)
    found = credit.assign(credit.agentprm(rewards="progress", weight=0.7), **given)
    total = 0.7 * at_last(given, "promise")
    np.testing.assert_allclose(np.asarray(found.step_reward).sum(axis=1), total, **CLOSE)


def test_agentprm_targets_between_one_step_and_the_outcome():
    given = random_signals(5)
    steps = np.arange(5) < given["n_steps"][:, None]
    last = np.arange(5) == given["n_steps"][:, None] - 1
    outcome = given["outcome"][:, None] * np.ones((1, 5))
    ahead = np.where(last, outcome, np.roll(given["promise"], -1, axis=1))
    for lam, expected in ((1.0, outcome), (0.0, ahead)):
        target = credit.assign(credit.agentprm(td_lam=lam), **given).step_target["promise"]
        np.testing.assert_allclose(target, np.where(steps, expected, 0.0), **CLOSE)


# ---------------------------------------------------------------------- iStar


def test_istar_by_hand():
    """Two attempts of one step; the reward model has moved on two of the three tokens."""
    rng = np.random.default_rng(0)
    first, second = (
        dataclasses.replace(
            random_trial(rng, 0, tokens=[tokens]),
            outcome=outcome,
            weight=1.0,
            logp=[[-1.0] * len(tokens)],
            reward_logp=[reward],
        )
        for tokens, outcome, reward in (
            ([True, True, False], 1.0, [-0.5, -0.7, 9.0]),
            ([True], 0.0, [-3.0]),
        )
    )
    packed = pack([first, second])
    found = run(credit.istar(std=None, alpha=10.0), packed)
    np.testing.assert_allclose(found.step_reward[:2, 0], [0.05 * 0.8, -0.1], **CLOSE)
    half = 10 * 0.14 / 2 + 0.5
    np.testing.assert_allclose(found.step_advantage[:2, 0], [half, -half], **CLOSE)
    # One pair with the margin 0.04 + 0.1: each token of the winner is pulled up, the loser's down.
    pull = 0.05 / (1 + np.exp(0.14))
    slope = nested([first, second], packed, found.reward_slope)
    np.testing.assert_allclose(slope[0], [[-pull, -pull, 0.0]], rtol=1e-5)
    np.testing.assert_allclose(slope[1], [[pull]], rtol=1e-5)
    np.testing.assert_allclose(
        found.diagnostics["preference_loss"], np.log1p(np.exp(-0.14)), rtol=1e-5
    )


def test_istar_without_a_step_term_or_an_untrained_model_is_grpo():
    trials = random_trials(6)
    packed = pack(trials)
    untrained = dataclasses.replace(
        packed, signals=dataclasses.replace(packed.signals, reward_logp=packed.signals.logp)
    )
    grpo = run(credit.grpo(), packed).token_advantage
    assert not np.allclose(run(credit.istar(), packed).token_advantage, grpo, **CLOSE)
    for method, data in ((credit.istar(alpha=0.0), packed), (credit.istar(), untrained)):
        np.testing.assert_allclose(run(method, data).token_advantage, grpo, **CLOSE)


def test_the_preference_loss_agrees_with_a_loop():
    pairs = 0
    for seed in range(8):
        trials = random_trials(seed)
        packed = pack(trials, window=bool(seed % 2), seed=seed)
        batch, logs = packed.batch, packed.signals
        score = preferences.implicit_return(batch, logs.reward_logp, logs.logp, beta=2.0)
        expected = [
            2.0
            * sum(
                trial.reward_logp[k][j] - trial.logp[k][j]
                for k, flags in enumerate(trial.tokens)
                for j, yes in enumerate(flags)
                if yes and trial.weight > 0
            )
            for trial in trials
        ]
        np.testing.assert_allclose(score[: len(trials)], expected, **CLOSE)
        losses = [
            np.log1p(np.exp(expected[j] - expected[i]))
            for i, better in enumerate(trials)
            for j, worse in enumerate(trials)
            if better.task == worse.task
            and better.outcome > worse.outcome
            and better.weight * worse.weight > 0
        ]
        pairs += len(losses)
        found = preferences.preference_loss(score, batch.task, batch.outcome, batch.weight)
        np.testing.assert_allclose(found, np.mean(losses) if losses else 0.0, **CLOSE)
    assert pairs > 20


def test_the_preference_loss_makes_the_better_attempt_likelier_and_needs_a_pair():
    task, weight = jnp.array([0, 0, 1]), jnp.ones(3)
    outcome = jnp.array([1.0, 0.0, 0.5])
    gradient = jax.grad(preferences.preference_loss)
    moved = gradient(jnp.zeros(3), task, outcome, weight)
    np.testing.assert_allclose(moved, [-0.5, 0.5, 0.0], **CLOSE)
    far = preferences.preference_loss(jnp.array([-1e4, 1e4, 0.0]), task, outcome, weight)
    np.testing.assert_allclose(far, 2e4, rtol=1e-5)
    for same in (jnp.ones(3), jnp.full(3, jnp.nan)):
        empty = jnp.zeros(3) if jnp.isnan(same).any() else weight
        assert float(preferences.preference_loss(jnp.zeros(3), task, same, empty)) == 0.0
        assert not np.asarray(gradient(jnp.zeros(3), task, same, empty)).any()


def test_nothing_under_the_masks_reaches_the_gradient_of_the_preference_loss():
    packed = pack(random_trials(1))  # NaN wherever no mask covers
    batch = packed.batch

    def loss(reward_logp):
        score = preferences.implicit_return(batch, reward_logp, packed.signals.logp)
        return preferences.preference_loss(score, batch.task, batch.outcome, batch.weight)

    gradient = np.asarray(jax.grad(loss)(packed.signals.reward_logp))
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).sum() > 0


# ---------------------------------------------------------------------- what they share


@pytest.mark.parametrize("name", ["rudder", "spa_rl", "agentprm", "archer"])
def test_regressed_to_its_targets_again_and_again_the_model_comes_true(name: str):
    """The loop of training with the policy held still and a model that can say anything."""
    given = random_signals(7)
    method = make(name)
    learned = [x for x in given if x in method.needs]
    for _ in range(100):
        found = credit.assign(method, **given).step_target
        for key in learned:
            given[key] = given[key] + 0.5 * (np.asarray(found[key]) - given[key])
    steps = np.arange(5) < given["n_steps"][:, None]
    outcome = given["outcome"][:, None] * np.ones((1, 5))
    ahead = 0.95 ** (given["n_steps"][:, None] - 1 - np.arange(5))
    for key in learned:
        if name == "spa_rl":
            total = np.where(steps, given[key], 0.0).sum(axis=1)
            np.testing.assert_allclose(total, given["outcome"], **CLOSE)
        elif name == "archer":  # an attempt's own discounted outcome: nothing else is known
            expected = (outcome * ahead)[steps]
            for twin in (0, 1):
                np.testing.assert_allclose(given[key][steps][:, twin], expected, atol=1e-3)
        else:
            np.testing.assert_allclose(given[key][steps], outcome[steps], atol=5e-3)


@pytest.mark.parametrize(
    ("name", "signals"),
    [
        ("poad", {"value"}),
        ("archer", {"q_value", "v_value"}),
        ("vineppo", {"mc_value"}),
        ("rudder", {"predicted_return"}),
        ("spa_rl", {"predicted_progress", "action_valid"}),
        ("istar", {"reward_logp", "logp"}),
        ("agentprm", {"promise"}),
    ],
)
def test_what_is_needed_and_what_a_critic_adds(name: str, signals: set[str]):
    assert make(name).needs == signals
    if name in ("rudder", "spa_rl", "agentprm"):
        assert make(name, baseline="critic").needs == signals | {"value"}


def test_targets_survive_a_sum_and_two_sources_of_them_are_refused():
    penalty = credit.chain(credit.invalid_action_penalty(0.1), credit.broadcast())
    both = credit.estimator("both", credit.add(credit.rudder(), penalty))
    given = random_signals(6)
    alone = credit.assign("rudder", **given).step_target["predicted_return"]
    found = credit.assign(both, **given).step_target
    np.testing.assert_array_equal(found["predicted_return"], alone)
    assert credit.assign("grpo", **given).step_target is None
    with pytest.raises(ValueError, match="set step_target"):
        credit.add(credit.rudder(), credit.archer())
    with pytest.raises(ValueError, match="overwrites step_target"):
        credit.chain(credit.return_target(), credit.attribution_target())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rudder", {"baseline": "grup"}, "baseline='grup'.*did you mean 'group'"),
        ("rudder", {"early": 2.0}, "early=2.0"),
        ("agentprm", {"weight": 0.0}, "weight=0.0"),
        ("agentprm", {"rewards": "outcome"}, "rewards='outcome'"),
        ("agentprm", {"td_lam": 1.5}, "lam=1.5"),
        ("archer", {"gamma": -1.0}, "gamma=-1.0"),
        ("archer", {"lam": 1.5}, "lam=1.5"),
        ("vineppo", {"gamma": 2.0}, "gamma=2.0"),
        ("poad", {"gamma": 2.0}, "gamma=2.0"),
        ("istar", {"beta": 0.0}, "beta=0.0"),
        ("spa_rl", {"std": "sampl"}, "std='sampl'"),
    ],
)
def test_wrong_hyperparameters_are_refused(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_a_missing_twin_is_named():
    trials = random_trials(0)
    packed = pack(trials)
    one = Signals(q_value=packed.signals.q_value, v_value=packed.signals.v_value[..., :1])
    with pytest.raises(ValueError, match=r"'archer': signal 'v_value' has shape .*, 2\]"):
        credit.archer().estimate(packed.batch, one, ())


def test_oracles_are_merged():
    assert oracles_learned.ORACLES.items() <= oracles.ORACLES.items()
