"""What a compiled program does between devices, read from its HLO text.

Numbers are per device and per call. The body of a loop counts as often as the compiler says it
runs; of a conditional's branches the one that moves the most counts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}  # else the digits / 8
_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_LIST = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange, summed over a call.

    Attributes:
      kind: one of ``KINDS``.
      crosses: whether a group holds devices of more than one node.
      count: how often it runs.
      sent: bytes that each device sends, if the exchange goes round a ring: of n devices and a
        whole array of b bytes, b (n - 1) / n for a gather, a scatter or an all-to-all, twice that
        for an all-reduce, and b for a permutation.
    """

    kind: str
    crosses: bool
    count: int
    sent: float


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    root: bool
    opcode: str
    shape: str
    rest: str


def collectives(text: str, *, per_node: int, loop_trips: int = 1) -> tuple[Collective, ...]:
    """The exchanges of one call of a compiled program.

    Args:
      text: ``compiled.as_text()``.
      per_node: devices of one node; devices are numbered node by node.
      loop_trips: how often a loop runs whose number of rounds only the data decides.
    """
    computations, entry = _computations(text)
    totals = _walk(entry, computations, per_node, loop_trips, {})
    return tuple(
        Collective(kind, crosses, round(count), sent)
        for (kind, crosses), (count, sent) in sorted(totals.items())
    )


def stacked_bytes(text: str, layers: int, rows: tuple[int, int]) -> int:
    """Bytes of the arrays ``[layers, rows, tokens, ...]`` that a loop carries: what the forward
    pass over the layers keeps for the backward pass.

    Args:
      text: ``compiled.as_text()``.
      layers: length of the loop over layers.
      rows: (rows, tokens) of a micro-batch on one device.
    """
    most = 0
    for computation in _computations(text)[0].values():
        for instruction in computation:
            if instruction.opcode == "while":
                most = max(most, sum(_kept(instruction.shape, layers, rows)))
    return most


def custom_calls(text: str) -> Counter[str]:
    """Names of the library routines and hand-written kernels that a program calls."""
    return Counter(re.findall(r'custom_call_target="([^"]+)"', text))


def _kept(shape: str, layers: int, rows: tuple[int, int]) -> Iterator[int]:
    for kind, sizes in _SHAPE.findall(shape):
        dims = [int(d) for d in sizes.split(",") if d]
        # The compiler may reorder what follows the layers, and drops axes of length one.
        whole = math.prod(dims[1:]) % math.prod(rows) == 0 and rows[1] in dims[1:]
        if len(dims) > 2 and dims[0] == layers and whole:
            yield int(_size(kind, dims))


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    found: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            match = _COMPUTATION.match(line)
            if match:
                current = found.setdefault(match[1], [])
                entry = match[1] if line.startswith("ENTRY") else entry
            continue
        match = _INSTRUCTION.match(line)
        if match:
            shape, rest = _split_shape(re.sub(r"/\*.*?\*/", "", match[3]))
            opcode = _OPCODE.match(rest)
            if opcode:
                current.append(_Instruction(match[2], bool(match[1]), opcode[1], shape, rest))
    return found, entry


def _split_shape(text: str) -> tuple[str, str]:
    """A shape, which may be nested tuples, without its layouts; and what follows it."""
    text = _LAYOUT.sub("", text)
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 2 :]
    return text, ""


Totals = dict[tuple[str, bool], tuple[float, float]]


