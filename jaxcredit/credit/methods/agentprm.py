"""AgentPRM: a step is worth the promise it adds."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, add, estimator
from jaxcredit.credit.baselines import reward_advantage
from jaxcredit.credit.checks import choice
from jaxcredit.credit.learned import promise_gain, promise_target
from jaxcredit.credit.rewards import outcome_reward


def agentprm(
    *,
    weight: float = 1.0,
    rewards: str = "outcome+progress",
    td_gamma: float = 1.0,
    td_lam: float = 0.95,
    baseline: str = "group",
    gamma: float = 1.0,
    lam: float | str = 0.95,
    std: str | None = "sample",
    eps: float = 1e-6,
) -> CreditEstimator:
    """r_k = weight (M_k - M_{k-1}), M_0 = 0, plus R at the last step.

        "group":  A_k = (G_k - mean) / (std + eps) over all steps of the task,
                  G_k = sum_{k' >= k} gamma^(k' - k) r_k'
        "critic": PPO on r_k, each on the last action token of its step
        M_k is learned from M_k + sum_l (td_gamma td_lam)^l delta_{k+l},
                  delta_k = td_gamma M_{k+1} - M_k, delta_K = R - M_K

    Xi et al., arXiv 2511.08325: promise Q(s_k, a_k) and progress Q_k - Q_{k-1}, learned by
    temporal differences with generalised advantage estimation. Progress sums to weight M_K.

    Args:
      weight: of the progress against the outcome.
      rewards: "outcome+progress", or "progress" alone.
      td_gamma, td_lam: of the targets.
      baseline: "group", or "critic" (needs ``value``).
      gamma, lam, std, eps: as in ``reward_advantage``.

    Reconstructed: known from a digest of the paper; M_0 = 0, that R is added, the baselines, and
    td_gamma are ours. The paper's separate loss on the progress is left out: the progress of
    promises that are right is right.
    """
    choice("rewards", rewards, ("outcome+progress", "progress"))
    progress = promise_gain(weight)
    return estimator(
        "agentprm",
        promise_target(gamma=td_gamma, lam=td_lam),
        progress if rewards == "progress" else add(outcome_reward(), progress),
        reward_advantage(baseline, gamma=gamma, lam=lam, std=std, eps=eps),
    )
