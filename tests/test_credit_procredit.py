"""What ProCredit claims (its Appendices B, C and G), its worked example, and its ablations."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from credit_cases import (
    low_effort_compilation,  # noqa: F401
    nested,
    pack,
    random_trial,
    random_trials,
    run,
)
from oracles import oracles_paper
from test_credit_examples import EXAMPLE
from test_credit_methods import check
from test_credit_paper import CLOSE, advantages, credit_of

from jaxcredit.credit import assign, procredit


@pytest.mark.parametrize(
    "options",
    [
        {"level": "token"},
        {"level": "token", "gamma": 0.9, "turn_return": "progress", "turn_weight": 0.5},
        {"turn_weight": 0.0},
        {"gamma": 0.95, "c": 2.0},
        {"turn_return": "progress"},
        {"turn_group": "progress"},
        {"turn_group": "state", "gamma": 0.95},
    ],
    ids=str,
)
def test_ablations_agree_with_the_oracle(options: dict):
    method = procredit(**options)
    estimate = jax.jit(method.estimate)
    for seed in range(8):
        trials = random_trials(seed)
        packed = pack(trials, window=seed % 2 == 1, seed=seed)
        found, _ = estimate(packed.batch, packed.signals, method.init())
        check(found, trials, packed, oracles_paper.procredit(trials, **options))


def test_order_of_the_alarm_example():
    # Appendix B: C does better than B at every turn, B no worse than A; reading the alarm list
    # and the progress that follows have the same progress ahead of them.
    given = {key: x for key, x in EXAMPLE.items() if key != "n_steps"}
    a, b, c = advantages("procredit", [3, 3, 4], **given)
    assert c.min() > b.max()
    assert b.min() >= a.max()
    np.testing.assert_allclose(c[1], c[2], atol=1e-6)
    np.testing.assert_allclose(b[0] - b[1], 1 / 6, atol=1e-6)


@pytest.mark.parametrize("c", [0.1, 0.5, 3.0])
def test_credit_falls_by_exactly_the_progress_just_earned(c: float):
    rng = np.random.default_rng(0)
    progress = rng.integers(0, 5, (6, 8)) / 4  # progress may be undone
    turns = advantages(
        procredit(c=c),
        [7] * 6,
        task=np.repeat([0, 1], 3),
        outcome=rng.integers(0, 2, 6).astype(float),
        progress=progress,
    )
    earned = c * np.diff(progress)[:, :-1]
    np.testing.assert_allclose(np.diff(turns), -earned, atol=1e-5)


def test_gap_between_success_and_failure():
    # Appendix G: 1 + c (1 - Phi of the failure), whatever was done on the way.
    for c in (0.01, 0.5, 20.0):
        found = assign(
            procredit(c=c),
            task=np.zeros(2, int),
            outcome=np.array([1.0, 0.0]),
            n_steps=np.array([3, 3]),
            progress=np.array([[0.25, 0, 0.5, 1], [0.25, 1, 1, 0.75]]),
        )
        scores = np.asarray(found.step_reward).sum(axis=1)
        np.testing.assert_allclose(scores[0] - scores[1], 1 + 0.25 * c, rtol=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.95])
def test_discounting_taxes_length(gamma: float):
    # Appendix C: two successes with three checks; the longer takes every one twice as late.
    short, long = np.zeros(17), np.zeros(17)
    for k in (2, 5, 8):
        short[k:] += 1 / 3
        long[2 * k :] += 1 / 3
    given = {
        "task": np.zeros(2, int),
        "outcome": np.ones(2),
        "progress": np.stack([short, long]),
    }
    trajectory = advantages(procredit(turn_weight=0.0, gamma=gamma), [8, 16], **given)
    assert not np.concatenate(trajectory).any()  # scores tie: the turns are the only signal
    a, b = advantages(procredit(gamma=gamma), [8, 16], **given)
    if gamma == 1.0:
        np.testing.assert_allclose(np.repeat(a, 2), b, atol=1e-6)  # the same staircase
        np.testing.assert_allclose(a.mean(), b.mean(), atol=1e-6)
    else:
        for k in (2, 5, 8):
            assert a[k - 2] > b[2 * k - 4]  # as long as the stage's reward is ahead
        assert a.mean() > b.mean() + 0.05


@pytest.mark.parametrize("gamma", [1.0, 0.95])
def test_an_added_turn_costs_five_percent_whatever_it_does(gamma: float):
    # Attempt 2 is attempt 1 with a useless turn before the last one.
    progress = np.array([[0, 0.5, 1, 1], [0, 0.5, 0.5, 1]])
    method = procredit(gamma=gamma, turn_return="progress", turn_group="task", c=1.0)
    given = {"task": np.zeros(2, int), "outcome": np.zeros(2), "progress": progress}
    a, b = advantages(method, [2, 3], **given)
    base = a[1] - 0.5  # the last turn's return is 0.5; the trajectory terms tie
    np.testing.assert_allclose(b[2] - base, 0.5, atol=1e-6)
    np.testing.assert_allclose(a[0] - base - 0.5, 0.5 * gamma, atol=1e-6)
    np.testing.assert_allclose(b[0] - base - 0.5, 0.5 * gamma**2, atol=1e-6)


def test_without_turns_is_grpo_on_its_score():
    packed = pack(random_trials(3))
    trials = random_trials(3)
    found = credit_of(procredit(turn_weight=0.0), packed)
    for trial in trials:
        trial.outcome += 0.5 * (trial.progress[trial.n] - trial.progress[0])
    again = run("grpo", pack(trials))
    np.testing.assert_allclose(found.token_advantage, again.token_advantage, **CLOSE)


def test_turns_are_tokens_where_each_has_one():
    for gamma in (1.0, 0.9):
        turn = assign(procredit(gamma=gamma), **EXAMPLE)
        token = assign(procredit(gamma=gamma, level="token"), **EXAMPLE)
        np.testing.assert_allclose(turn.step_advantage, token.step_advantage, **CLOSE)


def test_token_level_by_hand():
    # One task, two attempts of one turn: two tokens with progress 1, one token without; R = 0.
    trial = random_trial(np.random.default_rng(0), 0, tokens=[[True, True]])
    plain = {"outcome": 0.0, "weight": 1.0}
    trials = [
        dataclasses.replace(trial, progress=[0.0, 1.0], **plain),
        dataclasses.replace(trial, progress=[0.0, 0.0], tokens=[[True]], **plain),
    ]
    packed = pack(trials)
    found = credit_of(procredit(level="token"), packed)
    # G = .5, .25 and 0: mean .25. S = .5 and 0: A_traj = +-1/sqrt(2).
    first, second = nested(trials, packed, found.token_advantage)
    np.testing.assert_allclose(first[0], [0.5**0.5 + 0.25, 0.5**0.5], **CLOSE)
    np.testing.assert_allclose(second[0], [-(0.5**0.5) - 0.25], **CLOSE)


def test_baseline_of_equal_progress_by_hand():
    # Turns that start at 0: returns 1.5, 0 and 0 (mean .5); those at .5: 1.25 and nobody else.
    found = advantages(
        procredit(turn_group="progress", std=None),
        [2, 2],
        task=np.zeros(2, int),
        outcome=np.array([1.0, 0.0]),
        progress=np.array([[0, 0.5, 1], [0, 0, 0]]),
    )
    np.testing.assert_allclose(found, [[0.75 + 1, 0.75], [-0.75 - 0.5, -0.75 - 0.5]], **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "tokens"}, "did you mean 'token'"),
        ({"level": "token", "turn_group": "state"}, 'needs level="turn"'),
        ({"turn_group": "progres"}, "did you mean 'progress'"),
    ],
)
def test_options_are_checked(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        procredit(**options)
