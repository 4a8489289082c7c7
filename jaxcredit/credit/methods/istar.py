"""iStar: step rewards that a preference model implies, beside the compared outcomes."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, add, chain, estimator, scale
from jaxcredit.credit.groups import group_normalise
from jaxcredit.credit.learned import implicit_reward, preference_slope
from jaxcredit.credit.returns import discounted_return
from jaxcredit.credit.rewards import task_reward
from jaxcredit.credit.tokens import broadcast


def istar(
    *,
    alpha: float = 1.0,
    beta: float = 0.05,
    std: str | None = "sample",
    rewards: str = "outcome",
    eps: float = 1e-6,
) -> CreditEstimator:
    """A_k = A_E + alpha (r_k - mean) / (std + eps), r_k compared over all steps of the task.

        A_E = (R - mean) / (std + eps) over the episodes of the task
        r_k = beta sum_u (log pi_phi(y_u) - log pi_old(y_u)) over the action tokens of step k

        L   = -mean log sigmoid(sum_k r_ik - sum_k r_jk) over the pairs of a task with R_i > R_j

    Liu et al., arXiv 2509.19199, Section 3. The reward model pi_phi starts as a copy of the policy
    and learns from L, see ``jaxcredit.preferences``. ``Credit.step_reward`` holds r_k.

    Args:
      alpha: weight of the step term.
      beta: scale of the reward, 0.05 as published; normalisation cancels it in A_k, not in L.
      std: of both terms; None for the mean alone.
      rewards: "outcome", or "outcome+steps" to add the environment's step rewards to R.
      eps: added to the standard deviation.

    Reconstructed: the value of alpha and the kind of standard deviation; that the rewards of a
    batch come from the reward model as it was before it learned from that batch.
    """
    # A return without any look ahead is the reward itself.
    step_term = chain(
        implicit_reward(beta),
        discounted_return(0.0),
        group_normalise(by=("task",), over="steps", std=std, eps=eps),
    )
    episode_term = chain(
        task_reward(rewards), group_normalise(by=("task",), over="episodes", std=std, eps=eps)
    )
    return estimator(
        "istar", preference_slope(beta), add(scale(alpha, step_term), episode_term), broadcast()
    )
