"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from launch.plan.hardware import GIB, Topology
from launch.plan.hlo import KINDS
from launch.plan.ledger import CONSUMERS, Planned, largest

# A column of the table is a sum of consumers; "activations" is what the backward pass needs.
COLUMNS = {
    "parameters": ("parameters", "initial copy", "sampler's weights"),
    "optimiser": ("optimiser",),
    "gradients": ("gradients",),
    "cache": ("cache",),
    "activations": ("activations",),
    "temporaries": ("temporaries", "batch", "results"),
}
_GPU_DEFAULT = 0.75  # share of a GPU's memory that JAX takes unless it is told otherwise


def as_data(
    topology: Topology, about: dict[str, Any], planned: Sequence[Planned]
) -> dict[str, Any]:
    """The plan of one topology as plain data: bytes, operations and seconds."""
    worst = max(planned, key=lambda p: p.peak)
    return {
        "topology": topology.name,
        **about,
        "devices": topology.size,
        "memory_bytes": topology.total_memory,
        "usable_bytes": topology.memory,
        "peak_bytes": worst.peak,
        "peak_in": worst.name,
        "fits": fits(topology, planned),
        "largest": [
            {"consumer": name, "bytes": size, "what": what, "fix": fix}
            for name, size, what, fix in largest(worst)
        ],
        "facts_source": topology.facts.get("source"),
        "programs": [_program(p) for p in planned],
    }


def fits(topology: Topology, planned: Sequence[Planned]) -> bool | None:
    """Whether every program fits; None where the device's memory is not known."""
    if any(p.failure for p in planned):
        return False
    if topology.memory is None:
        return None
    return all(p.peak <= topology.memory for p in planned)


def _program(p: Planned) -> dict[str, Any]:
    exchanges = None
    if p.collectives is not None:
        exchanges = {
            kind: {
                "calls": sum(c.count for c in p.collectives if c.kind == kind),
                "sent_bytes": sum(c.sent for c in p.collectives if c.kind == kind),
                "between_nodes_bytes": sum(
                    c.sent for c in p.collectives if c.kind == kind and c.crosses
                ),
            }
            for kind in KINDS
            if any(c.kind == kind for c in p.collectives)
        }
    least = None
    if p.estimate is not None:
        least = {
            "compute_s": p.estimate.compute,
            "memory_s": p.estimate.memory,
            "links_s": p.estimate.links,
            "least_s": p.estimate.seconds,
        }
    return {
        "name": p.name,
        "rows": p.shape[0],
        "tokens": p.shape[1],
        "calls_per_iteration": p.calls,
        "bytes": {name: p.live[name] for name in CONSUMERS if name in p.live},
        "peak_bytes": p.peak,
        "flops": p.flops,
        "collectives": exchanges,
        "attention": p.attention,
        "estimate": least,
        "failure": p.failure,
    }


def as_text(found: dict[str, Any]) -> str:
    """The plan of one topology as tables and a verdict."""
    lines = [
        f"{found['topology']}: {found['devices']} devices, {found['mesh']}",
        f"policy: {found['policy']}",
        "",
        _table(
            ["GiB per device", "rows x tokens", *COLUMNS, "peak"],
            [
                [
                    p["name"],
                    _shape(p),
                    *(_gib(sum(p["bytes"].get(c, 0) for c in part)) for part in COLUMNS.values()),
                    _gib(p["peak_bytes"]),
                ]
                for p in found["programs"]
            ],
        ),
        "",
        _table(
            ["one call", "PFLOP", "attention", "sent by a device, GB", "least seconds (estimate)"],
            [
                [
                    p["name"],
                    f"{p['flops'] / 1e15:.3g}",
                    p["attention"] or "-",
                    _sent(p["collectives"]),
                    _least(p["estimate"]),
                ]
                for p in found["programs"]
            ],
        ),
        "",
        *_iteration(found["programs"]),
        *_verdict(found),
    ]
    return "\n".join(lines)


def _shape(p: dict[str, Any]) -> str:
    return f"{p['rows']} x {p['tokens']}" if p["rows"] else "-"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _sent(exchanges: dict[str, Any] | None) -> str:
    if exchanges is None:
        return "?"
    parts = [f"{kind} {e['sent_bytes'] / 1e9:.3g}" for kind, e in exchanges.items()]
    between = sum(e["between_nodes_bytes"] for e in exchanges.values())
    if between:
        parts.append(f"(between nodes {between / 1e9:.3g})")
    return ", ".join(parts) or "-"


def _least(estimate: dict[str, float] | None) -> str:
    if estimate is None:
        return "-"
    bound = max(("compute", "memory", "links"), key=lambda k: estimate[f"{k}_s"])
    return f"{estimate['least_s']:.3g} ({bound})"


def _iteration(programs: Iterable[dict[str, Any]]) -> list[str]:
    """The least time of scoring and updating one iteration, where both are known."""
    mine = [p for p in programs if not p["name"].startswith("rollout")]
    if not mine or any(p["calls_per_iteration"] is None or not p["estimate"] for p in mine):
        return []
    known = [p["calls_per_iteration"] * p["estimate"]["least_s"] for p in mine]
    return [
        f"scoring and updates of an iteration whose rows are all full: at least {sum(known):.3g} s "
        "by the devices' peak rates (an estimate, nothing was run); playing comes on top"
    ]


def _verdict(found: dict[str, Any]) -> list[str]:
    peak = f"peak {_gib(found['peak_bytes'])} GiB ({found['peak_in']})"
    if found["usable_bytes"] is None:
        return [f"{peak}; this device's memory is not known: state it with --memory GIB"]
    usable = (
        f"{_gib(found['usable_bytes'])} GiB usable of {_gib(found['memory_bytes'])} GiB per device"
    )
    if found["fits"]:
        lines = [f"{peak}, {usable}: fits"]
        if (
            found["platform"] == "gpu"
            and found["peak_bytes"] > _GPU_DEFAULT * found["memory_bytes"]
        ):
            lines.append(
                "JAX takes 75 % of a GPU by default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"
            )
        return lines
    lines = [f"{peak}, {usable}: DOES NOT FIT; largest consumers:"]
    lines += [
        f"  {item['consumer']} ({item['what']}): {_gib(item['bytes'])} GiB; {item['fix']}"
        for item in found["largest"]
    ]
    lines += [f"  {p['name']}: {p['failure']}" for p in found["programs"] if p["failure"]]
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 or not _number(cell) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (heads, *rows)
    )


def _number(cell: str) -> bool:
    return cell.replace(".", "", 1).replace("e-", "", 1).isdigit()
