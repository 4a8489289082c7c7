"""From step rewards to returns, and what can be done to a return before it is compared."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcredit.credit import masks
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import between, choice, positive
from jaxcredit.episodes import EpisodeBatch, Signals


def backward_sum(x: Float[Array, "... M"], decay: Float[Array, "... M"]) -> Float[Array, "... M"]:
    """y_j = x_j + decay_j * y_{j+1} along the last axis, y = 0 after the end.

    After i rounds y_j covers 2^i terms, so log2 of the longest run of decays that are not 0 does.
    """
    size = x.shape[-1]
    axis = x.ndim - 1

    def later(y: Array, by: Array) -> Array:
        padded = jnp.concatenate([y, jnp.zeros_like(y)], axis=axis)
        return jax.lax.dynamic_slice_in_dim(padded, by, size, axis)

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        _, d, by = carry
        return (by < size) & (d != 0).any()

    def double(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, d, by = carry
        return y + d * later(y, by), d * later(d, by), 2 * by

    total: Array = jax.lax.while_loop(unfinished, double, (x, decay, jnp.int32(1)))[0]
    return total


def discounted_return(gamma: float) -> Stage:
    """G_k = sum_{k' >= k} gamma^(k' - k) r_k' over the steps of the episode."""
    between("gamma", gamma, 0.0, 1.0)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        reward = flow.step_reward
        return replace(flow, step_return=backward_sum(reward, jnp.full_like(reward, gamma)))

    return stage("discounted_return", apply, reads=["step_reward"], writes=["step_return"])


def plain_return() -> Stage:
    """A_k = G_k: the return itself, no baseline."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        return replace(flow, step_advantage=flow.step_return)

    return stage("plain_return", apply, reads=["step_return"], writes=["step_advantage"])


def hindsight_ratio(
    *,
    tau: float = 1.0,
    low: float = 0.8,
    high: float = 1.2,
    weight: str = "ratio",
    eps: float = 1e-6,
) -> Stage:
    """Q_k <- rho_k Q_k, rho_k = clip(u_k / (mean_k u_k + eps), low, high).

    u_k = pH_k / (p_k + eps), p_k = exp(mean token log-probability / tau) in the original
    context, pH_k the same in the outcome-augmented one; the mean of u runs over the
    episode's steps (RELACE, Eqs. 2-6). The paper does not print eps. Other weights:
    "score" is its ablation without the original-context denominator, Q_k <- pH_k Q_k (Table 2);
    "relative" is HCAPO's, u_k = pH_k.
    """
    positive("tau", tau)
    between("low", low, 0.0, 1.0)
    between("high", high, 1.0, float("inf"))
    choice("weight", weight, ("ratio", "score", "relative"))

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        valid = masks.valid_steps(batch)
        assert signals.hindsight_logp is not None
        rho = jnp.where(valid, jnp.exp(signals.hindsight_logp / tau), 0.0)
        if weight == "ratio":
            assert signals.logp is not None
            p = jnp.exp(masks.step_mean(batch, signals.logp) / tau)
            rho = rho / (p + eps)
        if weight != "score":
            mean = rho.sum(axis=1, keepdims=True) / jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
            rho = jnp.where(valid, jnp.clip(rho / (mean + eps), low, high), 0.0)
        used = rho.sum() / jnp.maximum(valid.sum(), 1)
        return replace(flow, step_return=rho * flow.step_return).note(hindsight_weight=used)

    needs = ["hindsight_logp"] + (["logp"] if weight == "ratio" else [])
    return stage(
        "hindsight_ratio", apply, needs=needs, reads=["step_return"], writes=["step_return"]
    )


def temporal_smoothing(alpha: float = 0.5) -> Stage:
    """Q_k <- alpha Q_k + (1 - alpha) Q_{min(k+1, K)} (RELACE, Eq. 7); alpha = 1 changes nothing."""
    between("alpha", alpha, 0.0, 1.0)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        q = flow.step_return
        following = jnp.pad(q[:, 1:], ((0, 0), (0, 1)))
        following = jnp.where(masks.last_step(batch), q, following)
        return replace(flow, step_return=alpha * q + (1.0 - alpha) * following)

    return stage("temporal_smoothing", apply, reads=["step_return"], writes=["step_return"])
