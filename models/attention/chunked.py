"""Attention in blocks of queries over static causal prefixes: plain XLA, memory linear in T.

The softmax of a block is shared between the values and the message indicators. The backward pass
recomputes it from the saved log-sum-exp (Dao et al., 2022), so nothing of size T x T is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from models.attention.case import MASKED, Case, Messages, indicator, mass_of

_BLOCK = {"cpu": 64}  # query tokens per block, by backend (measured at width 128 and 512 tokens)
_BLOCK_ELSEWHERE = 256
_SPANS = 16  # static key prefixes per call: bounds compile time at long T
_CACHE_BYTES = 1 << 22  # size of a score block that suits CPU caches (measured likewise)


def attend(
    case: Case,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    messages: Messages | None = None,
    *,
    block: int | None = None,
) -> tuple[Array, Array | None]:
    """Causal attention and, on request, the mass on each message; see ``models.attention``."""
    B, T, H, h = q.shape
    G = k.shape[2]
    block = min(block or _BLOCK.get(case.backend, _BLOCK_ELSEWHERE), T)
    pad = -T % block
    # Heads lead and the queries of one key-value head lie together, so that a block is one
    # [R * block, h] x [h, keys] product and no key is ever repeated.
    q = jnp.pad(q * h**-0.5, ((0, 0), (0, pad), (0, 0), (0, 0)))
    q = q.reshape(B, T + pad, G, H // G, h).transpose(0, 2, 3, 1, 4)
    k = jnp.pad(k, ((0, 0), (0, pad), (0, 0), (0, 0))).transpose(0, 2, 1, 3)
    v = jnp.pad(v, ((0, 0), (0, pad), (0, 0), (0, 0))).transpose(0, 2, 1, 3)
    segments = jnp.pad(segments, ((0, 0), (0, pad)))
    ids, weight = None, None
    if messages is not None:
        ids = jnp.pad(messages.ids, ((0, 0), (0, pad)), constant_values=-1)
        weight = messages.weight.reshape(G, H // G)
    rows = _rows_per_pass(case.backend, B, H, T + pad, block)
    n = 0 if messages is None else messages.n
    out, mass = _chunked(q, k, v, segments, ids, weight, block, rows, n)
    out = out.transpose(0, 3, 1, 2, 4).reshape(B, T + pad, H, h)[:, :T]
    return out, None if mass is None else mass[:, :T]


def _rows_per_pass(backend: str, B: int, H: int, T: int, block: int) -> int:
    """Batch rows worked on together: few on a CPU, whose caches decide; all elsewhere."""
    if backend != "cpu":
        return B
    fit = max(1, _CACHE_BYTES // (4 * H * block * T))
    return max(d for d in range(1, B + 1) if B % d == 0 and d <= fit)


def _spans(T: int, block: int) -> list[tuple[int, int]]:
    """At most _SPANS query ranges; a range sees the static key prefix up to its end."""
    size = block * -(-(T // block) // _SPANS)
    return [(lo, min(lo + size, T)) for lo in range(0, T, size)]


def _over_rows(f: Callable[..., Any], rows: int, args: tuple[Any, ...]) -> Any:
    B = args[0].shape[0]
    if rows == B:
        return f(*args)
    split = jax.tree.map(lambda x: x.reshape(B // rows, rows, *x.shape[1:]), args)
    _, out = jax.lax.scan(lambda c, xs: (c, f(*xs)), None, split)
    return jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), out)


def _over_blocks(f: Callable[..., Any], carry: Any, lo: int, hi: int, block: int, xs: Any) -> Any:
    """f(carry, start, *xs of one query block) over the blocks of one span, then rejoined.

    Arrays in ``xs`` and in the result are [..., query, last]; -2 is the query axis.
    """
    n = (hi - lo) // block
    if n == 1:
        return f(carry, lo, *xs)

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:-2], n, block, x.shape[-1]), -3, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], hi - lo, x.shape[-1])

    starts = jnp.asarray(np.arange(lo, hi, block))
    carry, out = jax.lax.scan(
        lambda c, s: f(c, s[0], *s[1]), carry, (starts, jax.tree.map(split, tuple(xs)))
    )
    return carry, jax.tree.map(join, out)


def _scores(q: Array, k: Array, segments_q: Array, segments_k: Array, start: Any) -> Any:
    """Masked scores [B, G, R * block, keys] in float32, and the mask."""
    B, G, R, n, h = q.shape
    s = jnp.einsum(
        "bgqh,bgkh->bgqk", q.reshape(B, G, R * n, h), k, preferred_element_type=jnp.float32
    )
    causal = start + jnp.arange(n)[:, None] >= jnp.arange(k.shape[2])[None, :]
    mask = (segments_q == segments_k[:, None, :]) & (segments_q != 0) & causal
    mask = jnp.tile(mask, (1, R, 1))[:, None]
    return jnp.where(mask, s, MASKED), mask


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _forward_rows(
    block: int,
    n_messages: int,
    weight: Array | None,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    messages: Array | None,
) -> tuple[Array, Array | None, Array]:
    T = q.shape[3]
    columns = None if messages is None else indicator(messages, n_messages)

    def one_block(carry: None, start: Any, q: Array, seg: Array, *, hi: int) -> Any:
        s, mask = _scores(q, k[:, :, :hi], seg, segments[:, :hi], start)
        top = s.max(axis=-1, keepdims=True)
        p = jnp.where(mask, jnp.exp(s - top), 0)
        total = jnp.maximum(p.sum(axis=-1, keepdims=True), 1e-30)
        out = jnp.einsum(
            "bgqk,bgkh->bgqh", p.astype(v.dtype), v[:, :, :hi], preferred_element_type=jnp.float32
        )
        out = (out / total).astype(v.dtype).reshape(q.shape)
        log_total = (top + jnp.log(total)).reshape(*q.shape[:-1], 1)
        if columns is None or weight is None:
            return carry, (out, log_total)
        # Mean over heads of p / total, spelt out: XLA's CPU backend makes one vectorised pass of
        # these sums, and of a reduction over the two leading axes a loop ten times slower.
        heads = (p.shape[0], weight.size, q.shape[3])
        scale = (weight.reshape(-1, 1) / total.reshape(heads))[..., None]
        p = p.reshape(*heads, hi)
        mean = functools.reduce(jnp.add, (p[:, n] * scale[:, n] for n in range(weight.size)))
        return carry, (out, log_total, mass_of(mean, columns[:, :hi]))

    parts = []
    for lo, hi in _spans(T, block):
        xs = (q[:, :, :, lo:hi], segments[:, lo:hi, None])
        _, part = _over_blocks(functools.partial(one_block, hi=hi), None, lo, hi, block, xs)
        parts.append(part)
    joined = [jnp.concatenate(x, axis=-2) for x in zip(*parts, strict=True)]
    return joined[0], (None if columns is None else joined[2]), joined[1]


def _backward_rows(
    block: int,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    out: Array,
    log_total: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """Recomputes p from the saved log-sum-exp (float32), block by block (Dao et al., 2022)."""
    T = q.shape[3]
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    f32: dict[str, Any] = {"preferred_element_type": jnp.float32}

    def one_block(
        carry: Any, start: Any, q: Array, lse: Array, do: Array, dlt: Array, seg: Array, *, hi: int
    ) -> Any:
        dk, dv = carry
        s, mask = _scores(q, k[:, :, :hi], seg, segments[:, :hi], start)
        p = jnp.where(mask, jnp.exp(s - _flat(lse)), 0)
        do = _flat(do)
        dv = dv.at[:, :, :hi].add(jnp.einsum("bgqk,bgqh->bgkh", p.astype(v.dtype), do, **f32))
        dp = jnp.einsum("bgqh,bgkh->bgqk", do, v[:, :, :hi], **f32)
        ds = (p * (dp - _flat(dlt))).astype(k.dtype)
        dq = jnp.einsum("bgqk,bgkh->bgqh", ds, k[:, :, :hi], **f32)
        dk = dk.at[:, :, :hi].add(jnp.einsum("bgqk,bgqh->bgkh", ds, _flat(q), **f32))
        return (dk, dv), dq.reshape(q.shape).astype(q.dtype)

    carry = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    dqs = []
    for lo, hi in _spans(T, block):
        xs = (*(x[:, :, :, lo:hi] for x in (q, log_total, d_out, delta)), segments[:, lo:hi, None])
        carry, dq = _over_blocks(functools.partial(one_block, hi=hi), carry, lo, hi, block, xs)
        dqs.append(dq)
    return jnp.concatenate(dqs, axis=-2), carry[0].astype(k.dtype), carry[1].astype(v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _chunked(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    messages: Array | None,
    weight: Array | None,
    block: int,
    rows: int,
    n_messages: int,
) -> tuple[Array, Array | None]:
    return _chunked_fwd(q, k, v, segments, messages, weight, block, rows, n_messages)[0]


def _chunked_fwd(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    messages: Array | None,
    weight: Array | None,
    block: int,
    rows: int,
    n_messages: int,
) -> Any:
    f = functools.partial(_forward_rows, block, n_messages, weight)
    out, mass, log_total = _over_rows(f, rows, (q, k, v, segments, messages))
    return (out, mass), (q, k, v, segments, out, log_total)


def _chunked_bwd(block: int, rows: int, n_messages: int, saved: Any, cotangents: Any) -> Any:
    del n_messages
    d_out, _ = cotangents  # mass is a signal, not a path for gradients
    f = functools.partial(_backward_rows, block)
    return (*_over_rows(f, rows, (*saved, d_out)), None, None, None)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)
