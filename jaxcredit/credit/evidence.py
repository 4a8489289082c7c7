"""How far a comparison at one state can be trusted: few tries, noisy returns."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxcredit.credit import masks, segments
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import nonnegative, positive
from jaxcredit.episodes import EpisodeBatch, Signals


def action_shrinkage(kappa: float = 2.0) -> Stage:
    """G_k <- (n_u Gbar_u + kappa mu_s) / (n_u + kappa) for the action u of step k at state s.

    Gbar_u is the mean return of the n_u steps of the task that took u at s, mu_s that of all
    steps at s. An action tried once moves far towards the state's mean.
    """
    nonnegative("kappa", kappa)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        value, mask, state, action = _steps(batch, flow)
        at_state = segments.group(value, mask, state)
        tries = segments.group(value, mask, [*state, action])
        n = tries.count
        shrunk = (n * tries.mean + kappa * at_state.mean) / jnp.maximum(n + kappa, 1.0)
        shrunk = jnp.where(mask, shrunk, 0.0).reshape(batch.step_mask.shape)
        return replace(flow, step_return=shrunk)

    return stage(
        "action_shrinkage",
        apply,
        needs=["state", "action"],
        reads=["step_return"],
        writes=["step_return"],
    )


def variance_gate(inner: Stage, *, tau: float = 4.0, eps: float = 1e-6) -> Stage:
    """A_k = rho_s A'_k, A' from ``inner``, rho_s = tanh(n_s / tau) B_s / (B_s + W_s + eps).

    B_s is the variance between the mean returns of the actions taken at state s, W_s the mean
    variance within them. Each of the n_s steps at s counts once, so B_s + W_s is the population
    variance of the incoming returns at s. rho is near 1 where many steps agree that the action
    decides the return, near 0 where few steps say so or equal actions return unequal amounts.

    Args:
      inner: a stateless stage or chain from step returns to step advantages.
      tau: how many steps at a state count as many.
      eps: keeps the quotient finite.
    """
    positive("tau", tau)
    if "step_advantage" not in inner.writes or jax.tree.leaves(inner.init()):
        raise ValueError(f"variance_gate: {inner.name!r} must be stateless, write step_advantage")

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        value, mask, state, action = _steps(batch, flow)
        mean = segments.group(value, mask, [*state, action]).mean
        among = segments.group(mean, mask, state)
        between = among.squares / jnp.maximum(among.count, 1.0)
        off = jnp.where(mask, value - mean, 0.0)
        within = segments.group(off**2, mask, state).mean
        rho = jnp.tanh(among.count / tau) * between / (between + within + eps)
        rho = jnp.where(mask, rho, 0.0)
        out, _ = inner.apply(batch, signals, flow, inner.init())
        gated = rho.reshape(batch.step_mask.shape) * out.step_advantage
        used = rho.sum() / jnp.maximum(mask.sum(), 1)
        return replace(out, step_advantage=gated).note(variance_gate=used)

    return stage(
        f"variance_gate({inner.name})",
        apply,
        needs=inner.needs | {"state", "action"},
        reads=inner.reads | {"step_return"},
        writes=inner.writes,
    )


def _steps(
    batch: EpisodeBatch, flow: Flow
) -> tuple[Float[Array, " M"], Bool[Array, " M"], list[Int[Array, " M"]], Int[Array, " M"]]:
    """Of all M = N K steps: the return, whether it counts, the keys of its state, its action."""
    state = [masks.task_of_step(batch).reshape(-1), batch.state.reshape(-1)]
    value, mask = flow.step_return.reshape(-1), masks.valid_steps(batch).reshape(-1)
    return value, mask, state, batch.action.reshape(-1)
