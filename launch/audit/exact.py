"""Exact values, advantages, posteriors and policy gradients of a problem, by dynamic programming.

Steps t = 0 .. H - 1; a value depends on the step because the horizon cuts episodes off.

    Q_t(s, a) = sum_s' P(s' | s, a) V_{t+1}(s') ;  V_t(s) = sum_a pi(a | s) Q_t(s, a)
    V_H = R, and V_t = R at terminal states ;  A_t = Q_t - V_t
    d_t(s) = probability that step t is taken in state s
    dJ / dtheta(s, a) = sum_t d_t(s) pi(a | s) A_t(s, a)            theta the logits of pi
    F_t(s, f) = probability that an episode in s at step t ends in f
    p(a | s, t, f) = pi(a | s) sum_s' P(s' | s, a) F_{t+1}(s', f) / F_t(s, f)
"""

from __future__ import annotations

import dataclasses

import numpy as np

from launch.audit.problems import Problem


@dataclasses.dataclass(frozen=True)
class Exact:
    """The truth about a problem under its policy; float64, letters as above.

    Attributes:
      v: [H + 1, S].
      q: [H, S, A].
      advantage: [H, S, A].
      reach: [H, S], d_t.
      final: [H + 1, S, S], F_t.
      success: J, the expected outcome.
      gradient: [S, A], of J with respect to the logits.
    """

    v: np.ndarray
    q: np.ndarray
    advantage: np.ndarray
    reach: np.ndarray
    final: np.ndarray
    success: float
    gradient: np.ndarray

    def posterior_logp(
        self, problem: Problem, t: np.ndarray, s: np.ndarray, a: np.ndarray, f: np.ndarray
    ) -> np.ndarray:
        """log p(a | s, t, f), elementwise; f must be reachable through a."""
        through = np.einsum("...s,...s->...", problem.transition[s, a], self.final[t + 1, :, f])
        return np.log(problem.policy[s, a]) + np.log(through) - np.log(self.final[t, s, f])


def solve(problem: Problem) -> Exact:
    """Everything in ``Exact``; see the equations above."""
    p, pi, h = problem.transition, problem.policy, problem.horizon
    size = len(problem.states)
    v, q = np.zeros((h + 1, size)), np.zeros((h, size, len(problem.actions)))
    final = np.zeros((h + 1, size, size))
    v[h], final[h] = problem.outcome, np.eye(size)
    for t in range(h - 1, -1, -1):
        q[t] = p @ v[t + 1]
        v[t] = np.where(problem.terminal, problem.outcome, (pi * q[t]).sum(axis=1))
        onward = np.einsum("sa,san,nf->sf", pi, p, final[t + 1])
        final[t] = np.where(problem.terminal[:, None], np.eye(size), onward)
    # A difference of rounding alone is no advantage.
    advantage = np.where(np.abs(q - v[:-1, :, None]) < 1e-12, 0.0, q - v[:-1, :, None])
    reach = np.zeros((h, size))
    going = np.bincount(problem.starts, minlength=size) / len(problem.starts)
    success = float(going @ v[0])
    for t in range(h):
        reach[t] = np.where(problem.terminal, 0.0, going)
        going = np.einsum("s,sa,san->n", reach[t], pi, p)
    gradient = np.einsum("ts,sa,tsa->sa", reach, pi, advantage)
    return Exact(v, q, advantage, reach, final, success, gradient)
