"""Step heads: which token is read, what is learned, and what is left alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from episode_cases import random_episodes
from test_learn import config_of

from jaxcredit import heads
from jaxcredit.batching import batch_episodes, length_slices, row_lengths, take_rows
from jaxcredit.episodes import Kind, Step
from jaxcredit.losses import head_loss
from jaxcredit.update import LossConfig, MicroBatch, TrainState, make_update
from launch import train
from models.config import QwenConfig
from models.heads import init_step_heads, read
from models.params import init_params
from models.policy import Policy
from models.score import ScoreConfig, score

CONFIG = QwenConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
NAMES = tuple(heads.STEP_HEADS)
POLICY = Policy(CONFIG, step_heads=NAMES)


def batch_of(context: str, seed: int = 0):
    return batch_episodes(random_episodes(seed, context=context), max_steps=6, length_multiple=32)


def trainable_of() -> dict:
    """Random weights, random heads: nothing is 0 by chance."""
    fresh = init_step_heads(CONFIG, NAMES, jax.random.key(1))
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    drawn = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return {
        "params": init_params(CONFIG, jax.random.key(0)),
        "heads": jax.tree.unflatten(tree, drawn),
    }


# ---------------------------------------------------------------------- where heads are read


def test_the_tokens_that_are_read_by_hand():
    def step(response: int, sampled: list[bool]) -> Step:
        return Step(
            context_ids=np.arange(3),
            response_ids=np.arange(response),
            behaviour_logp=np.zeros(response),
            sampled=np.array(sampled),
            stop="stop",
            observation_span=(0, 2),
        )

    steps = (step(3, [True, True, False]), step(1, [True]), step(2, [False, False]))
    episode = dataclasses.replace(random_episodes(0)[0], steps=steps)
    # Conversation: 3 of context, 3 of response, 3, 1, 3, 2. Injected ids are not asked.
    batch = batch_episodes([episode], max_steps=4)
    for name, places in (("promise", [4, 9]), ("v_value", [3, 9])):
        found = heads.read_tokens(batch, name)
        assert np.argwhere(found).tolist() == [[0, place] for place in places]
    batch = batch_episodes([dataclasses.replace(episode, context="window")], max_steps=4)
    for name, places in (("promise", [4, 3]), ("v_value", [3, 3])):
        found = heads.read_tokens(batch, name)
        assert np.argwhere(found).tolist() == [[row, place] for row, place in enumerate(places)]


@pytest.mark.parametrize("context", ["conversation", "window"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_go_to_their_tokens_and_back(context: str, name: str):
    batch = batch_of(context)
    read_at = heads.read_tokens(batch, name)
    per_step = np.random.default_rng(0).normal(size=(*batch.step_mask.shape, *heads.outputs(name)))
    per_token = heads.to_tokens(batch, read_at, per_step)
    assert not per_token[~read_at].any()
    back = heads.to_steps(batch, read_at, per_token)
    mask = batch.step_mask
    np.testing.assert_array_equal(back[mask], per_step[mask])
    assert not back[~mask].any()
    assert read_at.sum() == mask.sum()


def test_step_weights_by_hand():
    """Episodes of 1, 3 and 2 steps; the last does not count, the second's row is another's size."""
    episodes = [random_episodes(s, groups=1, size=1, steps=n)[0] for s, n in ((0, 1), (1, 3))]
    batch = batch_episodes([*episodes, episodes[1]], max_steps=4)
    batch = dataclasses.replace(batch, weight=np.array([1.0, 1.0, 0.0], np.float32))
    read_at = heads.read_tokens(batch, "promise")
    for reduce, expected in (("token", [0.25, 0.25, 0.0]), ("episode", [1 / 2, 1 / 6, 0.0])):
        weight = heads.step_weights(batch, read_at, np.arange(3), reduce)
        assert not weight[~read_at].any()
        for episode, each in enumerate(expected):
            np.testing.assert_allclose(weight[read_at & (batch.episode == episode)], each)


# ---------------------------------------------------------------------- the read-outs


def test_read_outs_belong_to_the_state_after_the_token_or_before_it():
    hidden = jnp.zeros((2, 3, 16)).at[..., 0].set(jnp.asarray([[3.0, 6, -8], [30, 0, 5]]))
    hidden = hidden.at[..., 2].set(jnp.asarray([[4.0, 8, 6], [40, 0, -12]]))
    first = np.array([[0.6, 0.6, -0.8], [0.6, 0.0, 5 / 13]])  # of states of length one
    third = np.array([[0.8, 0.8, 0.6], [0.8, 0.0, -12 / 13]])
    one = {"w": jnp.eye(16)[2], "b": jnp.asarray(0.5)}
    two = {"w": jnp.eye(16)[:, [0, 2]], "b": jnp.asarray([0.5, 0.0])}
    found = read({"promise": one, "q_value": two, "v_value": two}, hidden)
    np.testing.assert_allclose(found["promise"], third + 0.5, rtol=1e-6)
    pair = np.stack([first + 0.5, third], axis=-1)
    np.testing.assert_allclose(found["q_value"], pair, rtol=1e-6)
    np.testing.assert_allclose(found["v_value"][:, 1:], pair[:, :-1], rtol=1e-6)
    assert not np.asarray(found["v_value"][:, 0]).any()


def test_fresh_heads_say_nothing_but_twins_differ():
    fresh = init_step_heads(CONFIG, NAMES, jax.random.key(0))
    assert fresh.keys() == set(NAMES)
    for name, head in fresh.items():
        assert head["w"].shape == (16, *heads.outputs(name))
        if heads.outputs(name):
            assert np.abs(head["w"][:, 0] - head["w"][:, 1]).min() > 0
            assert np.abs(head["w"]).max() < 0.05
        else:
            assert not np.asarray(head["w"]).any()
        assert not np.asarray(head["b"]).any()


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_scores_are_the_read_outs_at_those_tokens(context: str):
    batch, trainable = batch_of(context), trainable_of()
    config = ScoreConfig(buckets=(128,), tokens=512, layers=())
    found = score(POLICY, trainable, None, batch, config)
    hidden, _ = POLICY.hidden(trainable, None, batch.tokens, batch.position, batch.segment)
    hidden = np.asarray(hidden)
    hidden = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    for name in NAMES:
        head = jax.tree.map(np.asarray, trainable["heads"][name])
        signal = np.asarray(getattr(found, name))
        assert signal.shape == (*batch.step_mask.shape, *heads.outputs(name))
        assert not signal[~batch.step_mask].any()
        for i, k in np.argwhere(batch.step_mask):
            mine = (batch.episode == i) & (batch.step == k) & batch.trainable
            (row, *_), places = np.nonzero(mine & (batch.kind == Kind.ACTION))
            place = places[0] - 1 if name == "v_value" else places[-1]
            expected = hidden[row, place] @ head["w"] + head["b"]
            np.testing.assert_allclose(signal[i, k], expected, rtol=1e-4, atol=1e-4)
    assert found.logp is not None


# ---------------------------------------------------------------------- the update


# One object for all tests, so that its programs are compiled once.
UPDATE = make_update(POLICY.evaluate, optax.sgd(0.1), LossConfig(head=0.5))


def micro_batches(batch, targets: dict, tokens: int, reduce: str = "episode"):
    shape = batch.tokens.shape
    on = batch.trainable.astype(np.float32)
    given = {"weight": on / on.sum(), "advantage": 0.0 * on, "old_logp": np.full(shape, -3.9)}
    everyone = np.arange(len(batch.weight))
    for part in length_slices(row_lengths(batch), tokens=tokens, buckets=(128,)):
        fields = take_rows(batch, part)
        read_at = {name: heads.read_tokens(batch, name) for name in targets}
        yield MicroBatch(
            **{name: fields[name] for name in ("tokens", "position", "segment")},
            **{name: part.take(x.astype(np.float32)) for name, x in given.items()},
            head_target={
                name: part.take(heads.to_tokens(batch, read_at[name], target))
                for name, target in targets.items()
            },
            head_weight={
                name: part.take(heads.step_weights(batch, read_at[name], everyone, reduce))
                for name in targets
            },
        )


def state_of(trainable: dict) -> TrainState:
    return TrainState(
        trainable=trainable,
        opt_state=(),
        credit_state=(),
        iteration=jnp.int32(0),
        updates=jnp.int32(0),
    )


def random_targets(batch, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(*batch.step_mask.shape, *heads.outputs(name))).astype(np.float32)
        for name in NAMES
    }


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_the_gradient_is_that_of_the_squared_error_over_steps_whatever_the_cut(context: str):
    batch, trainable = batch_of(context), trainable_of()
    targets = random_targets(batch)
    state = state_of(trainable)

    def gradient(tokens: int):
        grads, sums = UPDATE.zeros(state), []
        for micro in micro_batches(batch, targets, tokens, "token"):
            grads, found = UPDATE.accumulate(state, None, grads, micro)
            sums.append(found)
        loss = {name: float(sum(s[f"{name}_loss"] for s in sums)) for name in NAMES}
        return jax.device_get(grads), loss

    whole, loss = gradient(4096)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(gradient(512)[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
    # Advantages are zero: what is left is the heads' loss, and it stops before the trunk.
    assert all(not x.any() for x in jax.tree.leaves(whole["params"]))

    config = ScoreConfig(buckets=(128,), tokens=512, layers=())
    signals = score(POLICY, trainable, None, batch, config)
    mask = batch.step_mask
    for name in NAMES:
        error = (np.asarray(getattr(signals, name)) - targets[name])[mask]
        np.testing.assert_allclose(loss[name], 0.5 * (error**2).sum() / mask.sum(), rtol=1e-4)
        bias = 0.5 * error.sum(axis=0) / mask.sum()
        np.testing.assert_allclose(whole["heads"][name]["b"], bias, rtol=1e-4, atol=1e-6)


def test_nan_where_a_head_is_not_read_changes_nothing():
    batch, trainable = batch_of("conversation"), trainable_of()
    state = state_of(trainable)
    (micro,) = micro_batches(batch, random_targets(batch), 4096)
    dirty = {
        name: np.where(
            micro.head_weight[name].reshape(x.shape[:2] + (1,) * (x.ndim - 2)), x, np.nan
        )
        for name, x in micro.head_target.items()
    }
    clean = UPDATE.accumulate(state, None, UPDATE.zeros(state), micro)
    other = UPDATE.accumulate(
        state, None, UPDATE.zeros(state), dataclasses.replace(micro, head_target=dirty)
    )
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_heads_and_targets_must_match():
    batch, trainable = batch_of("conversation"), trainable_of()
    targets = {"promise": random_targets(batch)["promise"]}
    (micro,) = micro_batches(batch, targets, 4096)
    state = state_of(trainable)
    with pytest.raises(ValueError, match=r"loss\.head=0\.5 .* targets for \['promise'\]"):
        UPDATE.accumulate(state, None, UPDATE.zeros(state), micro)


def test_head_loss_by_hand():
    x, t = jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 4.0]])
    np.testing.assert_allclose(head_loss(x, t), [[0.5, 2.0]])
    np.testing.assert_allclose(head_loss(x[None], t[None]), [[2.5]])


# ---------------------------------------------------------------------- the optimiser


def test_step_heads_learn_at_their_own_rate_and_leave_the_policy_its_step(tmp_path):
    """Clipped apart: with huge gradients of heads and without, the policy moves alike."""
    config = config_of(
        tmp_path, optimizer={"learning_rate": 1e-4, "head_learning_rate": 1e-2, "clip_norm": 0.1}
    )
    policy = {"params": jnp.array([1.0, -2.0]), "value": jnp.array([0.5])}
    huge = {"heads": {"promise": jnp.array([1e3, -1e3])}}
    moved = []
    for tree in (policy, policy | huge):
        optimizer = train.make_optimizer(config, beside=tree.keys() & {"heads"})
        state, found = optimizer.init(tree), []
        smaller = jax.tree.map(lambda x: 0.01 * x, tree)
        for grads in (
            tree,
            smaller,
        ):  # Adam tells the second from the first by how both were clipped
            step, state = optimizer.update(grads, state, tree)
            found.append(step)
        moved.append(found)
    for alone, beside in zip(*moved, strict=True):
        for name in policy:
            np.testing.assert_array_equal(alone[name], beside[name])
    np.testing.assert_allclose(moved[1][0]["params"], [-1e-4, 1e-4], rtol=1e-4)
    np.testing.assert_allclose(moved[1][0]["heads"]["promise"], [-1e-2, 1e-2], rtol=1e-4)
