"""RUDDER: a step is worth what it changes in the prediction of the outcome."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, estimator
from jaxcredit.credit.baselines import reward_advantage
from jaxcredit.credit.learned import redistributed_return, return_target


def rudder(
    *,
    exact: bool = True,
    early: float = 0.1,
    baseline: str = "group",
    gamma: float = 1.0,
    lam: float | str = 0.95,
    std: str | None = "sample",
    eps: float = 1e-6,
) -> CreditEstimator:
    """r_k = g_k - g_{k-1} + (R - g_K) / K, g_0 = 0, so that sum_k r_k = R.

        "group":  A_k = (G_k - mean) / (std + eps) over all steps of the task,
                  G_k = sum_{k' >= k} gamma^(k' - k) r_k'
        "critic": PPO on r_k, each on the last action token of its step

    g_k, the outcome predicted after step k, is learned from R at every step, with weight 1 at
    the last and ``early`` before it. Arjona-Medina et al., arXiv 1806.07857, Sections 2-3. With
    gamma = 1 the redistribution before step k cancels: G_k = R - g_{k-1} up to the spread rest.

    Args:
      exact: spread R - g_K evenly over the steps; otherwise the rewards sum to g_K.
      early: weight of the early predictions' errors in the model's loss.
      baseline: "group", or "critic" (needs ``value``), which is what the paper trains with.
      gamma, lam, std, eps: as in ``reward_advantage``.

    Reconstructed: the "group" baseline and the value of ``early``. Of the paper's ways to take a
    prediction apart this is the difference of consecutive predictions.
    """
    return estimator(
        "rudder",
        return_target(early),
        redistributed_return(exact=exact),
        reward_advantage(baseline, gamma=gamma, lam=lam, std=std, eps=eps),
    )
