"""What an environment is to the rest of the project: three calls and one kind of answer.

The types here are plain data. They cross a process boundary as one JSON object per line
(`to_json`, `from_json`), so that a worker may run under an interpreter of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Info:
    """What the engine knows besides the text.

    Attributes:
      admissible: the actions that the engine would accept now, sorted; empty where listing them
        is slow and nobody asked.
      progress: verifiable progress in [0, 1], such as the fraction of the goal's conjuncts that
        hold now; 1 on success.
      state: anchor-state key; equal keys count as equal states within one task (GiGPO, Sec. 4.2).
      success: whether the goal holds.
      valid: whether the last action was accepted (True after a reset).
      goal: the task in words.
      task_id: identity of the task this observation belongs to.
      expert: the expert's next action, only where it was asked for.
    """

    admissible: list[str]
    progress: float
    state: str
    success: bool
    valid: bool
    goal: str
    task_id: str
    expert: str | None = None


@dataclasses.dataclass(frozen=True)
class Observation:
    """Answer to a reset or a step: text, environment reward, end of episode, and `Info`."""

    text: str
    reward: float
    done: bool
    info: Info


@dataclasses.dataclass(frozen=True)
class EnvFailure:
    """Answer of an episode that an environment error spoiled; it enters no statistic.

    ``own`` is False if the environment was lost to the fault of another episode in its worker.
    """

    ticket: int
    reason: str
    own: bool = True


@dataclasses.dataclass(frozen=True)
class Task:
    """A task by its stable name and the kind it is reported under."""

    id: str
    kind: str


def task_list_hash(tasks: Sequence[Task]) -> str:
    """SHA-256 of the ids in order, in hexadecimal: the name of a task list in a result."""
    return hashlib.sha256("\n".join(task.id for task in tasks).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """How to build an environment in a worker.

    Attributes:
      name: a built-in name ("alfworld", "scienceworld") or "module:function"; the function takes
        the options and returns an `Environment`.
      options: keyword options of that environment; JSON values only.
      python: interpreter of the workers; None is the one that runs now.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    python: str | None = None


class Environment(Protocol):
    """One stream of episodes. `reset` starts the next one and may be called at any time."""

    def reset(self, task_id: str, expert: bool = False) -> Observation: ...

    def step(self, action: str) -> Observation: ...

    def close(self) -> None: ...


def to_json(observation: Observation) -> dict[str, Any]:
    """Observation as JSON values."""
    return dataclasses.asdict(observation)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "reward": (int, float),
    "done": bool,
    "info.admissible": list,
    "info.progress": (int, float),
    "info.state": str,
    "info.success": bool,
    "info.valid": bool,
    "info.goal": str,
    "info.task_id": str,
    "info.expert": (str, type(None)),
}


def from_json(data: Mapping[str, Any]) -> Observation:
    """Inverse of `to_json`.

    Raises:
      TypeError: a field is missing, unknown, or of another type than stated.
      ValueError: a number is not finite, or the progress outside [0, 1].
    """
    if not isinstance(data, dict) or not isinstance(data.get("info"), dict):
        raise TypeError("an observation has a text, a reward, done and info")
    observation = Observation(**{**data, "info": Info(**data["info"])})
    info = observation.info
    for name, kind in _TYPES.items():
        part, _, field = name.rpartition(".")
        value = getattr(info if part else observation, field)
        if not isinstance(value, kind) or (kind == (int, float) and isinstance(value, bool)):
            raise TypeError(f"{name} is {value!r:.80}")
    if not all(isinstance(action, str) for action in info.admissible):
        raise TypeError("info.admissible holds something else than strings")
    if not math.isfinite(observation.reward):
        raise ValueError(f"reward is {observation.reward}")
    if not 0 <= info.progress <= 1:
        raise ValueError(f"info.progress is {info.progress}, outside [0, 1]")
    return observation
