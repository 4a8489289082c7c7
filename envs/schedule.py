"""Slots, episodes and environments in motion: who waits for whom, and who is next.

Every slot that is in use is in one of three states: its episode waits for the environment, is
ready (its next ids are known), or has a response growing. Between two decode blocks, answers are
taken in, what is ready is prefilled, and free slots take the next episodes. Nobody waits for
anybody else's environment.

Nothing here knows about tokens or texts, and no decision changes what an episode is: that depends
on its sampling keys and its environment alone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from envs.meter import Meter
from envs.protocol import EnvFailure, Observation
from envs.sampling import Generated, Key, Sampler
from jaxcredit.episodes import Status

_PATIENCE = 1.0  # seconds per look at the pool when nothing else is to be done


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an episode wants sampled: ids to append (``fresh``: to an emptied row), key, length."""

    ids: np.ndarray
    fresh: bool
    key: Key
    most: int


# What an episode does next: have a response sampled, act in its environment, or end.
Next = Turn | str | Status


class Playable(Protocol):
    """An episode as the schedule sees it. ``ticket`` is its number, unique in the rollout."""

    @property
    def ticket(self) -> int: ...

    @property
    def task_id(self) -> str: ...

    def restart(self) -> None:
        """Forgets what was played."""
        ...

    def observe(self, observation: Observation) -> Next:
        """Takes in the environment's answer to the reset, or to the last action."""
        ...

    def respond(self, generated: Generated) -> Next:
        """Takes in the response to the last turn."""
        ...


class Environments(Protocol):
    """What the schedule needs of ``envs.pool.Pool``."""

    def reset(self, ticket: int, task_id: str) -> None: ...

    def step(self, ticket: int, action: str) -> None: ...

    def close(self, ticket: int) -> None: ...

    def poll(self, timeout: float = 0.0) -> Mapping[int, Observation | EnvFailure]: ...


def play(
    episodes: Iterable[Playable],
    sampler: Sampler,
    pool: Environments,
    *,
    retries: int,
    meter: Meter,
    finished: Callable[[Playable, Status], None],
) -> None:
    """Plays every episode once.

    Args:
      episodes: in the order in which they get slots.
      sampler: holds the policy.
      pool: holds the environments.
      retries: how often an episode that its environment spoiled starts again. One that lost its
        environment to another episode's fault starts again uncounted.
      meter: counts; its clock runs already.
      finished: called once per episode, with how it ended.
    """
    queue = collections.deque(episodes)
    free = collections.deque(range(sampler.slots))
    held: dict[int, Playable] = {}  # by slot
    slot_of: dict[int, int] = {}  # by ticket
    spoiled: collections.Counter[int] = collections.Counter()
    growing: set[int] = set()  # slots
    ready: dict[int, Turn] = {}

    def move(slot: int, then: Next) -> None:
        episode = held[slot]
        if isinstance(then, Turn):
            ready[slot] = then
        elif isinstance(then, Status):
            pool.close(episode.ticket)
            sampler.reset(slot)
            del held[slot], slot_of[episode.ticket]
            free.append(slot)
            finished(episode, then)
        else:
            pool.step(episode.ticket, then)

    def begin(slot: int) -> None:
        episode = held[slot]
        sampler.reset(slot)
        pool.reset(episode.ticket, episode.task_id)

    def fail(slot: int, failure: EnvFailure) -> None:
        episode = held[slot]
        spoiled[episode.ticket] += failure.own
        if spoiled[episode.ticket] > retries:
            meter.failures["given_up"] += 1
            move(slot, Status.ENV_ERROR)
            return
        meter.failures["retried" if failure.own else "displaced"] += 1
        pool.close(episode.ticket)
        episode.restart()
        begin(slot)

    while queue or held:
        with meter.timed():
            while free and queue:
                slot, episode = free.popleft(), queue.popleft()
                held[slot], slot_of[episode.ticket] = episode, slot
                begin(slot)
        meter.tick(len(held))
        sampler.launch()
        with meter.timed(waiting=not growing):
            answers = pool.poll(0.0 if growing else _PATIENCE)
        with meter.timed():
            for ticket in sorted(answers):
                answer, slot = answers[ticket], slot_of[ticket]
                if isinstance(answer, EnvFailure):
                    fail(slot, answer)
                else:
                    move(slot, held[slot].observe(answer))
        ended = sampler.collect()
        with meter.timed():
            for slot, generated in ended.items():
                growing.remove(slot)
                move(slot, held[slot].respond(generated))
        if ready:
            for slot, turn in ready.items():
                if turn.fresh:
                    sampler.reset(slot)
            sampler.extend({slot: turn.ids for slot, turn in ready.items()})
            sampler.start({slot: (turn.key, turn.most) for slot, turn in ready.items()})
            growing |= ready.keys()
            ready.clear()
        meter.tick(len(held))
