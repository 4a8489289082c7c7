"""Compositions: what they sum, what they need, and which ones are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_cases import (
    credit_of,
    low_effort_compilation,  # noqa: F401
    pack,
    random_trials,
    run,
)
from oracles import mean_outcome

from jaxcredit.credit import (
    AttentionConfig,
    add,
    assign,
    attention_reweight,
    broadcast,
    chain,
    discounted_return,
    environment_reward,
    estimator,
    gae,
    gigpo,
    group_normalise,
    grpo,
    hindsight_ratio,
    invalid_action_penalty,
    linear,
    linear_budget,
    make,
    outcome_reward,
    ppo,
    procredit,
    progress_reward,
    relace,
    scale,
    stage,
    success_mask,
    temporal_smoothing,
    token_rewards,
    whiten,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_add_and_scale_are_linear_in_advantages():
    packed = pack(random_trials(0))
    both = estimator("both", add(grpo(), scale(0.5, gigpo())))
    total = credit_of(both, packed)
    one, two = run("grpo", packed), run("gigpo", packed)
    for field in ("step_advantage", "token_advantage"):
        expected = np.asarray(getattr(one, field)) + 0.5 * np.asarray(getattr(two, field))
        np.testing.assert_allclose(getattr(total, field), expected, **CLOSE)
    np.testing.assert_array_equal(total.step_reward, one.step_reward)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_invalid_action_penalty_is_added_outside_the_normalisation(name: str):
    packed = pack(random_trials(1))
    penalty = chain(invalid_action_penalty(0.1), broadcast())
    method = estimator("penalised", add(make(name), penalty))
    plain, penalised = run(name, packed), credit_of(method, packed)
    counted = packed.batch.step_mask & (packed.batch.weight > 0)[:, None]
    fined = np.asarray(counted & ~packed.batch.action_valid)
    difference = np.asarray(penalised.step_advantage - plain.step_advantage)
    np.testing.assert_allclose(difference, np.where(fined, -0.1, 0.0), **CLOSE)
    assert fined.any()
    if name == "ppo":
        np.testing.assert_array_equal(penalised.token_target, plain.token_target)


def test_relace_with_the_progress_of_procredit_is_one_expression():
    hindsight = chain(
        discounted_return(0.6),
        hindsight_ratio(),
        temporal_smoothing(),
        group_normalise(by=("task", "state"), over="steps"),
        success_mask(),
    )
    method = estimator(
        "relace_progress",
        add(outcome_reward(), progress_reward(0.5)),
        add(group_normalise(over="episodes"), hindsight),
        broadcast(),
    )
    assert method.needs == {"progress", "state", "success", "logp", "hindsight_logp"}
    assert np.isfinite(np.asarray(credit_of(method, pack(random_trials(2))).token_advantage)).all()


def test_attention_reweighting_applies_to_any_step_method():
    method = estimator(
        "tilted_procredit",
        add(outcome_reward(), progress_reward(0.5)),
        group_normalise(over="episodes"),
        attention_reweight(AttentionConfig(), alpha=0.5),
        broadcast(),
    )
    assert method.needs == {"progress", "step_graph"}


def test_needs_are_inferred():
    assert grpo().needs == frozenset()
    assert ppo().needs == {"value"}
    assert ppo(rewards="outcome+steps").needs == {"value", "step_reward"}
    assert relace(mask="none", variant="score").needs == {"state", "hindsight_logp"}
    assert procredit(turn_group="state").needs == {"progress", "state"}


def test_states_of_all_branches_are_carried():
    budgets = add(linear_budget(decay=0.9), scale(2.0, linear_budget(decay=0.5)))
    method = estimator("two", budgets, group_normalise(over="episodes"), broadcast())
    step, state = jax.jit(method.estimate), method.init()
    means = []
    for seed in (3, 4):
        packed = pack(random_trials(seed))
        means.append(mean_outcome(random_trials(seed)))
        credit, state = step(packed.batch, packed.signals, state)
    slow, fast = (x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))
    np.testing.assert_allclose(slow, 0.9 * means[0] + 0.1 * means[1], **CLOSE)
    np.testing.assert_allclose(fast, 0.5 * means[0] + 0.5 * means[1], **CLOSE)
    assert np.isfinite(np.asarray(credit.token_advantage)).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: estimator("x", outcome_reward(), group_normalise(over="steps"), broadcast()),
            r"estimator 'x': stage 'group_normalise\(steps by task\)' reads step_return",
        ),
        (
            lambda: estimator("x", outcome_reward(), add(chain(success_mask())), broadcast()),
            "stage 'success_mask' reads step_advantage",
        ),
        (
            lambda: estimator("x", outcome_reward(), broadcast()),
            "stage 'broadcast' reads step_advantage",
        ),
        (
            lambda: chain(outcome_reward(), progress_reward()),
            "'progress_reward' overwrites step_reward of stage 'outcome_reward'.*add",
        ),
        (
            lambda: chain(outcome_reward(), token_rewards(), discounted_return(0.9)),
            "'discounted_return' works on steps but comes after 'token_rewards'",
        ),
        (
            lambda: chain(grpo(), success_mask()),
            "'success_mask' works on steps but comes after",
        ),
        (lambda: estimator("x", outcome_reward()), "gives no token advantages"),
        (
            lambda: add(outcome_reward(), invalid_action_penalty()),
            "cannot sum step_reward .* and step_advantage",
        ),
        (lambda: add(ppo(), linear()), "set token_target"),
        (lambda: chain(), "at least one"),
        (lambda: add(), "at least one"),
        (lambda: chain(outcome_reward), "call it"),
        (lambda: stage("mine", lambda b, s, f: f, writes=["reward"]), "'mine'.*'reward'"),
        (
            lambda: stage("mine", lambda b, s, f: f, needs=["logits"], writes=["step_reward"]),
            "'mine'.*'logits'",
        ),
        (
            lambda: group_normalise(by=("task", "state"), over="episodes"),
            'needs over="steps"',
        ),
        (lambda: group_normalise(over="step"), "over='step'.*did you mean 'steps'"),
        (lambda: group_normalise(over="steps", std="samples"), "did you mean 'sample'"),
        (lambda: group_normalise(over="steps", focal=outcome_reward()), "focal='outcome_reward'"),
        (lambda: discounted_return(1.5), r"gamma=1.5 must lie in \[0.0, 1.0\]"),
        (lambda: gae(lam="len"), "lam='len'"),
        (lambda: ppo(rewards="all"), "rewards='all'"),
        (lambda: make("attnsr", confidence="focsu"), "did you mean 'focus'"),
        (lambda: make("attnsr", m_target=0.0), "m_target=0.0"),
        (lambda: procredit(c=-1.0), "c=-1.0"),
        (lambda: make("gipo"), "no credit method 'gipo'; did you mean 'gigpo'"),
        (lambda: make("gigpo", gama=0.9), "no hyperparameter 'gama'; did you mean 'gamma'"),
    ],
)
def test_wrong_compositions_are_refused_when_built(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_missing_or_misshapen_signal_names_estimator_and_signal():
    packed = pack(random_trials(0))
    without = packed.signals.replace(value=None)
    with pytest.raises(ValueError, match="estimator 'ppo' needs the signal 'value'"):
        ppo().estimate(packed.batch, without, ppo().init())
    cut = packed.signals.replace(step_graph=packed.signals.step_graph[..., :-1])
    with pytest.raises(ValueError, match="estimator 'attnsr': signal 'step_graph' has shape"):
        make("attnsr").estimate(packed.batch, cut, make("attnsr").init())


@pytest.mark.parametrize("need", ["entropy", "ref_logp", "judge_score"])
def test_assign_takes_every_signal_and_says_which_is_missing(need: str):
    signal = stage("mine", lambda b, s, f: f, needs=[need], writes=["step_advantage"])
    method = estimator("mine", signal, broadcast())
    given = {"task": [0, 0], "outcome": [0.0, 1.0], "n_steps": [2, 2]}
    with pytest.raises(ValueError, match=rf"'mine' needs the signal '{need}'.*pass {need}="):
        assign(method, **given)
    assign(method, **given, **{need: np.zeros((2, 2))})
    with pytest.raises(ValueError, match=rf"{need} has shape \[2, 3\], expected \[N=2, K=2\]"):
        assign(method, **given, state=np.zeros((2, 2), int), **{need: np.zeros((2, 3))})
    with pytest.raises(ValueError, match="no signal 'entropie'"):
        assign(method, **given, entropie=np.zeros((2, 2)))


def test_environment_rewards_enter_where_asked():
    packed = pack(random_trials(4))
    method = estimator(
        "score",
        add(outcome_reward(), environment_reward()),
        group_normalise(over="episodes", std=None),
        broadcast(),
    )
    credit = credit_of(method, packed)
    trials = random_trials(4)
    for i, trial in enumerate(trials):
        expected = np.array(trial.rewards) * trial.weight
        expected[-1] += trial.outcome * trial.weight
        np.testing.assert_allclose(credit.step_reward[i, : trial.n], expected, **CLOSE)


def test_whiten_gives_mean_zero_and_variance_one_over_action_tokens():
    packed = pack(random_trials(5))
    credit = run("ppo", packed)
    kept = np.asarray(credit.token_advantage)[np.asarray(credit.token_weight) > 0]
    np.testing.assert_allclose(kept.mean(), 0.0, atol=1e-5)
    np.testing.assert_allclose(kept.std(ddof=1), 1.0, atol=1e-5)
    assert whiten().reads == {"token_advantage", "step_advantage"}
