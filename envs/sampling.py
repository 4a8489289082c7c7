"""What a rollout needs of whatever samples: rows of ids in slots, responses that grow by blocks.

``models.sampler`` implements it in this process, ``envs.engine`` with a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

# What a response is sampled under: (iteration, group, replica, turn).
Key = tuple[int, int, int, int]


class Generated(Protocol):
    """A sampled response.

    Attributes:
      ids: at least one id; a stop id only as the last one.
      logp: log-probability of each id as it was sampled.
      stop: "stop" if the last id is a stop id, "string" if it completes a stop string, else
        "length".
    """

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def logp(self) -> np.ndarray: ...

    @property
    def stop(self) -> str: ...


class Work(Protocol):
    """What a sampler did so far: tokens prefilled, taken over from cached rows, and decoded; rows
    that decode steps computed, used or not; seconds of prefill and of decoding."""

    @property
    def prefilled(self) -> int: ...

    @property
    def reused(self) -> int: ...

    @property
    def decoded(self) -> int: ...

    @property
    def computed(self) -> int: ...

    @property
    def prefill_s(self) -> float: ...

    @property
    def decode_s(self) -> float: ...


class Sampler(Protocol):
    """Rows of ids in slots 0 to ``slots`` - 1. What a response is depends on the slot's ids and
    the response's key, not on the slot or its company."""

    @property
    def slots(self) -> int: ...

    @property
    def work(self) -> Work: ...

    def reset(self, slot: int) -> None:
        """Empties a slot."""
        ...

    def extend(self, requests: Mapping[int, np.ndarray]) -> None:
        """Appends ids to slots."""
        ...

    def start(self, requests: Mapping[int, tuple[Key, int]]) -> None:
        """Begins one response per slot: its key, and the largest number of its tokens."""
        ...

    def launch(self) -> None:
        """Lets responses grow, and returns at once."""
        ...

    def collect(self) -> Mapping[int, Generated]:
        """Waits a little while for what was launched; returns the responses that ended.

        Their ids are part of their slots' rows.
        """
        ...
