"""Progress bars on stderr; silent where there is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

from envs.meter import Meter


@contextlib.contextmanager
def bar(label: str) -> Iterator[Callable[[Meter], None]]:
    """Yields ``update(meter)``: episodes done, tokens per second, slots in use, where time goes."""
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

        def update(meter: Meter) -> None:
            display.update(line, completed=meter.done, total=meter.jobs, state=meter.line())

        yield update
