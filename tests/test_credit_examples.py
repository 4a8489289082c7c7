"""Numbers worked by hand, the reductions between methods, and the arrays-only entry."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_cases import (
    credit_of,
    low_effort_compilation,  # noqa: F401
    nested,
    pack,
    random_trial,
    random_trials,
    run,
)

from jaxcredit.credit import (
    AttentionConfig,
    allocate,
    assign,
    attnsr,
    attnsr_grpo,
    estimator,
    gae,
    gigpo,
    grpo,
    make,
    outcome_reward,
    procredit,
    relace,
    step_mean,
    token_rewards,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


# ProCredit's worked example: three checks, three attempts at one task.
EXAMPLE = {
    "task": np.zeros(3, int),
    "outcome": np.array([0.0, 0.0, 1.0]),
    "n_steps": np.array([3, 3, 4]),
    "progress": np.array(
        [[0, 0, 0, 0, 0], [0, 1 / 3, 2 / 3, 2 / 3, 0], [0, 1 / 3, 1 / 3, 2 / 3, 1]]
    ),
}


def test_procredit_worked_example():
    whole = assign("procredit", **EXAMPLE)
    scores = np.asarray(whole.step_reward).sum(axis=1)
    np.testing.assert_allclose(scores, [0.0, 1 / 3, 1.5], atol=1e-6)
    trajectory = assign(procredit(turn_weight=0.0), **EXAMPLE).step_advantage
    np.testing.assert_allclose(trajectory[:, 0], [-0.776, -0.353, 1.129], atol=5e-4)
    turns = np.asarray(whole.step_advantage)
    # Attempt 2 passes a check at turns 1 and 2; the turn after each gets 0.5 / 3 less.
    np.testing.assert_allclose(turns[1, 1] - turns[1, 0], -1 / 6, atol=1e-6)
    np.testing.assert_allclose(turns[1, 2] - turns[1, 1], -1 / 6, atol=1e-6)
    # Attempt 3 does nothing at turn 2: no fall after it.
    np.testing.assert_allclose(turns[2, 2] - turns[2, 1], 0.0, atol=1e-6)


@pytest.mark.parametrize("c", [0.1, 0.5, 5.0])
def test_procredit_scores_every_success_above_every_failure_by_one(c: float):
    rng = np.random.default_rng(0)
    n, k = 64, 5
    success = rng.random(n) < 0.5
    progress = rng.integers(0, 4, (n, k + 1)) / 4
    progress[:, 0] = 0.25
    progress[success, -1] = 1.0
    credit = assign(
        procredit(c=c),
        task=np.zeros(n, int),
        outcome=success.astype(float),
        n_steps=np.full(n, k),
        progress=progress,
    )
    scores = np.asarray(credit.step_reward).sum(axis=1)
    assert scores[success].min() - scores[~success].max() >= 1.0 - 1e-5


def test_procredit_learns_from_groups_in_which_all_fail():
    credit = assign(
        "procredit",
        task=np.zeros(2, int),
        outcome=np.zeros(2),
        n_steps=np.full(2, 2),
        progress=np.array([[0, 0, 0], [0, 0, 0.5]]),
    )
    assert credit.step_advantage[1, 0] > 0.5 > -0.5 > credit.step_advantage[0, 0]


def test_gae_by_hand_skips_observations():
    # One episode, two steps of two and one action tokens. Observations lie between them, the
    # discount must not see them. V = .5, .2, .4; R = 1; gamma = .9, lam = .8.
    trial = dataclasses.replace(
        random_trial(np.random.default_rng(0), 0, tokens=[[True, False, True], [True]]),
        outcome=1.0,
        value=[[0.5, 9.0, 0.2], [0.4]],
        logp=[[-1.0, -9.0, -3.0], [-2.0]],
    )
    method = estimator("raw", outcome_reward(), token_rewards(), gae(gamma=0.9, lam=0.8))
    packed = pack([trial])
    credit = credit_of(method, packed)
    a3 = 1 - 0.4
    a2 = 0.9 * 0.4 - 0.2 + 0.72 * a3
    a1 = 0.9 * 0.2 - 0.5 + 0.72 * a2
    advantage = nested([trial], packed, credit.token_advantage)[0]
    np.testing.assert_allclose(advantage[0], [a1, 0.0, a2], **CLOSE)
    np.testing.assert_allclose(advantage[1], [a3], **CLOSE)
    target = nested([trial], packed, credit.token_target)[0]
    np.testing.assert_allclose(target[0], [a1 + 0.5, 0.0, a2 + 0.2], **CLOSE)
    np.testing.assert_allclose(credit.step_advantage[0, :2], [(a1 + a2) / 2, a3], **CLOSE)
    mean_logp = step_mean(packed.batch, packed.signals.logp)
    np.testing.assert_allclose(mean_logp[0, :2], [-2.0, -2.0], **CLOSE)

    # lam = 1 - 1 / (1.5 n) with n = 3 for the actor, Monte-Carlo targets for the critic.
    long = gae(gamma=1.0, lam="length", critic_lam=1.0)
    credit = credit_of(estimator("raw", outcome_reward(), token_rewards(), long), packed)
    lam = 1 - 1 / 4.5
    a2 = 0.4 - 0.2 + lam * a3
    np.testing.assert_allclose(
        nested([trial], packed, credit.token_advantage)[0][0],
        [0.2 - 0.5 + lam * a2, 0.0, a2],
        **CLOSE,
    )
    np.testing.assert_allclose(credit.token_target[np.asarray(credit.token_weight) > 0], 1.0)


def test_linear_control_by_hand():
    # K = 3: w = 1/3, 2/3; Rbar = (1 + 0) / 2; B = 0.25 * (+-0.5). The third has one step.
    credit = assign(
        "linear",
        task=np.arange(3),
        outcome=np.array([1.0, 0.0, 0.5]),
        n_steps=np.array([3, 3, 1]),
        value=np.zeros((3, 3)),
    )
    b = 0.125
    expected = [[b / 3, 2 * b / 3, 1], [-b / 3, -2 * b / 3, 0], [0.5, 0, 0]]
    np.testing.assert_allclose(credit.step_reward, expected, atol=1e-6)


def graphs(rng: np.random.Generator, n: int, k: int, layers: int = 2) -> np.ndarray:
    """Step graphs whose rows hold at most all of the attention."""
    raw = np.tril(rng.random((n, layers, 2, k, k)), -1)
    raw *= rng.random((n, layers, 1, k, 1))
    return raw / np.maximum(raw.sum(axis=(2, 4), keepdims=True), 1.0)


def test_attnsr_allocation_by_hand():
    # Three steps, one layer. Step 3 puts .4 on step 1 and .2 on step 2 (both kinds together),
    # step 2 puts .5 on step 1. G is half of it.
    graph = np.zeros((1, 1, 2, 3, 3))
    graph[0, 0, :, 2] = [[0.3, 0.2, 0], [0.1, 0.0, 0]]
    graph[0, 0, 0, 1, 0] = 0.5
    packed = pack([dataclasses.replace(random_trials(0)[0])])
    batch = packed.batch.replace(
        step_mask=jnp.ones((1, 3), bool), weight=jnp.ones(1), n_steps=jnp.full(1, 3)
    )
    config = AttentionConfig(m_target=1.0, kappa_target=1.0)
    got = jax.jit(functools.partial(allocate, config=config))(batch, jnp.asarray(graph))
    a2 = 0.9 * 0.1
    a1 = 0.9 * (0.2 + a2 * 0.25)
    # norm of two numbers is +-1; a1 > a2, and step 1 is the older one: z = (1.5, -1.5).
    share = 1 / (1 + np.exp(-3.0))
    np.testing.assert_allclose(got.share[0], [share, 1 - share, 0], **CLOSE)
    np.testing.assert_allclose(got.mass, [0.6], **CLOSE)
    abar = np.array([a1, a2]) / (a1 + a2)
    phi = 1 + (abar * np.log(abar)).sum() / np.log(2)
    np.testing.assert_allclose(got.focus, [phi], **CLOSE)
    np.testing.assert_allclose(got.consensus, [1.0], **CLOSE)
    np.testing.assert_allclose(got.confidence, [0.6 * min(phi / 0.2, 1.0)], **CLOSE)


@pytest.mark.parametrize("confidence", ["focus", "const"])
def test_attnsr_spends_exactly_its_bounded_budget(confidence: str):
    rng = np.random.default_rng(0)
    n, k = 200, 7
    lengths = rng.integers(1, k + 1, n)
    outcome = rng.random(n)
    graph = graphs(rng, n, k)
    graph[:20] = 0.0
    credit = assign(
        attnsr(confidence=confidence),
        task=np.arange(n),
        outcome=outcome,
        n_steps=lengths,
        step_graph=graph,
        value=np.zeros((n, k)),
    )
    shaped = np.array(credit.step_reward)
    shaped[np.arange(n), lengths - 1] -= outcome
    spent = np.abs(shaped).sum(axis=1)
    assert (spent <= 0.25 * np.abs(outcome - outcome.mean()) + 1e-6).all()
    np.testing.assert_allclose(spent.mean(), credit.diagnostics["attnsr_budget"], **CLOSE)
    assert (spent[lengths == 1] < 1e-6).all()
    if confidence == "const":
        full = 0.25 * np.abs(outcome - outcome.mean())
        np.testing.assert_allclose(spent[lengths > 1], full[lengths > 1], **CLOSE)
    else:
        assert (spent[:20] < 1e-6).all()  # no attention, no confidence
        assert 0 < credit.diagnostics["attnsr_confidence"] < 1
    assert {"attnsr_mass", "attnsr_focus", "attnsr_consensus"} <= credit.diagnostics.keys()


def test_less_mass_in_the_last_row_never_raises_confidence():
    rng = np.random.default_rng(1)
    n, k = 300, 6
    graph = graphs(rng, n, k)
    less = graph.copy()
    less[:, :, :, -1] *= 0.3
    batch = pack(random_trials(0)).batch.replace(
        step_mask=jnp.ones((n, k), bool), weight=jnp.ones(n), n_steps=jnp.full(n, k)
    )
    config = AttentionConfig()
    full, cut = (jax.jit(functools.partial(allocate, config=config))(batch, g)
                 for g in (jnp.asarray(graph), jnp.asarray(less)))  # fmt: skip
    assert (np.asarray(cut.mass) < np.asarray(full.mass)).all()
    assert (np.asarray(cut.confidence) <= np.asarray(full.confidence) + 1e-6).all()
    assert (np.asarray(full.confidence) <= 1).all()


def test_attnsr_without_confidence_is_ppo():
    packed = pack(random_trials(0))
    silent = dataclasses.replace(
        packed, signals=packed.signals.replace(step_graph=0 * packed.signals.step_graph)
    )
    ppo, blind = run("ppo", packed), run("attnsr", silent)
    np.testing.assert_array_equal(ppo.token_advantage, blind.token_advantage)
    np.testing.assert_array_equal(ppo.token_target, blind.token_target)
    heard = run("attnsr", packed)
    assert np.abs(np.asarray(heard.token_advantage - ppo.token_advantage)).max() > 1e-3


def test_attnsr_grpo_without_alpha_is_grpo_and_otherwise_keeps_each_episodes_mean():
    packed = pack(random_trials(1))
    plain = run("grpo", packed)
    off = credit_of(attnsr_grpo(alpha=0.0), packed)
    np.testing.assert_allclose(off.token_advantage, plain.token_advantage, **CLOSE)
    on = run("attnsr_grpo", packed)
    assert np.abs(np.asarray(on.token_advantage - plain.token_advantage)).max() > 1e-3
    episode = np.where(np.asarray(on.token_weight) > 0, np.asarray(packed.batch.episode), -1)
    for i in range(len(random_trials(1))):
        mine = episode == i
        np.testing.assert_allclose(
            np.asarray(on.token_advantage)[mine].sum(),
            np.asarray(plain.token_advantage)[mine].sum(),
            **CLOSE,
        )


def test_relace_without_ratio_smoothing_and_mask_is_gigpo():
    packed = pack(random_trials(2))
    one = credit_of(relace(low=1.0, high=1.0, alpha=1.0, mask="none"), packed)
    two = credit_of(gigpo(gamma=0.6), packed)
    np.testing.assert_allclose(one.token_advantage, two.token_advantage, **CLOSE)


def test_procredit_with_checks_passed_at_the_end_only_is_grpo_up_to_a_constant():
    outcome = np.array([1.0, 0.0, 0.0, 1.0])
    lengths = np.array([4, 2, 3, 1])
    progress = np.zeros((4, 5))
    progress[np.arange(4), lengths] = outcome
    common = {"task": np.zeros(4, int), "outcome": outcome, "n_steps": lengths}
    fine = assign("procredit", progress=progress, **common).step_advantage
    coarse = assign("grpo", **common).step_advantage
    real = np.arange(4) < lengths[:, None]
    difference = np.where(real, np.asarray(fine - coarse), np.nan)
    spread = np.nanmax(difference, axis=1) - np.nanmin(difference, axis=1)
    np.testing.assert_allclose(spread, 0.0, atol=1e-5)


def test_one_bad_turn_in_an_all_fail_group_is_not_blown_up():
    n, k = 8, 50
    credit = assign("grpo", task=np.zeros(n, int), outcome=np.zeros(n), n_steps=np.full(n, k))
    assert not np.asarray(credit.step_advantage).any()
    assert credit.diagnostics["flat_episodes"] == 1.0


def test_rounding_is_no_spread():
    # Progress that goes up and comes back sums to 1e-17, not to 0: no signal may come of it.
    progress = np.array([[0.1, 0.4, 0.2, 0.1], [0.1, 0.7, 0.3, 0.1], [0.1, 0.1, 0.1, 0.1]])
    credit = assign(
        procredit(turn_weight=0.0),
        task=np.zeros(3, int),
        outcome=np.full(3, 0.1),
        n_steps=np.full(3, 3),
        progress=progress,
    )
    assert not np.asarray(credit.step_advantage).any()


def test_no_gradient_flows_through_credit():
    packed = pack(random_trials(3))
    method = make("ppo")

    def total(value: jax.Array) -> jax.Array:
        signals = packed.signals.replace(value=value)
        credit, _ = method.estimate(packed.batch, signals, method.init())
        return (credit.token_advantage**2).sum() + credit.token_target.sum()

    value = jnp.nan_to_num(packed.signals.value)
    assert not np.asarray(jax.jit(jax.grad(total))(value)).any()


# assign: the arrays-only entry.


def test_assign_takes_a_name_or_an_estimator_and_works_under_jit():
    by_name = assign("procredit", **EXAMPLE)
    by_value = assign(procredit(), **EXAMPLE)
    np.testing.assert_array_equal(by_name.step_advantage, by_value.step_advantage)
    inside = jax.jit(lambda arrays: assign("procredit", **arrays))(EXAMPLE)
    np.testing.assert_allclose(inside.step_advantage, by_name.step_advantage, **CLOSE)
    with pytest.raises(ValueError, match="at least one"):
        jax.jit(lambda n: assign("grpo", task=n, outcome=n, n_steps=n))(jnp.ones(2, int))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("procredit", {"progress": None}, "'procredit' needs the signal 'progress'"),
        ("gigpo", {}, "'gigpo' needs the signal 'state'"),
        ("grpo", {"task": np.zeros(2, int)}, r"task has shape \[2\], expected \[N=3\]"),
        ("grpo", {"outcome": np.zeros((3, 1))}, r"outcome has shape \[3, 1\], expected \[N\]"),
        (
            "gigpo",
            {"state": np.zeros((3, 7), int)},
            r"progress has shape \[3, 5\], expected \[N=3, K\+1=8\]",
        ),
        (
            "attnsr_grpo",
            {"step_graph": np.zeros((3, 2, 2, 4, 5))},
            r"step_graph has shape \[3, 2, 2, 4, 5\], expected \[N=3, L, 2, K=4, K=4\]",
        ),
        ("procredit", {"n_steps": np.array([3, 0, 4])}, r"n_steps\[1\] = 0 must lie in 1..K = 4"),
        ("procredit", {"n_steps": np.array([3, 3, 5])}, r"n_steps\[2\] = 5 must lie in 1..K = 4"),
        ("grop", {}, "no credit method 'grop'; did you mean 'grpo'"),
    ],
)
def test_assign_refuses_what_does_not_fit(name: str, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        assign(name, **(EXAMPLE | change))


def test_grpo_by_hand():
    credit = assign(
        grpo(),
        task=np.array([7, -3, 7, -3, 7]),
        outcome=np.array([1.0, 0.5, 0.0, 0.5, 0.0]),
        n_steps=np.array([1, 2, 2, 1, 2]),
    )
    std = np.sqrt(1 / 3)
    expected = [
        [2 / 3 / std, 0],
        [0, 0],
        [-1 / 3 / std, -1 / 3 / std],
        [0, 0],
        [-1 / 3 / std, -1 / 3 / std],
    ]
    np.testing.assert_allclose(credit.step_advantage, expected, atol=1e-5)
