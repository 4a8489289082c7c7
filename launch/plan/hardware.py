"""Devices that are not here: parsed names, known facts, and JAX devices to compile for."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import yaml

from launch.errors import UserError, one_line

_FILE = Path(__file__).with_name("hardware.yaml")
GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Topology:
    """What a plan is made for.

    Attributes:
      name: as it was asked for.
      platform: "cpu", "gpu" or "tpu".
      kind: key of the table in hardware.yaml; "cpu" has no entry.
      shape: nodes and GPUs per node, the sides of a TPU slice, or the number of CPU devices.
      memory: bytes that a device may plan with, or None if it is not known.
      total_memory: bytes that a device has, likewise.
      facts: the table's entry; empty for "cpu".
    """

    name: str
    platform: str
    kind: str
    shape: tuple[int, ...]
    memory: float | None
    total_memory: float | None
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def per_node(self) -> int:
        """Devices that reach each other without the network between nodes."""
        return self.shape[-1] if self.platform == "gpu" else self.size


@functools.cache
def table() -> dict[str, Any]:
    """The facts of hardware.yaml."""
    found: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return found


def parse(name: str, memory_gib: float | None = None) -> Topology:
    """Reads a topology's name.

    Args:
      name: ``h200x8`` (multiples of 8: nodes of 8), ``v5p:2x2x4``, or ``cpu:8``.
      memory_gib: memory per device to plan with, in place of the table's.

    Raises:
      UserError: the name is none of these.
    """
    if match := re.fullmatch(r"cpu:([1-9]\d*)", name):
        return _topology(name, "cpu", "cpu", (int(match[1]),), memory_gib)
    if match := re.fullmatch(r"([a-z]\w*?)x([1-9]\d*)", name):
        facts = table()["gpu"].get(match[1])
        if facts is not None and int(match[2]) % facts["per_node"] == 0:
            shape = (int(match[2]) // facts["per_node"], facts["per_node"])
            return _topology(name, "gpu", match[1], shape, memory_gib)
    if match := re.fullmatch(r"(v\w+):(\d+(?:x\d+)+)", name):
        facts = table()["tpu"].get(match[1])
        sides = tuple(int(side) for side in match[2].split("x"))
        if facts is not None and len(sides) == facts["dimensions"] and all(sides):
            return _topology(name, "tpu", match[1], sides, memory_gib)
    gpus, tpus = "|".join(table()["gpu"]), "|".join(table()["tpu"])
    raise UserError(
        f"--topology: {name!r} is not known; write {gpus} with a multiple of 8 (h200x8, h200x16), "
        f"{tpus} with a slice's sides (v5e:2x4, v5p:2x2x4), or cpu:N"
    )


def _topology(
    name: str, platform: str, kind: str, shape: tuple[int, ...], memory_gib: float | None
) -> Topology:
    facts = table().get(platform, {}).get(kind, {})
    total = facts.get("memory_bytes")
    memory = None if total is None else total * facts["usable"]
    if memory_gib is not None:
        total = memory = memory_gib * GIB
    return Topology(name, platform, kind, shape, memory, total, facts)


def devices(topology: Topology) -> list[Any]:
    """JAX devices of a topology, to compile for; only those of ``cpu:N`` can run anything.

    Raises:
      UserError: a package is missing, or the compiler knows no such slice.
    """
    import jax
    from jax.experimental import topologies

    try:
        if topology.platform == "cpu":
            found = jax.devices("cpu")
            if len(found) < topology.size:
                raise UserError(
                    f"--topology: {topology.name}, but this process has {len(found)} CPU devices; "
                    f"set XLA_FLAGS=--xla_force_host_platform_device_count={topology.size}"
                )
            return found[: topology.size]
        if topology.platform == "gpu":
            _need("jax_cuda12_plugin", "jax_cuda13_plugin", extra="plan-gpu", name=topology.name)
            nodes, gpus = topology.shape
            return topologies.get_topology_desc(
                topology.name,
                "cuda",
                target_config=target_text(topology),
                topology=f"{nodes}x1x{gpus}",
            ).devices
        _need("libtpu", extra="plan-tpu", name=topology.name)
        sides = "x".join(map(str, topology.shape))
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{topology.kind}:{sides}"
        ).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UserError(f"--topology: {topology.name}: {one_line(error)[:300]}") from error


def _need(*packages: str, extra: str, name: str) -> None:
    if not any(map(importlib.util.find_spec, packages)):
        raise UserError(
            f"--topology: {name} needs the package {' or '.join(packages)}; "
            f"install it with `make {extra}`, or `pip install -e '.[{extra}]'`"
        )


def target_text(topology: Topology) -> str:
    """The compiler's description of a GPU, as a text protocol buffer."""
    facts = topology.facts
    own = dict(facts["target"])
    name, major = own.pop("name"), own.pop("major")
    fields = {
        **table()["target"],
        **own,
        "memory_bandwidth": int(facts["memory_rate"]),
        "device_memory_size": int(topology.total_memory or 0),
    }
    lines = "\n".join(f"  {key}: {value}" for key, value in fields.items())
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability {{ major: {major} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        "runtime_version { major: 12 minor: 8 }\n"
        f'device_description_str: "{name}"\n'
    )
