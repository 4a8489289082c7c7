"""Ragged episodes to static arrays, and arrays to micro-batches of similar length.

Masks come from lengths and from the ``sampled`` bits, never from token ids: a pad id that
equals a stop id changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxcredit.episodes import Episode, EpisodeBatch, Kind, Status, as_fields

_TOKEN_FIELDS = (
    "tokens",
    "kind",
    "step",
    "episode",
    "position",
    "segment",
    "behaviour_logp",
    "trainable",
)
_TOKEN_FILL = {"episode": -1, "step": -1}


@dataclasses.dataclass(frozen=True)
class Row:
    """The tokens of one model input, before padding."""

    tokens: np.ndarray
    kind: np.ndarray
    step: np.ndarray
    behaviour_logp: np.ndarray
    sampled: np.ndarray


def episode_rows(episode: Episode, *, hindsight: bool = False) -> list[Row]:
    """The token rows of an episode: one for a conversation, one per step for windows.

    With ``hindsight`` each step's context is replaced by its outcome-augmented form; the
    response ids stay those that were sampled.
    """
    parts: list[list[tuple[np.ndarray, ...]]] = []
    for k, step in enumerate(episode.steps):
        context = np.asarray(step.context_ids, np.int32)
        start, end = step.observation_span
        if hindsight and step.hindsight_ids is not None:
            context, (start, end) = np.asarray(step.hindsight_ids, np.int32), (0, 0)
        kind = np.full(len(context), Kind.CONTEXT, np.int32)
        owner = np.full(len(context), k, np.int32)
        kind[start:end] = Kind.OBSERVATION
        owner[start:end] = k - 1  # an observation belongs to the step that caused it
        blank = np.zeros(len(context), np.float32)
        response = np.asarray(step.response_ids, np.int32)
        piece: list[tuple[np.ndarray, ...]] = [
            (context, kind, owner, blank, blank.astype(bool)),
            (
                response,
                np.full(len(response), Kind.ACTION, np.int32),
                np.full(len(response), k, np.int32),
                np.asarray(step.behaviour_logp, np.float32),
                np.asarray(step.sampled, bool),
            ),
        ]
        if episode.context == "conversation" and parts:
            parts[0].extend(piece)
        else:
            parts.append(piece)
    return [Row(*(np.concatenate(column) for column in zip(*row, strict=True))) for row in parts]


def batch_episodes(
    episodes: Sequence[Episode],
    *,
    max_steps: int,
    pad_id: int = 0,
    length_multiple: int = 128,
    hindsight: bool = False,
    groups: int | None = None,
) -> EpisodeBatch:
    """Builds an ``EpisodeBatch`` of NumPy arrays.

    Args:
      episodes: N episodes; those with status ENV_ERROR get weight 0.
      max_steps: K, the padded number of steps.
      pad_id: token id of padding (its value never matters).
      length_multiple: rows are padded to a multiple of this many tokens.
      hindsight: build the outcome-augmented rows instead.
      groups: if given, assert that each of the task groups holds this many episodes.

    Raises:
      ValueError: an episode has no step or more than ``max_steps``, or a group is incomplete.
    """
    n = len(episodes)
    if n == 0:
        raise ValueError("batch_episodes: no episodes; collect at least one before batching")
    if groups is not None:
        ids, counts = np.unique([e.group for e in episodes], return_counts=True)
        if (counts != groups).any():
            odd = ids[counts != groups][0]
            raise ValueError(
                f"batch_episodes: group {odd} has {counts[counts != groups][0]} episodes, "
                f"expected {groups}; a group is the attempts at one task"
            )
    rows: list[tuple[int, Row]] = []
    tables = {
        "step_mask": np.zeros((n, max_steps), bool),
        "step_reward": np.zeros((n, max_steps), np.float32),
        "progress": np.zeros((n, max_steps + 1), np.float32),
        "state": np.full((n, max_steps), -1, np.int32),
        "action": np.full((n, max_steps), -1, np.int32),
        "action_valid": np.zeros((n, max_steps), bool),
    }
    state_ids: dict[tuple[int, str], int] = {}
    action_ids: dict[tuple[int, str | None], int] = {}
    for i, episode in enumerate(episodes):
        k = len(episode.steps)
        spoiled = episode.status == Status.ENV_ERROR
        if k > max_steps or (k == 0 and not spoiled):
            raise ValueError(
                f"batch_episodes: episode {i} ({episode.task_id}) has {k} steps, expected 1 to "
                f"max_steps={max_steps}"
            )
        tables["step_mask"][i, :k] = True
        tables["step_reward"][i, :k] = [s.reward for s in episode.steps]
        progress = [episode.initial_progress, *(s.progress for s in episode.steps)]
        tables["progress"][i, : k + 1] = progress
        tables["progress"][i, k + 1 :] = progress[-1]
        tables["action_valid"][i, :k] = [s.valid for s in episode.steps]
        tables["state"][i, :k] = [
            state_ids.setdefault((episode.group, s.state), len(state_ids)) for s in episode.steps
        ]
        tables["action"][i, :k] = [
            action_ids.setdefault((episode.group, s.action), len(action_ids)) for s in episode.steps
        ]
        if k:
            rows.extend((i, row) for row in episode_rows(episode, hindsight=hindsight))

    if not rows:
        raise ValueError("batch_episodes: every episode ended in an environment error")
    longest = max(len(row.tokens) for _, row in rows)
    width = -(-longest // length_multiple) * length_multiple
    shape = (len(rows), width)
    arrays = {
        "tokens": np.full(shape, pad_id, np.int32),
        "kind": np.full(shape, Kind.PAD, np.int32),
        "step": np.full(shape, -1, np.int32),
        "episode": np.full(shape, -1, np.int32),
        "position": np.zeros(shape, np.int32),
        "segment": np.zeros(shape, np.int32),
        "behaviour_logp": np.zeros(shape, np.float32),
        "trainable": np.zeros(shape, bool),
    }
    for b, (i, row) in enumerate(rows):
        t = len(row.tokens)
        arrays["tokens"][b, :t] = row.tokens
        arrays["kind"][b, :t] = row.kind
        arrays["step"][b, :t] = row.step
        arrays["episode"][b, :t] = i
        arrays["position"][b, :t] = np.arange(t)
        arrays["segment"][b, :t] = 1
        arrays["behaviour_logp"][b, :t] = row.behaviour_logp
        arrays["trainable"][b, :t] = row.sampled
    episode_tables = {
        "task": np.array([e.group for e in episodes], np.int32),
        "outcome": np.array([e.outcome for e in episodes], np.float32),
        "success": np.array([e.success for e in episodes], bool),
        "status": np.array([e.status for e in episodes], np.int32),
        "n_steps": np.array([len(e.steps) for e in episodes], np.int32),
        "weight": np.array([e.status != Status.ENV_ERROR for e in episodes], np.float32),
    }
    return EpisodeBatch(**as_fields({**arrays, **tables, **episode_tables}))


@dataclasses.dataclass(frozen=True)
class Slice:
    """Rows that are computed together: ``rows[:n]`` are real, the rest repeat row 0's padding."""

    rows: np.ndarray
    n: int
    width: int

    def take(self, array: np.ndarray, fill: float | int | bool = 0) -> np.ndarray:
        """``array[rows, :width]`` with padding rows filled; further axes are kept."""
        out = np.full((len(self.rows), self.width, *array.shape[2:]), fill, array.dtype)
        keep = min(self.width, array.shape[1])
        out[: self.n, :keep] = array[self.rows[: self.n], :keep]
        return out


