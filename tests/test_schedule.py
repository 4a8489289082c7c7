"""The schedule alone, against fake environments and a fake sampler, over many random histories."""

from __future__ import annotations

import collections
import dataclasses
import random

import numpy as np
import pytest

from envs.engine import Response, Work
from envs.meter import Meter
from envs.protocol import EnvFailure
from envs.schedule import Turn, play
from jaxcredit.episodes import Status


class World:
    """Environments and a sampler on one clock; every rule of either side is asserted.

    A random episode: turns (some refused, so that no action follows), latencies, failures.
    """

    def __init__(self, rng, slots, jobs):
        self.rng, self.slots, self.work = rng, slots, Work()
        self.now = 0
        self.due: list[tuple[int, int, object]] = []  # (time, ticket, answer)
        self.open: dict[int, int] = {}  # ticket -> steps taken in this attempt
        self.rows: list[list[int]] = [[] for _ in range(slots)]
        self.growing: dict[int, tuple] = {}  # slot -> (key, blocks left)
        self.launched = False
        self.jobs = jobs

    # --- environments

    def _answer(self, ticket, kind):
        assert all(t != ticket for _, t, _ in self.due), "two requests of one ticket"
        roll = self.rng.random()
        answer = (ticket, self.open[ticket], kind)
        if roll < 0.03:
            answer = EnvFailure(ticket, "broken")
        elif roll < 0.05:
            answer = EnvFailure(ticket, "another's fault", own=False)
        self.due.append((self.now + self.rng.choice((0, 1, 1, 2, 9)), ticket, answer))

    def reset(self, ticket, task_id):
        assert ticket not in self.open
        assert task_id == f"task {ticket}"
        self.open[ticket] = 0
        self._answer(ticket, "reset")

    def step(self, ticket, action):
        assert action == f"act {ticket} {self.open[ticket]}", "another episode's action"
        self.open[ticket] += 1
        self._answer(ticket, "step")

    def close(self, ticket):
        del self.open[ticket]
        self.due = [entry for entry in self.due if entry[1] != ticket]

    def poll(self, timeout):
        if timeout and self.due:
            assert not self.growing, "waits although responses could grow"
            self.now = max(self.now, min(at for at, _, _ in self.due))
        ready = {ticket: answer for at, ticket, answer in self.due if at <= self.now}
        self.due = [entry for entry in self.due if entry[0] > self.now]
        return ready

    # --- sampler

    def reset_slot(self, slot):
        assert slot not in self.growing, "a slot was emptied under a growing response"
        self.rows[slot] = []

    def extend(self, requests):
        for slot, ids in requests.items():
            assert slot not in self.growing
            self.rows[slot].extend(ids.tolist())

    def start(self, requests):
        for slot, (key, most) in requests.items():
            assert slot not in self.growing
            assert self.rows[slot], "a response to nothing"
            self.growing[slot] = (key, most, self.rng.choice((1, 1, 2, 3)))

    def launch(self):
        assert not self.launched
        self.launched = bool(self.growing)

    def collect(self):
        self.now += 1
        self.launched = False
        out = {}
        for slot, (key, most, left) in list(self.growing.items()):
            if left > 1:
                self.growing[slot] = (key, most, left - 1)
                continue
            del self.growing[slot]
            ids = np.asarray([most])  # echoes what was asked for
            out[slot] = Response(ids, np.zeros(1, np.float32), "stop")
            self.rows[slot].append(most)
        return out


class Slots:
    """The sampler's side of a world; ``reset`` means something else on the other side."""

    def __init__(self, world):
        self.slots, self.work, self.reset = world.slots, world.work, world.reset_slot
        self.extend, self.start = world.extend, world.start
        self.launch, self.collect = world.launch, world.collect


