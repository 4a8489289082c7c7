"""An environment for the rollout's tests; workers import this file by name."""

from __future__ import annotations

import dataclasses
import os
import time

from test_rollout import Stairs


class Faulty(Stairs):
    """Stairs on whose second floor things go wrong in the way that the task's name says."""

    def step(self, action):
        seen = super().step(action)
        fault = self.task.split()[2] if len(self.task.split()) > 2 else None
        if self.floor < 2 or fault is None:
            return seen
        if fault == "die":
            os._exit(3)
        if fault == "hang":
            time.sleep(1000)
        if fault == "raise":
            raise OSError("out of order")
        changes = {
            "garbage": {"info": None},
            "text": {"text": 7},
            "nan": {"reward": float("nan")},
            "other": {"info": dataclasses.replace(seen.info, task_id="room 9")},
        }
        return dataclasses.replace(seen, **changes[fault])


def make(options):
    return Faulty(options)
