"""Verifiable progress: what the engine's table of subgoals says.

Sequential rows are required, one after the other. Unordered rows are milestones, among them
alternatives that exclude each other (stove, oven, blast furnace), so they never hold all at once.
"""

from __future__ import annotations

import dataclasses
import re

_ROW = re.compile(r"^(\d+)\t(true|false)\t")
_SECTIONS = ("Sequential Subgoals", "Unordered and Optional Subgoals")


@dataclasses.dataclass(frozen=True)
class Subgoals:
    """Which subgoals hold, in the order of the table."""

    sequential: tuple[bool, ...]
    unordered: tuple[bool, ...]

    @property
    def fraction(self) -> float:
        """Fraction of the sequential subgoals that hold."""
        return sum(self.sequential) / len(self.sequential)

    @property
    def key(self) -> str:
        """One digit per subgoal, for a state key."""
        return "/".join(
            "".join("01"[x] for x in rows) for rows in (self.sequential, self.unordered)
        )


def parse(table: str) -> Subgoals:
    """Reads the table. Raises ValueError if it has no sequential subgoal."""
    rows: dict[str, list[bool]] = {name: [] for name in _SECTIONS}
    section = None
    for line in table.splitlines():
        name = line.strip().removesuffix(":")
        if name in rows:
            section = name
        elif section is not None and (row := _ROW.match(line)):
            rows[section].append(row[2] == "true")
    sequential, unordered = (tuple(rows[name]) for name in _SECTIONS)
    if not sequential:
        raise ValueError(f"the table of subgoals names none: {table[:200]!r}")
    return Subgoals(sequential, unordered)
