"""Step heads: linear read-outs of the final hidden states' direction, one per learned signal.

They learn on the policy's states and send no gradient back: what they get wrong cannot harm the
policy. Which token of a step counts is said in ``jaxcredit.heads``.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxcredit.heads import STEP_HEADS, outputs
from models.config import QwenConfig
from models.params import Spec, init_from_specs

StepHeads = dict[str, dict[str, Array]]

_TWIN_SCALE = 0.01  # of the first outputs of heads that come in twos


def head_specs(config: QwenConfig, names: Iterable[str]) -> dict[str, dict[str, Spec]]:
    """Specifications: per signal a weight [D, ...] and a bias [...], "..." its numbers per step.

    A single number starts at 0. Twins start at small different ones, or they would stay equal.
    """
    specs = {}
    for name in names:
        shape = outputs(name)
        init = _TWIN_SCALE if shape else "zeros"
        none = (None,) * len(shape)
        specs[name] = {
            "w": Spec((config.hidden_size, *shape), ("embed", *none), init),
            "b": Spec(shape, none, "zeros"),
        }
    return specs


def init_step_heads(config: QwenConfig, names: Iterable[str], key: Key[Array, ""]) -> StepHeads:
    """Fresh heads, float32."""
    heads: StepHeads = init_from_specs(head_specs(config, names), key)
    return heads


def read(heads: StepHeads, hidden: Float[Array, "B T D"]) -> dict[str, Float[Array, "B T ..."]]:
    """x[b, t] = h w + b, h = hidden[b, t] / |hidden[b, t]|; of t - 1 for heads read before a step.

    Unit length makes a learning rate mean the same at every width. Temporal differences, whose
    targets move with the head, diverge where one step moves the output too far.

    Returns float32; column 0 of a head read before a step, where there is no state, is 0.
    """
    states = jax.lax.stop_gradient(hidden).astype(jnp.float32)
    states /= jnp.maximum(jnp.linalg.norm(states, axis=-1, keepdims=True), 1e-6)
    out = {}
    for name, head in heads.items():
        x = states @ head["w"] + head["b"]
        if STEP_HEADS[name] == "before":
            x = jnp.pad(x[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))
        out[name] = x
    return out
