"""Heads and reward models learn, through the trainer's own update, what is known to be true."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_learn import TINY, config_of, state_of

from jaxcredit import credit, preferences
from jaxcredit.batching import batch_episodes
from jaxcredit.episodes import Episode, Status, Step
from jaxcredit.heads import STEP_HEADS
from jaxcredit.update import LossConfig, make_update
from launch import placement, train
from launch.learn import Setup, signals_for, update_policy
from models import sharding
from models.heads import init_step_heads
from models.params import init_params
from models.policy import Policy, weight_specs
from models.score import ScoreConfig

BAD, GOOD = 5, 6
CHANCE = {BAD: 0.2, GOOD: 0.8}


def attempt(word: int, won: bool, replica: int, context: str) -> Episode:
    """Two steps; the word said first settles the chances, and the second prompt repeats it."""

    def step(prompt: list[int], said: int) -> Step:
        return Step(
            context_ids=np.array(prompt, np.int32),
            response_ids=np.array([3, said], np.int32),
            behaviour_logp=np.zeros(2, np.float32),
            sampled=np.ones(2, bool),
            stop="stop",
            observation_span=(0, 0),
            action="go",
            valid=True,
        )

    return Episode(
        task_id="task",
        group=0,
        replica=replica,
        steps=(step([1, 2], word), step([2, word], 7)),
        outcome=float(won),
        success=won,
        status=Status.SUCCESS if won else Status.FAILURE,
        context=context,
    )


def attempts(context: str) -> list[Episode]:
    """Five attempts with either word, won exactly as often as the chances say."""
    return [
        attempt(word, i < 5 * CHANCE[word], i + 5 * (word == GOOD), context)
        for word in (BAD, GOOD)
        for i in range(5)
    ]


def setup_of(method: credit.CreditEstimator, rate: float, size: int = 10, **options) -> Setup:
    """The trainer with the policy held still: only what stands beside it moves."""
    names = tuple(name for name in STEP_HEADS if name in method.needs)
    params = init_params(TINY, jax.random.key(0))
    trainable = {"params": params}
    if names:
        trainable["heads"] = init_step_heads(TINY, names, jax.random.key(1))
    reward = "reward_logp" in method.needs
    if reward:
        trainable["reward"] = {"params": params}
    policy = Policy(TINY, step_heads=names, reward_model=reward)
    optimizer = optax.partition(
        {"still": optax.set_to_zero(), "moves": optax.adam(rate)},
        lambda tree: {name: "still" if name == "params" else "moves" for name in tree},
    )
    loss = LossConfig(head=1.0 if names else 0.0, reward=float(reward))
    return Setup(
        config=config_of(
            rollout={"tasks_per_iteration": 1, "group_size": size},
            loss={"kl": 0.0},
            optimizer=options,
        ),
        parts=types.SimpleNamespace(policy=policy, trainable=trainable, frozen=None),
        estimator=method,
        scoring=ScoreConfig(buckets=(16,), tokens=1024, layers=()),
        optimizer=optimizer,
        update=make_update(policy.evaluate, optimizer, loss),
        tasks=(),
    )


def learn(setup: Setup, episodes: list[Episode], iterations: int):
    """Score, estimate, update, again and again; returns the last signals, credit and state."""
    trainable = jax.tree.map(jnp.copy, setup.parts.trainable)
    state = dataclasses.replace(state_of(trainable), opt_state=setup.optimizer.init(trainable))
    batch = batch_episodes(episodes, max_steps=3, length_multiple=16)
    estimate = jax.jit(setup.estimator.estimate)
    history = []
    for _ in range(iterations):
        signals = signals_for(setup, state, episodes, batch)
        found, _ = estimate(batch, signals, setup.estimator.init())
        found = jax.tree.map(np.asarray, found)
        history.append(found)
        state, _ = update_policy(setup, state, batch, signals, found)
    return batch, signals_for(setup, state, episodes, batch), history, state


@pytest.mark.parametrize(
    ("name", "options", "context"),
    [
        ("rudder", {"early": 0.5}, "conversation"),
        ("spa_rl", {}, "window"),
        ("agentprm", {}, "window"),
        ("archer", {"gamma": 1.0, "lam": 0.95}, "conversation"),
    ],
)
def test_a_head_learns_the_chances(name: str, options: dict, context: str):
    setup = setup_of(credit.make(name, **options), rate=0.1)
    episodes = attempts(context)
    _, signals, history, state = learn(setup, episodes, 150)
    chance = np.array([CHANCE[int(e.steps[0].response_ids[1])] for e in episodes])
    if name == "spa_rl":  # only the sum is known
        found = {"sum": np.asarray(signals.predicted_progress)[:, :2].sum(axis=1)[:, None]}
        expected = {"sum": chance[:, None]}
    else:
        after = np.stack([chance, chance], axis=1)
        before = np.stack([np.full(10, 0.5), chance], axis=1)
        found = {x: np.asarray(getattr(signals, x))[:, :2] for x in setup.parts.policy.step_heads}
        expected = {x: before if x == "v_value" else after for x in found}
    for key, numbers in found.items():
        wanted = expected[key]
        for twin in range(2) if numbers.ndim == 3 else (None,):
            each = numbers if twin is None else numbers[..., twin]
            np.testing.assert_allclose(each, wanted, atol=0.05, err_msg=key)
    # The credit of the first step now tells the words apart, whatever came out of the attempts.
    step = history[-1].step_advantage[:, 0]
    if name == "archer":
        np.testing.assert_allclose(step, chance - 0.5, atol=0.1)
    if name == "rudder":
        assert step[chance > 0.5].mean() > step[chance < 0.5].mean() + 0.3
    for a, b in zip(
        jax.tree.leaves(state.trainable["params"]),
        jax.tree.leaves(setup.parts.trainable["params"]),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------------- iStar's reward model


def test_a_reward_model_learns_which_word_wins():
    """Attempts that say the good word win. Their first step must come to be worth more."""
    setup = setup_of(credit.istar(beta=0.5), rate=3e-3, size=8)
    episodes = [attempt(word, word == GOOD, i, "conversation") for i, word in enumerate((5, 6) * 4)]
    _, _, history, _ = learn(setup, episodes, 40)
    loss = [float(found.diagnostics["preference_loss"]) for found in history]
    np.testing.assert_allclose(loss[0], np.log(2), rtol=1e-5)
    assert not history[0].step_reward.any(), "a copy of the policy has nothing to say"
    assert loss[-1] < 0.2
    reward, good = history[-1].step_reward, np.arange(8) % 2 == 1
    total = reward.sum(axis=1)
    assert total[good].min() - total[~good].max() > 1.0
    assert reward[good, 0].min() > reward[~good, 0].max() + 0.3
    advantage = history[-1].step_advantage
    outcomes = 2 * (0.5 / np.std([0.0] * 4 + [1.0] * 4, ddof=1))  # the gap that GRPO sees
    assert advantage[good, 0].min() - advantage[~good, 0].max() > outcomes + 0.2


@pytest.mark.parametrize("minibatch", [None, 5])
def test_the_reward_model_follows_the_gradient_of_the_preference_loss(minibatch):
    """Summed over micro-batches and mini-batches it is that of the whole batch's loss."""
    method, episodes = credit.istar(beta=0.5), attempts("window")
    setup = setup_of(method, rate=0.0, minibatch_episodes=minibatch)
    setup = dataclasses.replace(setup, scoring=ScoreConfig((16,), tokens=48, layers=()))
    trainable = dict(setup.parts.trainable)
    trainable["reward"] = jax.tree.map(lambda x: 1.3 * x, trainable["reward"])
    batch = batch_episodes(episodes, max_steps=3, length_multiple=16)
    state = dataclasses.replace(state_of(trainable), opt_state=setup.optimizer.init(trainable))
    signals = signals_for(setup, state, episodes, batch)
    found, _ = jax.jit(method.estimate)(batch, signals, method.init())

    kept: list = []

    def apply(state, grads):
        kept.append(jax.tree.map(np.asarray, grads))
        return state, {"grad_norm": jnp.float32(0.0)}

    setup = dataclasses.replace(setup, update=dataclasses.replace(setup.update, apply=apply))
    update_policy(setup, state, batch, signals, jax.tree.map(np.asarray, found))
    assert len(kept) == (1 if minibatch is None else 2)
    total = jax.tree.map(lambda *x: sum(x), *kept)["reward"]

    def loss(reward):
        policy = setup.parts.policy
        row = (batch.tokens, batch.position, batch.segment, jnp.asarray(batch.trainable))
        logp = policy.reward_logp({"reward": reward}, None, *row)
        score = preferences.implicit_return(batch, logp, jnp.asarray(signals.logp), 0.5)
        return preferences.preference_loss(score, batch.task, batch.outcome, batch.weight)

    batch = jax.tree.map(jnp.asarray, batch)
    expected = jax.jit(jax.grad(loss))(trainable["reward"])
    sizes = [np.abs(x).max() for x in jax.tree.leaves(expected)]
    assert max(sizes) > 1e-3
    for a, b in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_a_reward_model_without_its_slope_is_refused():
    setup = setup_of(credit.istar(), rate=0.1)
    episodes = attempts("window")
    state = state_of(setup.parts.trainable)
    batch = batch_episodes(episodes, max_steps=3, length_multiple=16)
    signals = signals_for(setup, state, episodes, batch)
    found, _ = setup.estimator.estimate(batch, signals, setup.estimator.init())
    found = dataclasses.replace(jax.tree.map(np.asarray, found), reward_slope=None)
    with pytest.raises(ValueError, match=r"loss\.reward=1\.0 needs a reward model .*\(istar\)"):
        update_policy(setup, state, batch, signals, found)


