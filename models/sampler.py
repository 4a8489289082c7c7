"""A sampler whose key-value cache lives across the turns of an episode.

Slots are grouped in waves. A wave is the unit of a device program: while one wave decodes, the
environments of the others step on the host. A turn prefills its new tokens only. Programs have a
small fixed set of shapes (prefill buckets, one decode block, spans of the cache), compiled once.

Sampling keys are functions of (seed, iteration, task, replica, turn, token), so what an episode
samples does not depend on its slot, its wave or the number of workers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from models import qwen
from models.config import QwenConfig

_MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Shapes and sampling settings.

    Attributes:
      waves: number of slot groups.
      slots: slots per wave.
      capacity: cache length per slot, in tokens.
      max_response: largest response, in tokens.
      block: decode steps per device call.
      prefill: increasing prefill bucket widths, in tokens.
      temperature: 0 is greedy; log-probabilities are then taken at temperature 1.
      top_p, top_k: filters (1.0 and 0 switch them off). Log-probabilities are those of the
        filtered distribution, the one that was sampled from.
      stop_ids: ids that end a response.
    """

    waves: int
    slots: int
    capacity: int
    max_response: int
    stop_ids: tuple[int, ...]
    block: int = 16
    prefill: tuple[int, ...] = (32, 128)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclasses.dataclass(frozen=True)
class Generated:
    """A sampled response: its ids, their log-probabilities, and "stop" or "length"."""

    ids: np.ndarray
    logp: np.ndarray
    stop: str


@struct.dataclass
class Wave:
    """Device state of a wave: per layer [S,G,C,h] keys and values, lengths, next-token logits."""

    keys: tuple[Float[Array, "S G C h"], ...]
    values: tuple[Float[Array, "S G C h"], ...]
    length: Int[Array, "S"]
    logits: Float[Array, "S V"]


def empty_wave(config: QwenConfig, slots: int, capacity: int, dtype: Any) -> Wave:
    """A wave with nothing in its cache."""
    shape = (slots, config.num_key_value_heads, capacity, config.head_dim)
    layers = range(config.num_hidden_layers)
    return Wave(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=jnp.zeros(slots, jnp.int32),
        logits=jnp.zeros((slots, config.vocab_size), jnp.float32),
    )


def wave_shardings(config: QwenConfig, slots: int, mesh: Mesh | None) -> Any:
    """Slots over ``data`` and key-value heads over ``tensor``, where they divide; None without."""
    if mesh is None:
        return None
    wave = jax.eval_shape(lambda: empty_wave(config, slots, 1, jnp.float32))
    rows = "data" if slots % mesh.shape["data"] == 0 else None
    heads = "tensor" if config.num_key_value_heads % mesh.shape["tensor"] == 0 else None
    return jax.tree.map(
        lambda x: NamedSharding(mesh, P(rows, heads) if x.ndim == 4 else P(rows)), wave
    )


def _layer(params: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], params)


