"""The sampler's two device programs, jitted: on one device, or on every replica of a mesh.

A replica holds its own slots and works on its own rows: slots, and the rows of a call, lie on the
mesh axis ``data``, replica after replica, and a replica counts its slots from 0. Within a replica
the compiler splits heads, columns and vocabulary over ``tensor``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models import decoding
from models.config import QwenConfig

_SPANS = 3  # spans of the cache: all of it, a half, a quarter
_MULTIPLE = 64  # of which spans are multiples
_NARROWEST, _STEP = 16, 4  # width of a prefill call, and the factor to the next
_REPLICAS = "data"


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Shapes, all of one replica, and sampling settings.

    Attributes:
      slots: rows of the cache.
      capacity: length of a row, in tokens.
      max_response: largest response, in tokens.
      stop_ids: ids that end a response.
      rows: slots that one decode block works on; None is all.
      block: decode steps per device call.
      prefill: tokens of a prefill call, padding included, a power of two: many short chunks or
        one long one. So all calls multiply matrices of one shape, however a row is cut.
      temperature: 0 is greedy; log-probabilities are then taken at temperature 1.
      top_p, top_k: filters (1.0 and 0 switch them off). Log-probabilities are those of the
        filtered distribution, the one that was sampled from.
      share: take over common prefixes of rows.
    """

    slots: int
    capacity: int
    max_response: int
    stop_ids: tuple[int, ...]
    rows: int | None = None
    block: int = 16
    prefill: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    share: bool = True

    def __post_init__(self) -> None:
        if self.prefill < _NARROWEST or self.prefill & (self.prefill - 1):
            raise ValueError(
                f"prefill is {self.prefill} tokens; expected a power of two of at least "
                f"{_NARROWEST}"
            )

    @property
    def decode_rows(self) -> int:
        """Rows of a decode block."""
        return min(self.rows or self.slots, self.slots)

    @property
    def spans(self) -> tuple[int, ...]:
        """Cache lengths that programs exist for, increasing; the last is the allocated one."""
        parts = {-(-self.capacity // (_MULTIPLE << k)) * _MULTIPLE for k in range(_SPANS)}
        return tuple(sorted(parts))

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a prefill call, increasing; each has ``prefill // width`` rows."""
        powers = (_NARROWEST * _STEP**k for k in range(10))
        return (*(w for w in powers if w < self.prefill), self.prefill)


def replicas(mesh: Mesh | None) -> int:
    """Replicas of the sampler."""
    return 1 if mesh is None else mesh.shape[_REPLICAS]


def empty_cache(
    config: QwenConfig, settings: SamplerConfig, dtype: Any, hidden_dtype: Any, mesh: Mesh | None
) -> decoding.Cache:
    """A cache for all replicas with nothing in it (may be called for its shape alone)."""
    slots = settings.slots * replicas(mesh)
    return decoding.empty_cache(config, slots, settings.spans[-1], dtype, hidden_dtype)


def by_layer(params: Any, adapters: Any, config: QwenConfig, places: Any = None) -> tuple[Any, Any]:
    """Weights and adapters (or None) as the programs read them: a tuple of layers, none stacked.

    ``places`` has the shardings of both as they are given, stacked; None leaves everything where it
    lies. The layers are copied, and put in place one by one, so that no stack is put together
    beside them; another weight is copied only if its place is another one. Of shapes
    (``jax.ShapeDtypeStruct``) it gives shapes.
    """
    if places is None:
        places = jax.tree.map(lambda x: x.sharding, (params, adapters))
    to, adapters_to = places
    layers = range(config.num_hidden_layers)
    outside = {name: x for name, x in params.items() if name != "layers"}
    split = {name: jax.tree.map(_put, x, to[name]) for name, x in outside.items()}
    split["layers"] = tuple(_layer(params["layers"], to["layers"], i) for i in layers)
    return split, tuple(
        None if adapters is None else _layer(adapters, adapters_to, i) for i in layers
    )


def _layer(tree: Any, places: Any, index: int) -> Any:
    def part(x: Any, place: Any) -> Any:
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, P(*place.spec[1:]))
        shape_only = isinstance(x, jax.ShapeDtypeStruct)
        return _put(jax.eval_shape(_part, x, 0) if shape_only else _part(x, index), place)

    return jax.tree.map(part, tree, places)


def _put(x: Any, place: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    # On one device it lies there already, and is not to be pinned there.
    return jax.device_put(x, place) if isinstance(place, NamedSharding) else x


@jax.jit
def _part(x: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def cache_shardings(config: QwenConfig, mesh: Mesh | None) -> Any:
    """Slots over ``data``; key-value heads over ``tensor`` if it divides them. None without."""
    if mesh is None:
        return None
    cache = jax.eval_shape(lambda: decoding.empty_cache(config, 1, 1, np.float32, np.float32))
    heads = "tensor" if config.num_key_value_heads % mesh.shape["tensor"] == 0 else None
    return jax.tree.map(
        lambda x: NamedSharding(mesh, P(_REPLICAS, heads) if x.ndim == 4 else P(_REPLICAS)), cache
    )


def jitted(
    config: QwenConfig, settings: SamplerConfig, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """Jitted ``decoding.prefill`` and ``decoding.decode``, shared by samplers of equal settings.

    Shapes come from the arguments, spans from ``settings.spans``; no weights are needed.
    """
    # One compilation serves every temperature, which is an argument of the program.
    return _jitted(config, settings.block, settings.stop_ids, settings.top_p, settings.top_k, mesh)


@functools.lru_cache(maxsize=8)
def _jitted(
    config: QwenConfig,
    block: int,
    stop_ids: tuple[int, ...],
    top_p: float,
    top_k: int,
    mesh: Mesh | None,
) -> tuple[Any, Any]:
    prefill: Callable[..., Any] = functools.partial(decoding.prefill, config=config)
    decode: Callable[..., Any] = functools.partial(
        decoding.decode,
        config=config,
        block=block,
        stop_ids=stop_ids,
        top_p=top_p,
        top_k=top_k,
        axis=None if mesh is None else _REPLICAS,
    )
    jit = functools.partial(jax.jit, donate_argnums=(2,), static_argnames=("span",))
    if mesh is None:
        return jit(prefill), jit(decode)
    jit = functools.partial(jit, out_shardings=(cache_shardings(config, mesh), None))
    # After weights, adapters and cache: arguments by row, then those that all rows share.
    return jit(_replicated(prefill, mesh, 5, 0)), jit(_replicated(decode, mesh, 7, 3))


def _replicated(function: Callable[..., Any], mesh: Mesh, by_row: int, shared: int) -> Any:
    """The function of one replica as one of all."""
    row, whole = P(_REPLICAS), P()

    def everywhere(*args: Any, span: int) -> Any:
        return jax.shard_map(
            functools.partial(function, span=span),
            mesh=mesh,
            in_specs=(whole, whole, row, *[row] * by_row, *[whole] * shared),
            out_specs=row,
            axis_names={_REPLICAS},
            check_vma=False,
        )(*args)

    return everywhere


def idle_prefill(settings: SamplerConfig, width: int, count: int = 1) -> list[np.ndarray]:
    """Arguments by row (tokens, count, start, source, target) of ``count`` replicas' prefill call
    that changes nothing; whatever is called for has their shapes."""
    rows = count * (settings.prefill // width)
    tokens = np.zeros((rows, width), np.int32)
    return [
        tokens,
        *(np.zeros(rows, np.int32) for _ in range(3)),
        np.full(rows, settings.slots, np.int32),
    ]


def idle_decode(settings: SamplerConfig, count: int = 1) -> list[np.ndarray]:
    """Arguments by row (rows, active, length, keys, first, limit, automaton) of ``count``
    replicas' decode call that changes nothing."""
    rows = settings.decode_rows
    whole = rows == settings.slots  # then row and slot are one
    slots = np.arange(rows, dtype=np.int32) if whole else np.full(rows, settings.slots, np.int32)
    rows *= count
    return [
        np.tile(slots, count),
        np.zeros(rows, bool),
        np.zeros(rows, np.int32),
        np.zeros((rows, 4), np.int32),
        *(np.zeros(rows, np.int32) for _ in range(3)),
    ]
