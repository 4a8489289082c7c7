"""Stages of methods that learn a model of the task: rewards, advantages, and what to learn next.

The stages named ``*_target`` write ``step_target``: for every step the number that the model's
output is regressed to, by half the squared error (``jaxcredit.losses.head_loss``). Targets are
made once from whole episodes, so the regression may be cut into rows and micro-batches as one
likes. A loss L that is no plain regression becomes one whose gradient at the current outputs x is
that of L: its target is x - dL/dx. The loss of a reward model over tokens is handed on as its
slope alone (``preference_slope``): per token it is far smaller than the rounding of a score.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcredit.credit import masks
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import between, positive
from jaxcredit.credit.returns import backward_sum
from jaxcredit.episodes import EpisodeBatch, Signals
from jaxcredit.preferences import implicit_return, preference_loss


def redistributed_return(*, exact: bool = True) -> Stage:
    """r_k = g_k - g_{k-1} + (R - g_K) / K, g_0 = 0; without the last term if not ``exact``.

    g_k predicts the episode's outcome R after step k (RUDDER). The rewards of an episode sum to
    R, or to g_K if not ``exact``.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        g = signals.predicted_return
        assert g is not None
        missing = batch.outcome - _last(batch, g)
        reward = g - _previous(g)
        if exact:
            reward += (missing / jnp.maximum(batch.n_steps, 1))[:, None]
        reward = jnp.where(masks.valid_steps(batch), reward, 0.0)
        error = _mean(masks.included(batch), jnp.abs(missing))
        return replace(flow, step_reward=reward).note(predicted_return_error=error)

    return stage("redistributed_return", apply, needs=["predicted_return"], writes=["step_reward"])


def return_target(early: float = 0.1) -> Stage:
    """target_k = g_k + w_k (R - g_k), w_K = 1 and w_k = ``early`` for k < K.

    The gradient is that of sum_k w_k (g_k - R)^2 / 2: RUDDER's loss on the final prediction, and
    its auxiliary loss that has the outcome predicted as early as possible.
    """
    between("early", early, 0.0, 1.0)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        g = signals.predicted_return
        assert g is not None
        weight = jnp.where(masks.last_step(batch), 1.0, early)
        target = g + weight * (batch.outcome[:, None] - g)
        return replace(flow, step_target={"predicted_return": target})

    return stage("return_target", apply, needs=["predicted_return"], writes=["step_target"])


def attributed_progress(*, alpha: float = 1.0, beta: float = 0.5) -> Stage:
    """r_k = alpha c_k + beta [the environment accepted action k], c_k the predicted progress."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        c = signals.predicted_progress
        assert c is not None
        reward = alpha * c + jnp.where(batch.action_valid, beta, 0.0)
        reward = jnp.where(masks.valid_steps(batch), reward, 0.0)
        error = _mean(masks.included(batch), jnp.abs(batch.outcome - c.sum(axis=1)))
        return replace(flow, step_reward=reward).note(predicted_progress_error=error)

    needs = ["predicted_progress", "action_valid"]
    return stage("attributed_progress", apply, needs=needs, writes=["step_reward"])


def attribution_target() -> Stage:
    """target_k = c_k + (R - sum_j c_j) / K: the nearest numbers that sum to R.

    The gradient is that of (sum_k c_k - R)^2 / (2 K), SPA-RL's loss up to its scale.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        c = signals.predicted_progress
        assert c is not None
        missing = (batch.outcome - c.sum(axis=1)) / jnp.maximum(batch.n_steps, 1)
        return replace(flow, step_target={"predicted_progress": c + missing[:, None]})

    return stage("attribution_target", apply, needs=["predicted_progress"], writes=["step_target"])


def promise_gain(weight: float = 1.0) -> Stage:
    """r_k = weight (M_k - M_{k-1}), M_0 = 0, M_k the promise after step k (AgentPRM's progress).

    The rewards of an episode sum to weight M_K.
    """
    positive("weight", weight)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        m, valid = signals.promise, masks.valid_steps(batch)
        assert m is not None
        gain = jnp.where(valid, weight * (m - _previous(m)), 0.0)
        return replace(flow, step_reward=gain).note(promise=_mean(valid, m))

    return stage("promise_gain", apply, needs=["promise"], writes=["step_reward"])


