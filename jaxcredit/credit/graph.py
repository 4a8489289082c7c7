"""The graph of a task's observed transitions, and how far from success each step led."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxcredit.credit import masks, segments
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import choice, positive
from jaxcredit.episodes import EpisodeBatch, Signals


@struct.dataclass
class GoalDistance:
    """Per step, d of the state before and after it; ``found`` says that the task has a d."""

    before: Float[Array, "N K"]
    after: Float[Array, "N K"]
    found: Bool[Array, "N K"]


def goal_distance(batch: EpisodeBatch) -> GoalDistance:
    """d(s) = min over the observed transitions s -> s' of 1 + d(s') ; d(SUCCESS) = 0.

    All episodes of a task share one graph. A step is a transition from its state to that of the
    next step. The last step of an episode that succeeded leads to SUCCESS; that of any other
    leads to a state that the arrays do not name, and from which nothing leads on. States without
    a path to SUCCESS have the task's largest finite d plus 1. A task without success has no d.
    """
    shape = batch.step_mask.shape
    size = batch.step_mask.size
    valid, last = masks.valid_steps(batch), masks.last_step(batch)
    task = masks.task_of_step(batch).reshape(-1)
    node = segments.dense_ids([task, batch.state.reshape(-1)]).reshape(shape)
    following = jnp.roll(node, -1, axis=1)

    def ahead(d: Float[Array, " M"]) -> Float[Array, "N K"]:
        beyond = jnp.where(last & batch.success[:, None], 0.0, jnp.inf)
        return jnp.where(valid & ~last, d[following], beyond)

    def relax(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d, _ = carry
        nearer = jax.ops.segment_min(1.0 + ahead(d).reshape(-1), node.reshape(-1), size)
        return nearer, (nearer < d).any()

    # Round i finds the paths of up to i transitions; the longest shortest path ends it.
    start = (jnp.full(size, jnp.inf), jnp.array(True))
    d = jax.lax.while_loop(lambda carry: carry[1], relax, start)[0]

    before, after = d[node], ahead(d)
    finite = jnp.where(valid & jnp.isfinite(before), before, -jnp.inf).reshape(-1)
    tasks = segments.dense_ids([task])
    farthest = jax.ops.segment_max(finite, tasks, size)[tasks].reshape(shape)
    found = valid & jnp.isfinite(farthest)

    def known(x: Float[Array, "N K"]) -> Float[Array, "N K"]:
        return jnp.where(found, jnp.where(jnp.isfinite(x), x, farthest + 1.0), 0.0)

    return GoalDistance(known(before), known(after), found)


def graph_return(gamma: float = 0.1, *, size: float = 10.0, distance: str = "absolute") -> Stage:
    """y_k = size gamma^d(s_{k+1}), d the ``goal_distance`` of the state after step k.

    Tasks without a success give 0. ``distance="relative"`` takes d(s_{k+1}) - d(s_k) + 1
    instead: at one state that is a constant factor, which keeps y from vanishing far from
    success.
    """
    positive("gamma", gamma)
    if gamma >= 1:
        raise ValueError(f"gamma={gamma!r} must be below 1, or no state is nearer than another")
    positive("size", size)
    choice("distance", distance, ("absolute", "relative"))

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        d = goal_distance(batch)
        exponent = d.after if distance == "absolute" else d.after - d.before + 1.0
        y = jnp.where(d.found, size * gamma**exponent, 0.0)
        share = d.found.sum() / jnp.maximum(masks.valid_steps(batch).sum(), 1)
        return replace(flow, step_return=y).note(graph_steps=share)

    return stage("graph_return", apply, needs=["state", "success"], writes=["step_return"])
