"""A run owns its folder: one stored config, and files that are appended to, never overwritten."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from launch.errors import UserError
from launch.loading import flatten, parse_yaml, to_plain, to_yaml

# Keys that leave the results of a run as they are. ``run`` is where the folder is now.
OPERATIONAL = frozenset(
    {
        "run",
        "env.workers",
        "env.deadline_s",
        "env.python",
        "env.scienceworld.gold",
        "env.scienceworld.jvm",
        "judge.url",
        "judge.key_variable",
        "judge.deadline_s",
        "checkpoint.every",
        "checkpoint.keep",
    }
)
MAY_GROW = frozenset({"iterations"})


@dataclasses.dataclass(frozen=True)
class Run:
    """An opened run folder. ``lock`` is held until ``close`` or the end of the process."""

    folder: Path
    lock: int = dataclasses.field(repr=False)
    resumed: bool = False  # whether the folder held this run before

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def episodes(self) -> Path:
        return self.folder / "episodes.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.folder / "evaluations.jsonl"

    def close(self) -> None:
        """Lets another process open the run."""
        os.close(self.lock)


def open_run(config: BaseModel, folder: Path) -> Run:
    """Opens ``folder`` for the run that ``config`` describes, and creates it if it is new.

    The resolved config is stored as config.yaml. A folder whose stored config differs in a key
    that matters belongs to another run: ``UserError`` names the first such key, both values and
    the fix. So does a folder that holds something else, or that another process has open.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"run: {folder} cannot be made a folder: {error.strerror}") from error
    stored = folder / "config.yaml"
    if not stored.exists() and any(entry.name != ".lock" for entry in folder.iterdir()):
        raise UserError(
            f"run: {folder} is not empty and holds no run; name a new folder with --set run=FOLDER"
        )
    lock = _lock(folder)
    try:
        resumed = stored.exists()
        if resumed:
            check_same_run(config, stored)
        text = to_yaml(config)
        if not resumed or stored.read_text(encoding="utf-8") != text:
            _replace(stored, text)
    except BaseException:
        os.close(lock)
        raise
    return Run(folder=folder, lock=lock, resumed=resumed)


def check_same_run(config: BaseModel, stored: Path, free: Sequence[str] = ()) -> None:
    """Raises ``UserError`` for the first key in which the stored config is another run's.

    ``free`` names whole sections that may differ, such as "evaluate" when a finished run is
    evaluated in another way.
    """
    old = dict(flatten(parse_yaml(stored.read_text(encoding="utf-8"), str(stored))))
    new = dict(flatten(to_plain(config)))
    for key in (*new, *(key for key in old if key not in new)):
        before, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        section = key.partition(".")[0]
        if before == now or key in OPERATIONAL or section in free:
            continue
        if before is _ABSENT and now is None and section != "credit":
            continue  # a key that is younger than the run, and off
        if key in MAY_GROW and isinstance(before, int) and isinstance(now, int):
            if now >= before:
                continue
            fix = f"it may only grow; or start a new run with --set run={stored.parent}-2"
        else:
            fix = (
                f"start a new run with --set run={stored.parent}-2, or keep this one with "
                f"--set {key}={_show(before)}"
                if before is not _ABSENT
                else f"start a new run with --set run={stored.parent}-2"
            )
        raise UserError(
            f"run: {stored.parent} was made with {key}: {_show(before)}, the config now says "
            f"{_show(now)}; {fix}"
        )


_ABSENT = object()


def _show(value: Any) -> str:
    return "(absent)" if value is _ABSENT else json.dumps(value)


def _lock(folder: Path) -> int:
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UserError(
            f"run: {folder} is open in another process; wait for it, or name a new folder with "
            "--set run=FOLDER"
        ) from error
    return lock


def _replace(path: Path, text: str) -> None:
    """Writes a whole file so that a reader sees the old one or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends one JSON line per row, all in one write; numbers that are not finite become null."""
    text = "".join(
        json.dumps(_plain(row), allow_nan=False, ensure_ascii=False) + "\n" for row in rows
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode())


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file of JSON lines; a torn last line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the process died while it wrote this
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}: not JSON: {error}") from error


def resume_rows(path: Path, iteration: int) -> int:
    """Makes a file of JSON lines agree with a restored iteration; returns the rows dropped.

    Cuts a torn last line and drops the rows whose ``iteration`` is ``iteration`` or later: they
    were written after the checkpoint and will be written again. ``iteration`` counts from 0, so 0
    empties the file.
    """
    if not path.exists():
        return 0
    dropped = 0
    kept: list[str] = []
    for row in read_rows(path):
        if row.get("iteration", -1) >= iteration:
            dropped += 1
        else:
            kept.append(json.dumps(row, ensure_ascii=False) + "\n")
    with path.open("rb") as file:
        torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0
        torn = torn and file.read(1) != b"\n"
    if dropped or torn:
        _replace(path, "".join(kept))
    return dropped


def _plain(value: Any) -> Any:
    """Python data from NumPy and JAX scalars and arrays, paths and tuples."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
