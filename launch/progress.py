"""Progress bars on stderr; silent where there is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

from envs.meter import Meter


@contextlib.contextmanager
def bar(label: str) -> Iterator[Callable[..., None]]:
    """Yields ``update(done, total, state="")``; the state is a text at the end of the line."""
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[state]}"),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as display:
        line = display.add_task(label, total=None, state="")

        def update(done: int, total: int, state: str = "") -> None:
            display.update(line, completed=done, total=total, state=state)

        yield update


@contextlib.contextmanager
def episodes(label: str) -> Iterator[Callable[[Meter], None]]:
    """Yields ``update(meter)``: episodes done, tokens per second, slots in use, where time goes."""
    with bar(label) as update:
        yield lambda meter: update(meter.done, meter.jobs, meter.line())
