"""The engine's own solutions ("gold paths"), made once and kept on disk.

Making one takes seconds and turns later resets of the same interface slow, so it happens on an
interface that plays nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

from envs.scienceworld.jvm import Jvm
from envs.scienceworld.tasks import parse


def folder() -> Path:
    """Where paths are kept if nobody says: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxcredit" / "scienceworld"


def gold_path(jvm: Jvm, task_id: str, simplifications: str, cache: Path) -> tuple[str, ...]:
    """Actions that lead from the start of a task to its end.

    Read from ``cache``/VERSION/SIMPLIFICATIONS/KIND/VARIATION.json, or made and written there.

    Raises ValueError for an unknown task, RuntimeError if the engine knows no solution.
    """
    kind, variation = parse(task_id)
    version = importlib.metadata.version("scienceworld")
    file = cache / version / (simplifications or "none") / kind / f"{variation}.json"
    if file.is_file():
        return tuple(json.loads(file.read_text(encoding="utf-8")))
    interface = jvm.interface()
    if error := interface.call("load", kind, variation, simplifications, True):
        raise RuntimeError(f"{task_id}: {error}")
    actions = [str(action) for action in interface.call("getGoldActionSequence")]
    if not actions or actions[0].startswith("ERROR"):
        raise RuntimeError(f"{task_id}: the engine gives no gold path: {actions[:1]}")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{variation}.{os.getpid()}")  # several workers may write it
    partial.write_text(json.dumps(actions), encoding="utf-8")
    partial.replace(file)
    return tuple(actions)
