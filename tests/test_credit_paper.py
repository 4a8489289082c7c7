"""Limits and ablations of RELACE, HCAPO, AttnSR's asynchronous arm and TARL."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from credit_cases import (
    credit_of,
    low_effort_compilation,  # noqa: F401
    pack,
    random_trials,
    run,
)
from oracles import oracles_paper
from test_credit_methods import check

from jaxcredit.credit import (
    assign,
    attnsr,
    broadcast,
    discounted_return,
    estimator,
    gigpo,
    grpo,
    hcapo,
    hindsight_ratio,
    make,
    outcome_reward,
    relace,
    stage,
    tarl,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def advantages(method, lengths, **arrays) -> list[np.ndarray]:
    """Step advantages of each episode, without padding."""
    found = assign(method, n_steps=np.array(lengths), **arrays).step_advantage
    return [np.asarray(a)[:n] for a, n in zip(found, lengths)]


# RELACE and HCAPO


def test_relace_ignores_hindsight_where_the_ratio_is_one():
    packed = pack(random_trials(4))
    signals = packed.signals.replace(logp=0 * packed.signals.logp - 0.3)
    flat = dataclasses.replace(
        packed,
        signals=signals.replace(hindsight_logp=0 * packed.signals.hindsight_logp - 1.7),
    )
    one = credit_of(relace(alpha=1.0, mask="none"), flat)
    np.testing.assert_allclose(
        one.token_advantage, credit_of(gigpo(gamma=0.6), flat).token_advantage, **CLOSE
    )
    focal = credit_of(relace(alpha=1.0, mask="none", variant="focal"), flat)
    np.testing.assert_allclose(one.token_advantage, focal.token_advantage, **CLOSE)


def test_relace_of_failures_is_grpo():
    # R = 0 makes every weighted return 0, whatever hindsight says.
    trials = random_trials(5)
    for trial in trials:
        trial.outcome = 0.0
    for method in (relace(), relace(variant="score"), hcapo()):
        assert not np.asarray(credit_of(method, pack(trials)).token_advantage).any()
    packed = pack(random_trials(5))
    off = credit_of(relace(omega=0.0), packed)
    np.testing.assert_allclose(
        off.token_advantage, credit_of(grpo(), packed).token_advantage, **CLOSE
    )


def test_relace_weights_have_mean_one_before_clipping():
    packed = pack(random_trials(6))
    packed = dataclasses.replace(packed, batch=packed.batch.replace(outcome=jnp.ones(16)))

    def weights(ratio):
        show = stage(
            "show",
            lambda batch, signals, flow: flow.replace(step_advantage=flow.step_return),
            reads=["step_return"],
            writes=["step_advantage"],
        )
        method = estimator(
            "rho", outcome_reward(), discounted_return(1.0), ratio, show, broadcast()
        )
        return np.asarray(credit_of(method, packed).step_advantage)

    free = weights(hindsight_ratio(low=0.0, high=float("inf"), eps=0.0))
    clipped = weights(hindsight_ratio())
    counted = [(i, trial.n) for i, trial in enumerate(random_trials(6)) if trial.weight > 0]
    np.testing.assert_allclose([free[i, :n].mean() for i, n in counted], 1.0, rtol=1e-5)
    for i, n in counted:
        np.testing.assert_allclose(clipped[i, :n], np.clip(free[i, :n], 0.8, 1.2), atol=1e-4)
    assert np.abs(clipped - free).max() > 0.01


def test_relace_mask_takes_negative_local_credit_off_successes_and_nothing_else():
    packed = pack(random_trials(7))
    local = {"omega": 1.0, "alpha": 0.5}
    macro = np.asarray(credit_of(grpo(), packed).step_advantage)
    free = np.asarray(credit_of(relace(mask="none", **local), packed).step_advantage) - macro
    kept = np.asarray(credit_of(relace(**local), packed).step_advantage) - macro
    harmful = np.asarray(packed.batch.success)[:, None] & (free < -1e-6)
    assert harmful.any()
    np.testing.assert_allclose(kept, np.where(harmful, 0.0, free), **CLOSE)


def test_relace_smoothing_leaves_the_last_step():
    # One success of three steps at three states, each shared with a failure: A_H = +-1/sqrt(2)
    # for any positive return; so look at returns: Q = .36, .6, 1 with alpha = .5.
    given = {
        "task": np.zeros(2, int),
        "outcome": np.array([1.0, 0.0]),
        "state": np.array([[0, 0, 0], [0, 0, 0]]),
        "success": np.array([False, False]),
        "logp": np.zeros((2, 3)),
        "hindsight_logp": np.zeros((2, 3)),
    }
    for alpha, q in ((1.0, [0.36, 0.6, 1.0]), (0.5, [0.48, 0.8, 1.0])):
        found = advantages(relace(alpha=alpha, mask="none", eps=1e-9), [3, 3], **given)
        returns = np.array([q, [0.0] * 3])
        local = (returns - returns.mean()) / returns.std(ddof=1)
        expected = local + np.array([[0.5**0.5], [-(0.5**0.5)]])
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_hcapo_is_relace_without_the_original_context_and_states():
    trials = random_trials(8)
    for trial in trials:
        trial.states = [0] * trial.n
        trial.logp = [[0.0] * len(step) for step in trial.logp]
    packed = pack(trials)
    one = credit_of(hcapo(tau=2.0, gamma=0.7), packed)
    two = credit_of(relace(tau=2.0, gamma=0.7), packed)
    np.testing.assert_allclose(one.token_advantage, two.token_advantage, **CLOSE)


def test_hcapo_by_hand():
    # pH = 1 and e^-1 at tau = 5: mean .684, rho = clip(1.462), clip(.538) = 1.2, .8.
    found = advantages(
        hcapo(alpha=1.0, mask="none"),
        [2, 2],
        task=np.zeros(2, int),
        outcome=np.array([1.0, 0.0]),
        success=np.array([True, False]),
        hindsight_logp=np.array([[0.0, -5.0], [0.0, 0.0]]),
    )
    q = np.array([[1.2 * 0.95, 0.8], [0.0, 0.0]])
    micro = (q - q.mean()) / q.std(ddof=1)
    macro = np.array([[0.5**0.5], [-(0.5**0.5)]])
    np.testing.assert_allclose(found, macro + micro, **CLOSE)


# AttnSR, asynchronous


def test_attnsr_async_on_fresh_data_is_attnsr_with_its_lambdas():
    trials = random_trials(9)
    for trial in trials:
        trial.behaviour = trial.logp
    packed = pack(trials)
    fresh = run("attnsr_async", packed)
    plain = credit_of(attnsr(lam="length", critic_lam=1.0), packed)
    for field in ("token_advantage", "token_target", "token_weight", "step_reward"):
        np.testing.assert_array_equal(getattr(fresh, field), getattr(plain, field))
    assert fresh.diagnostics["ratio_masked"] == 0.0


def test_attnsr_async_masks_by_ratio():
    ratio = np.array([[0.69, 0.71, 1.0], [5.9, 6.1, 0.01]])
    found = assign(
        "attnsr_async",
        task=np.arange(2),
        outcome=np.array([1.0, 0.0]),
        n_steps=np.array([3, 2]),
        logp=np.log(ratio) - 2.0,
        behaviour_logp=np.full((2, 3), -2.0),
        value=np.zeros((2, 3)),
        step_graph=np.zeros((2, 1, 2, 3, 3)),
    )
    np.testing.assert_array_equal(found.token_weight, [[0, 1, 1], [1, 0, 0]])
    np.testing.assert_allclose(found.diagnostics["ratio_masked"], 2 / 5, rtol=1e-6)
    np.testing.assert_allclose(found.diagnostics["ratio_above"], 1 / 5, rtol=1e-6)
    assert np.asarray(found.token_advantage)[0, 0] != 0.0, "the mask is on the loss alone"
    with pytest.raises(ValueError, match="'attnsr_async' needs the signal 'behaviour_logp'"):
        assign("attnsr_async", task=[0], outcome=[1.0], n_steps=[1])


def test_attnsr_async_carries_the_baseline():
    method = make("attnsr_async")
    estimate, state, rbar = jax.jit(method.estimate), method.init(), None
    for seed in range(3):
        trials = random_trials(seed)
        packed = pack(trials, seed=seed)
        found, state = estimate(packed.batch, packed.signals, state)
        mean = oracles.mean_outcome(trials)
        rbar = mean if rbar is None else 0.99 * rbar + 0.01 * mean
        check(found, trials, packed, oracles_paper.attnsr_async(trials, baseline=rbar))


# TARL


@pytest.mark.parametrize("options", [{"variant": "episode"}, {"gamma": 0.9, "c": 0.2}], ids=str)
def test_tarl_variants_agree_with_the_oracle(options: dict):
    method = tarl(**options)
    estimate = jax.jit(method.estimate)
    for seed in range(8):
        trials = random_trials(seed)
        packed = pack(trials, seed=seed)
        found, _ = estimate(packed.batch, packed.signals, method.init())
        check(found, trials, packed, oracles_paper.tarl(trials, **options))


def test_tarl_by_hand():
    # r = .5 j / K, only the first -1 counts: attempt 1 earns 0, -.125, 0, .125 and R = 0.
    given = {
        "task": np.zeros(2, int),
        "outcome": np.array([0.0, 1.0]),
        "judge_score": np.array([[0, -1, -1, 1], [1, 1, 9, 9]]),
    }
    found = assign(tarl(std=None), n_steps=np.array([4, 2]), **given)
    np.testing.assert_allclose(found.step_reward[0], [0, -0.125, 0, 0.125], atol=1e-6)
    np.testing.assert_allclose(found.step_reward[1, :2], [0.25, 1.25], atol=1e-6)
    returns = np.array([0, 0, 0.125, 0.125, 1.5, 1.25])
    turns = np.concatenate(advantages(tarl(std=None), [4, 2], **given))
    np.testing.assert_allclose(turns, returns - returns.mean(), atol=1e-6)
    scalar = advantages(tarl(std=None, variant="episode"), [4, 2], **given)
    np.testing.assert_allclose(np.concatenate(scalar), [-0.75] * 4 + [0.75] * 2, atol=1e-6)


def test_tarl_the_judge_cannot_lift_a_failure_over_a_success():
    rng = np.random.default_rng(0)
    n, k = 64, 6
    outcome = rng.integers(0, 2, n).astype(float)
    found = assign(
        "tarl",
        task=np.zeros(n, int),
        outcome=outcome,
        n_steps=rng.integers(1, k + 1, n),
        judge_score=rng.integers(-7, 8, (n, k)),  # a judge out of bounds is cut
    )
    scores = np.asarray(found.step_reward).sum(axis=1)
    assert (np.abs(scores - outcome) <= 0.5 + 1e-6).all()
    assert scores[outcome == 1].min() >= scores[outcome == 0].max() - 1e-6


def test_tarl_with_a_silent_judge_is_grpo():
    trials = random_trials(1)
    for trial in trials:
        trial.judge = [0] * trial.n
    packed = pack(trials)
    np.testing.assert_allclose(
        credit_of(tarl(variant="episode"), packed).token_advantage,
        run("grpo", packed).token_advantage,
        **CLOSE,
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: hcapo(mask="succes"), "did you mean 'success'"),
        (lambda: hcapo(tau=0.0), "tau=0.0"),
        (lambda: make("attnsr_async", low=1.2), r"low=1.2 must lie in \[0.0, 1.0\]"),
        (lambda: make("attnsr_async", high=0.5), "high=0.5"),
        (lambda: tarl(variant="turns"), "did you mean 'turn'"),
        (lambda: tarl(c=0.0), "c=0.0"),
    ],
)
def test_hyperparameters_are_checked(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
