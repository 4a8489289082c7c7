"""Scoring passes: what the policy says about finished episodes, signal by signal.

Only the signals an estimator declares are computed. Rows are cut into slices of similar length,
one compiled program per width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from jaxcredit import heads
from jaxcredit.batching import length_slices, row_lengths, take_rows
from jaxcredit.episodes import EpisodeBatch, Signals, as_fields
from models.policy import Policy, message_steps
from models.sharding import place_rows
from models.step_graph import Capture


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """How scoring is cut.

    Attributes:
      buckets: row widths, increasing; the last holds the longest row.
      tokens: token budget of one device call.
      layers: captured layers of the step graph.
    """

    buckets: tuple[int, ...]
    tokens: int
    layers: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def scoring_program(policy: Policy, layers: tuple[int, ...], n_steps: int, head: bool) -> Any:
    """Jitted scoring of one slice; ``layers`` empty: no graph; ``head`` False: graph only."""

    def run(trainable: Any, frozen: Any, rows: dict[str, Any]) -> Any:
        capture = None
        if layers:
            action, observation = message_steps(rows["kind"], rows["step"])
            capture = Capture(layers, n_steps, action, observation)
        hidden, graph = policy.hidden(
            trainable, frozen, rows["tokens"], rows["position"], rows["segment"], capture
        )
        if not head:
            return None, graph
        output = policy.read(trainable, frozen, hidden, rows["tokens"], rows["trainable"])
        if policy.reward_model:
            row = (rows["tokens"], rows["position"], rows["segment"], rows["trainable"])
            reward_logp = policy.reward_logp(trainable, frozen, *row)
            output = dataclasses.replace(output, reward_logp=reward_logp)
        return output, graph

    return jax.jit(run)


def score(
    policy: Policy,
    trainable: Any,
    frozen: Any,
    batch: EpisodeBatch,
    config: ScoreConfig,
    *,
    step_graph: bool = False,
    head: bool = True,
) -> Signals:
    """Log-probabilities of trainable tokens, and whatever else the policy has: values, entropies,
    the signals of its step heads, and its reward model's log-probabilities.

    Args:
      policy: the static half of the policy.
      trainable: its trained weights.
      frozen: its frozen weights, or None.
      batch: the episodes.
      config: how to cut.
      step_graph: also capture the step graph; rows must be whole conversations.
      head: False skips all but the graph, for callers that need it alone.

    Raises:
      ValueError: a step graph was asked for but an episode is spread over several rows.
    """
    rows, width = np.shape(batch.tokens)
    n, k = np.shape(batch.step_mask)
    owner = np.asarray(batch.episode).max(axis=1)  # the one episode of each row
    if step_graph and len(np.unique(owner)) != rows:
        raise ValueError(
            "the step graph needs one row per episode; set prompt.context=conversation"
        )
    layers = config.layers if step_graph else ()
    program = scoring_program(policy, layers, k, head)
    arrays: dict[str, np.ndarray] = {}
    graph = np.zeros((n, len(layers), 2, k, k), np.float32) if step_graph else None
    mesh = policy.mesh
    for part in length_slices(
        row_lengths(batch),
        tokens=config.tokens,
        buckets=config.buckets,
        multiple=1 if mesh is None else mesh.shape["data"],
    ):
        output, part_graph = program(trainable, frozen, place_rows(take_rows(batch, part), mesh))
        chosen = part.rows[: part.n]
        if output is not None:
            said = ("logp", "value", "entropy", "reward_logp")
            named = {name: getattr(output, name) for name in said}
            for name, values in {**named, **(output.heads or {})}.items():
                if values is None:
                    continue
                if name not in arrays:
                    arrays[name] = np.zeros((rows, width, *values.shape[2:]), np.float32)
                keep = min(width, part.width)
                arrays[name][chosen, :keep] = np.asarray(values)[: part.n, :keep]
        if graph is not None:
            graph[owner[chosen]] = np.asarray(part_graph)[: part.n]
    for name in arrays.keys() & heads.STEP_HEADS.keys():
        arrays[name] = heads.to_steps(batch, heads.read_tokens(batch, name), arrays[name])
    if graph is not None:
        arrays["step_graph"] = graph
    return Signals(**as_fields(arrays))


def buckets_for(longest: int, *, multiple: int = 128, growth: float = 1.2) -> tuple[int, ...]:
    """Row widths from ``multiple`` up to one that holds ``longest``, all multiples of ``multiple``.

    Each is ``growth`` times the one before, rounded up: few programs, and little padding for rows
    of any length.
    """
    top = -(-longest // multiple)
    steps = [1]
    while steps[-1] < top:
        steps.append(min(top, max(steps[-1] + 1, math.ceil(steps[-1] * growth))))
    return tuple(multiple * s for s in steps)
