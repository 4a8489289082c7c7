"""What the commands must know of each environment: its tasks, its options, its words, its needs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envs.protocol import Task
from launch.config import EnvConfig, PromptConfig, ScienceWorldConfig
from launch.errors import UserError, one_line, user_errors

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of environment.

    Attributes:
      tasks: the tasks of a split; raises ``UserError``.
      options: options of the workers, JSON values.
      words: words of a tokenizer for policies made from scratch.
      check: raises ``UserError`` if something that the workers need is missing.
    """

    tasks: Callable[[EnvConfig, str], tuple[Task, ...]]
    options: Callable[[EnvConfig, PromptConfig], Mapping[str, Any]]
    words: Callable[[], list[str]]
    check: Callable[[EnvConfig], None]


def family(config: EnvConfig) -> Family:
    """The family that ``env.name`` names."""
    return FAMILIES[config.name]


# ------------------------------------------------------------------ ALFWorld


def _alfworld_tasks(config: EnvConfig, split: str) -> tuple[Task, ...]:
    from envs.alfworld.tasks import list_tasks

    with user_errors("env.data", FileNotFoundError, ValueError):
        return list_tasks(config.data_folder(), split, config.kinds)


def _alfworld_options(config: EnvConfig, prompt: PromptConfig) -> Mapping[str, Any]:
    return {"data": str(config.data_folder())}


def _alfworld_words() -> list[str]:
    from envs.alfworld.vocabulary import words

    return words()


# ------------------------------------------------------------------ ScienceWorld


def _scienceworld(config: EnvConfig) -> ScienceWorldConfig:
    return config.scienceworld or ScienceWorldConfig()


def _scienceworld_tasks(config: EnvConfig, split: str) -> tuple[Task, ...]:
    from envs.scienceworld.tasks import list_tasks

    chosen = _scienceworld(config)
    with user_errors("env.scienceworld"):
        return list_tasks(split, chosen.tasks, chosen.variations)


def _scienceworld_options(config: EnvConfig, prompt: PromptConfig) -> Mapping[str, Any]:
    chosen = _scienceworld(config)
    return {
        "simplifications": list(chosen.simplifications),
        "progress": chosen.progress,
        "surroundings": chosen.surroundings,
        "admissible": prompt.show_admissible,
        "gold": None if chosen.gold is None else str(chosen.gold),
        "jvm": list(chosen.jvm),
    }


def _scienceworld_words() -> list[str]:
    from envs.scienceworld.vocabulary import words

    return words()


def _scienceworld_check(config: EnvConfig) -> None:
    # The interpreter of the workers is asked: its packages may be others than those here.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from envs.scienceworld.jvm import missing; "
        "sys.exit(missing(sys.argv[2:]))"
    )
    interpreter = str(config.python or sys.executable)
    command = [interpreter, "-c", code, str(ROOT), *_scienceworld(config).jvm]
    with user_errors("env.python", OSError):
        asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"env.name: {one_line(asked.stderr)}")


FAMILIES: Mapping[str, Family] = {
    "alfworld": Family(_alfworld_tasks, _alfworld_options, _alfworld_words, lambda config: None),
    "scienceworld": Family(
        _scienceworld_tasks, _scienceworld_options, _scienceworld_words, _scienceworld_check
    ),
}
