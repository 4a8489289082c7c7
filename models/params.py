"""One tree of parameter specifications; shapes, shardings and initial values all come from it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from models.config import QwenConfig

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape, logical axis names and initialiser of one array.

    Attributes:
      shape: array shape.
      axes: one logical name per dimension (see ``models.sharding``), None for unsharded.
      init: "ones", "zeros" or the standard deviation of a normal distribution.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str | float


def is_spec(node: Any) -> bool:
    return isinstance(node, Spec)


def param_specs(config: QwenConfig) -> Params:
    """Specifications of every weight, layers stacked along a leading axis L.

    Matrices are stored as [in, out]. Projections start at standard deviation 1/sqrt(in), those
    that write into the residual stream a further 1/sqrt(2 L) lower, so that the variance of the
    stream does not grow with depth.
    """
    L, D, F = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    q_out = config.num_attention_heads * config.head_dim
    kv_out = config.num_key_value_heads * config.head_dim
    residual = 1.0 / math.sqrt(2 * L)

    def matrix(n_in: int, n_out: int, a_in: str, a_out: str, scale: float = 1.0) -> Spec:
        return Spec((L, n_in, n_out), ("layers", a_in, a_out), scale / math.sqrt(n_in))

    def vector(n: int, axis: str | None, init: str) -> Spec:
        return Spec((L, n), ("layers", axis), init)

    layers = {
        "input_norm": vector(D, None, "ones"),
        "q": matrix(D, q_out, "embed", "heads"),
        "k": matrix(D, kv_out, "embed", "kv_heads"),
        "v": matrix(D, kv_out, "embed", "kv_heads"),
        "o": matrix(q_out, D, "heads", "embed", residual),
        "post_norm": vector(D, None, "ones"),
        "gate": matrix(D, F, "embed", "mlp"),
        "up": matrix(D, F, "embed", "mlp"),
        "down": matrix(F, D, "mlp", "embed", residual),
    }
    if config.family.qkv_bias:
        layers["q_bias"] = vector(q_out, "heads", "zeros")
        layers["k_bias"] = vector(kv_out, "kv_heads", "zeros")
        layers["v_bias"] = vector(kv_out, "kv_heads", "zeros")
    if config.family.qk_norm:  # one vector for all heads of a layer
        layers["q_norm"] = vector(config.head_dim, None, "ones")
        layers["k_norm"] = vector(config.head_dim, None, "ones")
    specs: Params = {
        "embed": Spec((config.vocab_size, D), ("vocab", "embed"), 0.02),
        "layers": layers,
        "final_norm": Spec((D,), (None,), "ones"),
    }
    if not config.tie_word_embeddings:
        specs["head"] = Spec((D, config.vocab_size), ("embed", "vocab"), 0.02)
    return specs


def init_from_specs(specs: Any, key: Key[Array, ""], dtype: Any = jnp.float32) -> Any:
    """Draws every array of a specification tree; one independent key per leaf, in tree order."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(key, len(leaves))

    def draw(spec: Spec, k: Key[Array, ""]) -> Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        return (float(spec.init) * jax.random.normal(k, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree.unflatten(treedef, [draw(s, k) for s, k in zip(leaves, keys, strict=True)])


def init_params(config: QwenConfig, key: Key[Array, ""], dtype: Any = jnp.float32) -> Params:
    """Random weights of a fresh policy (see :func:`param_specs` for the distribution)."""
    return init_from_specs(param_specs(config), key, dtype)


def abstract_params(config: QwenConfig, dtype: Any = jnp.float32) -> Params:
    """The same tree as ``jax.ShapeDtypeStruct``: for lowering without allocating weights."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, dtype), param_specs(config), is_leaf=is_spec
    )


def param_count(config: QwenConfig) -> int:
    """Number of scalars in the policy; a tied head is counted once."""
    leaves = jax.tree.leaves(param_specs(config), is_leaf=is_spec)
    return sum(math.prod(s.shape) for s in leaves)


def cast(tree: Any, dtype: Any) -> Any:
    """Every floating array of ``tree`` in ``dtype`` (a bfloat16 compute copy of fp32 masters)."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
