"""Statistics of groups given by arbitrary int keys, with static shapes.

M items, each with one or more int keys; items with equal keys form a group. Cost is one sort
and a few segment reductions, never M x M.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

FLAT = 1e-6
"""A spread up to FLAT * max(1, |x|) is rounding, not signal. Rewards live on the scale of 1."""


@struct.dataclass
class Group:
    """For each item, the statistics of the group it belongs to.

    ``flat`` says that the group has one member or no spread beyond rounding. ``rest`` is what
    rounding left out of ``mean``: it matters where the spread is small beside the mean.
    """

    count: Float[Array, " M"]
    mean: Float[Array, " M"]
    rest: Float[Array, " M"]
    squares: Float[Array, " M"]
    flat: Bool[Array, " M"]


def dense_ids(keys: Sequence[Int[Array, " M"]]) -> Int[Array, " M"]:
    """Ids in 0..M-1, equal exactly where all keys are equal."""
    order = jnp.lexsort(tuple(keys))
    changed = jnp.zeros(order.shape, bool)
    for key in keys:
        ordered = key[order]
        changed |= jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    ranks = jnp.cumsum(changed, dtype=jnp.int32)
    return jnp.zeros(order.shape, jnp.int32).at[order].set(ranks, unique_indices=True)


def group(
    x: Float[Array, " M"], mask: Bool[Array, " M"], keys: Sequence[Int[Array, " M"]]
) -> Group:
    """Count, mean, sum of squared deviations and flatness of each item's group.

    Items outside ``mask`` enter no statistic. Deviations are taken from the mean before
    squaring, so that a large mean costs no precision.
    """
    ids, size = dense_ids(keys), x.shape[0]

    def total(values: Array) -> Array:
        return jax.ops.segment_sum(values, ids, size)

    def top(values: Array) -> Array:
        return jax.ops.segment_max(jnp.where(mask, values, -jnp.inf), ids, size)[ids]

    kept = jnp.where(mask, x, 0.0)
    count = total(jnp.where(mask, 1.0, 0.0))[ids]
    mean = total(kept)[ids] / jnp.maximum(count, 1.0)
    off = jnp.where(mask, kept - mean, 0.0)
    rest = total(off)[ids] / jnp.maximum(count, 1.0)
    squares = total(jnp.where(mask, off - rest, 0.0) ** 2)[ids]
    high, low = top(x), -top(-x)
    # An empty group has high = -inf; the first test settles it before the second can say NaN.
    spread = jnp.where(count > 1, high - low, 0.0)
    reach = jnp.where(count > 1, jnp.maximum(jnp.abs(high), jnp.abs(low)), 0.0)
    flat = spread <= FLAT * jnp.maximum(1.0, reach)
    return Group(count, mean, rest, squares, flat)


def standardise(
    x: Float[Array, " M"], mask: Bool[Array, " M"], stats: Group, std: str | None, eps: float
) -> Float[Array, " M"]:
    """``(x - mean) / (std + eps)``, or ``x - mean`` if ``std`` is None.

    ``std`` is "sample" (n - 1) or "population" (n). Exactly 0 in flat groups and outside mask.
    """
    use = mask & ~stats.flat
    centred = jnp.where(use, x - stats.mean - stats.rest, 0.0)
    if std is None:
        return centred
    n = stats.count - 1.0 if std == "sample" else stats.count
    sigma = jnp.sqrt(stats.squares / jnp.maximum(n, 1.0))
    return jnp.where(use, centred / jnp.where(use, sigma + eps, 1.0), 0.0)


def largest(
    x: Float[Array, " M"],
    mask: Bool[Array, " M"],
    ids: Int[Array, " M"],
    order: Int[Array, " M"],
    share: Fraction,
) -> Bool[Array, " M"]:
    """The ceil(share n) largest of each group's n items; lower ``order`` first among equals.

    Items outside ``mask`` belong to no group.
    """
    size = x.shape[0]
    group_of = jnp.where(mask, dense_ids([ids]), size)
    by_size = jnp.lexsort((order, jnp.where(mask, -x, 0.0), group_of))
    where = jnp.arange(size)
    start = jax.ops.segment_min(where, group_of[by_size], size + 1)[group_of[by_size]]
    count = jax.ops.segment_sum(mask.astype(jnp.int32), group_of, size + 1)[group_of[by_size]]
    chosen = (where - start) * share.denominator < count * share.numerator
    return mask & jnp.zeros(size, bool).at[by_size].set(chosen, unique_indices=True)
