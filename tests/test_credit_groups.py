"""The group-relative methods: groups worked by hand, reductions, and what is refused."""

from __future__ import annotations

import numpy as np
import oracles_groups
import pytest
from credit_cases import (
    agrees,
    credit_of,
    low_effort_compilation,  # noqa: F401
    pack,
    random_trials,
    run,
)

from jaxcredit.credit import (
    add,
    assign,
    broadcast,
    chain,
    dapo,
    discounted_return,
    dr_grpo,
    ecpo,
    empg,
    estimator,
    gigpo,
    graphgpo,
    group_normalise,
    grpo,
    hgpo,
    make,
    outcome_reward,
    reinforce_pp,
    rloo,
    scale,
    variance_gate,
    verl_agent_gigpo,
    verl_agent_grpo,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HAND = {"rtol": 1e-4, "atol": 2e-5}  # numbers below are typed with five digits

# One task, three attempts of two steps; attempts 1 and 3 pass through the same states.
THREE = {
    "task": np.zeros(3, int),
    "outcome": np.array([1.0, 0.0, 0.0]),
    "n_steps": np.full(3, 2),
    "state": np.array([[0, 1], [2, 1], [0, 1]]),
}


# Episodes compared.


def test_rloo_by_hand_counts_episodes_and_not_steps():
    credit = assign(
        "rloo",
        task=np.array([4, 4, 9, 4]),
        outcome=np.array([1.0, 0.0, 1.0, 0.5]),
        n_steps=np.array([1, 3, 2, 2]),
    )
    np.testing.assert_allclose(credit.step_advantage[:, 0], [0.75, -0.75, 0.0, 0.0], **CLOSE)
    np.testing.assert_allclose(credit.step_advantage[1], [-0.75] * 3, **CLOSE)


def test_dr_grpo_is_grpo_without_std():
    packed = pack(random_trials(0))
    plain = credit_of(grpo(std=None), packed)
    np.testing.assert_array_equal(run("dr_grpo", packed).token_advantage, plain.token_advantage)


def test_reinforce_pp_by_hand():
    # Returns 1 | 0 0 0, one token a step: mean 0.25, sample std 0.5. Tasks play no part.
    credit = assign(
        "reinforce_pp", task=np.arange(2), outcome=np.array([1.0, 0.0]), n_steps=np.array([1, 3])
    )
    np.testing.assert_allclose(credit.step_advantage, [[1.5, 0, 0], [-0.5] * 3], **CLOSE)
    halved = assign(
        reinforce_pp(gamma=0.5), task=np.zeros(1), outcome=np.ones(1), n_steps=np.array([2])
    )
    np.testing.assert_allclose(halved.step_advantage, [[-0.70711, 0.70711]], **HAND)


# DAPO.


def test_dapo_without_a_limit_is_grpo():
    packed = pack(random_trials(1))
    plain, found = run("grpo", packed), run("dapo", packed)
    np.testing.assert_array_equal(found.token_advantage, plain.token_advantage)
    assert found.diagnostics["flat_episodes"] == plain.diagnostics["flat_episodes"]


def test_dapo_penalises_length_softly():
    # Up to 6 tokens nothing is lost, from 10 on a whole point.
    lengths = np.array([5, 8, 10, 14])
    credit = assign(
        dapo(max_tokens=10, buffer=4),
        task=np.zeros(4, int),
        outcome=np.array([0.0, 1.0, 0.0, 0.0]),
        n_steps=lengths,
        progress=np.zeros((4, 15)),
    )
    last = credit.step_reward[np.arange(4), lengths - 1]
    np.testing.assert_allclose(last, [0.0, 0.5, -1.0, -1.0], **CLOSE)
    np.testing.assert_allclose(np.asarray(credit.step_reward).sum(axis=1), last, **CLOSE)
    method = dapo(max_tokens=8, buffer=3)
    for seed in range(10):
        trials = random_trials(seed)
        agrees(method, trials, oracles_groups.dapo(trials, 8, 3), seed)


def test_dapo_drops_tasks_whose_outcomes_agree_however_long_they_are():
    # Task 0 fails throughout at different lengths; task 1 is mixed; task 2 has one episode.
    credit = assign(
        dapo(max_tokens=4, buffer=4),
        task=np.array([0, 0, 1, 1, 2]),
        outcome=np.array([0.0, 0.0, 1.0, 0.0, 1.0]),
        n_steps=np.array([1, 4, 2, 2, 3]),
        progress=np.zeros((5, 5)),
    )
    assert not np.asarray(credit.step_advantage)[[0, 1, 4]].any()
    np.testing.assert_allclose(credit.step_advantage[2:4, 0], [0.70711, -0.70711], **HAND)
    np.testing.assert_allclose(credit.diagnostics["dropped_groups"], 2.0, **CLOSE)


# GiGPO and HGPO.


def test_gigpo_by_hand():
    # A_E = 1.15470, -0.57735, -0.57735. State 0: G = .5, 0. State 1: G = 1, 0, 0. State 2: one.
    credit = assign(gigpo(gamma=0.5), **THREE)
    expected = [[1.86181, 2.30940], [-0.57735, -1.15470], [-1.28446, -1.15470]]
    np.testing.assert_allclose(credit.step_advantage, expected, **HAND)


def test_hgpo_by_hand():
    # One state back. m = 1: state 0 gives 1, -1; state 1 gives 1.41421, -.70711, -.70711.
    # m = 2: the pair (0, 1) gives 1, -1. Weights 2 and 3; attempt 2 has no pair to compare.
    credit = assign(hgpo(c=1, gamma=0.5), **THREE)
    expected = [[1.0, 1.16569], [0.0, -0.70711], [-1.0, -0.88284]]
    np.testing.assert_allclose(credit.step_advantage, expected, **HAND)
    np.testing.assert_allclose(credit.diagnostics["lone_steps"], 1 / 6, **CLOSE)
    # alpha = 0 weighs both alike.
    credit = assign(hgpo(c=1, gamma=0.5, alpha=0.0), **THREE)
    np.testing.assert_allclose(credit.step_advantage[:, 1], [1.20711, -0.70711, -0.85355], **HAND)


def test_hgpo_may_leave_zeros_out_of_the_weights():
    # Three ways into state 1; those through state 0 return the same, so m = 2 says 0 there.
    ways = {
        "task": np.zeros(3, int),
        "outcome": np.array([1.0, 1.0, 0.0]),
        "n_steps": np.full(3, 2),
        "state": np.array([[0, 1], [0, 1], [2, 1]]),
    }
    kept = assign(hgpo(c=1), **ways).step_advantage
    dropped = assign(hgpo(c=1, members="nonzero"), **ways).step_advantage
    np.testing.assert_allclose(kept[:, 1], [2 / 5 * 0.70711, 2 / 5 * 0.70711, -1.41421], **HAND)
    np.testing.assert_allclose(dropped[:, 1], [0.70711, 0.70711, -1.41421], **HAND)


@pytest.mark.parametrize("std", ["population", None])
def test_hgpo_without_history_is_the_step_term_of_gigpo(std: str | None):
    packed = pack(random_trials(2))
    step_term = estimator(
        "step_term",
        outcome_reward(),
        discounted_return(0.95),
        group_normalise(by=("task", "state"), over="steps", std=std),
        broadcast(),
    )
    one, two = credit_of(hgpo(c=0, std=std), packed), credit_of(step_term, packed)
    np.testing.assert_allclose(one.token_advantage, two.token_advantage, **CLOSE)
    assert np.asarray(two.token_advantage).any()


@pytest.mark.parametrize("c", [1, 4])
def test_hgpo_agrees_with_the_oracle_at_other_depths(c: int):
    method = hgpo(c=c, alpha=2.0)
    for seed in range(10):
        trials = random_trials(seed)
        agrees(method, trials, oracles_groups.hgpo(trials, c, 2.0), seed)


# Compositions and refusals.


def test_methods_join_like_any_stage():
    half = estimator("half", add(rloo(), scale(0.5, dr_grpo())))
    packed = pack(random_trials(7))
    expected = run("rloo", packed).token_advantage + 0.5 * run("dr_grpo", packed).token_advantage
    np.testing.assert_allclose(credit_of(half, packed).token_advantage, expected, **CLOSE)
    gated = chain(discounted_return(0.9), variance_gate(group_normalise(over="steps")))
    assert gated.needs == {"state", "action"}


def test_needs():
    assert not (dr_grpo().needs | rloo().needs | dapo(max_tokens=9).needs | reinforce_pp().needs)
    assert hgpo().needs == {"state"}
    assert graphgpo().needs == {"state", "success"}
    assert ecpo().needs == {"state", "action"}
    assert empg().needs == {"entropy"}
    assert verl_agent_grpo().needs == {"action_valid"}
    assert verl_agent_gigpo().needs == {"action_valid", "state"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dapo", {"buffer": 5}, "buffer=5 says nothing without max_tokens"),
        ("dapo", {"max_tokens": 4, "buffer": 5}, r"buffer=5 must lie in \[0.0, 4\]"),
        ("dapo", {"max_tokens": 0}, "max_tokens=0 must be a positive"),
        ("dr_grpo", {"rewards": "outcom"}, "did you mean 'outcome'"),
        ("ecpo", {"kappa": -1.0}, "kappa=-1.0 must be a finite number that is not negative"),
        ("ecpo", {"kappa": float("inf")}, "kappa=inf must be a finite number"),
        ("ecpo", {"tau": 0.0}, "tau=0.0 must be a positive"),
        ("empg", {"k": -1.0}, "k=-1.0 must be"),
        ("empg", {"zeta": float("nan")}, "zeta=nan must be"),
        ("graphgpo", {"gamma": 1.0}, "gamma=1.0 must be below 1"),
        ("graphgpo", {"distance": "hops"}, "distance='hops' is not one of"),
        ("hgpo", {"c": -1}, "c=-1 must be an integer that is not negative"),
        ("hgpo", {"c": 1.5}, "c=1.5 must be an integer"),
        ("hgpo", {"members": "all"}, "members='all' is not one of"),
        ("reinforce_pp", {"gamma": 2.0}, "gamma=2.0 must lie in"),
        ("rloo", {"eps": 1e-6}, "method 'rloo' has no hyperparameter 'eps'"),
        ("verl_agent_grpo", {"penalty": -0.1}, "penalty=-0.1 must be"),
        ("verl_agent_grpo", {"std": "population"}, "std='population' is not one of"),
        ("verl_agent_gigpo", {"size": 0.0}, "size=0.0 must be a positive"),
    ],
)
def test_refused_hyperparameters(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(name, **options)
