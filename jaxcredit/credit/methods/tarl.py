"""TARL: a judge scores every turn; the outcome keeps the last word."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, add, chain, estimator
from jaxcredit.credit.checks import choice
from jaxcredit.credit.groups import group_normalise
from jaxcredit.credit.returns import discounted_return
from jaxcredit.credit.rewards import judge_reward, outcome_reward
from jaxcredit.credit.tokens import broadcast


def tarl(
    *,
    c: float = 0.5,
    variant: str = "turn",
    gamma: float = 1.0,
    std: str | None = "sample",
    eps: float = 1e-6,
) -> CreditEstimator:
    """A of bounded turn rewards r_k = c j_k / K, j_k in {-1, 0, 1} the judge's score of turn k.

        "turn"     A_k = (G_k - mean) / (std + eps) over all turns of all episodes of the task
                   G_k = sum_{k' >= k} gamma^(k' - k) r_k'  (+ R at the last turn)
        "episode"  A_i = (S - mean) / (std + eps) over the episodes of the task
                   S = R + sum_k r_k, one scalar per episode

    Tan et al., arXiv 2509.14480. At most one turn of an episode counts as -1, the first; further
    ones count as 0. So |sum_k r_k| <= c, and with c <= 0.5 no failure scores above a success.

    Args:
      c: bound of what the judge may give or take in an episode.
      variant: "turn" or "episode".
      gamma: discount per turn; for "turn".
      std, eps: of the comparison.

    Reconstructed: the paper was read in a digest. Ours are c, the division by K, which -1 counts,
    and that turns are compared within the task instead of against a critic.
    """
    choice("variant", variant, ("turn", "episode"))
    reward = add(outcome_reward(), judge_reward(c))
    if variant == "episode":
        compare = group_normalise(by=("task",), over="episodes", std=std, eps=eps)
    else:
        compare = chain(
            discounted_return(gamma), group_normalise(by=("task",), over="steps", std=std, eps=eps)
        )
    return estimator("tarl", reward, compare, broadcast())
