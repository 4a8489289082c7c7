"""Qwen2.5 and Qwen3 forward pass: stacked layers under one scan, in pieces for a cached decoder.

    x   = embed(tokens)
    x  += attention(rms_norm(x)) ;  x += mlp(rms_norm(x))      L times
    out = rms_norm(x)

Weights are in the layout of ``models.params``; activations have the dtype of the embedding table,
norms, rotary angles, softmax and logits are float32.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import attention as attn
from models.config import QwenConfig
from models.linear import matmul
from models.lora import Adapters
from models.params import Params
from models.sharding import constrain
from models.step_graph import Capture, aggregate, check_layers, message_ids

Remat = Literal["none", "full", "dots"]


# Elementwise pieces are recomputed in the backward pass whatever the remat setting: one pass over
# their inputs costs less than keeping each intermediate of every layer.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_recomputed, static_argnums=(2,))
def rms_norm(x: Float[Array, "... D"], w: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """w * x / sqrt(mean(x^2) + eps), the mean in float32 (Zhang and Sennrich, 2019)."""
    with jax.named_scope("rms_norm"):
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
        return (x32 * scale).astype(x.dtype) * w.astype(x.dtype)


def rope(
    x: Float[Array, "... T heads h"], positions: Int[Array, "... T"], theta: float
) -> Float[Array, "... T heads h"]:
    """Rotary position embedding in the half-split layout (Su et al., 2024, Eq. 34).

    Channels i and i + h/2 turn by position * theta^(-2 i / h).
    """
    half = x.shape[-1] // 2
    frequency = jnp.asarray(theta ** (-np.arange(half, dtype=np.float64) / half), jnp.float32)
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def project(layer: Params, name: str, x: Array, adapters_layer: Adapters | None) -> Array:
    """x W (+ bias) (+ scale (x A) B) of projection ``name``; weights are cast to x's dtype."""
    y = matmul(x, layer[name].astype(x.dtype))
    bias = layer.get(f"{name}_bias")
    if bias is not None:
        y = y + bias.astype(x.dtype)
    pair = None if adapters_layer is None else adapters_layer.weights.get(name)
    if adapters_layer is None or pair is None:
        return y
    low = matmul(x, pair["a"].astype(x.dtype))
    return y + matmul(low, pair["b"].astype(x.dtype)) * adapters_layer.scale