def _attend(
    q: Float[Array, "S T H h"],
    pieces: Sequence[tuple[Float[Array, "S G C h"], Float[Array, "S G C h"], Bool[Array, "..."]]],
) -> Float[Array, "S T H h"]:
    """Softmax attention over several (keys, values, mask [S,T,C]) pieces, in fp32."""
    s, t, heads, size = q.shape
    groups = pieces[0][0].shape[1]
    q = q.reshape(s, t, groups, heads // groups, size).transpose(0, 2, 3, 1, 4)
    q = q.reshape(s, groups, -1, size) * size**-0.5
    scores = []
    for keys, _, mask in pieces:
        score = jnp.einsum("sgqh,sgch->sgqc", q, keys, preferred_element_type=jnp.float32)
        score = score.reshape(s, groups, heads // groups, t, -1)
        scores.append(jnp.where(mask[:, None, None], score, _MASKED))
    top = functools.reduce(
        jnp.maximum, [jnp.max(score, axis=-1, keepdims=True) for score in scores]
    )
    out: Array | float = 0.0
    total: Array | float = 0.0
    for (_, values, mask), score in zip(pieces, scores, strict=True):
        weight = jnp.where(mask[:, None, None], jnp.exp(score - top), 0.0)
        total = total + weight.sum(axis=-1, keepdims=True)
        flat = weight.reshape(s, groups, -1, weight.shape[-1]).astype(values.dtype)
        out = out + jnp.einsum(
            "sgqc,sgch->sgqh", flat, values, preferred_element_type=jnp.float32
        ).reshape(s, groups, heads // groups, t, size)
    out = out / jnp.maximum(total, 1e-30)
    return out.transpose(0, 3, 1, 2, 4).reshape(s, t, heads, size)


def prefill(
    params: Any,
    adapters: Any,
    wave: Wave,
    tokens: Int[Array, "S P"],
    count: Int[Array, "S"],
    *,
    config: QwenConfig,
    span: int,
) -> Wave:
    """Appends ``tokens[s, :count[s]]`` to slot s.

    ``span`` is a static bound of the filled cache that is looked at.
    """
    capacity = wave.keys[0].shape[2]
    slots, width = tokens.shape
    start = wave.length
    offset = jnp.arange(width)
    position = start[:, None] + offset
    real = offset[None] < count[:, None]
    cached = jnp.broadcast_to(
        (jnp.arange(span)[None] < start[:, None])[:, None], (slots, width, span)
    )
    causal = (offset[None, None] <= offset[None, :, None]) & real[:, None]
    target = jnp.where(real, position, capacity)
    rows = jnp.arange(slots)

    x = qwen.embed(params, tokens)
    keys, values = list(wave.keys), list(wave.values)
    for i in range(config.num_hidden_layers):
        layer, lora = _layer(params["layers"], i), _adapter_layer(adapters, i)
        normed = qwen.rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        q, k, v = qwen.project_qkv(layer, config, normed, position, lora)
        k, v = (z.astype(keys[i].dtype).transpose(0, 2, 1, 3) for z in (k, v))
        old_keys, old_values = keys[i][:, :, :span], values[i][:, :, :span]
        out = _attend(q, [(old_keys, old_values, cached), (k, v, causal)]).astype(x.dtype)
        keys[i] = keys[i].at[rows[:, None], :, target].set(k.transpose(0, 2, 1, 3), mode="drop")
        values[i] = values[i].at[rows[:, None], :, target].set(v.transpose(0, 2, 1, 3), mode="drop")
        x = x + qwen.attention_output(layer, config, out, lora)
        normed = qwen.rms_norm(x, layer["post_norm"], config.rms_norm_eps)
        x = x + qwen.mlp(layer, config, normed, lora)
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    last = qwen.rms_norm(last, params["final_norm"], config.rms_norm_eps)
    logits = qwen.unembed(params, config, last)
    return Wave(
        keys=tuple(keys),
        values=tuple(values),
        length=start + count,
        logits=jnp.where((count > 0)[:, None], logits, wave.logits),
    )


def _adapter_layer(adapters: Any, index: int) -> Any:
    return None if adapters is None else _layer(adapters, index)


def filtered_logp(
    logits: Float[Array, "S V"], temperature: Float[Array, ""], top_p: float, top_k: int
) -> Float[Array, "S V"]:
    """Log-probabilities after temperature, top-k and top-p, renormalised; removed ids get -1e30."""
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    if top_k:
        kth = jax.lax.top_k(scaled, min(top_k, scaled.shape[-1]))[0][:, -1:]
        scaled = jnp.where(scaled < kth, _MASKED, scaled)
    if top_p < 1.0:
        order = jnp.sort(scaled, axis=-1, descending=True)
        probs = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # mass of strictly likelier ids
        least = jnp.min(jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled < least, _MASKED, scaled)
    return jax.nn.log_softmax(scaled, axis=-1)


def decode(
    params: Any,
    adapters: Any,
    wave: Wave,
    active: Bool[Array, "S"],
    keys: Int[Array, "S 4"],
    first: Int[Array, "S"],
    limit: Int[Array, "S"],
    seed: Int[Array, ""],
    temperature: Float[Array, ""],
    *,
    config: QwenConfig,
    settings: SamplerConfig,
    span: int,
) -> tuple[Wave, Int[Array, "S n"], Float[Array, "S n"], Int[Array, "S"], Bool[Array, "S"]]:
    """Samples up to ``settings.block`` tokens per active slot; ends early when all have stopped.

    New keys and values stay in a small buffer during the block and enter the cache once.

    Returns:
      the wave, tokens, log-probabilities, number of tokens per slot, and which slots stopped.
    """
    n, slots = settings.block, wave.length.shape[0]
    layers = [_layer(params["layers"], i) for i in range(config.num_hidden_layers)]
    loras = [_adapter_layer(adapters, i) for i in range(config.num_hidden_layers)]
    capacity = wave.keys[0].shape[2]
    shape = (slots, config.num_key_value_heads, n, config.head_dim)
    dtype = wave.keys[0].dtype
    in_cache = (jnp.arange(span)[None] < wave.length[:, None])[:, None]
    base = jax.vmap(lambda row: _fold(jax.random.key(seed), row))(keys)
    stops = jnp.asarray(settings.stop_ids, jnp.int32)
    cache = [(k[:, :, :span], v[:, :, :span]) for k, v in zip(wave.keys, wave.values, strict=True)]

    def step(carry: Any) -> Any:
        t, going, count, logits, buffer_k, buffer_v, tokens, logps, stopped = carry
        logp = filtered_logp(logits, temperature, settings.top_p, settings.top_k)
        noise = jax.vmap(
            lambda key, index: jax.random.gumbel(
                jax.random.fold_in(key, index), (config.vocab_size,), jnp.float32
            )
        )(base, first + t)
        choice = jnp.where(temperature > 0, jnp.argmax(logp + noise, -1), jnp.argmax(logp, -1))
        choice = choice.astype(jnp.int32)
        chosen = jnp.take_along_axis(logp, choice[:, None], axis=1)[:, 0]
        tokens = tokens.at[:, t].set(choice)
        logps = logps.at[:, t].set(chosen)

        x = qwen.embed(params, choice[:, None])
        position = (wave.length + t)[:, None]
        in_buffer = jnp.broadcast_to((jnp.arange(n) <= t)[None, None], (slots, 1, n))
        for i, (layer, lora) in enumerate(zip(layers, loras, strict=True)):
            normed = qwen.rms_norm(x, layer["input_norm"], config.rms_norm_eps)
            q, k, v = qwen.project_qkv(layer, config, normed, position, lora)
            k, v = (z.astype(dtype).transpose(0, 2, 1, 3) for z in (k, v))
            buffer_k[i] = jax.lax.dynamic_update_slice_in_dim(buffer_k[i], k, t, axis=2)
            buffer_v[i] = jax.lax.dynamic_update_slice_in_dim(buffer_v[i], v, t, axis=2)
            pieces = [(*cache[i], in_cache), (buffer_k[i], buffer_v[i], in_buffer)]
            out = _attend(q, pieces).astype(x.dtype)
            x = x + qwen.attention_output(layer, config, out, lora)
            normed = qwen.rms_norm(x, layer["post_norm"], config.rms_norm_eps)
            x = x + qwen.mlp(layer, config, normed, lora)
        hidden = qwen.rms_norm(x[:, 0], params["final_norm"], config.rms_norm_eps)
        new_logits = qwen.unembed(params, config, hidden)

        count = count + going
        ended = going & jnp.any(choice[:, None] == stops[None], axis=-1)
        logits = jnp.where(going[:, None], new_logits, logits)
        going = going & ~ended & (first + count < limit)
        return t + 1, going, count, logits, buffer_k, buffer_v, tokens, logps, stopped | ended

    carry = (
        jnp.int32(0),
        active,
        jnp.zeros(slots, jnp.int32),
        wave.logits,
        [jnp.zeros(shape, dtype) for _ in layers],
        [jnp.zeros(shape, dtype) for _ in layers],
        jnp.zeros((slots, n), jnp.int32),
        jnp.zeros((slots, n), jnp.float32),
        jnp.zeros(slots, bool),
    )
    _, _, count, logits, buffer_k, buffer_v, tokens, logps, stopped = jax.lax.while_loop(
        lambda c: (c[0] < n) & jnp.any(c[1]), step, carry
    )
    offset = jnp.arange(n)
    target = jnp.where(offset[None] < count[:, None], wave.length[:, None] + offset, capacity)
    rows = jnp.arange(slots)[:, None]

    def commit(old: Array, new: Array) -> Array:
        return old.at[rows, :, target].set(new.transpose(0, 2, 1, 3), mode="drop")

    wave = Wave(
        keys=tuple(commit(o, b) for o, b in zip(wave.keys, buffer_k, strict=True)),
        values=tuple(commit(o, b) for o, b in zip(wave.values, buffer_v, strict=True)),
        length=wave.length + count,
        logits=logits,
    )
    return wave, tokens, logps, count, stopped


def _fold(key: Array, row: Int[Array, "4"]) -> Array:
    for i in range(4):
        key = jax.random.fold_in(key, row[i])
    return key


class Sampler:
    """Host-side handle of the waves; see the module docstring.

    Args:
      params: the policy's parameters (not copied).
      adapters: LoRA adapters' stacked weights, or None.
      config: the architecture.
      settings: shapes and sampling settings.
      seed: the run's seed.
      dtype: of the cache.
      mesh: the devices that weights and cache are spread over; None: a single one.
    """

    def __init__(
        self,
        params: Any,
        config: QwenConfig,
        settings: SamplerConfig,
        *,
        adapters: Any = None,
        seed: int = 0,
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
    ) -> None:
        self.params, self.adapters = params, adapters
        self.config, self.settings, self.seed = config, settings, seed
        # Made where they will lie: one device may not hold a whole cache.
        empty = jax.jit(
            functools.partial(empty_wave, config, settings.slots, settings.capacity, dtype),
            out_shardings=wave_shardings(config, settings.slots, mesh),
        )
        self._waves = [empty() for _ in range(settings.waves)]
        self._length = np.zeros((settings.waves, settings.slots), np.int64)
        # One compilation serves every temperature, which is an argument of the programs.
        self._prefill, self._decode = programs(
            config, dataclasses.replace(settings, temperature=1.0), mesh
        )
        self.prefilled = self.decoded = 0

    def lengths(self, wave: int) -> np.ndarray:
        """Tokens in the cache, per slot."""
        return self._length[wave]

    def reset(self, wave: int, slot: int) -> None:
        """Forgets a slot's tokens."""
        self._length[wave, slot] = 0
        self._sync(wave)

    def _sync(self, wave: int) -> None:
        length = jnp.asarray(self._length[wave], jnp.int32)
        self._waves[wave] = dataclasses.replace(self._waves[wave], length=length)

    def _span(self, wave: int) -> int:
        """Smallest quarter of the capacity that covers the wave's caches."""
        quarter = -(-self.settings.capacity // 4)
        quarters = max(1, -(-int(self._length[wave].max()) // quarter))
        return min(quarter * quarters, self.settings.capacity)

    def extend(self, wave: int, requests: Mapping[int, np.ndarray]) -> None:
        """Appends ids to slots.

        Raises:
          ValueError: a slot would grow beyond the capacity.
        """
        for slot, ids in requests.items():
            total = self._length[wave, slot] + len(ids)
            if total > self.settings.capacity:
                raise ValueError(
                    f"slot {slot} would hold {total} tokens, its cache {self.settings.capacity}; "
                    "raise prompt.max_context or end the episode earlier"
                )
        rest = {slot: np.asarray(ids, np.int32) for slot, ids in requests.items() if len(ids)}
        widths = self.settings.prefill
        while rest:
            longest = max(map(len, rest.values()))
            width = next((w for w in widths if w >= longest), widths[-1])
            tokens = np.zeros((self.settings.slots, width), np.int32)
            count = np.zeros(self.settings.slots, np.int32)
            for slot, ids in rest.items():
                part = ids[:width]
                tokens[slot, : len(part)], count[slot] = part, len(part)
            self._waves[wave] = self._prefill(
                self.params,
                self.adapters,
                self._waves[wave],
                tokens,
                count,
                span=self._span(wave),
            )
            for slot, ids in rest.items():
                self._length[wave, slot] += min(len(ids), width)
            self.prefilled += int(count.sum())
            rest = {slot: ids[width:] for slot, ids in rest.items() if len(ids) > width}

    def generate(
        self, wave: int, requests: Mapping[int, tuple[tuple[int, int, int, int], int]]
    ) -> dict[int, Generated]:
        """Samples one response per requested slot.

        Args:
          wave: which wave.
          requests: slot -> ((iteration, task, replica, turn), largest number of tokens).
        """
        slots = self.settings.slots
        keys = np.zeros((slots, 4), np.int32)
        limit = np.zeros(slots, np.int32)
        first = np.zeros(slots, np.int32)
        going = np.zeros(slots, bool)
        for slot, (key, most) in requests.items():
            keys[slot], limit[slot], going[slot] = key, most, True
        ids: dict[int, list[np.ndarray]] = {slot: [] for slot in requests}
        logps: dict[int, list[np.ndarray]] = {slot: [] for slot in requests}
        stop: dict[int, str] = {}
        while going.any():
            self._waves[wave], *out = self._decode(
                self.params,
                self.adapters,
                self._waves[wave],
                going,
                keys,
                first,
                limit,
                np.int32(self.seed),
                np.float32(self.settings.temperature),
                span=self._span(wave),
            )
            tokens, logp, count, stopped = (np.asarray(x) for x in out)
            for slot in np.flatnonzero(going).tolist():
                ids[slot].append(tokens[slot, : count[slot]])
                logps[slot].append(logp[slot, : count[slot]])
            first = first + count
            self._length[wave] += count
            self.decoded += int(count.sum())
            for slot in np.flatnonzero(going & (stopped | (first >= limit))).tolist():
                stop[slot] = "stop" if stopped[slot] else "length"
                going[slot] = False
        return {
            slot: Generated(np.concatenate(ids[slot]), np.concatenate(logps[slot]), stop[slot])
            for slot in requests
        }


@functools.lru_cache(maxsize=8)
def programs(
    config: QwenConfig, settings: SamplerConfig, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """Jitted prefill and decode, shared by samplers of the same shapes on the same devices."""
    place = wave_shardings(config, settings.slots, mesh)
    places = None if place is None else (place, None, None, None, None)
    prefill_fn = jax.jit(
        functools.partial(prefill, config=config),
        donate_argnums=(2,),
        static_argnames=("span",),
        out_shardings=place,
    )
    decode_fn = jax.jit(
        functools.partial(decode, config=config, settings=settings),
        donate_argnums=(2,),
        static_argnames=("span",),
        out_shardings=places,
    )
    return prefill_fn, decode_fn
