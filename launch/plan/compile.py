"""Traces and compiles a program, and reads what it costs."""

from __future__ import annotations

import re
import time

import jax

from launch.plan import flops, hlo
from launch.plan.hardware import GIB, Topology
from launch.plan.ledger import Planned, estimate
from launch.plan.programs import Program
from models.policy import Policy

# XLA on a TPU refuses a program that is too large for the memory it knows of.
_NEEDED = re.compile(r"\(([\d.]+)([GM])\) exceeds|Used ([\d.]+)([GM]) of")


def plan_program(program: Program, topology: Topology, policy: Policy) -> Planned:
    """Compiles a program of a policy for a topology."""
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
            attention=None,
            estimate=None,
            failure=str(error).splitlines()[0],
            compile_s=time.perf_counter() - started,
        )
    text, memory = compiled.as_text(), compiled.memory_analysis()
    kept = 0
    if program.differentiated:
        kept = hlo.stacked_bytes(text, policy.config.num_hidden_layers, _local(program, policy))
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
        attention=_attention(text) if program.shape[0] else None,
        estimate=estimate(topology, policy.dtype, operations, touched, exchanges),
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


def _local(program: Program, policy: Policy) -> tuple[int, int]:
    """Rows and tokens of a program's slice on one device."""
    (rows, tokens), mesh = program.shape, policy.mesh
    if mesh is None:
        return rows, tokens
    return rows // mesh.shape["data"], tokens // mesh.shape["context"]


def _attention(text: str) -> str:
    """Which attention a program was compiled with, by the kernels it calls."""
    names = " ".join(hlo.custom_calls(text))
    if "fmha" in names:
        return "cudnn"
    return "splash" if "tpu_custom_call" in names else "xla"
