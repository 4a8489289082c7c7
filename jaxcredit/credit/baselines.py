"""From step rewards to token advantages: against the other attempts, or against a critic."""

from __future__ import annotations

from jaxcredit.credit.algebra import Stage, chain
from jaxcredit.credit.checks import choice
from jaxcredit.credit.groups import group_normalise
from jaxcredit.credit.returns import discounted_return
from jaxcredit.credit.tokens import broadcast, gae, token_rewards, whiten


def reward_advantage(
    baseline: str,
    *,
    gamma: float = 1.0,
    lam: float | str = 0.95,
    std: str | None = "sample",
    eps: float = 1e-6,
) -> Stage:
    """What a method that only says what a step's reward is makes of its rewards.

        "group":   G_k = sum_{k' >= k} gamma^(k' - k) r_k' ;  A_k = (G_k - mean) / (std + eps)
                   over all steps of the task's episodes; needs no critic
        "critic":  PPO: r_k on the last action token of step k, GAE, whitening; needs ``value``

    Args:
      baseline: "group" or "critic".
      gamma: discount, per step for "group", per action token for "critic".
      lam: of GAE, for "critic".
      std: for "group": "sample", "population", or None for the mean alone.
      eps: added to the standard deviation.
    """
    choice("baseline", baseline, ("group", "critic"))
    if baseline == "critic":
        return chain(token_rewards(), gae(gamma=gamma, lam=lam), whiten(eps))
    compare = group_normalise(by=("task",), over="steps", std=std, eps=eps)
    return chain(discounted_return(gamma), compare, broadcast())
