"""ScienceWorld's 30 tasks and its official splits, without the engine.

A task id is KIND/VARIATION, such as "boil/3". The variations of a kind are numbered: the first
ones are for training, the next for development, the rest for testing. A test compares the table
with the engine.
"""

from __future__ import annotations

from collections.abc import Collection

from envs.protocol import Task

SPLITS = ("train", "dev", "test")
# Variations of each split, in the order of SPLITS: 7,207 in all.
VARIATIONS: dict[str, tuple[int, int, int]] = {
    "boil": (14, 7, 9),
    "change-the-state-of-matter-of": (14, 7, 9),
    "chemistry-mix": (16, 8, 8),
    "chemistry-mix-paint-secondary-color": (18, 9, 9),
    "chemistry-mix-paint-tertiary-color": (18, 9, 9),
    "find-animal": (150, 75, 75),
    "find-living-thing": (150, 75, 75),
    "find-non-living-thing": (150, 75, 75),
    "find-plant": (150, 75, 75),
    "freeze": (14, 7, 9),
    "grow-fruit": (62, 31, 33),
    "grow-plant": (62, 31, 33),
    "identify-life-stages-1": (6, 3, 5),
    "identify-life-stages-2": (4, 2, 4),
    "inclined-plane-determine-angle": (84, 42, 42),
    "inclined-plane-friction-named-surfaces": (692, 346, 348),
    "inclined-plane-friction-unnamed-surfaces": (80, 40, 42),
    "lifespan-longest-lived": (62, 31, 32),
    "lifespan-longest-lived-then-shortest-lived": (62, 31, 32),
    "lifespan-shortest-lived": (62, 31, 32),
    "measure-melting-point-known-substance": (218, 109, 109),
    "measure-melting-point-unknown-substance": (150, 75, 75),
    "melt": (14, 7, 9),
    "mendelian-genetics-known-plant": (60, 30, 30),
    "mendelian-genetics-unknown-plant": (240, 120, 120),
    "power-component": (10, 5, 5),
    "power-component-renewable-vs-nonrenewable-energy": (10, 5, 5),
    "test-conductivity": (450, 225, 225),
    "test-conductivity-of-unknown-substances": (300, 150, 150),
    "use-thermometer": (270, 135, 135),
}
KINDS = tuple(VARIATIONS)
# Whoever must connect wires cannot do without the actions that this simplification removes.
ELECTRICAL = tuple(k for k in KINDS if "power-component" in k or "conductivity" in k)
SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "openDoors",
    "openContainers",
    "selfWateringFlowerPots",
    "noElectricalAction",
)


def variations(kind: str, split: str) -> range:
    """Numbers of the variations of `kind` that belong to `split`."""
    position = SPLITS.index(split)
    start = sum(VARIATIONS[kind][:position])
    return range(start, start + VARIATIONS[kind][position])


def list_tasks(
    split: str, kinds: Collection[str] | None = None, most: int | None = None
) -> tuple[Task, ...]:
    """The tasks of an official split, sorted by kind and variation.

    Args:
      split: train, dev or test.
      kinds: task kinds to keep; None keeps all 30.
      most: keep the first so many variations of each kind; None keeps all.

    Raises:
      ValueError: an unknown split or kind, or `most` below 1.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: expected one of {', '.join(SPLITS)}")
    if most is not None and most < 1:
        raise ValueError(f"most = {most}: keep at least one variation")
    wanted = check_kinds(KINDS if kinds is None else kinds)
    return tuple(
        Task(f"{kind}/{number}", kind)
        for kind in sorted(wanted)
        for number in variations(kind, split)[:most]
    )


def check_kinds(kinds: Collection[str]) -> tuple[str, ...]:
    """`kinds` as a tuple. Raises ValueError if one is unknown, or there is none."""
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        told = ", ".join(unknown) or "nothing"
        raise ValueError(f"unknown task {told}: expected some of {', '.join(KINDS)}")
    return tuple(kinds)


def check_simplifications(names: Collection[str], kinds: Collection[str]) -> str:
    """The engine's word for these simplifications: comma-separated, in a fixed order.

    Raises ValueError for an unknown name, and for one that makes a task impossible.
    """
    unknown = sorted(set(names) - set(SIMPLIFICATIONS))
    if unknown:
        raise ValueError(
            f"unknown simplification {', '.join(unknown)}: expected some of "
            f"{', '.join(SIMPLIFICATIONS)}"
        )
    stuck = sorted(set(kinds) & set(ELECTRICAL))
    if "noElectricalAction" in names and stuck:
        raise ValueError(
            f"noElectricalAction makes {', '.join(stuck)} impossible; leave one of them out"
        )
    return ",".join(name for name in SIMPLIFICATIONS if name in names)


def parse(task_id: str) -> tuple[str, int]:
    """Kind and variation of a task id. Raises ValueError if there is no such task."""
    kind, _, number = task_id.rpartition("/")
    if kind not in VARIATIONS:
        raise ValueError(f"task {task_id!r}: no kind {kind!r}; expected one of {', '.join(KINDS)}")
    total = sum(VARIATIONS[kind])
    if not number.isascii() or not number.isdigit() or int(number) >= total:
        raise ValueError(f"task {task_id!r}: {kind} has the variations 0 to {total - 1}")
    return kind, int(number)
