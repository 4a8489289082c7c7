"""Statistics in which every step counts once, so that long episodes weigh more.

Only the presets in ``methods.verl_agent`` use these stages: there a training row is one step,
and a score belongs to a row. Everything else in this library compares episodes.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxcredit.credit import masks, segments
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import choice, nonnegative
from jaxcredit.episodes import EpisodeBatch, Signals


def row_score() -> Stage:
    """x_k = sum_j r_j: every row of an episode carries the episode's whole reward."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        score = flow.step_reward.sum(axis=1, keepdims=True)
        return replace(flow, step_return=jnp.where(masks.valid_steps(batch), score, 0.0))

    return stage("row_score", apply, reads=["step_reward"], writes=["step_return"])


def row_penalty(penalty: float = 0.1) -> Stage:
    """x_k <- x_k - penalty if the environment refused action k; other rows keep theirs.

    What follows normalises the penalty too, and can blow it up. ``invalid_action_penalty``
    cannot be.
    """
    nonnegative("penalty", penalty)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        fine = jnp.where(masks.refused_steps(batch), penalty, 0.0)
        return replace(flow, step_return=flow.step_return - fine)

    fields = ["step_return"]
    return stage("row_penalty", apply, needs=["action_valid"], reads=fields, writes=fields)


def row_normalise(*, std: str | None = "sample", eps: float = 1e-6) -> Stage:
    """A_k = (x_k - mean) / (std + eps) over all rows of all episodes of the task.

    A task with one row has mean 0 and std 1: A_k = x_k / (1 + eps), or x_k without std. Several
    rows without spread give exactly 0. ``std`` is "sample" or None for the mean alone.
    """
    choice("std", std, ("sample", None))

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        shape = batch.step_mask.shape
        mask, x = masks.valid_steps(batch).reshape(-1), flow.step_return.reshape(-1)
        stats = segments.group(x, mask, [masks.task_of_step(batch).reshape(-1)])
        several = segments.standardise(x, mask, stats, std, eps)
        one = x if std is None else x / (1.0 + eps)
        out = jnp.where(mask & (stats.count == 1), one, several).reshape(shape)
        return replace(flow, step_advantage=out)

    return stage("row_normalise", apply, reads=["step_return"], writes=["step_advantage"])
