"""Which episodes, steps and tokens count, and the moves between steps and tokens.

Everything here is a pure function of an ``EpisodeBatch``. Letters: N episodes, K steps,
B rows, T tokens. An episode counts if its weight is positive and it has a step; a step
counts if its episode does and ``step_mask`` holds; a token counts if it is a trainable
ACTION token of a step that counts.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxcredit.episodes import SIGNAL_AXES, EpisodeBatch, Kind, Signals


def included(batch: EpisodeBatch) -> Bool[Array, " N"]:
    """Episodes that enter statistics: positive weight and at least one step."""
    return (batch.weight > 0) & batch.step_mask.any(axis=1)


def valid_steps(batch: EpisodeBatch) -> Bool[Array, "N K"]:
    """Steps that enter statistics and receive credit."""
    return batch.step_mask & (batch.weight > 0)[:, None]


def last_step(batch: EpisodeBatch) -> Bool[Array, "N K"]:
    """True at the last valid step of each episode (nowhere if it has none)."""
    valid = valid_steps(batch)
    following = jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    return valid & ~following


def refused_steps(batch: EpisodeBatch) -> Bool[Array, "N K"]:
    """Valid steps whose action the environment did not accept."""
    return valid_steps(batch) & ~batch.action_valid


def task_of_step(batch: EpisodeBatch) -> Int[Array, "N K"]:
    """The task of every step, padding included."""
    return jnp.broadcast_to(batch.task[:, None], batch.step_mask.shape)


def action_tokens(batch: EpisodeBatch) -> Bool[Array, "B T"]:
    """Trainable ACTION tokens of valid steps: the only tokens that get credit."""
    known = (batch.episode >= 0) & (batch.step >= 0)
    step_ok = valid_steps(batch)[jnp.maximum(batch.episode, 0), jnp.maximum(batch.step, 0)]
    return known & step_ok & batch.trainable & (batch.kind == Kind.ACTION)


def step_of_token(batch: EpisodeBatch) -> Int[Array, "B T"]:
    """Flat step id ``episode * K + step`` of each action token; N * K for all others."""
    n, k = batch.step_mask.shape
    return jnp.where(action_tokens(batch), batch.episode * k + batch.step, n * k)


def task_of_token(batch: EpisodeBatch) -> Int[Array, "B T"]:
    """The task of every action token; that of some episode for all others."""
    return batch.task[jnp.maximum(batch.episode, 0)]


def broadcast_steps(batch: EpisodeBatch, per_step: Float[Array, "N K"]) -> Float[Array, "B T"]:
    """The one place where step numbers become token numbers.

    Every action token of step k of episode i gets ``per_step[i, k]``; other tokens get 0.
    """
    return jnp.append(per_step.reshape(-1), 0.0)[step_of_token(batch)]


def step_sum(batch: EpisodeBatch, per_token: Float[Array, "B T"]) -> Float[Array, "N K"]:
    """Sum of ``per_token`` over the action tokens of each step; 0 for a step without any."""
    n, k = batch.step_mask.shape
    ids = step_of_token(batch)
    kept = jnp.where(ids < n * k, per_token, 0.0)
    return jax.ops.segment_sum(kept.reshape(-1), ids.reshape(-1), n * k + 1)[:-1].reshape(n, k)


def token_counts(batch: EpisodeBatch) -> Float[Array, "N K"]:
    """Number of action tokens of each step."""
    return step_sum(batch, jnp.ones(batch.tokens.shape))


def step_mean(batch: EpisodeBatch, per_token: Float[Array, "B T"]) -> Float[Array, "N K"]:
    """Mean of ``per_token`` over the action tokens of each step; 0 for a step without any."""
    count = token_counts(batch)
    return step_sum(batch, per_token) / jnp.maximum(count, 1.0)


def last_tokens(batch: EpisodeBatch) -> Bool[Array, "B T"]:
    """True at the last action token of each step (a step lies in one row)."""
    n, k = batch.step_mask.shape
    ids = step_of_token(batch).reshape(-1)
    where = jnp.arange(ids.size)
    last = jax.ops.segment_max(where, ids, n * k + 1)
    return ((last[ids] == where) & (ids < n * k)).reshape(batch.tokens.shape)


def per_step(mask: Bool[Array, "N K"], x: Float[Array, "N K ..."]) -> Float[Array, "N K ..."]:
    """``x`` at the steps of ``mask``, 0 at the others."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, 0.0)


def clean(batch: EpisodeBatch, signals: Signals) -> tuple[EpisodeBatch, Signals]:
    """Puts zeros wherever a mask says that nothing is known.

    Done once, before any arithmetic, so that no stage can meet NaN or garbage under a mask.
    ``step_graph`` is left to the stage that reads it, which knows its triangular mask.
    """
    episode, step, token = included(batch), valid_steps(batch), action_tokens(batch)
    moments = jnp.concatenate([episode[:, None], step], axis=1)

    def keep(mask: Array, x: Array) -> Array:
        return jnp.where(mask, x, jnp.zeros((), x.dtype))

    batch = replace(
        batch,
        step_mask=step,
        step_reward=keep(step, batch.step_reward),
        progress=keep(moments, batch.progress),
        state=keep(step, batch.state),
        action=keep(step, batch.action),
        action_valid=batch.action_valid | ~step,
        outcome=keep(episode, batch.outcome),
        success=batch.success & episode,
        n_steps=step.sum(axis=1),
        weight=episode.astype(batch.weight.dtype),
        behaviour_logp=keep(token, batch.behaviour_logp),
        trainable=token,
        episode=jnp.where(token, batch.episode, -1),
        step=jnp.where(token, batch.step, -1),
    )
    by_axes = {"B T": token, "N K": step, "N K 2": step[..., None], "N K+1": moments}
    known = {
        name: keep(by_axes[axes], value)
        for name, axes in SIGNAL_AXES.items()
        if axes in by_axes and (value := getattr(signals, name)) is not None
    }
    signals = replace(signals, **known)
    return batch, signals
