"""Device programs of the sampler: prefill some rows of a cache, decode a block of tokens.

The cache holds one row per slot. Both programs gather the rows that take part, work on a batch of
fixed shape and scatter back, so the slots of a call may be any; rows of padding name no slot.

Up to rounding, a row's floats depend on the row alone: shapes are fixed and masked keys weigh
exactly zero, whatever its company, its slot, the static ``span`` and the cut of its prompt into
chunks. How much rounding is left is the backend's matter: none on some CPUs, 1e-6 on others.

``params["layers"]`` is a tuple here, one tree per layer, and so are adapters (a tuple of None
without any). Of a stacked array a program would copy every layer's part, at each call, before it
can multiply with it, which costs as much as a decode step.

Letters: S slots, R rows of a call, P prefill width, n decode block, C capacity, G key-value heads,
h head size, D width, V vocabulary, A states of the stop automaton.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from models import qwen
from models.config import QwenConfig

MASKED = -1e30
GOING, STOP_ID, STOP_STRING = 0, 1, 2  # why a row's response ended in this block, if it did


@struct.dataclass
class Cache:
    """Keys and values per layer, and the last token's final hidden state, normalised.

    Slots and key-value heads are plain array axes, sharded on a mesh (``models.programs``).
    """

    keys: tuple[Float[Array, "S G C h"], ...]
    values: tuple[Float[Array, "S G C h"], ...]
    hidden: Float[Array, "S D"]


@struct.dataclass
class Block:
    """What a decode call sampled: row by row ``count`` tokens and why the row ended, if it did."""

    tokens: Int[Array, "R n"]
    logp: Float[Array, "R n"]
    count: Int[Array, "R"]
    ended: Int[Array, "R"]
    automaton: Int[Array, "R"]


def empty_cache(
    config: QwenConfig, slots: int, capacity: int, dtype: Any, hidden_dtype: Any
) -> Cache:
    """A cache with nothing in it: 2 L S G C h numbers of ``dtype`` and S D of ``hidden_dtype``."""
    shape = (slots, config.num_key_value_heads, capacity, config.head_dim)
    layers = range(config.num_hidden_layers)
    return Cache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        hidden=jnp.zeros((slots, config.hidden_size), hidden_dtype),
    )


def _mixed(params: Any, config: QwenConfig, layer: Any, low: Any, x: Array, out: Array) -> Array:
    """The rest of a layer, after its attention."""
    x = x + qwen.attention_output(layer, config, out.astype(x.dtype), low)
    normed = qwen.rms_norm(x, layer["post_norm"], config.rms_norm_eps)
    return x + qwen.mlp(layer, config, normed, low)


def _scores(q: Float[Array, "R G Q h"], keys: Float[Array, "R G C h"], mask: Array) -> Array:
    score = jnp.einsum("rgqh,rgch->rgqc", q, keys, preferred_element_type=jnp.float32)
    return jnp.where(mask, score, MASKED)


def _weighted(weights: Float[Array, "R G Q C"], values: Float[Array, "R G C h"]) -> Array:
    return jnp.einsum(
        "rgqc,rgch->rgqh",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )


def _grouped(q: Float[Array, "R T H h"], groups: int) -> Float[Array, "R G Q h"]:
    """Scaled queries with the H / G heads of a group and the tokens on one axis, heads first."""
    rows, tokens, heads, size = q.shape
    q = q.reshape(rows, tokens, groups, heads // groups, size).transpose(0, 2, 3, 1, 4)
    return q.reshape(rows, groups, -1, size) * size**-0.5


def _ungrouped(out: Float[Array, "R G Q h"], tokens: int) -> Float[Array, "R T H h"]:
    rows, groups, _, size = out.shape
    out = out.reshape(rows, groups, -1, tokens, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, tokens, -1, size)


def prefill(
    params: Any,
    adapters: Any,
    cache: Cache,
    tokens: Int[Array, "R P"],
    count: Int[Array, "R"],
    start: Int[Array, "R"],
    source: Int[Array, "R"],
    target: Int[Array, "R"],
    *,
    config: QwenConfig,
    span: int,
) -> tuple[Cache, Int[Array, "1"]]:
    """Makes slot ``target[r]`` hold the first ``start[r]`` tokens of slot ``source[r]`` and then
    ``tokens[r, :count[r]]``.

    The source may be the target itself (a row grows) or another slot (a prefix is shared). No slot
    may be the source of one row and, changed within its first ``start``, the target of another.
    ``span`` (static) bounds ``start + count``. A row whose target is S is padding.

    Returns:
      the cache, and a number that is there when the work is done.
    """
    rows, width = tokens.shape
    position = start[:, None] + jnp.arange(width)
    place = jnp.where(jnp.arange(width)[None] < count[:, None], position, span)
    heads = config.num_attention_heads // config.num_key_value_heads
    mask = jnp.arange(span)[None, None] <= position[:, :, None]
    mask = jnp.tile(mask, (1, heads, 1))[:, None]  # [R, 1, Q, span]
    index = jnp.arange(rows)[:, None]

    x = qwen.embed(params, tokens)
    keys, values = list(cache.keys), list(cache.values)
    for i in range(config.num_hidden_layers):
        layer, low = params["layers"][i], adapters[i]
        normed = qwen.rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        q, k, v = qwen.project_qkv(layer, config, normed, position, low)
        row_keys, row_values = (
            old[source, :, :span].at[index, :, place].set(new.astype(old.dtype), mode="drop")
            for old, new in ((keys[i], k), (values[i], v))
        )
        score = _scores(_grouped(q, config.num_key_value_heads), row_keys, mask)
        weight = jnp.exp(score - score.max(axis=-1, keepdims=True))  # masked: exactly 0
        out = _weighted(weight, row_values) / weight.sum(axis=-1, keepdims=True)
        x = _mixed(params, config, layer, low, x, _ungrouped(out, width))
        keys[i] = keys[i].at[target, :, :span].set(row_keys, mode="drop")
        values[i] = values[i].at[target, :, :span].set(row_values, mode="drop")
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    last = qwen.rms_norm(last, params["final_norm"], config.rms_norm_eps)
    hidden = cache.hidden.at[target].set(last.astype(cache.hidden.dtype), mode="drop")
    return Cache(tuple(keys), tuple(values), hidden), count.sum(keepdims=True)


def filtered_logp(
    logits: Float[Array, "S V"], temperature: Float[Array, ""], top_p: float, top_k: int
) -> Float[Array, "S V"]:
    """Log-probabilities after temperature, top-k and top-p, renormalised; removed ids get -1e30."""
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    if top_k:
        kth = jax.lax.top_k(scaled, min(top_k, scaled.shape[-1]))[0][:, -1:]
        scaled = jnp.where(scaled < kth, MASKED, scaled)
    if top_p < 1.0:
        order = jnp.sort(scaled, axis=-1, descending=True)
        probs = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # mass of strictly likelier ids
        least = jnp.min(jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled < least, MASKED, scaled)
    return jax.nn.log_softmax(scaled, axis=-1)


def _choose(
    logp: Float[Array, "R V"], keys: Array, index: Int[Array, "R"], temperature: Float[Array, ""]
) -> Int[Array, "R"]:
    """The likeliest id at temperature 0, else a sample under (key, index), row by row."""

    def sample() -> Array:
        noise = jax.vmap(
            lambda key, i: jax.random.gumbel(
                jax.random.fold_in(key, i), logp.shape[-1:], jnp.float32
            )
        )(keys, index)
        return jnp.argmax(logp + noise, -1)

    return jax.lax.cond(temperature > 0, sample, lambda: jnp.argmax(logp, -1)).astype(jnp.int32)


def decode(
    params: Any,
    adapters: Any,
    cache: Cache,
    rows: Int[Array, "R"],
    active: Bool[Array, "R"],
    length: Int[Array, "R"],
    keys: Int[Array, "R 4"],
    first: Int[Array, "R"],
    limit: Int[Array, "R"],
    automaton: Int[Array, "R"],
    seed: Int[Array, ""],
    temperature: Float[Array, ""],
    stop_table: Int[Array, "A V"] | None,
    *,
    config: QwenConfig,
    block: int,
    stop_ids: tuple[int, ...],
    top_p: float,
    top_k: int,
    span: int,
    axis: str | None = None,
) -> tuple[Cache, Block]:
    """Samples up to ``block`` tokens for each active row; ends early when all have ended.

    Args:
      rows: the slots, S for padding; all slots in order if there are as many rows.
      active: which rows sample.
      length: tokens in each slot.
      keys: (iteration, task, replica, turn) of each response.
      first: tokens each response has already.
      limit: tokens it may have.
      automaton: state of the stop strings' automaton.
      seed: the run's seed.
      temperature: 0 is greedy.
      stop_table: next state of the automaton per state and id, -1 where a stop string is complete;
        None without stop strings.
      span: static bound of ``length``.
      axis: the mesh axis of the replicas that call this together, if there are some. They end
        together, as devices of one program should.

    New keys and values stay in a small buffer during the block and enter the cache once.
    """
    (slots, groups, capacity, _), n_rows = cache.keys[0].shape, rows.shape[0]
    layers, lows = params["layers"], adapters
    shape = (n_rows, groups, block, config.head_dim)
    dtype = cache.keys[0].dtype
    in_cache = (jnp.arange(span)[None] < length[:, None])[:, None, None]
    base = jax.vmap(lambda row: _fold(jax.random.key(seed), row))(keys)
    stops = jnp.asarray(stop_ids, jnp.int32)
    whole = n_rows == slots
    at = jnp.minimum(rows, slots - 1)
    old_keys = [x[:, :, :span] if whole else x[at, :, :span] for x in cache.keys]
    old_values = [x[:, :, :span] if whole else x[at, :, :span] for x in cache.values]

    def go_on(going: Bool[Array, "R"]) -> Bool[Array, ""]:
        more = jnp.any(going)
        return more if axis is None else jax.lax.pmax(more.astype(jnp.int32), axis) > 0

    def step(carry: Any) -> Any:
        t, _, going, count, hidden, buffer_k, buffer_v, tokens, logps, ended, automaton = carry
        logits = qwen.unembed(params, config, hidden)
        logp = filtered_logp(logits, temperature, top_p, top_k)
        choice = _choose(logp, base, first + t, temperature)
        chosen = jnp.take_along_axis(logp, choice[:, None], axis=1)[:, 0]
        tokens, logps = tokens.at[:, t].set(choice), logps.at[:, t].set(chosen)

        x = qwen.embed(params, choice[:, None])
        position = (length + t)[:, None]
        in_buffer = (jnp.arange(block) <= t)[None, None, None]
        buffer_k, buffer_v = list(buffer_k), list(buffer_v)
        for i, (layer, low) in enumerate(zip(layers, lows, strict=True)):
            normed = qwen.rms_norm(x, layer["input_norm"], config.rms_norm_eps)
            q, k, v = qwen.project_qkv(layer, config, normed, position, low)
            k, v = (z.astype(dtype).transpose(0, 2, 1, 3) for z in (k, v))
            buffer_k[i] = jax.lax.dynamic_update_slice_in_dim(buffer_k[i], k, t, axis=2)
            buffer_v[i] = jax.lax.dynamic_update_slice_in_dim(buffer_v[i], v, t, axis=2)
            q = _grouped(q, groups)
            far, near = _scores(q, old_keys[i], in_cache), _scores(q, buffer_k[i], in_buffer)
            top = jnp.maximum(far.max(axis=-1, keepdims=True), near.max(axis=-1, keepdims=True))
            far, near = jnp.exp(far - top), jnp.exp(near - top)
            total = far.sum(axis=-1, keepdims=True) + near.sum(axis=-1, keepdims=True)
            out = (_weighted(far, old_values[i]) + _weighted(near, buffer_v[i])) / total
            x = _mixed(params, config, layer, low, x, _ungrouped(out, 1))
        new = qwen.rms_norm(x[:, 0], params["final_norm"], config.rms_norm_eps)

        count = count + going
        why = jnp.where(jnp.any(choice[:, None] == stops[None], axis=-1), STOP_ID, GOING)
        if stop_table is not None:
            after = stop_table[automaton, choice]
            why = jnp.where((why == GOING) & (after < 0), STOP_STRING, why)
            automaton = jnp.where(going, jnp.maximum(after, 0), automaton)
        ended = jnp.where(going, why, ended)
        hidden = jnp.where(going[:, None], new.astype(hidden.dtype), hidden)
        going = going & (why == GOING) & (first + count < limit)
        buffers = (buffer_k, buffer_v)
        more = go_on(going)
        return t + 1, more, going, count, hidden, *buffers, tokens, logps, ended, automaton

    carry = (
        jnp.int32(0),
        go_on(active),
        active,
        jnp.zeros(n_rows, jnp.int32),
        cache.hidden if whole else cache.hidden[at],
        [jnp.zeros(shape, dtype) for _ in layers],
        [jnp.zeros(shape, dtype) for _ in layers],
        jnp.zeros((n_rows, block), jnp.int32),
        jnp.zeros((n_rows, block), jnp.float32),
        jnp.zeros(n_rows, jnp.int32),
        automaton,
    )
    _, _, _, count, hidden, buffer_k, buffer_v, tokens, logps, ended, automaton = (
        jax.lax.while_loop(lambda c: (c[0] < block) & c[1], step, carry)
    )
    offset = jnp.arange(block)
    place = jnp.where(offset[None] < count[:, None], length[:, None] + offset, capacity)

    def commit(old: Array, new: Array) -> Array:
        return old.at[rows[:, None], :, place].set(new.transpose(0, 2, 1, 3), mode="drop")

    cache = Cache(
        keys=tuple(commit(o, b) for o, b in zip(cache.keys, buffer_k, strict=True)),
        values=tuple(commit(o, b) for o, b in zip(cache.values, buffer_v, strict=True)),
        hidden=cache.hidden.at[rows].set(hidden, mode="drop"),
    )
    return cache, Block(tokens, logps, count, ended, automaton)


def _fold(key: Array, row: Int[Array, "4"]) -> Array:
    for i in range(4):
        key = jax.random.fold_in(key, row[i])
    return key
