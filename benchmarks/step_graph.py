"""What the step graph costs: against scoring without it, and against transformers' attention maps.

    python benchmarks/step_graph.py
    python benchmarks/step_graph.py --torch-python TORCH_VENV/bin/python --lengths 2048

Scoring is the program of models/score.py: hidden states, log-probabilities of the sampled tokens
and, with it, the step graph of six layers, in float32. The other side asks transformers for
``output_attentions=True`` (eager attention) and aggregates the maps to the same graph; both graphs
and log-probabilities are compared. Each side has a process of its own and the same weights;
repetitions alternate and medians are taken. Memory is the rise of resident memory during a
repetition above what the process held before it: weights, imports and compiled code do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import SIZES, Side, interleaved, machine

TOLERANCE = 1e-3  # relative to the largest entry; float32 through the depth of the network


def difference(a: Path, b: Path, name: str) -> float:
    """Largest difference of two saved arrays, relative to the largest entry."""
    x, y = (np.load(path)[name] for path in (a, b))
    return float(np.abs(x - y).max() / np.abs(x).max())


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    load = os.getloadavg()[0]
    spec = {
        "task": "score",
        "size": options.size,
        "seed": options.seed,
        "steps": options.steps,
        "lengths": options.lengths,
        "weights": options.weights,
        "export": str(folder / "weights") if options.torch_python and not options.weights else "",
    }
    ours = Side(sys.executable, "jax_side.py", spec)
    sides, result = {"jaxcredit": ours.info}, []
    theirs = None
    if options.torch_python:
        spec["layers"] = ours.info["layers"]
        theirs = Side(options.torch_python, "torch_side.py", spec)
        sides["transformers"] = theirs.info
    for length in options.lengths:
        runs = {
            "without": lambda: ours.run(f"without-{length}"),  # noqa: B023
            "with": lambda: ours.run(f"with-{length}"),  # noqa: B023
        }
        mine, other = folder / "ours.npz", folder / "theirs.npz"
        ours.run(f"without-{length}")  # the first runs touch memory for the first time
        ours.run(f"with-{length}", mine)
        row: dict[str, Any] = {"tokens": length}
        if theirs is not None:
            theirs.run(f"with-{length}", other)
            row["relative_difference"] = {
                name: difference(other, mine, name) for name in ("graph", "logp")
            }
            runs["transformers"] = lambda: theirs.run(f"with-{length}")  # noqa: B023
        row |= interleaved(runs, options.repetitions)
        seconds = {name: row[name]["median_seconds"] for name in runs}
        row["ratio_with_to_without"] = seconds["with"] / seconds["without"]
        if theirs is not None:
            rise = {name: row[name]["peak_rss_rise"] for name in runs}
            row["ratio_of_seconds_to_transformers"] = seconds["with"] / seconds["transformers"]
            row["ratio_of_memory_to_transformers"] = rise["with"] / rise["transformers"]
        result.append(row)
        report(row)
    for side in (ours, theirs):
        if side is not None:
            side.close()
    return {"spec": spec | {"export": ""}, "machine": machine(load), "sides": sides, "rows": result}


def report(row: dict[str, Any]) -> None:
    print(f"{row['tokens']} tokens      seconds  processor  memory")
    for name in ("without", "with", "transformers"):
        if name in row:
            m = row[name]
            print(
                f"  {name:<14} {m['median_seconds']:8.3f}  {m['median_cpu_seconds']:8.3f}"
                f"  {m['peak_rss_rise'] / 1e6:8.0f} MB"
            )
    print(f"  with / without: {row['ratio_with_to_without']:.3f}")
    if "transformers" in row:
        print(
            f"  with / transformers: {row['ratio_of_seconds_to_transformers']:.3f} of the time, "
            f"{row['ratio_of_memory_to_transformers']:.3f} of the memory"
        )
        print(f"  relative differences: {row['relative_difference']}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="0.5b")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens per row")
    parser.add_argument("--steps", type=int, help="steps per row")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", default="", help="a Hugging Face folder; default: drawn")
    parser.add_argument("--torch-python", default="", help="interpreter with torch, transformers")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark/step_graph.json"))
    options = parser.parse_args()
    tiny = options.size == "tiny"
    options.lengths = options.lengths or ([128] if tiny else [2048, 4096])
    options.steps = options.steps or (4 if tiny else 30)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")
    for row in result["rows"]:
        found = row.get("relative_difference", {})
        if not all(value <= TOLERANCE for value in found.values()):
            raise SystemExit(f"error: the sides disagree at {row['tokens']} tokens: {found}")


if __name__ == "__main__":
    main()
