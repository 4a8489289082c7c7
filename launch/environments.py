"""What the commands must know of each environment: its tasks, its options, its words, its needs."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from envs.protocol import Task
from launch.config import EnvConfig, PromptConfig, ScienceWorldConfig
from launch.errors import UserError, one_line, user_errors


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
    from envs.scienceworld.jvm import NO_JAVA, find_java

    java = find_java()
    if java is None:
        raise UserError(f"env.name: {NO_JAVA}")
    options = _scienceworld(config).jvm
    started = subprocess.run([java, *options, "-version"], capture_output=True, text=True)
    if started.returncode:
        raise UserError(
            f"env.scienceworld.jvm: java does not start with {' '.join(options)}: "
            f"{one_line(started.stderr or started.stdout)}"
        )
    if config.python is None and importlib.util.find_spec("scienceworld") is None:
        raise UserError(
            "env.name: the package scienceworld is not installed; run `make install`, or set "
            "env.python to an interpreter that has the scienceworld extra"
        )


FAMILIES: Mapping[str, Family] = {
    "alfworld": Family(_alfworld_tasks, _alfworld_options, _alfworld_words, lambda config: None),
    "scienceworld": Family(
        _scienceworld_tasks, _scienceworld_options, _scienceworld_words, _scienceworld_check
    ),
}
