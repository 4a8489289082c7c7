"""``python -m launch plan``: whether a run fits hardware that is not here, before it is booked."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import progress
from launch.config import TrainConfig
from launch.errors import UserError
from launch.plan.hardware import Topology, parse


def main(
    config: TrainConfig,
    topologies: Sequence[str],
    memory_gib: float | None,
    out: Path | None,
    phases: Sequence[str] | None = None,
) -> None:
    """Prints a plan per topology; with ``out`` also writes them there as JSON.

    ``phases`` limits the plan to programs of "rollout", "score" or "update".

    Raises ``UserError`` if the config cannot be trained, does not fit, or a package is missing.
    """
    wanted = [parse(name, memory_gib) for name in topologies]
    for phase in phases or ():
        if phase not in ("rollout", "score", "update"):
            raise UserError(f"--phase: {phase!r} is not one of rollout, score, update")
    if out is not None and out.is_dir():
        raise UserError(f"--out: {out} is a folder; name a file")
    _prepare_process(wanted)
    from launch.plan import report

    found = []
    for topology in wanted:
        found.append(plan(config, topology, phases))
        print(report.as_text(found[-1]) + "\n", flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    misfits = [item["topology"] for item in found if item["fits"] is False]
    if misfits:
        raise UserError(f"plan: does not fit {', '.join(misfits)}; the lines above say what to do")


def plan(
    config: TrainConfig, topology: Topology, phases: Sequence[str] | None = None
) -> dict[str, Any]:
    """The plan of one topology as plain data (see ``launch.plan.report.as_data``)."""
    from launch.plan import hardware, report
    from launch.plan.compile import plan_program
    from launch.plan.programs import PHASES, about, abstract_setup, programs

    devices = hardware.devices(topology)
    setup = abstract_setup(config, topology, devices)
    planned = []
    wanted = phases or PHASES
    everything = [p for p in programs(setup, devices) if p.phase in wanted]
    with progress.bar(f"plan: {topology.name}") as update:
        for i, program in enumerate(everything):
            update(i, len(everything))
            planned.append(plan_program(program, topology, setup.parts.policy))
    return report.as_data(topology, about(config, setup, topology), planned)


def _prepare_process(topologies: Sequence[Topology]) -> None:
    """Settings that JAX reads once, when it starts."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs: plugins only compile
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # and no cloud is asked what this machine is
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nor is a TPU held
    # What a cloud would answer; libtpu complains without it. The topology decides all the same.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the compiler's advice about shardings
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # it would want devices to load for
    most = max((t.size for t in topologies if t.platform == "cpu"), default=1)
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        device_count = f"--xla_force_host_platform_device_count={most}"
        os.environ["XLA_FLAGS"] = f"{flags} {device_count}".strip()
