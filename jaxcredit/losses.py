"""Per-token losses. Every function returns an array of its input's shape; the caller sums.

Weights carry the whole normalisation: ``loss_weights`` divides once, by one denominator for
the whole mini-batch, so that the sum over micro-batches does not depend on how they are cut.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxcredit.episodes import EpisodeBatch

_MAX_LOG_RATIO = 20.0  # exp(20) is finite in bf16 and fp32


def clipped_policy_loss(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Array, "B T"]:
    r"""PPO's clipped surrogate, negated: -min(r A, clip(r, 1-c_low, 1+c_high) A).

    ``log_ratio`` = log pi(y) - log pi_old(y). Schulman et al. 2017, Eq. 7; separate bounds as
    in DAPO (Yu et al. 2025).
    """
    ratio = jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def reference_kl(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    r"""The k3 estimator of KL(pi || pi_ref): exp(d) - d - 1 with d = log pi_ref - log pi.

    Schulman, "Approximating KL divergence", 2020. The log-ratio is clamped before exp.
    """
    d = jnp.clip(ref_logp - logp, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return jnp.exp(d) - d - 1.0


def value_loss(
    value: Float[Array, "B T"],
    target: Float[Array, "B T"],
    old_value: Float[Array, "B T"],
    clip: float = 0.2,
) -> Float[Array, "B T"]:
    r"""Half the larger of the plain and the clipped squared error (PPO's value loss)."""
    clipped = old_value + jnp.clip(value - old_value, -clip, clip)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))


def head_loss(
    output: Float[Array, "B T ..."], target: Float[Array, "B T ..."]
) -> Float[Array, "B T"]:
    r"""(x - target)^2 / 2, summed over the outputs of a head that has several."""
    error = 0.5 * jnp.square(output - target)
    return error.sum(axis=tuple(range(2, error.ndim)))


def masked(
    mask: Bool[Array, "B T"], values: Float[Array, "B T ..."], other: float = 0.0
) -> Float[Array, "B T ..."]:
    """``values`` where ``mask``, else ``other``; NaN under the mask cannot leak."""
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return jnp.where(mask, values, jnp.asarray(other, values.dtype))


def loss_weights(
    batch: EpisodeBatch, token_weight: np.ndarray, episodes: np.ndarray, reduce: str
) -> np.ndarray:
    r"""[B,T] weights w with which a mini-batch's loss is sum_u w_u loss_u.

    ``reduce="token"``: w_u = c_u / sum of trainable tokens of the mini-batch.
    ``reduce="episode"``: w_u = c_u / (n_i E): mean over an episode's n_i trainable tokens, then
    over its E episodes (RELACE, Eq. 16; GRPO).
    c_u is the credit's ``token_weight``. Tokens of other episodes, of episodes with weight 0,
    and tokens that were not sampled get 0.

    Args:
      batch: the batch the mini-batch is part of.
      token_weight: [B,T] from ``Credit``.
      episodes: ids of the mini-batch's episodes.
      reduce: "token" or "episode".
    """
    if reduce not in ("token", "episode"):
        raise ValueError(f"loss.reduce={reduce!r}: expected 'token' or 'episode'")
    episode = np.asarray(batch.episode)
    weight = np.asarray(batch.weight)
    chosen = np.zeros(len(weight), bool)
    chosen[episodes] = weight[episodes] > 0
    owner = np.where(episode < 0, 0, episode)
    active = np.asarray(batch.trainable) & (episode >= 0) & chosen[owner]
    per_episode = np.bincount(owner[active], minlength=len(weight))
    if reduce == "token":
        scale = np.full(len(weight), 1.0 / max(int(per_episode.sum()), 1))
    else:
        scale = 1.0 / (np.maximum(per_episode, 1) * max(int(chosen.sum()), 1))
    return np.where(active, scale[owner] * np.asarray(token_weight), 0.0).astype(np.float32)


def weighted_sum(weight: Float[Array, "B T"], values: Float[Array, "B T"]) -> Float[Array, ""]:
    """sum_u w_u x_u over tokens with w_u != 0."""
    return jax.numpy.sum(jnp.where(weight != 0, weight * jnp.where(weight != 0, values, 0.0), 0.0))
