"""A ScienceWorld engine that breaks on command; workers import this file by name."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Mapping
from typing import Any

from envs.protocol import Observation
from envs.scienceworld import gold
from envs.scienceworld.engine import DEFAULTS, ScienceWorld


class Spoiled(ScienceWorld):
    """An engine that breaks on command, inside the worker."""

    def step(self, action: str) -> Observation:
        assert self._interface is not None
        pid = self.java_pid
        assert pid is not None
        if action == "stop java":
            os.kill(pid, signal.SIGSTOP)
        if action.startswith("garbage"):
            word = action.split()[1]
            real = self._interface
            lies: dict[str, Any] = {
                "getScore": float("nan"),
                "step": None,
                "getGoalProgressStr": "",
            }

            def call(method: str, *arguments: Any) -> Any:
                return lies[method] if method == word else real.call(method, *arguments)

            def step(action: str, seed: int) -> Any:
                return call("step", action) if word == "step" else real.step(action, seed)

            lying = types.SimpleNamespace(call=call, step=step, alive=True)
            self._interface = lying  # type: ignore[assignment]
        return super().step(action)


def make(options: Mapping[str, Any]) -> Spoiled:
    java = tuple(DEFAULTS["jvm"])
    return Spoiled("easy", "score", False, False, gold.folder(), java)
