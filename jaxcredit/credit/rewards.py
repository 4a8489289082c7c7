"""Sources of step rewards, and the penalty that stays outside every normalisation."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxcredit.credit import masks
from jaxcredit.credit.algebra import Flow, Stage, add, stage
from jaxcredit.credit.checks import between, choice, positive
from jaxcredit.episodes import EpisodeBatch, Signals


def outcome_reward() -> Stage:
    """r_k = R if k is the episode's last step, else 0."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        reward = jnp.where(masks.last_step(batch), batch.outcome[:, None], 0.0)
        return replace(flow, step_reward=reward)

    return stage("outcome_reward", apply, writes=["step_reward"])


def environment_reward() -> Stage:
    """r_k = what the environment paid at step k, the outcome not included."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        return replace(flow, step_reward=batch.step_reward)

    return stage("environment_reward", apply, needs=["step_reward"], writes=["step_reward"])


def progress_reward(c: float = 0.5) -> Stage:
    """r_k = c (Phi_k - Phi_{k-1}), Phi the fraction of acceptance checks passed (ProCredit)."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        gain = c * (batch.progress[:, 1:] - batch.progress[:, :-1])
        return replace(flow, step_reward=jnp.where(masks.valid_steps(batch), gain, 0.0))

    return stage("progress_reward", apply, needs=["progress"], writes=["step_reward"])


def overlong_penalty(max_tokens: float, buffer: float) -> Stage:
    """r_K = clip((max_tokens - buffer - n_i) / buffer, -1, 0), at the episode's last step.

    n_i counts the action tokens of the episode: nothing is lost up to max_tokens - buffer, 1
    from max_tokens on (DAPO, arXiv 2503.14476, Eq. 13, where n_i is the length of one response).
    """
    positive("max_tokens", max_tokens)
    positive("buffer", buffer)
    between("buffer", buffer, 0.0, max_tokens)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        length = masks.token_counts(batch).sum(axis=1)
        lost = jnp.clip((max_tokens - buffer - length) / buffer, -1.0, 0.0)
        return replace(flow, step_reward=jnp.where(masks.last_step(batch), lost[:, None], 0.0))

    return stage("overlong_penalty", apply, writes=["step_reward"])


def judge_reward(c: float = 0.5) -> Stage:
    """r_k = c j_k / K, j_k in {-1, 0, 1} a judge's score of step k (TARL).

    Of the scores below 0 only the episode's first counts. Scores are clipped to [-1, 1], so the
    rewards of an episode sum to at most c in size.
    """
    positive("c", c)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.judge_score is not None
        valid = masks.valid_steps(batch)
        score = jnp.clip(signals.judge_score, -1.0, 1.0)
        bad = valid & (score < 0)
        score = jnp.where(bad & (jnp.cumsum(bad, axis=1) > 1), 0.0, score)
        steps = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
        return replace(flow, step_reward=jnp.where(valid, c * score / steps, 0.0))

    return stage("judge_reward", apply, needs=["judge_score"], writes=["step_reward"])


def task_reward(rewards: str) -> Stage:
    """The reward a method is run on: "outcome" alone, or "outcome+steps"."""
    choice("rewards", rewards, ("outcome", "outcome+steps"))
    if rewards == "outcome":
        return outcome_reward()
    return add(outcome_reward(), environment_reward())


def invalid_action_penalty(penalty: float = 0.1) -> Stage:
    """A_k = -penalty if the environment refused action k, else 0.

    A step-advantage term to be added to a method *after* its normalisation, so that one bad
    turn in a group without outcome spread is not blown up by a small standard deviation:
    ``estimator("x", add(grpo(), chain(invalid_action_penalty(0.1), broadcast())))``.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        fine = jnp.where(masks.refused_steps(batch), -penalty, 0.0)
        return replace(flow, step_advantage=fine)

    return stage("invalid_action_penalty", apply, writes=["step_advantage"])
