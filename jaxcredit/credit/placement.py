"""Where the arrays of a batch live when a mesh axis is explicit.

Credit compares episodes across the whole batch: it sorts, gathers and scatters, which an
explicit mesh axis refuses to place by itself. The arrays are small, so every device gets all
of them, computes the same numbers, and keeps its own part of the result. On automatic mesh
axes the compiler decides and nothing here applies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jaxcredit.episodes import Credit, EpisodeBatch


def whole(tree: Any) -> Any:
    """The same arrays, explicitly sharded ones gathered to every device."""

    def gather(x: jax.Array) -> jax.Array:
        sharding = jax.typeof(x).sharding
        if all(axis is None for axis in sharding.spec):
            return x
        everywhere: jax.Array = jax.reshard(x, sharding.update(spec=jax.P()))
        return everywhere

    return jax.tree.map(gather, tree)


def like(credit: Credit, batch: EpisodeBatch) -> Credit:
    """``credit`` with token arrays placed as the batch's tokens and step arrays as its steps."""

    def place(x: jax.Array, model: jax.Array) -> jax.Array:
        sharding = jax.typeof(model).sharding
        explicit = any(axis is not None for axis in sharding.spec)
        return jax.reshard(x, sharding) if explicit else x

    target, slope = credit.token_target, credit.reward_slope
    return replace(
        credit,
        step_reward=place(credit.step_reward, batch.step_mask),
        step_advantage=place(credit.step_advantage, batch.step_mask),
        token_advantage=place(credit.token_advantage, batch.tokens),
        token_weight=place(credit.token_weight, batch.tokens),
        token_target=None if target is None else place(target, batch.tokens),
        reward_slope=None if slope is None else place(slope, batch.tokens),
        step_target=jax.tree.map(lambda x: place(x, batch.step_mask), credit.step_target),
    )
