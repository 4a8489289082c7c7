"""Attention by the splash kernel of JAX's Pallas library: TPUs, segments honoured.

Scores and softmax are float32 inside the kernel. The mass on messages is the same kernel with
one-hot message indicators as values.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.attention.case import Case, Messages, indicator

_LANES = 128  # of a TPU register: blocks of tokens, and indicator columns per pass


def accepts(case: Case) -> str | None:
    """Refuses what the kernel does not compute."""
    h = case.shape[-1]
    if case.backend != "tpu":
        return f"it needs a TPU and the backend is {case.backend}"
    if case.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it needs bfloat16 or float32, not {jnp.dtype(case.dtype).name}"
    if h % 64 or h > 256:
        return f"it needs a head size of 64, 128, 192 or 256, not {h}"
    return None


def attend(
    case: Case,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    messages: Messages | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """Values and messages in passes of the same kernel; see ``models.attention``.

    Args:
      interpret: run the kernel's program step by step on any backend, slowly; for tests.
    """
    del case
    T, h = q.shape[1], q.shape[3]
    pad = -T % _LANES
    real = (segments != 0)[:, :, None, None]
    padded = jnp.pad(segments, ((0, 0), (0, pad)))

    def heads_first(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    q, k, v = heads_first(q * h**-0.5), heads_first(k), heads_first(v)
    run = _kernel(q.shape[1], T + pad, interpret)

    def pass_over(q: Array, k: Array, v: Array) -> Array:
        return run(q, k, v, padded).transpose(0, 2, 1, 3)[:, :T]

    out = jnp.where(real, pass_over(q, k, v), 0)
    if messages is None:
        return out, None
    mass = []
    for start in range(0, messages.n, _LANES):
        columns = indicator(messages.ids - start, _LANES, q.dtype)
        columns = jnp.broadcast_to(heads_first(columns[:, :, None]), (*k.shape[:-1], _LANES))
        part = pass_over(jax.lax.stop_gradient(q), jax.lax.stop_gradient(k), columns)
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


def _kernel(heads: int, length: int, interpret: bool) -> Callable[..., Array]:
    """``(q, k, v [B, heads, length, .], segments [B, length])`` to the attention's output."""
    # Imported here: Pallas takes a second to load and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = next(b for b in (512, 256, _LANES) if length % b == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def one_row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        return kernel(q, k, v, segment_ids=splash.SegmentIds(q=segments, kv=segments))

    return jax.vmap(one_row)
