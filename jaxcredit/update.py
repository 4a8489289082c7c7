"""The jitted PPO / GRPO update: gradients summed over micro-batches, one optimiser step.

``accumulate`` adds one micro-batch's gradient to a donated buffer; ``apply`` turns the buffer
into a step of the donated ``TrainState``. A mini-batch is counted in episodes, its loss is a sum
of weighted token terms (``jaxcredit.losses.loss_weights``), so any cut into micro-batches gives
the same gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from jaxcredit import losses

Params = Any


@struct.dataclass
class TrainState:
    """Everything the next update depends on, the frozen base weights apart.

    Attributes:
      trainable: parameters with gradients (all weights, or adapters; the value head, step heads).
      opt_state: optax state.
      credit_state: the estimator's own state (running baselines).
      iteration: number of finished iterations; with the seed it gives every sampling key and
        the task order.
      updates: number of finished optimiser steps.
    """

    trainable: Params
    opt_state: Params
    credit_state: Params
    iteration: Int[Array, ""]
    updates: Int[Array, ""]


@struct.dataclass
class PolicyOutput:
    """What a policy says about a micro-batch, aligned with the tokens.

    ``heads`` maps a learned step signal to its read-outs (see ``jaxcredit.heads``);
    ``reward_logp`` are a reward model's log-probabilities.
    """

    logp: Float[Array, "B T"]
    value: Float[Array, "B T"] | None = None
    entropy: Float[Array, "B T"] | None = None
    heads: dict[str, Float[Array, "B T ..."]] | None = None
    reward_logp: Float[Array, "B T"] | None = None


@struct.dataclass
class MicroBatch:
    """Rows of a mini-batch with everything their loss needs.

    ``weight`` comes from ``loss_weights`` over the whole mini-batch. ``ref_logp`` is needed for a
    KL term; ``target`` and ``old_value`` for a value term. ``head_target`` has the target of each
    step head, and ``head_weight`` its weight, which is 0 wherever the head is not read;
    ``reward_slope`` is the gradient of a reward model's loss in its log-probabilities.
    """

    tokens: Int[Array, "B T"]
    position: Int[Array, "B T"]
    segment: Int[Array, "B T"]
    weight: Float[Array, "B T"]
    advantage: Float[Array, "B T"]
    old_logp: Float[Array, "B T"]
    ref_logp: Float[Array, "B T"] | None = None
    target: Float[Array, "B T"] | None = None
    old_value: Float[Array, "B T"] | None = None
    reward_slope: Float[Array, "B T"] | None = None
    head_target: dict[str, Float[Array, "B T ..."]] = struct.field(default_factory=dict)
    head_weight: dict[str, Float[Array, "B T"]] = struct.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Coefficients of the loss.

    Attributes:
      clip_low, clip_high: bounds of the ratio, 1 - clip_low to 1 + clip_high.
      kl: coefficient of the KL to the reference policy (k3 estimator).
      value: coefficient of the value loss.
      value_clip: bound of the value's move away from the old value.
      entropy: coefficient of the entropy bonus.
      head: coefficient of the step heads' squared error.
      reward: coefficient of the reward model's loss.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    value: float = 0.0
    value_clip: float = 0.2
    entropy: float = 0.0
    head: float = 0.0
    reward: float = 0.0


Evaluate = Callable[[Params, Params, MicroBatch], PolicyOutput]


def loss_terms(
    output: PolicyOutput, micro: MicroBatch, config: LossConfig
) -> tuple[Array, dict[str, Array]]:
    """Weighted sum of the loss over a micro-batch, and the sums behind the metrics."""
    weight, on = micro.weight, micro.weight != 0
    log_ratio = losses.masked(on, output.logp) - losses.masked(on, micro.old_logp)
    policy = losses.clipped_policy_loss(
        log_ratio, losses.masked(on, micro.advantage), config.clip_low, config.clip_high
    )
    total = losses.weighted_sum(weight, policy)
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    outside = (ratio < 1.0 - config.clip_low) | (ratio > 1.0 + config.clip_high)
    sums = {
        "policy_loss": total,
        "clip_fraction": losses.weighted_sum(weight, outside.astype(jnp.float32)),
        "old_kl": losses.weighted_sum(weight, losses.reference_kl(log_ratio, 0.0 * log_ratio)),
        "weight": jnp.sum(weight),
        "max_abs_log_ratio": jnp.max(jnp.abs(log_ratio)),
    }
    if config.kl:
        if micro.ref_logp is None:
            raise ValueError(f"loss.kl={config.kl} needs ref_logp in the micro-batch")
        kl = losses.reference_kl(losses.masked(on, output.logp), losses.masked(on, micro.ref_logp))
        sums["reference_kl"] = losses.weighted_sum(weight, kl)
        total = total + config.kl * sums["reference_kl"]
    if config.value:
        if output.value is None or micro.target is None or micro.old_value is None:
            raise ValueError(
                f"loss.value={config.value} needs a value head and a credit method with critic "
                "targets (ppo, attnsr, linear)"
            )
        value = losses.value_loss(
            losses.masked(on, output.value),
            losses.masked(on, micro.target),
            losses.masked(on, micro.old_value),
            config.value_clip,
        )
        sums["value_loss"] = losses.weighted_sum(weight, value)
        total = total + config.value * sums["value_loss"]
    if config.head:
        if not output.heads or output.heads.keys() != micro.head_target.keys():
            raise ValueError(
                f"loss.head={config.head} needs step heads and a credit method with a target for "
                f"each: there are heads for {sorted(output.heads or {})} and targets for "
                f"{sorted(micro.head_target)}"
            )
        for name, target in sorted(micro.head_target.items()):
            at_step, read = micro.head_weight[name], micro.head_weight[name] != 0
            error = losses.head_loss(
                losses.masked(read, output.heads[name]), losses.masked(read, target)
            )
            sums[f"{name}_loss"] = losses.weighted_sum(at_step, error)
            total = total + config.head * sums[f"{name}_loss"]
    if config.reward:
        if output.reward_logp is None or micro.reward_slope is None:
            raise ValueError(
                f"loss.reward={config.reward} needs a reward model and a credit method that "
                "teaches it (istar)"
            )
        # Linear in the log-probabilities: its gradient is the loss's, where they were scored.
        slope = micro.reward_slope
        learned = losses.masked(slope != 0, output.reward_logp)
        total = total + config.reward * losses.weighted_sum(slope, learned)
    if output.entropy is not None:
        sums["entropy"] = losses.weighted_sum(weight, output.entropy)
        total = total - config.entropy * sums["entropy"]
    return total, sums


@dataclasses.dataclass(frozen=True)
class Update:
    """The jitted halves of an optimiser step; see ``make_update``."""

    zeros: Callable[[TrainState], Params]
    accumulate: Callable[[TrainState, Params, Params, MicroBatch], tuple[Params, dict[str, Array]]]
    apply: Callable[[TrainState, Params], tuple[TrainState, dict[str, Array]]]


def make_update(
    evaluate: Evaluate,
    optimizer: optax.GradientTransformation,
    config: LossConfig,
    shardings: TrainState | None = None,
) -> Update:
    """Builds the update.

    Args:
      evaluate: (trainable, frozen, micro-batch) -> ``PolicyOutput``; differentiable in its
        first argument.
      optimizer: any optax transformation.
      config: loss coefficients.
      shardings: the state's shardings on a mesh, leaf by leaf; None on a single device. Gradients
        are laid out as the weights they belong to.

    Returns:
      ``zeros(state)`` makes the gradient buffer; ``accumulate(state, frozen, grads, micro)``
      returns it with the micro-batch added (the buffer is donated) and the metric sums;
      ``apply(state, grads)`` returns the new state (the old one is donated) and the gradient norm.
    """

    weights = None if shardings is None else shardings.trainable

    @functools.partial(jax.jit, out_shardings=weights)
    def zeros(state: TrainState) -> Params:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), state.trainable)

    out = None if shardings is None else (weights, None)

    @functools.partial(jax.jit, donate_argnums=(2,), out_shardings=out)
    def accumulate(
        state: TrainState, frozen: Params, grads: Params, micro: MicroBatch
    ) -> tuple[Params, dict[str, Array]]:
        def loss(trainable: Params) -> tuple[Array, dict[str, Array]]:
            return loss_terms(evaluate(trainable, frozen, micro), micro, config)

        grad, sums = jax.grad(loss, has_aux=True)(state.trainable)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, grad), sums

    out = None if shardings is None else (shardings, None)

    @functools.partial(jax.jit, donate_argnums=(0,), out_shardings=out)
    def apply(state: TrainState, grads: Params) -> tuple[TrainState, dict[str, Array]]:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        norm = optax.global_norm(grads)
        new = dataclasses.replace(
            state, trainable=trainable, opt_state=opt_state, updates=state.updates + 1
        )
        return new, {"grad_norm": norm}

    return Update(zeros=zeros, accumulate=accumulate, apply=apply)
