"""ProCredit: verified progress, credited to the attempt and to the turn."""

from __future__ import annotations

from jaxcredit.credit.algebra import CreditEstimator, add, chain, estimator, scale
from jaxcredit.credit.checks import choice, positive
from jaxcredit.credit.groups import group_normalise
from jaxcredit.credit.returns import discounted_return
from jaxcredit.credit.rewards import outcome_reward, progress_reward
from jaxcredit.credit.tokens import (
    broadcast,
    centre_tokens,
    spread_rewards,
    token_returns,
    token_rewards,
)


def procredit(
    *,
    c: float = 0.5,
    gamma: float = 1.0,
    turn_weight: float = 1.0,
    turn_return: str = "progress+outcome",
    turn_group: str = "task",
    level: str = "turn",
    std: str | None = "sample",
    eps: float = 1e-6,
) -> CreditEstimator:
    """A_k = A_traj + turn_weight A_turn.

        r_k = c (Phi_k - Phi_{k-1})            Phi the fraction of acceptance checks passed
        S = R + sum_k r_k ;  A_traj = (S - mean) / (std + eps) over the episodes of the task
        G_k = sum_{k' >= k} gamma^(k' - k) r_k'  (+ R at the last turn)
        A_turn = G_k - mean over all turns of all episodes of the task

    Ma et al., arXiv 2609.27532, Section 3.3. After a turn that made progress, the credit of
    the next turn falls by exactly the progress reward just earned.

    The ablation ``level="token"`` puts tokens in the place of turns: r_u = r_k / n_k on each of
    the n_k tokens of turn k, R on the episode's last token, G_u the discounted sum from token u
    on, A_u = G_u - mean over all action tokens of the task.

    Args:
      c: weight of progress against the outcome.
      gamma: per turn (per token for "token"); 1 in the paper, smaller values tax length (an
        ablation).
      turn_weight: 0 leaves A_traj alone (the ablation GRPO-Phi).
      turn_return: "progress+outcome", or "progress" to leave R out of G.
      turn_group: "task"; the ablation with a state-grouped baseline compares turns that start at
        the same "progress", or at the same anchor "state", of the task.
      level: "turn" or "token".
      std: of A_traj; "sample" reproduces the paper's worked example.
      eps: added to the standard deviation.

    Reconstructed: that R belongs to G_k rests on a digest of the paper; eps is not printed; where
    R lies for "token"; "progress" takes equal fractions for equal sets of passed checks.
    """
    positive("c", c)
    choice("turn_return", turn_return, ("progress+outcome", "progress"))
    choice("turn_group", turn_group, ("task", "state", "progress"))
    choice("level", level, ("turn", "token"))
    if level == "token" and turn_group != "task":
        raise ValueError(f'turn_group={turn_group!r} compares turns; it needs level="turn"')
    progress, outcome = progress_reward(c), outcome_reward()
    trajectory = chain(
        add(outcome, progress),
        group_normalise(by=("task",), over="episodes", std=std, eps=eps),
        broadcast(),
    )
    if level == "turn":
        reward = progress if turn_return == "progress" else add(outcome, progress)
        by = ("task",) if turn_group == "task" else ("task", turn_group)
        compare = group_normalise(by=by, over="steps", std=None)
        turn = chain(reward, discounted_return(gamma), compare, broadcast())
    else:
        reward = chain(progress, spread_rewards())
        if turn_return == "progress+outcome":
            reward = add(reward, chain(outcome, token_rewards()))
        turn = chain(reward, token_returns(gamma), centre_tokens())
    both = trajectory if turn_weight == 0 else add(trajectory, scale(turn_weight, turn))
    return estimator("procredit", both)