def length_slices(
    lengths: np.ndarray,
    *,
    tokens: int,
    buckets: Sequence[int],
    rows: np.ndarray | None = None,
    multiple: int = 1,
) -> Iterator[Slice]:
    """Cuts rows into slices of equal width, longest first.

    A slice takes the width of the smallest bucket that holds the longest row that is left, and as
    many of the longest rows as the budget allows: rows of one slice are of similar length and every
    slice but the last is full. A slice of width w has tokens // w rows, rounded down to a multiple,
    so that each width has one static shape.

    Args:
      lengths: [B] real tokens per row.
      tokens: token budget of a slice, padding included.
      buckets: increasing widths; the last must hold the longest row.
      rows: which rows to cut (default: all).
      multiple: the number of rows is a multiple of this, and at least this.

    Raises:
      ValueError: a row is longer than the last bucket.
    """
    rows = np.arange(len(lengths)) if rows is None else np.asarray(rows)
    edges = np.asarray(sorted(buckets))
    if len(rows) and lengths[rows].max() > edges[-1]:
        raise ValueError(
            f"length_slices: a row has {lengths[rows].max()} tokens, the last bucket "
            f"{edges[-1]}; add a larger bucket"
        )
    left = rows[np.argsort(-lengths[rows], kind="stable")]
    while len(left):
        width = int(edges[np.searchsorted(edges, lengths[left[0]])])
        size = max(1, tokens // (width * multiple)) * multiple
        part, left = left[:size], left[size:]
        yield Slice(np.concatenate([part, np.repeat(part[:1], size - len(part))]), len(part), width)


def row_lengths(batch: EpisodeBatch) -> np.ndarray:
    """[B] real tokens per row."""
    lengths: np.ndarray = np.asarray(batch.segment > 0).sum(axis=1)
    return lengths


def take_rows(batch: EpisodeBatch, part: Slice) -> dict[str, np.ndarray]:
    """The token arrays of a slice, by field name; padding rows are all padding."""
    return {
        name: part.take(np.asarray(getattr(batch, name)), _TOKEN_FILL.get(name, 0))
        for name in _TOKEN_FIELDS
    }
