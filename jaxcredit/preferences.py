"""The loss of iStar's implicit reward model: it should find the better attempts likelier."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcredit.credit import masks
from jaxcredit.episodes import EpisodeBatch


def implicit_return(
    batch: EpisodeBatch,
    reward_logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    beta: float = 0.05,
) -> Float[Array, " N"]:
    """s_i = beta sum_u (log pi_phi(y_u) - log pi_old(y_u)) over the action tokens of episode i.

    ``reward_logp`` comes from the reward model and carries its gradient, ``old_logp`` from the
    policy that played.
    """
    on = masks.action_tokens(batch)
    gap = jnp.where(on, reward_logp, 0.0) - jnp.where(on, old_logp, 0.0)
    return beta * masks.step_sum(batch, gap).sum(axis=1)


def preference_loss(
    score: Float[Array, " N"],
    task: Int[Array, " N"],
    outcome: Float[Array, " N"],
    weight: Float[Array, " N"],
) -> Float[Array, ""]:
    r"""L = -mean log sigmoid(s_i - s_j) over the pairs of one task with R_i > R_j.

    Rafailov et al., arXiv 2305.18290, Eq. 7, on whole episodes as in Liu et al., arXiv
    2509.19199. 0 if there is no pair. Episodes of weight 0 are in none.

    Reconstructed: that every such pair counts, and all alike.
    """
    counts = weight > 0
    pair = (task[:, None] == task) & counts[:, None] & counts
    known = jnp.where(counts, outcome, 0.0)
    pair &= known[:, None] > known
    margin = jnp.where(pair, score[:, None] - score, 0.0)
    total = jnp.where(pair, -jax.nn.log_sigmoid(margin), 0.0).sum()
    return total / jnp.maximum(pair.sum(), 1)
