"""Which cached tokens a new row of ids can take over; host bookkeeping of the sampler.

A slot's *clean* tokens are those at its front that were prefilled, not decoded: their keys and
values are the same whoever computed them, so any other row that begins with these ids may copy
them. They stay usable after the slot was reset, until another row takes the slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

_WORTH = 8  # shorter prefixes are prefilled again


@dataclasses.dataclass(frozen=True)
class Placement:
    """Slot ``slot`` holds the first ``start`` tokens of ``source``, and ``ids`` are to follow."""

    slot: int
    source: int
    start: int
    ids: np.ndarray


class Residents:
    """The ids in every slot.

    Args:
      slots: number of slots.
      capacity: tokens per slot.
      share: look for common prefixes; without it every row is prefilled whole.
    """

    def __init__(self, slots: int, capacity: int, *, share: bool = True) -> None:
        self.share = share
        self.length = np.zeros(slots, np.int64)
        self._clean = np.zeros(slots, np.int64)
        self._tokens = np.zeros((slots, capacity), np.int32)

    def reset(self, slot: int) -> None:
        """Empties a slot."""
        self.length[slot] = 0

    def append(self, slot: int, ids: np.ndarray) -> None:
        """Notes ids that were decoded into a slot."""
        end = self.length[slot] + len(ids)
        self._tokens[slot, self.length[slot] : end] = ids
        self.length[slot] = end

    def place(self, requests: Mapping[int, np.ndarray]) -> list[list[Placement]]:
        """Plans how ids get into their slots, and takes note of them.

        Args:
          requests: slot -> ids to append. An empty slot begins a new row, which may take over
            the longest prefix that any slot holds, or another new row of the same call.

        Returns:
          levels: the placements of one level may be carried out together, after those of the
          levels before.

        Raises:
          ValueError: a slot would grow beyond the capacity.
        """
        capacity = self._tokens.shape[1]
        for slot, ids in requests.items():
            total = int(self.length[slot]) + len(ids)
            if total > capacity:
                raise ValueError(
                    f"slot {slot} would hold {total} tokens, its cache {capacity}; "
                    "raise prompt.max_context or end the episode earlier"
                )
        wanted = {s: np.asarray(ids, np.int32) for s, ids in requests.items() if len(ids)}
        new = [slot for slot in wanted if self.length[slot] == 0]
        # What a new row replaces is nobody's source; what it brings is, one level later.
        level = np.zeros(len(self.length), np.int64)
        usable = np.ones(len(self.length), bool)
        usable[new] = False
        levels: dict[int, list[Placement]] = {}
        for slot, ids in wanted.items():
            start = int(self.length[slot])
            if start:
                levels.setdefault(0, []).append(Placement(slot, slot, start, ids))
                end = start + len(ids)
                self._tokens[slot, start:end] = ids
                if self._clean[slot] == start:
                    self._clean[slot] = end
                self.length[slot] = end
                continue
            source, start = self._longest(slot, ids, usable, level)
            at = 0 if source == slot else int(level[source])
            levels.setdefault(at, []).append(Placement(slot, source, start, ids[start:]))
            self._tokens[slot, : len(ids)] = ids
            self._clean[slot] = self.length[slot] = len(ids)
            usable[slot], level[slot] = True, at + 1
        return [levels[at] for at in sorted(levels)]

    def _longest(
        self, slot: int, ids: np.ndarray, usable: np.ndarray, level: np.ndarray
    ) -> tuple[int, int]:
        """The slot with the longest usable prefix of ``ids``, and its length; the last id is
        always left, because its hidden state is needed."""
        if not self.share:
            return slot, 0
        mine = usable.copy()
        mine[slot] = True
        longest = min(len(ids) - 1, int(self._clean[mine].max()))
        if longest < _WORTH:
            return slot, 0
        differ = self._tokens[:, :longest] != ids[None, :longest]
        common = np.where(differ.any(axis=1), differ.argmax(axis=1), longest)
        common = np.where(mine, np.minimum(common, self._clean), -1)
        # Among equals: the slot itself, then what is there already, then the earliest.
        order = np.lexsort((np.arange(len(level)) != slot, level, -common))
        best = int(order[0])
        if common[slot] == common[best]:
            best = slot
        return (best, int(common[best])) if common[best] >= _WORTH else (slot, 0)
