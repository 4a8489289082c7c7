"""Task lists of a data folder in ALFWorld's layout.

DATA/json_2.1.1/{train,valid_seen,valid_unseen}/KIND-.../trial_.../game.tw-pddl

A task id is the path of the trial's folder below json_2.1.1. Lists are sorted, so that a list is
the same on every machine.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from envs.protocol import Task

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLITS = ("train", "valid_seen", "valid_unseen")
LAYOUT = "json_2.1.1"
GAME = "game.tw-pddl"


def game_path(data: str | Path, task_id: str) -> Path:
    """The game file of a task. Raises ValueError for an id that leaves the data folder."""
    if task_id.startswith("/") or ".." in task_id.split("/"):
        raise ValueError(f"task id {task_id!r} is no path below {LAYOUT}")
    return Path(data) / LAYOUT / task_id / GAME


def list_tasks(
    data: str | Path, split: str, kinds: Collection[str] | None = None
) -> tuple[Task, ...]:
    """All playable tasks of a split, sorted by id.

    As in ALFWorld, tasks with sliced objects or movable receptacles are left out, and so are
    trials without a game file.

    Args:
      data: the data folder, the one that contains json_2.1.1.
      split: train, valid_seen or valid_unseen.
      kinds: task kinds to keep; None keeps the six of ALFWorld.

    Raises:
      ValueError: an unknown split or kind.
      FileNotFoundError: no such folder, or no game in it.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: expected one of {', '.join(SPLITS)}")
    wanted = KINDS if kinds is None else tuple(kinds)
    unknown = sorted(set(wanted) - set(KINDS))
    if unknown:
        raise ValueError(f"kinds has {', '.join(unknown)}: expected some of {', '.join(KINDS)}")
    root = Path(data) / LAYOUT
    folder = root / split
    tasks = [
        Task(path.parent.relative_to(root).as_posix(), kind)
        for path in folder.glob(f"*/*/{GAME}")
        if (kind := path.parent.parent.name.split("-")[0]) in wanted
        and "Sliced" not in path.parent.parent.name
        and "movable" not in path.parent.parent.name
    ]
    if not tasks:
        state = "holds no game of these kinds" if folder.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {state}. Make games with `python -m launch games ...`, or set "
            f"ALFWORLD_DATA (or the option `data`) to a folder that contains {LAYOUT}/{split}."
        )
    return tuple(sorted(tasks, key=lambda task: task.id))