def project_qkv(
    layer: Params,
    config: QwenConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    adapters_layer: Adapters | None = None,
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T G h"], Float[Array, "B T G h"]]:
    """Rotated queries, rotated keys and values of the *normalised* input x, one layer's weights.

    Qwen3 puts a root-mean-square norm over each head's h channels between projection and rotation
    (Qwen3 Technical Report, arXiv 2505.09388, Section 2).
    """
    with jax.named_scope("qkv"):
        heads = (*x.shape[:-1], -1, config.head_dim)
        q, k, v = (project(layer, name, x, adapters_layer).reshape(heads) for name in "qkv")
        if config.family.qk_norm:
            q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
            k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
        q = rope(q, positions, config.rope_theta)
        return q, rope(k, positions, config.rope_theta), v


def attention_output(
    layer: Params,
    config: QwenConfig,
    out: Float[Array, "B T H h"],
    adapters_layer: Adapters | None = None,
) -> Float[Array, "B T D"]:
    """Joins the heads and projects back to the width of the stream."""
    del config
    with jax.named_scope("attention_output"):
        return project(layer, "o", out.reshape(*out.shape[:-2], -1), adapters_layer)


def mlp(
    layer: Params,
    config: QwenConfig,
    x: Float[Array, "B T D"],
    adapters_layer: Adapters | None = None,
) -> Float[Array, "B T D"]:
    """(silu(x W_gate) * (x W_up)) W_down of the *normalised* input x (Shazeer, 2020, Eq. 6)."""
    del config
    with jax.named_scope("mlp"):
        gate, up = (project(layer, name, x, adapters_layer) for name in ("gate", "up"))
        return project(layer, "down", _gated(gate, up), adapters_layer)


@_recomputed
def _gated(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def embed(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the embedding table; an id outside it becomes NaN, never another token."""
    with jax.named_scope("embed"):
        return jnp.take(params["embed"], tokens, axis=0, mode="fill", fill_value=jnp.nan)


def head_matrix(params: Params, config: QwenConfig) -> Float[Array, "D V"]:
    """The output head: its own matrix, or the transposed embedding table when tied."""
    return params["embed"].T if config.tie_word_embeddings else params["head"]


def unembed(
    params: Params, config: QwenConfig, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """Float32 logits of normalised hidden states."""
    with jax.named_scope("unembed"):
        head = head_matrix(params, config).astype(hidden.dtype)
        return matmul(hidden, head, jnp.float32)


def forward(
    params: Params,
    config: QwenConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    adapters: Adapters | None = None,
    capture: Capture | None = None,
    attention: str = "auto",
    remat: Remat = "none",
    packed: bool = True,
    backend: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B L 2 K K"] | None]:
    """Hidden states after the final norm and, on request, the step graph.

    Args:
      params: weights as in ``models.params.param_specs``.
      config: architecture (static).
      tokens: ids; ids of padding may hold anything.
      positions: rotary position of each token.
      segments: tokens attend causally within equal non-zero ids; 0 is padding.
      adapters: low-rank adapters, or None.
      capture: which layers' step graphs to record, or None. The graph carries no gradient, and
        layers that are not captured compute nothing for it.
      attention: "auto" or an implementation named in ``models.attention``.
      remat: what the backward pass recomputes: "none", "full" (each layer), or "dots" (each layer
        but its weight products).
      packed: False promises one segment per row with padding on the right only, which fused GPU
        attention needs.
      backend: "cpu", "gpu" or "tpu" of the devices that will run this; None: JAX's default.

    Returns:
      hidden [B, T, D], and the step graph [B, len(capture.layers), 2, K, K] or None.
    """
    if capture is not None:
        check_layers(capture.layers, config.num_hidden_layers)
    tokens = jnp.where(segments != 0, tokens, 0)
    x = constrain(embed(params, tokens), "batch", "length", None)
    ids = None if capture is None else message_ids(capture)

    options: dict[str, Any] = {"name": attention, "packed": packed, "backend": backend}

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
        return attn.attend(q, k, v, segments, **options)[0], None

    def attend_and_record(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        assert capture is not None
        n = 2 * capture.n_steps
        out, mass = attn.attend(q, k, v, segments, ids, n, **options)
        assert mass is not None
        with jax.named_scope("step_graph"):
            return out, jax.lax.stop_gradient(aggregate(mass, capture))

    def block(x: Array, xs: tuple[Params, Any, Array | None]) -> tuple[Array, Array | None]:
        layer, weights, recorded = xs
        low = None if adapters is None else Adapters(weights=weights, scale=adapters.scale)
        with jax.named_scope("attention"):
            y = rms_norm(x, layer["input_norm"], config.rms_norm_eps)
            q, k, v = project_qkv(layer, config, y, positions, low)
            q = constrain(q, "batch", "length", "heads", None)
            if recorded is None:
                out, graph = attend(q, k, v)
            else:
                shape = (x.shape[0], 2, capture.n_steps, capture.n_steps)  # type: ignore[union-attr]
                out, graph = jax.lax.cond(
                    recorded,
                    attend_and_record,
                    lambda q, k, v: (attend(q, k, v)[0], jnp.zeros(shape, jnp.float32)),
                    q,
                    k,
                    v,
                )
            x = x + attention_output(layer, config, out, low)
        y = rms_norm(x, layer["post_norm"], config.rms_norm_eps)
        x = x + mlp(layer, config, y, low)
        return constrain(x, "batch", "length", None), graph

    recorded = None
    if capture is not None:
        recorded = jnp.isin(jnp.arange(config.num_hidden_layers), jnp.asarray(capture.layers))
    low_rank = None if adapters is None else adapters.weights
    x, graphs = jax.lax.scan(_remat(block, remat), x, (params["layers"], low_rank, recorded))
    hidden = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    if capture is None:
        return hidden, None
    return hidden, jnp.moveaxis(graphs[jnp.asarray(capture.layers)], 0, 1)


def _remat(block: Any, remat: str) -> Any:
    if remat == "none":
        return block
    if remat == "full":
        return jax.checkpoint(block, prevent_cse=False)
    if remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(block, prevent_cse=False, policy=policy)
    raise ValueError(f"remat is {remat!r}; expected 'none', 'full' or 'dots'")
