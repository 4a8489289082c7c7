"""What an environment is to the rest of the project: three calls and one kind of answer.

The types here are plain data. They cross a process boundary as one JSON object per line
(`to_json`, `from_json`), so that a worker may run under an interpreter of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
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
    """Answer of an episode that an environment error spoiled; it enters no statistic."""

    ticket: int
    reason: str


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


def from_json(data: Mapping[str, Any]) -> Observation:
    """Inverse of `to_json`. Raises TypeError on a missing or unknown field."""
    return Observation(**{**data, "info": Info(**data["info"])})
