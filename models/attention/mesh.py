"""Attention on a mesh: every device runs the kernel on whole rows of some heads.

Rows are split over ``data``, heads over ``tensor``. Tokens that are split over ``context`` are
exchanged for heads and back by all-to-all (Jacobs et al., 2023, DeepSpeed-Ulysses), so that any
kernel sees whole rows and the work is even; the mass on messages is summed over the devices'
heads. Where devices outnumber key-value heads these are repeated; where query heads do not divide,
heads of weight 0 are added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from models.attention.case import Messages

Kernel = Callable[[Array, Array, Array, Array, Messages | None], tuple[Array, Array | None]]


def divisible_heads(heads: int, kv_heads: int, devices: int) -> tuple[int, int]:
    """(copies of each key-value head, query heads per original key-value head).

    With them, ``kv_heads * copies`` key-value heads and ``kv_heads * per_head`` query heads split
    evenly over ``devices``, each query head beside a copy of its key-value head.
    """
    copies = math.lcm(kv_heads, devices) // kv_heads
    return copies, -(-(heads // kv_heads) // copies) * copies


def attend_on_mesh(
    kernel: Kernel,
    mesh: Any,
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T G h"],
    v: Float[Array, "B T G h"],
    segments: Array,
    messages: Messages | None,
) -> tuple[Array, Array | None]:
    """Runs ``kernel`` on each device's share and joins the results.

    Raises:
      ValueError: the rows' width is not a multiple of the mesh's context axis.
    """
    data, tensor, context = (mesh.shape[name] for name in ("data", "tensor", "context"))
    B, T, H, h = q.shape
    G = k.shape[2]
    if T % context:
        raise ValueError(
            f"rows of {T} tokens do not split over mesh.context={context}; "
            f"use widths that are multiples of {context}"
        )
    copies, per_head = divisible_heads(H, G, tensor * context)
    extra = per_head - H // G

    def padded(x: Array) -> Array:
        """Adds ``extra`` zeros to each key-value head's group; heads are the last axis but one."""
        x = x.reshape(*x.shape[:-2], G, H // G, x.shape[-1])
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, extra), (0, 0)])
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])

    if extra:
        q = padded(q)
        if messages is not None:
            weight = padded(messages.weight[:, None])[:, 0]
            messages = dataclasses.replace(messages, weight=weight)
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))

    rows = "data" if B % data == 0 else None
    split = P(rows, "context", "tensor", None)
    message_specs = None
    if messages is not None:
        # Heads of a device: its tensor share, of that its context share.
        heads = P(("tensor", "context"))
        message_specs = Messages(P(rows, None), heads, messages.n)  # type: ignore[arg-type]

    def local(
        q: Array, k: Array, v: Array, segments: Array, messages: Messages | None
    ) -> tuple[Array, Array | None]:
        if context > 1:
            q, k, v = (
                jax.lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True)
                for x in (q, k, v)
            )
        out, mass = kernel(q, k, v, segments, messages)
        if context > 1:
            out = jax.lax.all_to_all(out, "context", split_axis=1, concat_axis=2, tiled=True)
        if mass is None:
            return out, None
        mass = jax.lax.psum(mass, "tensor")
        return out, jax.lax.psum_scatter(mass, "context", scatter_dimension=1, tiled=True)

    out, mass = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(split, split, split, P(rows, None), message_specs),
        out_specs=(split, None if messages is None else P(rows, "context", None)),
        check_vma=False,
    )(q, k, v, segments, messages)
    if extra:
        out = out.reshape(B, T, G, per_head, h)[:, :, :, : H // G].reshape(B, T, H, h)
    return out, mass
