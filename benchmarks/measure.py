"""What both sides of a benchmark share: sizes, the row, the measuring, and the talk of processes.

Each side runs in a process of its own that prepares its programs once and then runs one of them
per line on its standard input, so that the caller can interleave them. Needs NumPy alone: the
PyTorch side runs it under another interpreter.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

# Qwen2.5-0.5B (its config.json), and something that runs in a moment.
SIZES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def agent_row(length: int, steps: int, vocab: int, seed: int) -> dict[str, np.ndarray]:
    """One conversation [1, T] with the proportions of agent data: a quarter of it is sampled.

    An eighth is the prompt; then each step has a message and, twice or three times as long, the
    observation that it causes. Lengths are drawn, ids too. ``kind`` is ``jaxcredit``'s: 1 context,
    2 message, 3 observation.
    """
    if steps < 1 or length < 8 * steps:
        raise SystemExit(f"error: --steps {steps} do not fit a row of {length} tokens; use fewer")
    rng = np.random.default_rng(seed)
    kind, step = np.full(length, 1, np.int32), np.full(length, -1, np.int32)
    shares = np.cumsum(rng.uniform(0.5, 1.5, steps))
    edges = length // 8 + (length - length // 8) * shares[:-1] / shares[-1]
    starts = [length // 8, *edges.astype(int).tolist(), length]
    for k, (lo, hi) in enumerate(itertools.pairwise(starts)):
        message = lo + max(1, round((hi - lo) * 2 / 7))
        kind[lo:message], kind[message:hi], step[lo:hi] = 2, 3, k
    row = {
        "tokens": rng.integers(0, vocab, length, dtype=np.int32),
        "position": np.arange(length, dtype=np.int32),
        "segment": np.ones(length, np.int32),
        "kind": kind,
        "step": step,
        "trainable": kind == 2,
    }
    return {name: value[None] for name, value in row.items()}


def _status(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"error: /proc/self/status has no {key}; memory is measured on Linux only")


def _measured(program: Callable[[], dict[str, np.ndarray]]) -> tuple[dict[str, Any], Any]:
    """Runs once; wall-clock, processor time, and how far resident memory rose above its start."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier runs left in the heap is no part of this one
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    started, cpu = time.perf_counter(), time.process_time()
    out = program()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    grown = _status("VmHWM") - before
    return {"seconds": seconds, "cpu_seconds": cpu, "rss_before": before, "rss_rise": grown}, out


def serve(programs: dict[str, Callable[[], dict[str, np.ndarray]]], info: dict[str, Any]) -> None:
    """A side's main loop: announces itself, then runs the program that each line names.

    ``NAME`` answers with the measurements, ``NAME PATH`` also writes the program's arrays there.
    Programs return NumPy arrays, so nothing is still being computed when the clock stops.
    """
    versions = {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "torch", "transformers", "peft", "numpy")
        if importlib.util.find_spec(name)
    }
    say = sys.stdout.write
    say(json.dumps({**info, "python": platform.python_version(), "versions": versions}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        name, _, path = line.strip().partition(" ")
        row, out = _measured(programs[name])
        if path:
            np.savez(path, **out)
        say(json.dumps(row) + "\n")
        sys.stdout.flush()


class Side:
    """The caller's end of a process that runs :func:`serve`."""

    def __init__(self, python: str, script: str, spec: dict[str, Any]):
        command = [python, str(Path(__file__).with_name(script)), json.dumps(spec)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.info = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self._process.args[1]} ended early; its message is above")
        return json.loads(line)

    def run(self, name: str, path: Path | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {path}\n" if path else f"{name}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def interleaved(
    runs: dict[str, Callable[[], dict[str, Any]]], repetitions: int
) -> dict[str, dict[str, Any]]:
    """A B A B ...: every program ``repetitions`` times, and medians of what each measured."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            rows[name].append(run())
    return {name: summary(found) for name, found in rows.items()}


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Each repetition's numbers, their medians, and the highest rise of resident memory."""
    rows = list(rows)
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    medians = {f"median_{key}": float(np.median(values)) for key, values in columns.items()}
    return {**columns, **medians, "peak_rss_rise": max(columns["rss_rise"])}


def machine(load_before: float) -> dict[str, Any]:
    """Cores that this process may use, and the load average before and after."""
    cores, load = len(os.sched_getaffinity(0)), [load_before, os.getloadavg()[0]]
    return {"cores": cores, "architecture": platform.machine(), "load_average": load}