def _walk(
    name: str,
    computations: dict[str, list[_Instruction]],
    per_node: int,
    loop_trips: int,
    done: dict[str, Totals],
) -> Totals:
    if name in done:
        return done[name]
    total: Totals = {}

    def add(more: Totals, times: float = 1.0) -> None:
        for key, (count, sent) in more.items():
            old = total.get(key, (0.0, 0.0))
            total[key] = (old[0] + times * count, old[1] + times * sent)

    def inside(called: str) -> Totals:
        return _walk(called, computations, per_node, loop_trips, done)

    for instruction in computations.get(name, ()):
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            add(_exchange(kind, instruction, per_node))
        elif instruction.opcode == "while":
            times = _rounds(instruction, computations) or loop_trips
            for called in _CALLED.findall(instruction.rest):
                add(inside(called), times)
        elif instruction.opcode == "conditional":
            branches = _BRANCHES.search(instruction.rest)
            if branches:
                names = [n.strip().lstrip("%") for n in (branches[1] or "").split(",")]
                names = [n for n in (*names, branches[2], branches[3]) if n]
                add(max(map(inside, names), key=lambda t: sum(sent for _, sent in t.values())))
        else:
            for called in _CALLED.findall(instruction.rest):
                add(inside(called))
    done[name] = total
    return total


def _rounds(loop: _Instruction, computations: dict[str, list[_Instruction]]) -> int | None:
    """How often a loop runs: as stated, else the constant that its counter is compared with."""
    if stated := _TRIPS.search(loop.rest):
        return int(stated[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    body = computations.get(condition[1], []) if condition else []
    ends = {i.name: re.match(r"constant\((\d+)\)", i.rest) for i in body}
    for i in body:
        compared = re.match(r"compare\(.*%([\w.\-]+)\), direction=LT", i.rest)
        if i.root and compared and (end := ends.get(compared[1])):
            return int(end[1])
    return None


def _exchange(kind: str, instruction: _Instruction, per_node: int) -> Totals:
    groups = _groups(instruction.rest)
    shape = instruction.shape
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        shape = _elements(shape)[1]  # (operands, results, ...)
    size = sum(_size(k, [int(d) for d in s.split(",") if d]) for k, s in _SHAPE.findall(shape))
    n = groups.shape[1]
    if n < 2:
        return {}
    sent = {
        "all-gather": size * (n - 1) / n,
        "all-reduce": 2 * size * (n - 1) / n,
        "reduce-scatter": size * (n - 1),
        "all-to-all": size * (n - 1) / n,
        "collective-permute": size,
    }[kind]
    crosses = bool((groups // per_node != groups[:, :1] // per_node).any())
    return {(kind, crosses): (1.0, sent)}


def _groups(rest: str) -> np.ndarray:
    """[groups, members] of device numbers; a permutation's pairs are groups of two."""
    if match := _IOTA.search(rest):
        shape, dims = _ints(match[1]), _ints(match[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(_ints(match[3])) if match[3] else ids
        return ids.reshape(shape)
    if match := _MESH.search(rest):
        axes = {k: int(v) for k, v in re.findall(r"'([^']*)'=(\d+)", match[1])}
        chosen = re.findall(r"'([^']*)'", match[2])
        ids = np.arange(math.prod(axes.values())).reshape(list(axes.values()))
        order = [i for i, axis in enumerate(axes) if axis not in chosen]
        order += [list(axes).index(axis) for axis in chosen]
        return ids.transpose(order).reshape(-1, math.prod(axes[axis] for axis in chosen))
    if match := _LIST.search(rest) or _PAIRS.search(rest):
        lists = [_ints(g) for g in re.findall(r"\{([\d, ]+)\}", match[1])]
        pairs = [g for g in lists if len(g) != 2 or g[0] != g[1]]
        return np.asarray(pairs) if pairs else np.zeros((1, 1), int)
    return np.zeros((1, 1), int)


def _elements(shape: str) -> list[str]:
    """The elements of a tuple's shape, outermost level only."""
    parts, depth, start = [], 0, 1
    for i, letter in enumerate(shape):
        depth += (letter in "([") - (letter in ")]")
        if (depth == 1 and letter == ",") or (depth == 0 and i == len(shape) - 1):
            parts.append(shape[start:i].strip())
            start = i + 1
    return parts


def _ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def _size(kind: str, dims: list[int]) -> float:
    if kind in _BYTES:
        width = _BYTES[kind]
    else:
        digits = re.search(r"\d+", kind)
        width = int(digits[0]) / 8 if digits else 0
    return width * math.prod(dims)
