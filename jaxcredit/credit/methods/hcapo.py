"""HCAPO: returns weighted by hindsight likelihood, compared over all steps of the task."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, add, chain, estimator, scale
from jaxcredit.credit.checks import choice
from jaxcredit.credit.groups import group_normalise, success_mask
from jaxcredit.credit.returns import discounted_return, hindsight_ratio, temporal_smoothing
from jaxcredit.credit.rewards import outcome_reward
from jaxcredit.credit.tokens import broadcast


def hcapo(
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    tau: float = 5.0,
    low: float = 0.8,
    high: float = 1.2,
    alpha: float = 0.5,
    mask: str = "success",
    eps: float = 1e-6,
) -> CreditEstimator:
    """A = A_macro + omega mask(A_micro).

        A_macro = (R - mean) / (std + eps) over the episodes of the task
        QH_k = rho_k gamma^(K - k) R ;  rho_k = clip(pH_k / (mean_k pH_k + eps), low, high)
        QH_k <- alpha QH_k + (1 - alpha) QH_{min(k+1, K)}
        A_micro = (QH_k - mean) / (std + eps) over all steps of all episodes of the task
        mask: A_micro <- 0 where the episode succeeded and A_micro < 0

    pH_k = exp(mean token log-probability / tau) in the outcome-augmented context. Tan et al.,
    arXiv 2603.08754. ``relace`` differs in two things: its ratio asks the original context too,
    and it compares per anchor state.

    Args:
      omega, gamma, tau, low, high, alpha: as in the equations, defaults as published.
      mask: "success" or "none".
      eps: every eps above.

    Reconstructed: that both standard deviations are sample ones, and the value of eps.
    """
    choice("mask", mask, ("success", "none"))
    micro = chain(
        discounted_return(gamma),
        hindsight_ratio(tau=tau, low=low, high=high, weight="relative", eps=eps),
        temporal_smoothing(alpha),
        group_normalise(by=("task",), over="steps", eps=eps),
    )
    if mask == "success":
        micro = chain(micro, success_mask())
    macro = group_normalise(by=("task",), over="episodes", eps=eps)
    return estimator("hcapo", outcome_reward(), add(macro, scale(omega, micro)), broadcast())
