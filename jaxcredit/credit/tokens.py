"""Token-level stages: the broadcast, rewards at step ends, GAE on action tokens, whitening."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxcredit.credit import masks, segments
from jaxcredit.credit.algebra import Flow, Stage, stage
from jaxcredit.credit.checks import between, choice
from jaxcredit.credit.returns import backward_sum
from jaxcredit.episodes import EpisodeBatch, Signals


def broadcast() -> Stage:
    """Every action token of a step gets the step's advantage."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        return replace(flow, token_advantage=masks.broadcast_steps(batch, flow.step_advantage))

    return stage("broadcast", apply, reads=["step_advantage"], writes=["token_advantage"])


def token_rewards() -> Stage:
    """r_u = r_k if u is the last action token e_k of step k, else 0.

    A reward of a step without action tokens has no token to sit on and is lost.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        reward = masks.broadcast_steps(batch, flow.step_reward)
        return replace(flow, token_reward=jnp.where(masks.last_tokens(batch), reward, 0.0))

    return stage("token_rewards", apply, reads=["step_reward"], writes=["token_reward"])


def gae(
    *,
    gamma: float = 1.0,
    lam: float | str = 0.95,
    critic_lam: float | str | None = None,
    inner_gamma: float | None = None,
) -> Stage:
    """Generalised advantage estimation on the action tokens of each episode.

        delta_u = r_u + gamma V_{u+1} - V_u ;  A_u = delta_u + gamma lam A_{u+1}
        target_u = A_u + V_u

    u runs over the episode's action tokens in order of step and position, over all rows the
    episode has; V is 0 after the last. Observation tokens are no transitions: reward,
    discount and bootstrap pass them by. (Schulman et al., arXiv 1506.02438, Eqs. 11-16.)

    Args:
      gamma: discount per action token.
      inner_gamma: the discount where the next token belongs to the same step; None means ``gamma``.
      lam: a number in [0, 1], or "length" for 1 - 1 / (1.5 n_i), n_i the episode's number of
        action tokens.
      critic_lam: the same for the target; None means ``lam``.
    """
    inner = gamma if inner_gamma is None else inner_gamma
    between("gamma", gamma, 0.0, 1.0)
    between("inner_gamma", inner, 0.0, 1.0)
    _check_lam("lam", lam)
    if critic_lam is not None:
        _check_lam("critic_lam", critic_lam)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        assert signals.value is not None
        line = _line(batch)
        value, reward = line.take(signals.value), line.take(flow.token_reward)
        following = jnp.where(line.goes_on, jnp.roll(value, -1), 0.0)
        discount = jnp.where(line.same_step, inner, gamma)
        delta = jnp.where(line.real, reward + discount * following - value, 0.0)

        def advantage(rate: float | str) -> Array:
            per_token = _rate(batch, rate)[line.episode]
            return backward_sum(delta, jnp.where(line.goes_on, discount * per_token, 0.0))

        actor = advantage(lam)
        critic = actor if critic_lam in (None, lam) else advantage(critic_lam)
        token_advantage = line.put(actor)
        return replace(
            flow,
            token_advantage=token_advantage,
            step_advantage=masks.step_mean(batch, token_advantage),
            token_target=line.put(critic + value),
        )

    return stage(
        "gae",
        apply,
        needs=["value"],
        reads=["token_reward"],
        writes=["token_advantage", "step_advantage", "token_target"],
    )


def spread_rewards() -> Stage:
    """r_u = r_k / n_k on each of the n_k action tokens u of step k."""

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        share = flow.step_reward / jnp.maximum(masks.token_counts(batch), 1.0)
        return replace(flow, token_reward=masks.broadcast_steps(batch, share))

    return stage("spread_rewards", apply, reads=["step_reward"], writes=["token_reward"])


def token_returns(gamma: float = 1.0) -> Stage:
    """A_u = sum_{u' >= u} gamma^(u' - u) r_u' over the action tokens of the episode."""
    between("gamma", gamma, 0.0, 1.0)

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        line = _line(batch)
        decay = jnp.where(line.goes_on, gamma, 0.0)
        returns = line.put(backward_sum(line.take(flow.token_reward), decay))
        return replace(
            flow, token_advantage=returns, step_advantage=masks.step_mean(batch, returns)
        )

    return stage(
        "token_returns",
        apply,
        reads=["token_reward"],
        writes=["token_advantage", "step_advantage"],
    )