@pytest.mark.parametrize(
    ("beside", "options"),
    [
        ([], {}),
        (["heads"], {"step_heads": ("promise", "q_value")}),
        (["reward"], {"reward_model": True}),
    ],
)
def test_moments_lie_on_a_mesh_as_the_weights_they_belong_to(beside: list, options: dict):
    mesh = sharding.make_mesh(2, 1, 4)
    wanted = {"step_heads": (), "reward_model": False} | options
    specs, _ = weight_specs(TINY, None, critic=True, **wanted)
    optimizer = train.make_optimizer(config_of(), beside=beside)
    policy = Policy(TINY, mesh=mesh, value_head=True, **options)
    places = placement.state_shardings(policy, specs, optimizer, ())
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), placement.abstract(specs))
    state = placement.initial_state(zeros, optimizer, (), places)
    weights = {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(state.trainable)}
    found = {
        jax.tree_util.keystr(p): x
        for p, x in jax.tree.leaves_with_path(state.opt_state)
        if ".mu" in jax.tree_util.keystr(p) or ".nu" in jax.tree_util.keystr(p)
    }
    assert len(found) == 2 * len(weights)
    for path, moment in found.items():
        _, _, name = path.replace(".nu", ".mu").rpartition(".mu")
        assert moment.shape == weights[name].shape
        assert moment.sharding == weights[name].sharding, path
    assert len({str(x.sharding.spec) for x in weights.values()}) > 1, "nothing is split"
