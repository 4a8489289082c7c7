"""Traces and compiles a program, and reads what it costs."""

from __future__ import annotations

import re
import time
from typing import Any

import jax

from launch.plan import flops, hlo
from launch.plan.hardware import GIB, Topology
from launch.plan.ledger import Planned, estimate
from launch.plan.programs import Program

# XLA on a TPU refuses a program that is too large for the memory it knows of.
_NEEDED = re.compile(r"\(([\d.]+)([GM])\) exceeds|Used ([\d.]+)([GM]) of")


def plan_program(
    program: Program, topology: Topology, layers: int, rows: tuple[int, int], dtype: str
) -> Planned:
    """Compiles a program for a topology.

    Args:
      program: what to compile.
      topology: for what.
      layers: of the policy.
      rows: (rows, tokens) of its slice on one device.
      dtype: of its products.
    """
    started = time.perf_counter()
    traced = program.function.trace(*program.args, **program.static)
    operations = flops.count(traced.jaxpr, loop_trips=program.rounds)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Planned(
            name=program.name,
            shape=program.shape,
            calls=program.calls,
            live={**program.live, "temporaries": _needed(str(error))},
            flops=operations,
            collectives=None,
            kernels={},
            estimate=None,
            failure=str(error).splitlines()[0],
            compile_s=time.perf_counter() - started,
        )
    text, memory = compiled.as_text(), compiled.memory_analysis()
    kept = min(hlo.stacked_bytes(text, layers, rows), memory.temp_size_in_bytes)
    if "accumulate" not in program.name:
        kept = 0  # nothing is kept where nothing is differentiated
    new = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    live = {
        **program.live,
        "activations": kept,
        "temporaries": memory.temp_size_in_bytes - kept,
        "results": new,
    }
    exchanges = hlo.collectives(text, per_node=topology.per_node, loop_trips=program.rounds)
    # Every argument is read, once a round; every temporary is written and read.
    touched = program.rounds * memory.argument_size_in_bytes + new
    touched += 2 * memory.temp_size_in_bytes
    return Planned(
        name=program.name,
        shape=program.shape,
        calls=program.calls,
        live=live,
        flops=operations,
        collectives=exchanges,
        kernels=dict(hlo.custom_calls(text)),
        estimate=estimate(topology, dtype, operations, touched, exchanges),
        failure=None,
        compile_s=time.perf_counter() - started,
    )


def _needed(message: str) -> float:
    """Bytes that the compiler says a program needs; 0 if it does not say."""
    match = _NEEDED.search(message)
    if match is None:
        return 0.0
    size, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    return float(size) * (GIB if unit == "G" else 1024**2)


def attention_of(kernels: Any) -> str:
    """Which attention a program was compiled with, by the kernels it calls."""
    names = " ".join(kernels)
    if "fmha" in names:
        return "cudnn"
    return "splash" if "tpu_custom_call" in names else "xla"
