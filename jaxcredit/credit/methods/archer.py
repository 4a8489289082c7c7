"""ArCHer: a critic of whole steps, two of each kind."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, estimator
from jaxcredit.credit.learned import critic_target, twin_advantage
from jaxcredit.credit.rewards import task_reward
from jaxcredit.credit.tokens import broadcast


def archer(*, gamma: float = 0.95, lam: float = 0.0, rewards: str = "outcome") -> CreditEstimator:
    """A_k = min(Q1, Q2)(s_k, a_k) - min(V1, V2)(s_k), the same for every token of the step.

        Q_j is learned from T_k = r_k + gamma ((1 - lam) V_j(s_{k+1}) + lam T_{k+1}),
        V_j from Q_j(s_k, a_k),  j = 1, 2

    Zhou et al., arXiv 2402.19446, Section 3, and their public code. V is 0 after the last step.

    Args:
      gamma: discount per step, 0.95 in the public code.
      lam: 0 as published; above it targets rest on what came out, less on the critics themselves.
      rewards: "outcome", or "outcome+steps" to add the environment's step rewards.

    Reconstructed: lam. The targets are made from the critics as they were when the episodes were
    scored, in the place of slowly following copies; they learn from the policy's own latest
    episodes, without a replay buffer, so the action in V's target is the one taken. V after a
    truncated episode is 0.
    """
    return estimator(
        "archer", task_reward(rewards), critic_target(gamma, lam), twin_advantage(), broadcast()
    )
