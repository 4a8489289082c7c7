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
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.config import QwenConfig
from models.params import Params
from models.qwen import unembed
from models.sharding import constrain

_CHUNK = {"cpu": 256}
_CHUNK_ELSEWHERE = 1024


def token_logprobs(
    params: Params,
    config: QwenConfig,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    mask: Bool[Array, "B T"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    backend: str | None = None,
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
      chunk: tokens, over all rows of one device, whose logits exist at one time; None is 256 on
        a CPU, where logits cost more memory than time, and 1024 elsewhere.
      entropy: whether to return entropies too (static).
      backend: "cpu", "gpu" or "tpu" of the devices that will run this; None: JAX's default.

    Returns:
      ``(logp, entropy or None)``, float32, aligned with ``tokens``, 0 where not wanted.
    """
    B, T = tokens.shape
    wanted = jnp.ones((B, T), bool) if mask is None else mask
    wanted = wanted.at[:, 0].set(False)
    chunk = chunk or _CHUNK.get(backend or jax.default_backend(), _CHUNK_ELSEWHERE)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and B % mesh.shape["data"] == 0:  # each device has its own rows
        chunk *= mesh.shape["data"]
    width = min(T, max(1, chunk // B))
    n = -(-T // width)

    # A row-local order keeps batch sharding intact: nothing crosses from row to row.
    order = jnp.argsort(~wanted, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    order = jnp.pad(order, ((0, 0), (0, n * width - T)))
    counts = wanted.sum(axis=1)

    labels = jnp.take_along_axis(jnp.where(wanted, tokens, 0), order, axis=1)
    labels = labels.reshape(B, n, width).swapaxes(0, 1)
    source = jnp.maximum(order - 1, 0).reshape(B, n, width).swapaxes(0, 1)
    index = jnp.arange(n * width).reshape(n, width)

    def scored(head: Params, hidden: Array, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        source, label, valid = xs
        with jax.named_scope("token_logprobs"):
            rows = jnp.take_along_axis(hidden, source[..., None], axis=1)
            rows = constrain(rows, "batch", None, None)
            # Unwanted states may hold anything; a NaN in them must not reach a gradient.
            rows = jnp.where(valid[..., None], rows, 0)
            z = constrain(unembed(head, config, rows), "batch", None, "vocab")
            z = z / head.get("temperature", temperature)
            total = jax.nn.logsumexp(z, axis=-1)
            # A comparison, not a gather: it partitions over a sharded vocabulary and its
            # gradient is no scatter.
            hit = jnp.arange(z.shape[-1]) == label[..., None]
            logp = jnp.where(valid, jnp.sum(jnp.where(hit, z, 0), axis=-1) - total, 0)
            if not entropy:
                return (logp,)
            p = jnp.exp(z - total[..., None])
            return logp, jnp.where(valid, total - jnp.sum(p * z, axis=-1), 0)

    # Differentiated by hand, because a `cond` inside a scan keeps a copy of all that its branches
    # read, the head included, for every chunk.
    @jax.custom_vjp
    def scored_if_any(head: Params, hidden: Array, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        blank = tuple(jnp.zeros((B, width), jnp.float32) for _ in range(1 + entropy))
        return jax.lax.cond(xs[2].any(), scored, lambda *_: blank, head, hidden, xs)

    def backward(saved: Any, d: tuple[Array, ...]) -> Any:
        head, hidden, xs = saved

        def pulled_back() -> Any:
            return jax.vjp(lambda head, hidden: scored(head, hidden, xs), head, hidden)[1](d)

        nothing = functools.partial(jax.tree.map, jnp.zeros_like, (head, hidden))
        return *jax.lax.cond(xs[2].any(), pulled_back, nothing), None

    scored_if_any.defvjp(lambda *args: (scored_if_any(*args), args), backward)

    name = "embed" if config.tie_word_embeddings else "head"
    # On a mesh it is gathered once, not in every chunk; its columns stay split.
    axes = ("vocab", None) if config.tie_word_embeddings else (None, "vocab")
    head = {name: constrain(params[name], *axes)}
    if isinstance(temperature, jax.Array):
        head["temperature"] = temperature

    def one_chunk(_: None, xs: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, ...]]:
        source, label, position = xs
        return None, scored_if_any(head, hidden, (source, label, position < counts[:, None]))

    _, outs = jax.lax.scan(one_chunk, None, (source, labels, index))
    restored = [
        jnp.take_along_axis(o.swapaxes(0, 1).reshape(B, n * width), inverse, axis=1) for o in outs
    ]
    return restored[0], (restored[1] if entropy else None)
