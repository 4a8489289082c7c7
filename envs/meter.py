"""What a rollout counts while it runs: episodes, tokens, occupancy of the slots, time by kind."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator

from envs.sampling import Work


@dataclasses.dataclass
class Meter:
    """Counters of one rollout; read them at any time.

    Attributes:
      jobs, done: episodes to play, and finished.
      slots, held: slots, and those that hold an episode now.
      failures: environment failures by what they cost: "retried" (the episode began again),
        "displaced" (it began again because another episode's environment took its worker along),
        "given_up" (status ENV_ERROR).
      shortened: windows that lost history to fit prompt.max_context.
      environment_s: seconds spent on environments' texts: sending, receiving, tokenising.
      waiting_s: seconds in which no response was growing and every episode waited for its
        environment.
      held_s, slot_s: integrals over time of ``held`` and ``slots``.
    """

    jobs: int = 0
    done: int = 0
    slots: int = 0
    held: int = 0
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    shortened: int = 0
    environment_s: float = 0.0
    waiting_s: float = 0.0
    held_s: float = 0.0
    slot_s: float = 0.0
    seconds: float = 0.0
    _work: Work | None = None
    _before: tuple[float, ...] = ()
    _last: float = 0.0

    def begin(self, jobs: int, slots: int, work: Work) -> None:
        """Starts the clock; ``work`` is the sampler's own count, earlier rollouts included."""
        self.jobs, self.slots, self._work = jobs, slots, work
        self._before = _numbers(work)
        self._last = time.perf_counter()

    def tick(self, held: int) -> None:
        """Notes how many slots hold an episode from now on."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.seconds += passed
        self.held_s += passed * self.held
        self.slot_s += passed * self.slots
        self.held = held

    @contextlib.contextmanager
    def timed(self, waiting: bool = False) -> Iterator[None]:
        """Adds the time inside to ``environment_s``, or to ``waiting_s``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - began
            if waiting:
                self.waiting_s += passed
            else:
                self.environment_s += passed

    def metrics(self) -> dict[str, float]:
        """Everything as numbers, under the names of the metrics file."""
        prefilled, reused, decoded, computed, prefill_s, decode_s = self.work()
        return {
            "rollout/prefilled_tokens": prefilled,
            "rollout/reused_tokens": reused,
            "rollout/sampled_tokens": decoded,
            "rollout/tokens_per_second": decoded / self.seconds if self.seconds else 0.0,
            "rollout/occupancy": self.held_s / self.slot_s if self.slot_s else 0.0,
            "rollout/decode_efficiency": decoded / computed if computed else 0.0,
            "rollout/prefill_seconds": prefill_s,
            "rollout/decode_seconds": decode_s,
            "rollout/environment_seconds": self.environment_s,
            "rollout/waiting_seconds": self.waiting_s,
            "rollout/shortened_windows": float(self.shortened),
            **{
                f"rollout/episodes_{what}": float(self.failures[what])
                for what in ("retried", "displaced", "given_up")
            },
        }

    def work(self) -> tuple[float, ...]:
        """The sampler's counters since ``begin``, in the order of ``Work``."""
        if self._work is None:
            return (0.0,) * 6
        return tuple(a - b for a, b in zip(_numbers(self._work), self._before, strict=True))

    def line(self) -> str:
        """Speed, occupancy and the split of the time, for a progress line."""
        _, _, decoded, _, prefill_s, decode_s = self.work()
        parts = {
            "prefill": prefill_s,
            "decode": decode_s,
            "environment": self.environment_s,
            "waiting": self.waiting_s,
        }
        total = sum(parts.values()) or 1.0
        split = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in parts.items())
        speed = decoded / self.seconds if self.seconds else 0.0
        return f"{speed:.0f} tokens/s, {self.held}/{self.slots} slots; {split}"


def _numbers(work: Work) -> tuple[float, ...]:
    return (
        work.prefilled,
        work.reused,
        work.decoded,
        work.computed,
        work.prefill_s,
        work.decode_s,
    )
