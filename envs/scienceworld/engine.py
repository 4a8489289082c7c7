"""ScienceWorld behind `Environment`: a lean step, several episodes per Java process."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.protocol import Info, Observation
from envs.scienceworld import gold, jvm, progress, tasks

DEFAULTS: Mapping[str, Any] = {
    "simplifications": ["easy"],
    "progress": "score",
    "surroundings": False,
    "admissible": False,
    "gold": None,
    "jvm": list(jvm.OPTIONS),
}
PROGRESS = ("score", "subgoals")
# How the engine answers an input that it cannot read; nothing else happens.
REFUSED = ("No known action matches that input", "Unknown action.")
SOLVED = 1.0 - 1e-9  # the score is a sum of fractions


def make(options: Mapping[str, Any]) -> ScienceWorld:
    """Build an environment from its options.

    Options: `simplifications` (list of names), `progress` ("score" or "subgoals"), `surroundings`
    (add room and inventory to every observation), `admissible` (list the valid actions: slow),
    `gold` (folder for gold paths), `jvm` (list of options for java).

    Raises ValueError for an unknown option or value.
    """
    for key in options:
        if key not in DEFAULTS:
            near = difflib.get_close_matches(key, DEFAULTS, n=1, cutoff=0.0)[0]
            raise ValueError(f"scienceworld has no option {key!r}; did you mean {near!r}?")
    chosen = {**DEFAULTS, **options}
    if chosen["progress"] not in PROGRESS:
        raise ValueError(f"progress = {chosen['progress']!r}: expected {' or '.join(PROGRESS)}")
    return ScienceWorld(
        simplifications=tasks.check_simplifications(chosen["simplifications"], ()),
        progress_by=chosen["progress"],
        surroundings=bool(chosen["surroundings"]),
        admissible=bool(chosen["admissible"]),
        gold_folder=Path(chosen["gold"]) if chosen["gold"] else gold.folder(),
        java=tuple(chosen["jvm"]),
    )


class ScienceWorld:
    """One stream of ScienceWorld episodes.

    The reward is 1 when the task is solved (score 1), else 0. Focusing on a wrong object gives
    the engine's score -1 (-100 on its other scale): the episode is lost, and its progress 0. An
    input that the engine cannot read is not valid. One that fits several actions is valid: the
    engine answers with a numbered list and reads a number next.
    """

    def __init__(
        self,
        simplifications: str,
        progress_by: str,
        surroundings: bool,
        admissible: bool,
        gold_folder: Path,
        java: tuple[str, ...],
    ) -> None:
        self._jvm = jvm.shared(java, simplifications)
        self._simplifications = simplifications
        self._progress_by = progress_by
        self._surroundings = surroundings
        self._admissible = admissible
        self._gold_folder = gold_folder
        self._interface: jvm.Interface | None = None
        self._gold: tuple[str, ...] | None = None
        self._task = self._goal = ""
        self._turn = 0  # steps so far: chance depends on the task and on this, and nothing else
        self._done = True

    @property
    def java_pid(self) -> int | None:
        """Process id of the engine."""
        return self._jvm.pid

    def reset(self, task_id: str, expert: bool = False) -> Observation:
        """Start the task `task_id`. Raises ValueError if there is no such task."""
        kind, variation = tasks.parse(task_id)
        self._gold = None
        if expert:
            self._gold = gold.gold_path(
                self._jvm, task_id, self._simplifications, self._gold_folder
            )
        if self._interface is None or not self._interface.alive:
            self._interface = self._jvm.interface()
        self._jvm.count_episode()
        # The engine's reset() would do the work of load() again.
        if error := self._interface.call("load", kind, variation, self._simplifications, False):
            raise ValueError(f"task {task_id!r}: {error}")
        self._task, self._done = task_id, False
        self._goal = _text(self._interface.call("getTaskDescription"))
        # Until a step is taken, score and subgoals are those of the episode before. This one is
        # free: it takes no time in the world.
        self._turn = 0
        self._act("look around")
        return self._observe(None)

    def step(self, action: str) -> Observation:
        """Act. Raises RuntimeError after the end of an episode, `JvmDied` if java is gone."""
        if self._done or self._interface is None:
            raise RuntimeError("the episode is over; call reset(task_id)")
        action = " ".join(action.split())
        answer = self._act(action)
        if self._gold and action == self._gold[0]:
            self._gold = self._gold[1:]
        return self._observe(answer)

    def close(self) -> None:
        """Forget the episode. The Java process stays for the worker's other episodes."""
        self._interface, self._done = None, True

    def _act(self, action: str) -> str:
        assert self._interface is not None
        digest = hashlib.sha256(f"{self._task} {self._turn}".encode()).digest()
        self._turn += 1
        # 62 bits, never so few that Py4J would send another integer type.
        return _text(self._interface.step(action, 2**61 + int.from_bytes(digest[:7], "big")))

    def _observe(self, answer: str | None) -> Observation:
        assert self._interface is not None
        call = self._interface.call
        score = float(call("getScore"))
        if not math.isfinite(score):
            raise ValueError(f"the engine gives the score {score}")
        around, carried = _text(call("freeActionLook")), _text(call("freeActionInventory"))
        subgoals = progress.parse(call("getGoalProgressStr"))
        lost = score < 0
        won = score >= SOLVED and bool(call("getCompleted"))
        self._done = won or lost or bool(call("getCompleted"))
        fraction = score if self._progress_by == "score" else subgoals.fraction
        text = around if answer is None else answer
        if self._surroundings:
            text = f"{around}\n{carried}" if answer is None else f"{answer}\n{around}\n{carried}"
        valid = (
            sorted(map(str, call("getValidActionObjectCombinations"))) if self._admissible else []
        )
        info = Info(
            admissible=valid,
            progress=0.0 if lost else min(max(fraction, 0.0), 1.0),
            state=_state_key(around, carried, subgoals.key),
            success=won,
            valid=answer is None or not answer.startswith(REFUSED),
            goal=self._goal,
            task_id=self._task,
            expert=self._gold[0] if self._gold else None,
        )
        return Observation(text, float(won), self._done, info)


def _text(value: Any) -> str:
    """A text of the engine, tidied. Raises TypeError if it is none, ValueError for its errors."""
    if not isinstance(value, str):
        raise TypeError(f"the engine gives {value!r}, not a text")
    if value.startswith("ERROR"):
        raise ValueError(f"the engine answers {value!r}")
    return "\n".join(line.rstrip() for line in value.strip().splitlines())


def _state_key(around: str, carried: str, subgoals: str) -> str:
    """Equal for equal rooms, inventories and subgoals, in whatever order things came there."""
    lines = [*sorted(around.splitlines()), "", *sorted(carried.splitlines()), subgoals]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
