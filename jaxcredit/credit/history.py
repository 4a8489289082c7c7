"""Comparison at equal histories: one group per number of states looked back on."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxcredit.credit import masks, segments
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import choice, count, nonnegative
from jaxcredit.episodes import EpisodeBatch, Signals


def history_normalise(
    c: int = 2,
    *,
    alpha: float = 1.0,
    std: str | None = "population",
    members: str = "several",
    eps: float = 1e-6,
) -> Stage:
    """A_k = sum_m w_m a_m / sum_m w_m over m = 1..c + 1, w_m = (m + 1)^alpha.

    a_m = (G_k - mean) / (std + eps) over the steps of the task whose last m states, the
    present one included, are those of step k. A step has no group m before its m-th step, and a
    group of one counts for nothing; without any group A_k = 0.

    Args:
      c: how many states before the present one may count.
      alpha: exponent of the weights; longer histories weigh more.
      std: as in ``group_normalise``.
      members: "several" weighs every group with more than one member; "nonzero" also leaves out
        groups in which a_m is exactly 0, so that the others weigh more.
      eps: added to the standard deviation.
    """
    count("c", c)
    nonnegative("alpha", alpha)
    choice("std", std, ("sample", "population", None))
    choice("members", members, ("several", "nonzero"))

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        shape = batch.step_mask.shape
        place = jnp.arange(shape[1])
        value = flow.step_return.reshape(-1)
        keys = [masks.task_of_step(batch).reshape(-1)]
        total, weights = jnp.zeros(shape), jnp.zeros(shape)
        for m in range(1, c + 2):
            keys.append(_earlier(batch.state, m - 1).reshape(-1))
            mask = masks.valid_steps(batch) & (place >= m - 1)
            stats = segments.group(value, mask.reshape(-1), keys)
            a = segments.standardise(value, mask.reshape(-1), stats, std, eps).reshape(shape)
            counts = mask & (stats.count.reshape(shape) > 1)
            if members == "nonzero":
                counts &= a != 0
            weight = jnp.where(counts, float(m + 1) ** alpha, 0.0)
            total, weights = total + weight * a, weights + weight
        advantage = total / jnp.where(weights > 0, weights, 1.0)
        alone = masks.valid_steps(batch) & (weights == 0)
        share = alone.sum() / jnp.maximum(masks.valid_steps(batch).sum(), 1)
        return replace(flow, step_advantage=advantage).note(lone_steps=share)

    return stage(
        f"history_normalise({c})",
        apply,
        needs=["state"],
        reads=["step_return"],
        writes=["step_advantage"],
    )


def _earlier(state: Int[Array, "N K"], by: int) -> Int[Array, "N K"]:
    size = state.shape[1]
    return jnp.pad(state, ((0, 0), (by, 0)))[:, :size]