def centre_tokens() -> Stage:
    """A_u <- A_u - mean over all action tokens of all episodes of the task.

    A task with one action token, or with equal advantages, gives exactly 0.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        mask, x = masks.action_tokens(batch), flow.token_advantage
        task = masks.task_of_token(batch).reshape(-1)
        stats = segments.group(x.reshape(-1), mask.reshape(-1), [task])
        centred = segments.standardise(x.reshape(-1), mask.reshape(-1), stats, None, 0.0)
        centred = centred.reshape(x.shape)
        return replace(
            flow, token_advantage=centred, step_advantage=masks.step_mean(batch, centred)
        )

    fields = ["token_advantage", "step_advantage"]
    return stage("centre_tokens", apply, reads=fields, writes=fields)


def whiten(eps: float = 1e-6) -> Stage:
    """A_u <- (A_u - mean) / (std + eps) over all action tokens of the batch, sample std.

    A batch with one action token, or with equal advantages, gives exactly 0.
    """

    def apply(batch: EpisodeBatch, signals: Signals, flow: Flow) -> Flow:
        mask, x = masks.action_tokens(batch), flow.token_advantage
        count = mask.sum()
        mean = jnp.where(mask, x, 0.0).sum() / jnp.maximum(count, 1)
        squares = jnp.where(mask, x - mean, 0.0) ** 2
        sigma = jnp.sqrt(squares.sum() / jnp.maximum(count - 1, 1))
        high = jnp.where(mask, x, -jnp.inf).max()
        low = jnp.where(mask, x, jnp.inf).min()
        reach = jnp.maximum(jnp.abs(high), jnp.abs(low))
        flat = (count < 2) | (high - low <= segments.FLAT * jnp.maximum(1.0, reach))

        def whitened(keep: Array, values: Array) -> Array:
            return jnp.where(keep & ~flat, (values - mean) / (sigma + eps), 0.0)

        has_token = masks.token_counts(batch) > 0
        return replace(
            flow,
            token_advantage=whitened(mask, x),
            step_advantage=whitened(has_token, flow.step_advantage),
        )

    fields = ["token_advantage", "step_advantage"]
    return stage("whiten", apply, reads=fields, writes=fields)


@dataclass(frozen=True)
class _Line:
    """All action tokens of the batch in a line: by episode, step and position.

    ``order`` says which token stands at a place of the line, ``place`` where a token stands;
    both are free where there is none. ``real`` marks the places that are taken, ``goes_on`` those
    whose next token is of the same episode,
    ``same_step`` those whose next token is of the same step.
    """

    order: Int[Array, " M"]
    place: Int[Array, "B T"]
    action: Bool[Array, "B T"]
    real: Bool[Array, " M"]
    episode: Int[Array, " M"]
    goes_on: Bool[Array, " M"]
    same_step: Bool[Array, " M"]

    def take(self, per_token: Float[Array, "B T"]) -> Float[Array, " M"]:
        """The numbers of the tokens in line, 0 for the others."""
        return jnp.where(self.real, per_token.reshape(-1)[self.order], 0.0)

    def put(self, in_line: Float[Array, " M"]) -> Float[Array, "B T"]:
        """The inverse of ``take``."""
        return jnp.where(self.action, in_line[self.place], 0.0)


def _line(batch: EpisodeBatch) -> _Line:
    """Counts instead of sorting: a step lies in one row, so a token's place is the number of
    tokens in the steps before its own, plus its rank among the action tokens of its row less
    that of the step's first one."""
    n, k = batch.step_mask.shape
    action, ids = masks.action_tokens(batch), masks.step_of_token(batch)
    size = ids.size
    rank = jnp.cumsum(action, axis=1, dtype=jnp.int32)
    first = jax.ops.segment_min(rank.reshape(-1), ids.reshape(-1), n * k + 1)
    counts = masks.token_counts(batch).astype(jnp.int32).reshape(-1)
    before = jnp.append(jnp.cumsum(counts) - counts, 0)
    place = jnp.where(action, (before - first)[ids] + rank, size)
    tokens = jnp.arange(size, dtype=jnp.int32)
    order = jnp.zeros(size, jnp.int32).at[place.reshape(-1)].set(tokens, mode="drop")
    real = tokens < counts.sum()
    steps = jnp.where(real, ids.reshape(-1)[order], n * k)
    episode = steps // k
    goes_on = jnp.append((episode[1:] == episode[:-1]) & real[1:], False)
    same_step = jnp.append(steps[1:] == steps[:-1], False) & real
    place, owner = jnp.minimum(place, size - 1), jnp.minimum(episode, n - 1)
    return _Line(order, place, action, real, owner, goes_on, same_step)


def _rate(batch: EpisodeBatch, lam: float | str) -> Float[Array, " N"]:
    n = batch.step_mask.shape[0]
    if not isinstance(lam, str):
        return jnp.full((n,), lam)
    tokens = masks.token_counts(batch).sum(axis=1)
    return 1.0 - 1.0 / (1.5 * jnp.maximum(tokens, 1.0))


def _check_lam(key: str, lam: float | str) -> None:
    if isinstance(lam, str):
        choice(key, lam, ("length",))
    else:
        between(key, lam, 0.0, 1.0)
