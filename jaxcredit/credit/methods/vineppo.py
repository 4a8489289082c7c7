"""VinePPO: the value of a state is what fresh attempts from it earn."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, estimator
from jaxcredit.credit.learned import monte_carlo_advantage
from jaxcredit.credit.rewards import task_reward
from jaxcredit.credit.tokens import broadcast


def vineppo(*, gamma: float = 1.0, rewards: str = "outcome") -> CreditEstimator:
    """A_k = r_k + gamma V_{k+1} - V_k, V_k the mean return of J attempts from before step k.

    Kazemnejad et al., arXiv 2410.01679, Section 4; J = 9 there. The advantages of an episode
    sum to R + V_{K+1} - V_1 if gamma = 1.

    Args:
      gamma: discount per step; 1 in the paper.
      rewards: "outcome", or "outcome+steps" to add the environment's step rewards.

    ``mc_value`` [N, K + 1] holds V_1 to V_{K+1}. Each counts what is earned from there on, so
    V_{K+1} is 0 where the episode ended by itself.
    """
    return estimator("vineppo", task_reward(rewards), monte_carlo_advantage(gamma), broadcast())