@dataclasses.dataclass
class Episode:
    """Knows its own row, and asserts that nobody else's ids got in."""

    ticket: int
    turns: int
    world: World
    window: bool
    row: list[int] = dataclasses.field(default_factory=list)
    played: int = 0
    restarts: int = 0

    @property
    def task_id(self):
        return f"task {self.ticket}"

    def restart(self):
        self.restarts += 1
        self.row, self.played = [], 0

    def _turn(self):
        ids = np.asarray([1000 * self.ticket + self.played])
        self.row = ids.tolist() if self.window else [*self.row, *ids.tolist()]
        fresh = self.window or len(self.row) == 1
        return Turn(ids, fresh, (0, self.ticket, 0, self.played), 7_000_000 + self.ticket)

    def observe(self, observation):
        ticket, steps, kind = observation
        assert ticket == self.ticket
        assert steps == self.world.open[ticket]
        assert kind == ("step" if steps else "reset")
        return Status.SUCCESS if steps == self.turns else self._turn()

    def respond(self, generated):
        assert generated.ids.tolist() == [7_000_000 + self.ticket], "another's response"
        self.row.append(7_000_000 + self.ticket)
        assert any(r == self.row for r in self.world.rows), "the row is not what was sent"
        self.played += 1
        roll = self.world.rng.random()
        if roll < 0.1:
            return self._turn()  # no action was found
        if roll < 0.15:
            return Status.FORMAT_ERROR
        return f"act {self.ticket} {self.world.open[self.ticket]}"


def one_schedule(seed):
    rng = random.Random(seed)
    slots, count = rng.randint(1, 5), rng.randint(1, 7)
    world = World(rng, slots, count)
    window = rng.random() < 0.5
    episodes = [Episode(i, rng.randint(0, 4), world, window) for i in range(count)]
    ends, meter, sampler = {}, Meter(), Slots(world)

    def finished(episode, status):
        assert episode.ticket not in ends, "finished twice"
        ends[episode.ticket] = status

    meter.begin(count, slots, world.work)
    retries = rng.randint(0, 2)
    play(episodes, sampler, world, retries=retries, meter=meter, finished=finished)
    assert sorted(ends) == list(range(count)), "an episode was lost"
    assert not world.open
    assert not world.due
    assert not world.growing
    assert world.rows == [[] for _ in range(slots)], "a slot was left behind"
    assert meter.held == 0
    failures = meter.failures
    assert failures["given_up"] == sum(s == Status.ENV_ERROR for s in ends.values())
    assert failures["retried"] + failures["displaced"] == sum(e.restarts for e in episodes)
    assert failures["retried"] <= retries * count
    return ends, failures


def test_ten_thousand_random_schedules():
    statuses, failures = collections.Counter(), collections.Counter()
    for seed in range(10_000):
        ends, found = one_schedule(seed)
        statuses.update(ends.values())
        failures.update(found)
    for status in (Status.SUCCESS, Status.FORMAT_ERROR, Status.ENV_ERROR):
        assert statuses[status] > 500
    for kind in ("retried", "displaced", "given_up"):
        assert failures[kind] > 500


def test_a_freed_slot_is_taken_at_once_and_nobody_waits_for_a_slow_environment():
    """One slot is stuck for 100 ticks; the other plays ten episodes meanwhile."""
    world = World(random.Random(0), 2, 11)
    world._answer = lambda ticket, kind: world.due.append(
        (world.now + (100 if ticket == 0 else 1), ticket, (ticket, world.open[ticket], kind))
    )
    world.rng.random = lambda: 0.5  # nothing fails
    world.rng.choice = lambda options: options[0]
    ends: dict[int, int] = {}
    meter = Meter()
    meter.begin(11, 2, world.work)
    play(
        [Episode(i, 2, world, False) for i in range(11)],
        Slots(world),
        world,
        retries=0,
        meter=meter,
        finished=lambda episode, status: ends.setdefault(episode.ticket, world.now),
    )
    assert list(ends) == [*range(1, 11), 0]
    assert ends[10] < 100 < ends[0]
    assert meter.held_s <= meter.slot_s


@pytest.mark.parametrize("own", [True, False])
def test_only_the_own_fault_counts(own):
    """Five failures in a row with one retry: given up after two of its own, played on else."""
    world = World(random.Random(0), 1, 1)
    world.rng.random, world.rng.choice = (lambda: 0.5), (lambda options: options[0])
    left = [5]

    def answer(ticket, kind):
        left[0] -= 1
        failing = left[0] >= 0
        found = EnvFailure(ticket, "", own=own) if failing else (ticket, world.open[ticket], kind)
        world.due.append((world.now, ticket, found))

    world._answer = answer
    ends, meter = {}, Meter()
    meter.begin(1, 1, world.work)
    play(
        [Episode(0, 1, world, False)],
        Slots(world),
        world,
        retries=1,
        meter=meter,
        finished=lambda episode, status: ends.setdefault(episode.ticket, status),
    )
    assert ends == {0: Status.ENV_ERROR if own else Status.SUCCESS}
    assert meter.failures == ({"retried": 1, "given_up": 1} if own else {"displaced": 5})
