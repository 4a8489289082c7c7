"""A LoRA forward-backward step against transformers with PEFT, in tokens per second.

    python benchmarks/model.py --torch-python TORCH_VENV/bin/python

Rank 64 on all projections, float32, one row of agent data; the loss is the mean negative
log-probability of its sampled tokens, the gradients are those of the adapters. Both sides have the
same weights and adapters, compute logits at sampled tokens only and keep all activations (no
rematerialisation). Loss and gradient norms are compared. Each side has a process of its own;
repetitions alternate and medians are taken.
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

TOLERANCE = 1e-3  # relative; float32 through the depth of the network, forth and back


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    load = os.getloadavg()[0]
    spec = {
        "task": "lora",
        "size": options.size,
        "seed": options.seed,
        "steps": options.steps,
        "length": options.length,
        "rank": options.rank,
        "remat": options.remat,
        "weights": "",
        "export": str(folder / "weights") if options.torch_python else "",
    }
    sides = {"jaxcredit": Side(sys.executable, "jax_side.py", spec)}
    if options.torch_python:
        sides["peft"] = Side(options.torch_python, "torch_side.py", spec)
    for name, side in sides.items():
        side.run("step", folder / f"{name}.npz")  # the first run touches memory for the first time
    runs = {name: lambda side=side: side.run("step") for name, side in sides.items()}
    found: dict[str, Any] = interleaved(runs, options.repetitions)
    for name, row in found.items():
        row["tokens_per_second"] = options.length / row["median_seconds"]
        print(
            f"{name:<10} {row['tokens_per_second']:8.1f} tokens/s  {row['median_seconds']:8.3f} s  "
            f"processor {row['median_cpu_seconds']:8.3f} s  "
            f"memory {row['peak_rss_rise'] / 1e6:6.0f} MB"
        )
    ratios = {}
    if options.torch_python:
        speed = {name: row["tokens_per_second"] for name, row in found.items()}
        ratios["tokens_per_second"] = speed["jaxcredit"] / speed["peft"]
        mine, other = (np.load(folder / f"{name}.npz") for name in sides)
        ratios["largest_relative_difference"] = max(
            float(abs(mine[key] - other[key]) / abs(other[key])) for key in other.files
        )
        print(f"jaxcredit / peft: {ratios['tokens_per_second']:.3f} of the tokens per second")
        print(f"largest relative difference: {ratios['largest_relative_difference']:.2e}")
    for side in sides.values():
        side.close()
    return {
        "spec": spec | {"export": ""},
        "machine": machine(load),
        "sides": {name: side.info for name, side in sides.items()},
        "rows": found,
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="0.5b")
    parser.add_argument("--length", type=int, help="tokens of the row")
    parser.add_argument("--steps", type=int, help="steps of the row")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="none")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torch-python", default="", help="interpreter with torch and peft")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark/model.json"))
    options = parser.parse_args()
    tiny = options.size == "tiny"
    options.length = options.length or (128 if tiny else 1024)
    options.steps = options.steps or (4 if tiny else 20)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")
    if not result["ratios"].get("largest_relative_difference", 0.0) <= TOLERANCE:
        raise SystemExit(f"error: the sides disagree: {result['ratios']}")


if __name__ == "__main__":
    main()
