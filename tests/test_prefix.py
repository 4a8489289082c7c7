"""Shared prefixes: random rows through a cache of plain lists, carried out level by level."""

from __future__ import annotations

import numpy as np
import pytest

from models.prefix import Residents


class Lists:
    """What the device does, on lists: all sources of a level are read before anything is written.

    Sampled ids are kept apart (negative): they may never be taken over.
    """

    def __init__(self, slots):
        self.rows = [[] for _ in range(slots)]
        self.prefilled = 0

    def carry_out(self, levels):
        for level in levels:
            assert len({p.slot for p in level}) == len(level)
            taken = [self.rows[p.source][: p.start] for p in level]
            for p, prefix in zip(level, taken, strict=True):
                assert len(prefix) == p.start
                assert len(p.ids) > 0
                assert p.source == p.slot or all(x >= 0 for x in prefix), "a decoded id was taken"
                self.rows[p.slot] = prefix + p.ids.tolist()
                self.prefilled += len(p.ids)


@pytest.mark.parametrize("share", [True, False])
def test_rows_are_what_was_asked_for(share):
    rng = np.random.default_rng(0)
    reused = 0
    for _ in range(300):
        slots = int(rng.integers(1, 7))
        residents, device = Residents(slots, 120, share=share), Lists(slots)
        want = [[] for _ in range(slots)]
        heads = [rng.integers(0, 3, rng.integers(1, 40)) for _ in range(3)]
        for _ in range(8):
            chosen = rng.choice(slots, rng.integers(1, slots + 1), replace=False).tolist()
            requests = {}
            for slot in chosen:
                if rng.random() < 0.5 or len(want[slot]) > 60:
                    residents.reset(slot)
                    want[slot] = []
                ids = rng.integers(0, 3, rng.integers(1, 15))
                if not want[slot]:
                    ids = np.concatenate([heads[rng.integers(3)], ids])
                requests[slot] = ids
                want[slot] = want[slot] + ids.tolist()
            before = device.prefilled
            device.carry_out(residents.place(requests))
            reused += sum(map(len, requests.values())) - (device.prefilled - before)
            for slot in chosen:
                assert device.rows[slot] == want[slot]
                spoken = -rng.integers(1, 3, rng.integers(1, 5))
                residents.append(slot, spoken)
                device.rows[slot] = device.rows[slot] + spoken.tolist()
                want[slot] = want[slot] + spoken.tolist()
                assert residents.length[slot] == len(want[slot])
    assert (reused > 20_000) == share


def test_replicas_follow_their_leader_and_tasks_share_the_system_prompt():
    """2 tasks x 3 replicas behind one system prompt: one whole prompt, one tail, four last ids."""
    residents, device = Residents(6, 200), Lists(6)
    system, tasks = np.arange(50), [np.full(30, 7), np.full(40, 8)]
    rows = {s: np.concatenate([system, tasks[s // 3]]) for s in range(6)}
    levels = residents.place(rows)
    device.carry_out(levels)
    assert [len(level) for level in levels] == [1, 3, 2]
    assert device.prefilled == 80 + 2 * 1 + 40 + 2 * 1
    assert device.rows == [rows[s].tolist() for s in range(6)]
