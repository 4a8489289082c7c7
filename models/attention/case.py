"""What an implementation of attention is given, and what it may decide on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

MASKED = -1e30  # finite, so that a fully masked row gives zeros and no NaN


@dataclasses.dataclass(frozen=True)
class Case:
    """What an implementation may decide on: all static, nothing traced.

    Attributes:
      shape: (B, T, H, h) of the queries, on one device.
      kv_heads: G.
      dtype: of queries, keys and values.
      backend: "cpu", "gpu" or "tpu".
      packed: whether a row may hold more than one segment, or padding anywhere but on the right.
      n_messages: M, or 0 when no mass is asked for.
    """

    shape: tuple[int, int, int, int]
    kv_heads: int
    dtype: Any
    backend: str
    packed: bool = True
    n_messages: int = 0


@struct.dataclass
class Messages:
    """The messages whose mass is asked for.

    Attributes:
      ids: message of each key token in [0, n), or -1 for none.
      weight: weight of each head in the mean over heads; the weights of all heads sum to 1.
      n: M, the number of messages (static).
    """

    ids: Int[Array, "B T"]
    weight: Float[Array, "H"]
    n: int = struct.field(pytree_node=False)


Attend = Callable[[Case, Array, Array, Array, Array, Messages | None], tuple[Array, Array | None]]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A named way to compute attention.

    Attributes:
      name: as it is asked for.
      accepts: None, or the reason of a refusal.
      attend: ``(case, q, k, v, segments, messages)`` to ``(out, mass or None)`` on one device.
    """

    name: str
    accepts: Callable[[Case], str | None]
    attend: Attend


def indicator(ids: Int[Array, "B T"], n: int, dtype: Any = jnp.float32) -> Array:
    """One-hot message indicators [B, T, n]; zeros for a token of no message."""
    return jax.nn.one_hot(ids, n, dtype=dtype)


def mass_of(p: Float[Array, "B Q S"], columns: Float[Array, "B S M"]) -> Float[Array, "B Q M"]:
    """Sum of the probabilities p of each message's tokens, in full float32."""
    return jnp.einsum("bts,bsm->btm", p, columns, precision=jax.lax.Precision.HIGHEST)
