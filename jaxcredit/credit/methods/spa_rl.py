"""SPA-RL: an outcome, attributed to the steps by a model whose numbers must sum to it."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, estimator
from jaxcredit.credit.baselines import reward_advantage
from jaxcredit.credit.learned import attributed_progress, attribution_target


def spa_rl(
    *,
    alpha: float = 1.0,
    beta: float = 0.5,
    baseline: str = "group",
    gamma: float | None = None,
    lam: float | str = 0.95,
    std: str | None = "sample",
    eps: float = 1e-6,
) -> CreditEstimator:
    """r_k = alpha c_k + beta [the environment accepted action k].

        "group":  A_k = (G_k - mean) / (std + eps) over all steps of the task,
                  G_k = sum_{k' >= k} gamma^(k' - k) r_k'
        "critic": PPO on r_k, each on the last action token of its step

    c_k, the progress predicted for step k, is learned from (sum_k c_k - R)^2. R itself is no
    reward. Wang et al., arXiv 2505.20732, Section 3, and their public code.

    Args:
      alpha, beta: weights of progress and of executability, 1 and 0.5 as published.
      baseline: "group", or "critic" (needs ``value``), which is what the paper trains with.
      gamma: discount; None means 0 for "group" and 1 for "critic".
      lam, std, eps: as in ``reward_advantage``.

    Reconstructed: the "group" baseline, and its gamma: c_k already is the step's own part of the
    outcome, and without a critic the sum of the bonuses beta that are still to come would tell
    early steps from late ones and little else.
    """
    if gamma is None:
        gamma = 1.0 if baseline == "critic" else 0.0
    return estimator(
        "spa_rl",
        attribution_target(),
        attributed_progress(alpha=alpha, beta=beta),
        reward_advantage(baseline, gamma=gamma, lam=lam, std=std, eps=eps),
    )
