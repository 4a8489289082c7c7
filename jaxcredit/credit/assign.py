"""Credit from plain arrays: no tokens, no model, no batch to build."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcredit.credit.algebra import CreditEstimator, shape_problem
from jaxcredit.credit.registry import make
from jaxcredit.episodes import SIGNAL_AXES, Credit, EpisodeBatch, Kind, Signals, Status


def assign(
    estimator: str | CreditEstimator,
    *,
    task: Any,
    outcome: Any,
    n_steps: Any,
    success: Any = None,
    state: Any = None,
    action: Any = None,
    action_valid: Any = None,
    progress: Any = None,
    step_reward: Any = None,
    behaviour_logp: Any = None,
    **signals: Any,
) -> Credit:
    """Credit of N episodes of up to K steps, from NumPy or JAX arrays.

    Each step is taken as one action token, so a token-level method works on steps. The
    estimator's state is fresh: a running baseline is the mean outcome of these episodes.

    Args:
      estimator: a method's name (its defaults hold) or a CreditEstimator.
      task: [N] int, group ids. outcome: [N] in [0, 1]. n_steps: [N] int in 1..K.
      success: [N] bool.
      state, action: [N, K] int, equal ids for equal states (before the action) and for equal
        actions of one task.
      action_valid: [N, K] bool, whether the environment accepted the action; all, if left out.
      progress: [N, K + 1], fraction of checks passed before the first and after each step.
      step_reward: [N, K], the outcome not included.
      behaviour_logp: [N, K], log-probabilities under the policy that sampled.
      signals: what a model said, by the names and shapes of ``Signals``; what is [B, T] there is
        [N, K] here, a mean over the step's tokens: logp, value, step_graph, ...

    Entries from n_steps on are never looked at. Raises ValueError if a signal that the
    estimator needs is missing, if one does not exist, or if a shape does not fit.
    """
    chosen = _named(estimator) if isinstance(estimator, str) else estimator
    for name in signals:
        if name not in SIGNAL_AXES:
            raise ValueError(f"there is no signal {name!r}; there are {', '.join(SIGNAL_AXES)}")
    given = {
        "success": success,
        "state": state,
        "action": action,
        "progress": progress,
        "step_reward": step_reward,
        "behaviour_logp": behaviour_logp,
        **signals,
    }
    for need in sorted(chosen.needs - {"action_valid"}):
        if given.get(need) is None:
            raise ValueError(
                f"estimator {chosen.name!r} needs the signal {need!r}, which is missing; "
                f"pass {need}=..."
            )
    given["action_valid"] = action_valid
    task, outcome, n_steps = jnp.asarray(task), jnp.asarray(outcome, float), jnp.asarray(n_steps)
    given = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    k = _steps(given, n_steps)
    n = _check_shapes({"task": task, "outcome": outcome, "n_steps": n_steps} | given, k)
    _check_lengths(n_steps, k)
    return _compiled(chosen)(*_batch(task, outcome, n_steps, given, n, k), chosen.init())[0]


_named = functools.cache(make)


@functools.lru_cache(maxsize=32)
def _compiled(estimator: CreditEstimator) -> Callable[..., tuple[Credit, Any]]:
    return jax.jit(estimator.estimate)


def _batch(
    task: Array, outcome: Array, n_steps: Array, given: dict[str, Array], n: int, k: int
) -> tuple[EpisodeBatch, Signals]:
    valid = jnp.arange(k) < n_steps[:, None]
    rows = jnp.broadcast_to(jnp.arange(n)[:, None], (n, k))
    columns = jnp.broadcast_to(jnp.arange(k), (n, k))
    zero = jnp.zeros((n, k))
    whole = jnp.zeros((n, k), jnp.int32)
    batch = EpisodeBatch(
        tokens=whole,
        kind=jnp.where(valid, int(Kind.ACTION), int(Kind.PAD)),
        step=jnp.where(valid, columns, -1),
        episode=jnp.where(valid, rows, -1),
        position=columns,
        segment=whole,
        behaviour_logp=given.get("behaviour_logp", zero).astype(float),
        trainable=valid,
        step_mask=valid,
        step_reward=given.get("step_reward", zero).astype(float),
        progress=given.get("progress", jnp.zeros((n, k + 1))).astype(float),
        state=given.get("state", whole),
        action=given.get("action", whole),
        action_valid=given.get("action_valid", jnp.ones((n, k), bool)).astype(bool),
        task=task,
        outcome=outcome,
        success=given.get("success", jnp.zeros(n, bool)).astype(bool),
        status=jnp.full((n,), int(Status.FAILURE)),
        n_steps=n_steps,
        weight=jnp.ones(n),
    )
    signals = {name: x.astype(float) for name, x in given.items() if name in SIGNAL_AXES}
    return batch, Signals(**signals)


def _axes(name: str) -> str:
    tables = {"task": "N", "outcome": "N", "n_steps": "N", "success": "N", "progress": "N K+1"}
    return tables.get(name) or SIGNAL_AXES.get(name, "N K").replace("B T", "N K")


def _steps(given: dict[str, Array], n_steps: Array) -> int:
    # Arrays with an entry more than there are steps are asked last.
    for name, x in sorted(given.items(), key=lambda item: "K+1" in _axes(item[0])):
        letters = _axes(name).split()
        if len(letters) == x.ndim > 1:
            return int(x.shape[letters.index("K")] if "K" in letters else x.shape[-1] - 1)
    if isinstance(n_steps, jax.core.Tracer):
        raise ValueError(
            "assign() inside jit cannot tell the number of steps from a traced n_steps; "
            "pass at least one [N, K] array"
        )
    return max(int(n_steps.max(initial=1)), 1)


def _check_shapes(arrays: dict[str, Array], k: int) -> int:
    if arrays["outcome"].ndim != 1:
        raise ValueError(f"outcome has shape {list(arrays['outcome'].shape)}, expected [N]")
    n = int(arrays["outcome"].shape[0])
    sizes = {"N": n, "K": k, "K+1": k + 1, "2": 2}
    for name, x in arrays.items():
        if problem := shape_problem(x.shape, _axes(name), sizes):
            raise ValueError(f"{name} {problem}")
    return n


def _check_lengths(n_steps: Array, k: int) -> None:
    if isinstance(n_steps, jax.core.Tracer):
        return
    lengths = np.asarray(n_steps)
    for index in np.flatnonzero((lengths < 1) | (lengths > k)):
        raise ValueError(
            f"n_steps[{index}] = {lengths[index]} must lie in 1..K = {k}; "
            "leave out episodes without steps"
        )
