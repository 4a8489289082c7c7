"""Log-probabilities and entropies of tokens, without ever holding [B, T, V] logits.

With z = hidden[t - 1] W / temperature and p = softmax(z),

    logp[t]    = z[token t] - logsumexp(z)
    entropy[t] = logsumexp(z) - sum_v p_v z_v          of the distribution token t was drawn from

Every row's wanted tokens are moved to its front and taken in chunks, so the head is paid for
wanted tokens only: in agent data most tokens are prompt and observation. A chunk in which no row
wants anything is skipped at run time. The backward pass recomputes a chunk's logits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.config import QwenConfig
from models.linear import matmul
from models.params import Params
from models.qwen import head_matrix
from models.sharding import constrain


def token_logprobs(
    params: Params,
    config: QwenConfig,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    mask: Bool[Array, "B T"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
    """Log-probability of every wanted token given the tokens before it.

    Args:
      params: weights; only the head (or the tied embedding table) is read.
      config: architecture (static).
      hidden: output of ``models.qwen.forward`` on ``tokens``.
      tokens: the ids that are scored.
      mask: tokens whose values matter; None means all. Token 0 of a row has no context and is
        never scored.
      temperature: divides the logits, as in sampling.
      chunk: tokens, over all rows of one device, whose logits exist at one time.
      entropy: whether to return entropies too (static).

    Returns:
      ``(logp, entropy or None)``, float32, aligned with ``tokens``, 0 where not wanted.
    """
    B, T = tokens.shape
    wanted = jnp.ones((B, T), bool) if mask is None else mask
    wanted = wanted.at[:, 0].set(False)
    mesh = jax.sharding.get_abstract_mesh()
    split = 1 if mesh.empty or B % mesh.shape["data"] else mesh.shape["data"]
    width = min(T, max(1, chunk * split // B))
    n = -(-T // width)

    # On a mesh the head is gathered once, not in every chunk, and logits stay split by columns.
    head = constrain(head_matrix(params, config).astype(hidden.dtype), None, "vocab")

    # A row-local order keeps batch sharding intact: nothing crosses from row to row.
    order = jnp.argsort(~wanted, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    order = jnp.pad(order, ((0, 0), (0, n * width - T)))
    counts = wanted.sum(axis=1)

    labels = jnp.take_along_axis(jnp.where(wanted, tokens, 0), order, axis=1)
    labels = labels.reshape(B, n, width).swapaxes(0, 1)
    source = jnp.maximum(order - 1, 0).reshape(B, n, width).swapaxes(0, 1)
    index = jnp.arange(n * width).reshape(n, width)

    def scored(hidden: Array, source: Array, label: Array, valid: Array) -> tuple[Array, ...]:
        with jax.named_scope("token_logprobs"):
            rows = jnp.take_along_axis(hidden, source[..., None], axis=1)
            # Unwanted states may hold anything; a NaN in them must not reach a gradient.
            rows = jnp.where(valid[..., None], rows, 0)
            z = constrain(matmul(rows, head, jnp.float32), "batch", None, "vocab") / temperature
            total = jax.nn.logsumexp(z, axis=-1)
            # A comparison, not a gather: it partitions over a sharded vocabulary and its
            # gradient is no scatter.
            hit = jnp.arange(z.shape[-1]) == label[..., None]
            logp = jnp.where(valid, jnp.sum(jnp.where(hit, z, 0), axis=-1) - total, 0)
            if not entropy:
                return (logp,)
            p = jnp.exp(z - total[..., None])
            return logp, jnp.where(valid, total - jnp.sum(p * z, axis=-1), 0)

    # Around the whole chunk: inside the cond, every chunk would keep a copy of head and states.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(_: None, xs: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, ...]]:
        source, label, position = xs
        valid = position < counts[:, None]
        blank = tuple(jnp.zeros((B, width), jnp.float32) for _ in range(1 + entropy))
        out = jax.lax.cond(valid.any(), scored, lambda *_: blank, hidden, source, label, valid)
        return None, out

    _, outs = jax.lax.scan(one_chunk, None, (source, labels, index))
    restored = [
        jnp.take_along_axis(o.swapaxes(0, 1).reshape(B, n * width), inverse, axis=1) for o in outs
    ]
    return restored[0], (restored[1] if entropy else None)
