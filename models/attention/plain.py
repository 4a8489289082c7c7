"""Attention with the whole [B, H, T, T] at once: the reading copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.attention.case import MASKED, Case, Messages, indicator, mass_of


def attend(
    case: Case, q: Array, k: Array, v: Array, segments: Array, messages: Messages | None = None
) -> tuple[Array, Array | None]:
    """Causal attention and, on request, the mass on each message; see ``models.attention``."""
    del case
    B, T, H, h = q.shape
    G = k.shape[2]
    q = q.reshape(B, T, G, H // G, h) * h**-0.5
    scores = jnp.einsum("btgrh,bsgh->bgrts", q, k, preferred_element_type=jnp.float32)
    mask = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, :, None]
    mask = (mask & jnp.tril(jnp.ones((T, T), bool)))[:, None, None]
    p = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1)
    p = jnp.where(mask, p, 0)
    out = jnp.einsum("bgrts,bsgh->btgrh", p.astype(v.dtype), v).reshape(B, T, H, h)
    if messages is None:
        return out, None
    heads = jax.lax.stop_gradient(p).reshape(B, H, T, T)
    mean = jnp.einsum("bnts,n->bts", heads, messages.weight, precision=jax.lax.Precision.HIGHEST)
    return out, mass_of(mean, indicator(messages.ids, messages.n))
