"""How close step credit comes to the true advantage, and its gradient to the true gradient.

Letters: R batches of N episodes with K steps; c the credit of a step, A its true advantage. The
credit is what multiplies the gradient of the step's log-probability: token weight times token
advantage, averaged over the step's action tokens.

An estimator's scale is arbitrary (a learning rate undoes it) and so is a constant added to every
step (a baseline), so both are taken out before credit and advantage are compared step by step:

    z = (c - mean c) / std c ,  a = (A - mean A) / std A          over all steps of all batches

(z = 0 if c does not vary).

An offset that depends on the state alone leaves the expected gradient as it is but counts as bias
here, sign and rank included; ``cosine_mean`` does not see it.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

THRESHOLD = 0.05  # advantages up to this size have no sign worth getting right
_DECIMALS = 5  # float32 differences below this are ties


def standardised(x: np.ndarray) -> np.ndarray:
    """(x - mean) / std of [steps]; zeros if x does not vary beyond rounding."""
    spread = x.std()
    if spread <= 1e-6 * max(1.0, float(np.abs(x).max())):
        return np.zeros_like(x)
    return np.round((x - x.mean()) / spread, _DECIMALS)


def step_measures(
    credit: np.ndarray, advantage: np.ndarray, cells: np.ndarray, half: np.ndarray
) -> dict[str, float | None]:
    """Bias, variance, sign accuracy and rank correlation.

        bias^2   = E[(E[z | cell] - a)^2] ,  variance = E[(z - a)^2] - bias^2

    The two means in the square come from two halves of the batches, which share no episode, so
    that the noise of a cell's mean does not count as bias; the estimate may be a little below 0.
    Cells that one half has not seen are left out of it.

    ``sign`` is the share of steps with |A| > THRESHOLD whose credit has the sign of A, before
    anything is taken out; no credit counts one half. ``rank`` is Spearman's correlation with ties,
    None if the credit does not vary.

    Args:
      credit, advantage: [steps].
      cells: [steps] ids; A is a function of the cell.
      half: [steps] bool, which half of the batches.
    """
    z, a = standardised(credit), standardised(advantage)
    _, cell = np.unique(cells, return_inverse=True)
    gap = z - a
    counts = [np.bincount(cell[side], minlength=cell.max() + 1) for side in (half, ~half)]
    sums = [np.bincount(cell[side], gap[side], len(counts[0])) for side in (half, ~half)]
    seen = (counts[0] > 0) & (counts[1] > 0)
    weight = (counts[0] + counts[1])[seen]
    product = [s[seen] / c[seen] for s, c in zip(sums, counts, strict=True)]
    bias = float(np.average(product[0] * product[1], weights=weight)) if seen.any() else 0.0
    clear = np.abs(advantage) > THRESHOLD
    agreement = np.sign(credit[clear]) * np.sign(advantage[clear])
    return {
        "bias2": bias,
        "variance": float(np.mean(gap**2)) - bias,
        "sign": float(np.mean(0.5 + 0.5 * agreement)) if clear.any() else None,
        "rank": float(stats.spearmanr(z, a).statistic) if z.any() and a.any() else None,
    }


def gradients(
    credit: np.ndarray, mask: np.ndarray, state: np.ndarray, action: np.ndarray, policy: np.ndarray
) -> np.ndarray:
    """[R, S * A]: score-function gradients of the batches for a tabular softmax policy.

        g(s, a) = 1/N sum_i sum_k c_ik ([a_ik = a] - pi(a | s)) [s_ik = s]

    Args:
      credit, mask, state, action: [R, N, K].
      policy: [S, A].
    """
    r, n, _ = credit.shape
    s, a = policy.shape
    c = np.where(mask, credit, 0.0)
    batch = np.arange(r)[:, None, None] * s + state
    taken = np.bincount((batch * a + action).ravel(), c.ravel(), r * s * a).reshape(r, s, a)
    visited = np.bincount(batch.ravel(), c.ravel(), r * s).reshape(r, s, 1)
    return ((taken - visited * policy) / n).reshape(r, s * a)


def gradient_measures(found: np.ndarray, exact: np.ndarray) -> dict[str, float | None]:
    """Direction and noise of batch gradients [R, P] against the exact one [P].

    ``cosine``: mean over batches; a batch whose gradient is zero counts 0. ``cosine_mean``: of the
    mean gradient, the direction that is left when all noise is averaged out. ``snr``:
    |mean|^2 / trace(cov), the mean's own noise trace(cov) / R taken off |mean|^2, not below 0;
    None if no batch has a gradient or all have the same.
    """
    mean = found.mean(axis=0)
    trace = float(found.var(axis=0, ddof=1).sum())
    signal = max(float(mean @ mean) - trace / len(found), 0.0)
    # Below this the batches differ by rounding alone.
    same = trace <= 1e-12 * float(mean @ mean) or not found.any()
    return {
        "cosine": float(np.mean([_cosine(g, exact) for g in found])),
        "cosine_mean": _cosine(mean, exact),
        "snr": None if same else signal / trace,
    }


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size > 0 else 0.0
