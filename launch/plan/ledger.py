"""What a device holds while a program runs, and what follows from it.

Three parts are live at once: what stays for the whole run, what the phase adds (a cache while
episodes are played, a gradient while the policy is updated), and the program's own temporaries
and results. The compiler knows the last part; the first two are counted from the arrays and
where the mesh puts them, since a program does not see arrays that it does not use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from launch.plan.hardware import Topology
from launch.plan.hlo import Collective

# What each group of live arrays is, and what makes it smaller.
CONSUMERS = {
    "parameters": (
        "weights",
        "raise mesh.tensor or the number of devices, or set policy.dtype=bfloat16 with policy.lora",
    ),
    "initial copy": (
        "weights of the initial policy",
        "set policy.lora: then the frozen base is the reference and only adapters are kept twice",
    ),
    "sampler's weights": ("a copy of the weights that the sampler reads", "raise mesh.tensor"),
    "optimiser": ("moments of AdamW", "set policy.lora, or raise the number of devices"),
    "gradients": ("sums over micro-batches", "set policy.lora, or raise the number of devices"),
    "cache": ("keys and values of all slots", "lower rollout.slots, or raise mesh.tensor"),
    "batch": ("rows of a slice", "lower optimizer.microbatch_tokens"),
    "activations": (
        "kept for the backward pass",
        "set policy.remat=full, lower optimizer.microbatch_tokens to the width of one row per "
        "replica, or raise mesh.context or mesh.tensor",
    ),
    "temporaries": (
        "intermediate arrays of the program",
        "lower optimizer.microbatch_tokens (rows of a slice) or rollout.slots (of a wave), or "
        "raise mesh.tensor or mesh.context",
    ),
    "results": ("what the program returns", "lower optimizer.microbatch_tokens"),
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Least seconds of one call: the largest of three lower bounds. Not a measurement."""

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """The bound that holds."""
        return max(self.compute, self.memory, self.links)


@dataclasses.dataclass(frozen=True)
class Planned:
    """One program of a run, compiled.

    Attributes:
      name: such as "update: accumulate".
      shape: of its rows, over all devices: (rows, tokens).
      calls: calls per iteration if every row is full; None where only the episodes decide.
      live: bytes per device by consumer (keys of ``CONSUMERS``).
      flops: operations of one call on all devices together.
      collectives: exchanges of one call, per device; None if it did not compile.
      attention: "cudnn", "splash" or "xla", by the kernels that it calls; None without attention.
      estimate: least seconds of one call; None without facts about the device.
      failure: the compiler's words if it found the program too large.
      compile_s: seconds that compiling took here.
    """

    name: str
    shape: tuple[int, int]
    calls: int | None
    live: Mapping[str, float]
    flops: float
    collectives: tuple[Collective, ...] | None
    attention: str | None
    estimate: Estimate | None
    failure: str | None
    compile_s: float

    @property
    def peak(self) -> float:
        """Bytes per device while it runs."""
        return sum(self.live.values())


def bytes_per_device(tree: Any) -> float:
    """Bytes that one device holds of a tree of arrays or of their abstract shapes."""
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def _leaf_bytes(leaf: Any) -> float:
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * np.dtype(leaf.dtype).itemsize


def estimate(
    topology: Topology,
    dtype: str,
    flops: float,
    touched: float,
    collectives: tuple[Collective, ...],
) -> Estimate | None:
    """Least seconds of a call by the facts about a device.

    Args:
      topology: the devices.
      dtype: of the products.
      flops: of all devices together, shared evenly.
      touched: bytes of device memory that a device reads or writes.
      collectives: what it sends.
    """
    facts = topology.facts
    if not facts:
        return None
    links = sum(
        c.sent / (facts["network_rate"] if c.crosses else facts["link_rate"]) for c in collectives
    )
    return Estimate(
        compute=flops / topology.size / facts[dtype],
        memory=touched / facts["memory_rate"],
        links=links,
    )


def largest(planned: Planned, count: int = 3) -> list[tuple[str, float, str, str]]:
    """(consumer, bytes, what it is, what makes it smaller) of the largest consumers."""
    order = sorted(planned.live.items(), key=lambda item: -item[1])[:count]
    return [(name, size, *CONSUMERS[name]) for name, size in order if size > 0]
