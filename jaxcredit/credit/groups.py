"""Comparison within groups: baselines, normalisation and the success mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxcredit.credit import masks, segments
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import choice
from jaxcredit.episodes import EpisodeBatch, Signals


def group_normalise(
    by: Sequence[str] = ("task",),
    *,
    over: str,
    std: str | None = "sample",
    eps: float = 1e-6,
    focal: Stage | None = None,
) -> Stage:
    """A = (x - mean_group) / (std_group + eps).

    Args:
      by: ("task",), ("task", "state") for the anchor states of one task, or ("task", "progress")
        for equal progress before the step.
      over: "episodes" compares scores S_i = sum_k r_k, one per episode (every step of the
        episode gets the same number); "steps" compares step returns G_k.
      std: "sample" (n - 1), "population" (n), or None for the mean alone.
      eps: added to the standard deviation.
      focal: a transformation of step returns for x alone; mean and std stay those of the
        incoming returns. None compares like with like.

    A group of one, and a group without spread (see ``segments.FLAT``), gives exactly 0.
    Episodes of weight 0 and padding belong to no group.
    """
    choice("by", tuple(by), (("task",), ("task", "state"), ("task", "progress")))
    choice("over", over, ("episodes", "steps"))
    choice("std", std, ("sample", "population", None))
    within = tuple(by)[1:]
    if within and over == "episodes":
        raise ValueError(
            f'group_normalise: by={tuple(by)} needs over="steps", an episode has no one {within[0]}'
        )

    if focal is not None and (
        over != "steps" or focal.writes != {"step_return"} or jax.tree.leaves(focal.init())
    ):
        raise ValueError(
            f"group_normalise: focal={focal.name!r} must be a stateless transformation of "
            'step_return, with over="steps"'
        )

    def episodes(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        mask, score = masks.included(batch), flow.step_reward.sum(axis=1)
        stats = segments.group(score, mask, [batch.task])
        advantage = segments.standardise(score, mask, stats, std, eps)
        out = jnp.where(masks.valid_steps(batch), advantage[:, None], 0.0)
        return replace(flow, step_advantage=out).note(**_flat(stats, mask, "episodes"))

    def steps(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        shape = batch.step_mask.shape
        mask, value = masks.valid_steps(batch).reshape(-1), flow.step_return.reshape(-1)
        keys = [masks.task_of_step(batch).reshape(-1)]
        if "state" in within:
            keys.append(batch.state.reshape(-1))
        if "progress" in within:
            # Fractions as ids: m / n differ by far more than a millionth.
            keys.append(jnp.rint(1e6 * batch.progress[:, :-1]).astype(jnp.int32).reshape(-1))
        stats = segments.group(value, mask, keys)
        if focal is not None:
            flow, _ = focal.apply(batch, signals, flow, focal.init())
            value = flow.step_return.reshape(-1)
        out = segments.standardise(value, mask, stats, std, eps).reshape(shape)
        return replace(flow, step_advantage=out).note(**_flat(stats, mask, "steps"))

    needs = frozenset(within) | (focal.needs if focal else frozenset())
    return stage(
        f"group_normalise({over} by {'+'.join(by)})",
        episodes if over == "episodes" else steps,
        needs=needs,
        reads=["step_reward" if over == "episodes" else "step_return"],
        writes=["step_advantage"],
    )


def leave_one_out() -> Stage:
    """A_i = S_i - mean of the task's other scores = n / (n - 1) (S_i - mean), S_i = sum_k r_k.

    n counts the episodes of the task. A task with one episode, or without spread, gives 0.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        mask, score = masks.included(batch), flow.step_reward.sum(axis=1)
        stats = segments.group(score, mask, [batch.task])
        centred = segments.standardise(score, mask, stats, None, 0.0)
        advantage = centred * stats.count / jnp.maximum(stats.count - 1.0, 1.0)
        out = jnp.where(masks.valid_steps(batch), advantage[:, None], 0.0)
        return replace(flow, step_advantage=out).note(**_flat(stats, mask, "episodes"))

    return stage("leave_one_out", apply, reads=["step_reward"], writes=["step_advantage"])


def mixed_outcomes() -> Stage:
    """A_k <- 0 where the outcomes of the task have no spread, whatever else the score holds.

    DAPO's filter (arXiv 2503.14476, Eq. 11) without its resampling. Reports how many tasks
    it dropped.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        mask = masks.included(batch)
        stats = segments.group(batch.outcome, mask, [batch.task])
        drop = mask & stats.flat
        groups = jnp.where(drop, 1.0 / jnp.maximum(stats.count, 1.0), 0.0).sum()
        kept = jnp.where(drop[:, None], 0.0, flow.step_advantage)
        return replace(flow, step_advantage=kept).note(dropped_groups=groups)

    fields = ["step_advantage"]
    return stage("mixed_outcomes", apply, reads=fields, writes=fields)


def success_mask() -> Stage:
    """A_k <- 0 where the episode succeeded and A_k < 0 (RELACE, Eq. 11)."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        harmful = batch.success[:, None] & (flow.step_advantage < 0)
        return replace(flow, step_advantage=jnp.where(harmful, 0.0, flow.step_advantage))

    return stage(
        "success_mask",
        apply,
        needs=["success"],
        reads=["step_advantage"],
        writes=["step_advantage"],
    )


def _flat(stats: segments.Group, mask: jnp.ndarray, over: str) -> dict[str, jnp.ndarray]:
    share = (mask & stats.flat).sum() / jnp.maximum(mask.sum(), 1)
    return {f"flat_{over}": share}
