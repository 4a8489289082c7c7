"""GraphGPO, ECPO, EMPG and the conventions of verl-agent: numbers by hand and reductions."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import oracles
import oracles_groups
import pytest
from credit_cases import (
    Shape,
    agrees,
    credit_of,
    low_effort_compilation,  # noqa: F401
    pack,
    random_trial,
    random_trials,
    run,
)
from jax.sharding import AxisType, NamedSharding

from jaxcredit.credit import (
    assign,
    discounted_return,
    dr_grpo,
    ecpo,
    empg,
    gigpo,
    graphgpo,
    grpo,
    make,
    variance_gate,
    verl_agent_gigpo,
    verl_agent_grpo,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HAND = {"rtol": 1e-4, "atol": 2e-5}  # numbers below are typed with five digits


# GraphGPO.

# 0 > 1 > 2 > SUCCESS; 0 > 3 > 0 > 1 > ?; 0 > 4 > 4 > ?. So d(2) = 1, d(1) = 2, d(0) = 3,
# d(3) = 4; what has no path, state 4 and both unknown ends, has 5.
MAZE = {
    "task": np.zeros(3, int),
    "outcome": np.array([1.0, 0.0, 0.0]),
    "success": np.array([True, False, False]),
    "n_steps": np.array([3, 4, 3]),
    "state": np.array([[0, 1, 2, 9], [0, 3, 0, 1], [0, 4, 4, 9]]),
}


def test_graphgpo_by_hand():
    credit = assign(graphgpo(gamma=0.5), **MAZE)
    episode = np.array([1.15470, -0.57735, -0.57735])
    # State 0 leads to 1, 3, 1 and 4: y = 10 / 4, 10 / 16, 10 / 4, 10 / 32.
    leave = np.array([2.5, 0.625, 2.5, 0.3125])
    leave = (leave - 1.484375) / 1.17966
    # State 1 leads to 2 (y = 5) and to the unknown end (y = 10 / 32).
    expected = np.zeros((3, 4))
    expected[0] = [leave[0], 0.70711, 0, 0]
    expected[1] = [leave[1], 0, leave[2], -0.70711]
    expected[2] = [leave[3], 0, 0, 0]  # both steps from state 4 lead nowhere: no spread
    expected += np.where(np.arange(4) < MAZE["n_steps"][:, None], episode[:, None], 0.0)
    np.testing.assert_allclose(credit.step_advantage, expected, **HAND)
    np.testing.assert_allclose(credit.diagnostics["graph_steps"], 1.0)


def test_graphgpo_credits_a_failed_attempt_that_leads_where_a_success_went_on():
    credit = assign("graphgpo", **MAZE)
    step = np.asarray(credit.step_advantage - assign("grpo", **MAZE).step_advantage)
    assert step[1, 2] > 0.5  # 0 > 1, as the successful attempt did
    assert step[1, 0] < -0.5 and step[2, 0] < -0.5  # 0 > 3 and 0 > 4


def test_graphgpo_without_a_success_in_the_task_is_grpo():
    failed = MAZE | {"success": np.zeros(3, bool), "outcome": np.array([0.5, 0.0, 0.0])}
    credit = assign("graphgpo", **failed)
    np.testing.assert_array_equal(credit.step_advantage, assign("grpo", **failed).step_advantage)
    np.testing.assert_allclose(credit.diagnostics["graph_steps"], 0.0)


def test_graphgpo_finds_paths_longer_than_any_episode():
    # Eight links of two steps each, only the last one succeeds: d of the start is 9.
    n = 8
    links = {
        "task": np.zeros(n + 1, int),
        "outcome": np.zeros(n + 1),
        "success": np.arange(n + 1) == n - 1,
        "n_steps": np.full(n + 1, 2),
        # One more attempt goes from the start into a dead end.
        "state": np.array([[i, i + 1] for i in range(n)] + [[0, 99]]),
    }
    credit = assign(graphgpo(gamma=0.9), **links)
    expected = 10 * 0.9**8, 10 * 0.9**10  # one ahead of the start, and beyond the farthest
    gap = expected[0] - expected[1]
    std = gap / np.sqrt(2)
    np.testing.assert_allclose(credit.step_advantage[0, 0], gap / 2 / std, **CLOSE)
    raw = assign(graphgpo(gamma=0.9, std=None), **links)
    np.testing.assert_allclose(raw.step_advantage[[0, n], 0], [gap / 2, -gap / 2], **CLOSE)


@pytest.mark.parametrize("distance", ["absolute", "relative"])
def test_graphgpo_agrees_with_the_oracle_on_larger_graphs(distance: str):
    method = graphgpo(gamma=0.5, distance=distance)
    for seed in range(15):
        rng = np.random.default_rng(seed)
        trials = [
            dataclasses.replace(
                random_trial(rng, int(rng.integers(2)), n=5),
                states=rng.integers(0, 9, 5).tolist(),
                success=bool(rng.random() < 0.2),
            )
            for _ in range(9)
        ]
        expected = oracles_groups.graphgpo(trials, 0.5, distance == "relative")
        agrees(method, trials, expected, seed)


def test_graphgpo_measures_far_from_success_only_if_it_measures_relatively():
    # Ten transitions from SUCCESS, one attempt goes on and one turns back.
    n = 10
    far = {
        "task": np.zeros(2, int),
        "outcome": np.array([1.0, 0.0]),
        "success": np.array([True, False]),
        "n_steps": np.array([n, 2]),
        "state": np.array([list(range(n)), [0, 99] + [0] * (n - 2)]),
    }
    plain = assign("grpo", **far).step_advantage[:, 0]
    absolute = assign("graphgpo", **far).step_advantage[:, 0]
    relative = assign(graphgpo(distance="relative"), **far).step_advantage[:, 0]
    np.testing.assert_allclose(absolute, plain, **CLOSE)
    np.testing.assert_allclose(relative - plain, [0.70711, -0.70711], **HAND)


def test_graphgpo_runs_on_an_explicit_mesh():
    packed = pack(random_trials(9), window=True)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    method = make("graphgpo")
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, jax.P("data"))
        batch, signals = jax.device_put((packed.batch, packed.signals), split)
        credit, _ = jax.jit(method.estimate)(batch, signals, method.init())
    expected = run("graphgpo", packed).token_advantage
    np.testing.assert_allclose(credit.token_advantage, expected, **CLOSE)


# ECPO.

# One state, two actions: action 0 returns 1, 1 and action 1 returns 0, 1.
TRIES = {
    "task": np.zeros(4, int),
    "outcome": np.array([1.0, 1.0, 0.0, 1.0]),
    "n_steps": np.ones(4, int),
    "state": np.zeros((4, 1), int),
    "action": np.array([[0], [0], [1], [1]]),
}


def test_ecpo_by_hand():
    # mu = .875 and .625, A_act = +-.86603; B = .0625, W = .125; rho = tanh(1) / 3 = .25387.
    credit = assign("ecpo", **TRIES)
    expected = [0.71985, 0.71985, -1.71985, 0.28015]
    np.testing.assert_allclose(credit.step_advantage[:, 0], expected, **HAND)
    np.testing.assert_allclose(credit.diagnostics["variance_gate"], np.tanh(1) / 3, rtol=1e-4)


def test_ecpo_shrinks_the_rare_action_more():
    # Action 1 succeeded once; four tries of action 0 succeeded half of the time.
    lucky = {
        "task": np.zeros(5, int),
        "outcome": np.array([1.0, 0.0, 1.0, 0.0, 1.0]),
        "n_steps": np.ones(5, int),
        "state": np.zeros((5, 1), int),
        "action": np.array([[0], [0], [0], [0], [1]]),
    }
    step = [
        np.asarray(assign(ecpo(kappa=kappa, std=None), **lucky).step_advantage)[:, 0]
        - np.asarray(assign(dr_grpo(), **lucky).step_advantage)[:, 0]
        for kappa in (0.0, 2.0)
    ]
    rho = np.tanh(5 / 4) * 0.04 / 0.24
    # Means .5 and 1, mu_s = .6: at kappa = 2 they become .53333 and .73333.
    np.testing.assert_allclose(step[0][[0, 4]], rho * np.array([-0.1, 0.4]), **HAND)
    np.testing.assert_allclose(step[1][[0, 4]], rho * np.array([-0.04, 0.16]), **HAND)


def test_ecpo_with_one_try_an_action_no_shrinkage_and_an_open_gate_is_gigpo():
    trials = random_trials(3)
    count = iter(range(1000))
    trials = [dataclasses.replace(t, actions=[next(count) for _ in range(t.n)]) for t in trials]
    packed = pack(trials)
    one = credit_of(ecpo(kappa=0.0, tau=1e-3, eps=1e-9), packed)
    two = credit_of(gigpo(eps=1e-9), packed)
    np.testing.assert_allclose(one.token_advantage, two.token_advantage, **CLOSE)


def test_the_variance_gate_refuses_what_is_no_comparison():
    with pytest.raises(ValueError, match="'discounted_return' must be stateless"):
        variance_gate(discounted_return(0.9))


# EMPG.


def test_empg_by_hand():
    # g = exp(-k H') with k = log 4: 1, 1/4 | 1/2; mean g = 7/12. A = +-.70711.
    credit = assign(
        empg(k=float(np.log(4)), zeta=0.1),
        task=np.zeros(2, int),
        outcome=np.array([1.0, 0.0]),
        n_steps=np.array([2, 1]),
        entropy=np.array([[0.2, 1.2], [0.7, 99.0]]),
    )
    raw = np.array([1.21218 + 0.025, 0.30305, -0.60609])
    expected = raw - 0.31138
    got = np.asarray(credit.step_advantage)[[0, 0, 1], [0, 1, 0]]
    np.testing.assert_allclose(got, expected, **HAND)
    np.testing.assert_allclose(credit.diagnostics["step_entropy"], 0.7, **CLOSE)


def test_empg_without_either_term_is_grpo_centred():
    packed = pack(random_trials(4))
    found = np.asarray(credit_of(empg(k=0.0, zeta=0.0), packed).token_advantage)
    plain = np.asarray(run("grpo", packed).token_advantage)
    tokens = np.asarray(run("grpo", packed).token_weight) > 0
    shift = (found - plain)[tokens]
    np.testing.assert_allclose(shift, shift[0], **CLOSE)
    assert abs(shift[0]) > 1e-3


def test_empg_pays_for_clarity_in_groups_without_spread():
    trials = [dataclasses.replace(t, outcome=1.0) for t in random_trials(5)]
    packed = pack(trials)
    assert np.asarray(run("empg", packed).token_advantage).any()
    assert not np.asarray(credit_of(empg(zeta=0.0), packed).token_advantage).any()


# The conventions of verl-agent.


def one_step(trials: list[oracles.Trial]) -> list[oracles.Trial]:
    """The first step of each trial alone, its action accepted."""
    return [
        random_trial(np.random.default_rng(i), t.task, tokens=[[True]])
        for i, t in enumerate(trials)
    ]


def batch_of(task: list[int], outcome: list[float], accepted: list[list[bool]]):
    rng = np.random.default_rng(0)
    return pack(
        [
            dataclasses.replace(
                random_trial(rng, t, tokens=[[True]] * len(ok)),
                outcome=r,
                accepted=ok,
                states=[0] * len(ok),
                weight=1.0,
            )
            for t, r, ok in zip(task, outcome, accepted)
        ]
    )


def test_verl_agent_grpo_by_hand():
    # Rows 10 | 0, -.1, 0: mean 2.475, sample std 5.01689. GRPO says +-.70711 for all.
    packed = batch_of([3, 3], [1.0, 0.0], [[True], [True, False, True]])
    credit = run("verl_agent_grpo", packed)
    np.testing.assert_allclose(credit.step_advantage[0, 0], 1.49993, **HAND)
    np.testing.assert_allclose(credit.step_advantage[1, :3], [-0.49333, -0.51327, -0.49333], **HAND)
    alone = run("verl_agent_grpo", batch_of([3], [1.0], [[True]]))
    np.testing.assert_allclose(alone.step_advantage[0, 0], 10.0, **CLOSE)
    mean_only = credit_of(verl_agent_grpo(std=None), packed)
    np.testing.assert_allclose(mean_only.step_advantage[1, :3], [-2.475, -2.575, -2.475], **CLOSE)


def test_verl_agent_gigpo_takes_the_penalty_off_the_return_of_that_step_alone():
    # Returns at state 0: 10 | 0, -.1, 0, as the scores above, so both terms agree.
    packed = batch_of([3, 3], [1.0, 0.0], [[True], [True, False, True]])
    credit = credit_of(verl_agent_gigpo(omega=0.5), packed)
    rows = np.asarray(run("verl_agent_grpo", packed).step_advantage)
    np.testing.assert_allclose(credit.step_advantage, 1.5 * rows, **CLOSE)
    # A state seen once has no step term, a task with one row keeps its raw score.
    alone = run("verl_agent_gigpo", batch_of([3], [1.0], [[False]]))
    np.testing.assert_allclose(alone.step_advantage[0, 0], 9.9, **CLOSE)


def test_verl_agent_blows_up_one_refused_action_and_grpo_does_not():
    # 400 rows of one task, all failed, one refused: (-.1 + .00025) / .005.
    accepted = [[True] * 50 for _ in range(8)]
    accepted[5][7] = False
    rng = np.random.default_rng(0)
    trials = [
        dataclasses.replace(
            random_trial(rng, 0, tokens=[[True]] * 50), outcome=0.0, accepted=ok, weight=1.0
        )
        for ok in accepted
    ]
    packed = pack(trials, Shape(n=8, k=50, b=8, t=300))
    credit = credit_of(verl_agent_grpo(), packed)
    np.testing.assert_allclose(credit.step_advantage[5, 7], -19.946, rtol=1e-3)
    assert not np.asarray(credit_of(grpo(), packed).step_advantage).any()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (verl_agent_grpo(penalty=0.0, size=1.0), grpo()),
        (verl_agent_gigpo(penalty=0.0, size=1.0), gigpo()),
    ],
    ids=["grpo", "gigpo"],
)
def test_verl_agent_without_penalty_agrees_on_episodes_of_one_step(theirs, ours):
    # One task, so that no group has a single row.
    trials = [dataclasses.replace(t, task=1, weight=1.0) for t in one_step(random_trials(6))]
    packed = pack(trials)
    one, two = credit_of(theirs, packed), credit_of(ours, packed)
    np.testing.assert_allclose(one.token_advantage, two.token_advantage, **CLOSE)
    assert np.asarray(two.token_advantage).any()
