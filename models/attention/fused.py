"""Attention by fused kernels of a vendor: cuDNN on NVIDIA GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.attention.case import Case, Messages, indicator


def accepts_cudnn(case: Case) -> str | None:
    """Refuses what the kernel does not compute."""
    h = case.shape[-1]
    if case.backend != "gpu":
        return f"it needs a GPU and the backend is {case.backend}"
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, not {jnp.dtype(case.dtype).name}"
    if h % 8 or h > 128:
        return f"it needs a head size that is a multiple of 8 up to 128, not {h}"
    if case.packed:
        return "it knows no segments, and the rows were not declared unpacked"
    return None


def attend_cudnn(
    case: Case, q: Array, k: Array, v: Array, segments: Array, messages: Messages | None = None
) -> tuple[Array, Array | None]:
    """Values and messages in passes of the same kernel; see ``models.attention``."""
    del case
    lengths = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
    real = (segments != 0)[:, :, None, None]

    def kernel(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )

    out = jnp.where(real, kernel(q, k, v), 0)
    if messages is None:
        return out, None
    # Messages as values, head-size columns per pass; the kernel wants as many columns as q has.
    h, mass = q.shape[-1], []
    for start in range(0, messages.n, h):
        columns = indicator(messages.ids - start, h, q.dtype)
        columns = jnp.broadcast_to(columns[:, :, None, :], k.shape)
        part = kernel(jax.lax.stop_gradient(q), jax.lax.stop_gradient(k), columns)
        mass.append(
            jnp.einsum(
                "btnm,n->btm",
                part.astype(jnp.float32),
                messages.weight,
                precision=jax.lax.Precision.HIGHEST,
            )
        )
    total = jnp.concatenate(mass, axis=-1)[..., : messages.n]
    return out, jax.lax.stop_gradient(jnp.where(real[..., 0], total, 0))
