"""Logical axes to mesh axes, in one place.

Mesh axes: ``data`` (replicas of the batch, and FSDP shards of weights), ``tensor`` (heads, MLP
columns, vocabulary), ``context`` (tokens of a row). Arrays name their dimensions logically; the
rules below say where a name lives. A dimension that a mesh axis does not divide is replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from models.config import QwenConfig
from models.params import Spec, is_spec, param_specs

MESH_AXES = ("data", "tensor", "context")

RULES: dict[str, str | None] = {
    "batch": "data",
    "length": "context",
    "layers": None,
    "vocab": "tensor",
    "embed": "data",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


# A sampler reads every weight for every token: it holds them whole in each replica.
SAMPLER_RULES = {**RULES, "embed": None}


def make_mesh(
    data: int = 1, tensor: int = 1, context: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the first data * tensor * context devices, propagated by the compiler.

    Args:
      data, tensor, context: sizes of the axes; data = -1 takes all devices that are left.
      devices: those to choose from (default: all that are present).

    Raises:
      ValueError: there are fewer devices than the product, or they cannot be shared out evenly.
    """
    found = list(jax.devices() if devices is None else devices)
    if data == -1:
        data, left = divmod(len(found), tensor * context)
        if left or not data:
            raise ValueError(
                f"{len(found)} devices do not divide into groups of tensor={tensor} x "
                f"context={context}; change the sizes, or set data to leave some out"
            )
    need = data * tensor * context
    if need > len(found):
        raise ValueError(
            f"a mesh of data={data}, tensor={tensor}, context={context} needs {need} devices and "
            f"{len(found)} are present; lower one of the sizes"
        )
    return jax.make_mesh(
        (data, tensor, context), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=found[:need]
    )


@contextmanager
def traced_on(mesh: Mesh | None) -> Iterator[None]:
    """Functions traced inside are for ``mesh``; for a single device if it is None."""
    if mesh is None:
        yield
    else:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield


def _mesh_axis(
    name: str | None, size: int, mesh_shape: Any, rules: Mapping[str, str | None]
) -> str | None:
    if name is None:
        return None
    if name not in rules:
        raise ValueError(f"logical axis {name!r} has no rule; known are {sorted(rules)}")
    axis = rules[name]
    if axis is None or axis not in mesh_shape or size % mesh_shape[axis]:
        return None
    return axis


def spec_partition(
    spec: Spec, config: QwenConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES
) -> PartitionSpec:
    """Partition of one array. Heads are split whole: their count decides, not their columns."""
    whole = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    return PartitionSpec(
        *(
            _mesh_axis(name, whole.get(name or "", size), mesh.shape, rules)
            for name, size in zip(spec.axes, spec.shape, strict=True)
        )
    )


def tree_shardings(
    specs: Any, config: QwenConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES
) -> Any:
    """Shardings of any tree of :class:`models.params.Spec` (adapters included)."""
    return jax.tree.map(
        lambda s: NamedSharding(mesh, spec_partition(s, config, mesh, rules)),
        specs,
        is_leaf=is_spec,
    )


def param_shardings(config: QwenConfig, mesh: Mesh) -> Any:
    """Shardings of the policy's weights, in the tree of ``param_specs``."""
    return tree_shardings(param_specs(config), config, mesh)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a [B, T] array: rows over ``data``, tokens over ``context``."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"], RULES["length"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def place_rows(rows: Any, mesh: Mesh | None) -> Any:
    """Puts every [B, T] array of a tree where the mesh wants it; as it is without a mesh."""
    return rows if mesh is None else jax.device_put(rows, batch_sharding(mesh))


def constrain(x: Array, *names: str | None) -> Array:
    """Pins x to its logical axes on the mesh it is traced on; identity without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    axes = (_mesh_axis(n, size, mesh.shape, RULES) for n, size in zip(names, x.shape, strict=True))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
