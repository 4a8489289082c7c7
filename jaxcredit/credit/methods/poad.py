"""POAD: a critic that looks through the tokens of a step, and discounts between steps."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, estimator
from jaxcredit.credit.rewards import task_reward
from jaxcredit.credit.tokens import gae, token_rewards, whiten


def poad(
    *,
    gamma: float = 0.95,
    lam: float | str = 0.95,
    critic_lam: float | str | None = None,
    rewards: str = "outcome",
    eps: float = 1e-6,
) -> CreditEstimator:
    """A_u = whiten(sum_{l >= 0} (prod d) lam^l delta_{u+l}), target_u = A_u + V_u before whitening.

        delta_u = V_{u+1} - V_u              inside a step: no reward, no discount
        delta_u = r_k + gamma V_{u+1} - V_u  at the last action token of step k

    where prod d is gamma to the number of step ends that are crossed. Wen et al., arXiv
    2405.15821, the Bellman backup with action decomposition, and their public code. With
    gamma = 1, or with steps of one token, this is PPO.

    Args:
      gamma: discount per step.
      lam: GAE's lambda per action token, or "length" for 1 - 1 / (1.5 n_i).
      critic_lam: lambda of the critic's target; None means ``lam``.
      rewards: "outcome", or "outcome+steps" to add the environment's step rewards.
      eps: added to the standard deviation in the whitening.

    Reconstructed: the value after a truncated episode's last token is 0; the standard deviation
    is the sample one (theirs is the population one).
    """
    return estimator(
        "poad",
        task_reward(rewards),
        token_rewards(),
        gae(gamma=gamma, inner_gamma=1.0, lam=lam, critic_lam=critic_lam),
        whiten(eps),
    )
