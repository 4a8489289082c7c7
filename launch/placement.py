"""Where the arrays of a training state live on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcredit.update import TrainState
from models import sharding
from models.params import is_spec
from models.policy import Policy


def abstract(specs: Any) -> Any:
    """Trained weights as shapes: they are float32 whatever the forward pass computes in."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs, is_leaf=is_spec
    )


def state_shardings(
    policy: Policy, specs: Any, optimizer: optax.GradientTransformation, credit_state: Any
) -> TrainState | None:
    """Sharding of every leaf of the state; None without a mesh.

    Moments lie as the weights they belong to; every device holds counters and the estimator's
    state whole.

    Args:
      policy: with its mesh.
      specs: specifications of the trained weights.
      optimizer: of the run.
      credit_state: the estimator's initial state.
    """
    if policy.mesh is None:
        return None
    whole = sharding.replicated(policy.mesh)
    weights = sharding.tree_shardings(specs, policy.config, policy.mesh)
    by_path = dict(jax.tree.leaves_with_path(weights))

    def as_weight(path: tuple[Any, ...], _: Any) -> jax.sharding.NamedSharding:
        """That of the weight whose path ends this one. The longest end: a reward model's weights
        lie deeper than the policy's of the same names."""
        ends = (path[i:] for i in range(len(path)))
        return next((by_path[end] for end in ends if end in by_path), whole)

    # optax's own map over parameters does not know optimisers that are partitioned by name.
    moments = jax.tree.map_with_path(as_weight, jax.eval_shape(optimizer.init, abstract(specs)))
    return TrainState(
        trainable=weights,
        opt_state=moments,
        credit_state=jax.tree.map(lambda _: whole, credit_state),
        iteration=whole,  # type: ignore[arg-type]  # a sharding in an array's place
        updates=whole,  # type: ignore[arg-type]
    )


def initial_state(
    trainable: Any,
    optimizer: optax.GradientTransformation,
    credit_state: Any,
    shardings: TrainState | None,
) -> TrainState:
    """The state before the first iteration, laid out as ``shardings`` say. Copies the weights."""
    place = None if shardings is None else shardings.opt_state
    state = TrainState(
        trainable=jax.tree.map(jnp.copy, trainable),
        opt_state=jax.jit(optimizer.init, out_shardings=place)(trainable),
        credit_state=credit_state,
        iteration=jnp.int32(0),
        updates=jnp.int32(0),
    )
    return state if shardings is None else jax.device_put(state, shardings)