def promise_target(*, gamma: float = 1.0, lam: float = 0.95) -> Stage:
    """target_k = M_k + sum_{l >= 0} (gamma lam)^l delta_{k+l}: TD(lambda) on the outcome.

    delta_k = gamma M_{k+1} - M_k for k < K, delta_K = R - M_K.
    """
    between("gamma", gamma, 0.0, 1.0)
    between("lam", lam, 0.0, 1.0)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        m = signals.promise
        assert m is not None
        ahead = jnp.where(masks.last_step(batch), batch.outcome[:, None], gamma * _following(m))
        delta = jnp.where(masks.valid_steps(batch), ahead - m, 0.0)
        target = m + backward_sum(delta, jnp.full_like(delta, gamma * lam))
        return replace(flow, step_target={"promise": target})

    return stage("promise_target", apply, needs=["promise"], writes=["step_target"])


def twin_advantage() -> Stage:
    """A_k = min(Q1_k, Q2_k) - min(V1_k, V2_k): Q after the action, V before it (ArCHer)."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.q_value is not None and signals.v_value is not None
        q, v = signals.q_value.min(axis=-1), signals.v_value.min(axis=-1)
        valid = masks.valid_steps(batch)
        return replace(flow, step_advantage=q - v).note(
            q_value=_mean(valid, q), v_value=_mean(valid, v)
        )

    return stage("twin_advantage", apply, needs=["q_value", "v_value"], writes=["step_advantage"])


def critic_target(gamma: float = 0.95, lam: float = 0.0) -> Stage:
    """Q target T_k = r_k + gamma ((1 - lam) V_{k+1} + lam T_{k+1}), 0 beyond K; V target Q_k.

    Each critic learns from its own twin. ``lam`` = 0 is the one-step target.
    """
    between("gamma", gamma, 0.0, 1.0)
    between("lam", lam, 0.0, 1.0)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.q_value is not None and signals.v_value is not None
        valid = masks.valid_steps(batch)[..., None]
        one_step = flow.step_reward[..., None] + gamma * (1 - lam) * _following(signals.v_value)
        q = jnp.moveaxis(jnp.where(valid, one_step, 0.0), -1, 0)
        q = jnp.moveaxis(backward_sum(q, jnp.full_like(q, gamma * lam)), 0, -1)
        return replace(flow, step_target={"q_value": q, "v_value": signals.q_value})

    return stage(
        "critic_target",
        apply,
        needs=["q_value", "v_value"],
        reads=["step_reward"],
        writes=["step_target"],
    )


def monte_carlo_advantage(gamma: float = 1.0) -> Stage:
    """A_k = r_k + gamma V_{k+1} - V_k, V_k the mean Monte-Carlo return from before step k."""
    between("gamma", gamma, 0.0, 1.0)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        v = signals.mc_value
        assert v is not None
        return replace(flow, step_advantage=flow.step_reward + gamma * v[:, 1:] - v[:, :-1])

    return stage(
        "monte_carlo_advantage",
        apply,
        needs=["mc_value"],
        reads=["step_reward"],
        writes=["step_advantage"],
    )


def implicit_reward(beta: float = 0.05) -> Stage:
    """r_k = beta sum_u (log pi_phi(y_u) - log pi_old(y_u)) over the action tokens u of step k."""
    positive("beta", beta)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.reward_logp is not None and signals.logp is not None
        gap = masks.step_sum(batch, signals.reward_logp - signals.logp)
        return replace(flow, step_reward=beta * gap)

    return stage("implicit_reward", apply, needs=["reward_logp", "logp"], writes=["step_reward"])


def preference_slope(beta: float = 0.05) -> Stage:
    """dL / d log pi_phi(y_u), L the preference loss of the batch (``jaxcredit.preferences``)."""
    positive("beta", beta)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.reward_logp is not None and signals.logp is not None
        old = signals.logp

        def loss(reward_logp: Float[Array, "B T"]) -> Float[Array, ""]:
            score = implicit_return(batch, reward_logp, old, beta)
            return preference_loss(score, batch.task, batch.outcome, batch.weight)

        value, slope = jax.value_and_grad(loss)(signals.reward_logp)
        return replace(flow, reward_slope=slope).note(preference_loss=value)

    return stage("preference_slope", apply, needs=["reward_logp", "logp"], writes=["reward_slope"])


def _previous(x: Float[Array, "N K"]) -> Float[Array, "N K"]:
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


def _following(x: Float[Array, "N K ..."]) -> Float[Array, "N K ..."]:
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2))


def _last(batch: EpisodeBatch, x: Float[Array, "N K"]) -> Float[Array, " N"]:
    return jnp.where(masks.last_step(batch), x, 0.0).sum(axis=1)


def _mean(mask: Array, x: Array) -> Float[Array, ""]:
    return jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1)
