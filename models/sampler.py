"""A sampler whose key-value cache lives across the turns of an episode.

A slot holds the cached row of one episode. A turn prefills its new tokens only, and a new row takes
over the longest prefix that some slot holds. Responses grow by blocks: ``launch`` starts a block on
the device for the rows that have been waiting longest, ``collect`` waits for it and hands out the
responses that ended. Slots join and leave between blocks, each at its own pace.

Programs have a small fixed set of shapes (rows and widths of a prefill, rows of a decode block,
spans of the cache). Sampling keys are functions of (seed, iteration, task, replica, turn, token),
so what an episode samples depends neither on its slot nor on its company.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import decoding
from models.config import QwenConfig
from models.prefix import Placement, Residents

# (iteration, task, replica, turn)
Key = tuple[int, int, int, int]

_SPANS = 3  # spans of the cache: all of it, a half, a quarter
_MULTIPLE = 64  # of which spans are multiples
_NARROWEST, _STEP = 16, 4  # width of a prefill call, and the factor to the next


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Shapes and sampling settings.

    Attributes:
      slots: rows of the cache.
      capacity: length of a row, in tokens.
      max_response: largest response, in tokens.
      stop_ids: ids that end a response.
      rows: slots that one decode block works on; None is all.
      block: decode steps per device call.
      prefill: tokens of a prefill call, padding included, a power of two: many short chunks or
        one long one. So all calls multiply matrices of one shape, and a row's bits do not depend
        on how it was cut.
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


@dataclasses.dataclass(frozen=True)
class Generated:
    """A sampled response: its ids, their log-probabilities, and "stop", "string" or "length"."""

    ids: np.ndarray
    logp: np.ndarray
    stop: str


@dataclasses.dataclass
class Work:
    """What a sampler did: tokens prefilled, taken over and decoded, rows of decode steps that were
    computed, and seconds."""

    prefilled: int = 0
    reused: int = 0
    decoded: int = 0
    computed: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclasses.dataclass
class _Response:
    key: Key
    limit: int
    automaton: int = 0
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logp: list[np.ndarray] = dataclasses.field(default_factory=list)
    size: int = 0


def programs(config: QwenConfig, settings: SamplerConfig) -> tuple[Any, Any]:
    """Jitted ``decoding.prefill`` and ``decoding.decode``, shared by samplers of equal settings.

    Shapes come from the arguments, spans from ``settings.spans``; no weights are needed.
    """
    # One compilation serves every temperature, which is an argument of the program.
    return _programs(config, settings.block, settings.stop_ids, settings.top_p, settings.top_k)


@functools.lru_cache(maxsize=8)
def _programs(
    config: QwenConfig, block: int, stop_ids: tuple[int, ...], top_p: float, top_k: int
) -> tuple[Any, Any]:
    jit = functools.partial(jax.jit, donate_argnums=(2,), static_argnames=("span",))
    decode = functools.partial(
        decoding.decode, config=config, block=block, stop_ids=stop_ids, top_p=top_p, top_k=top_k
    )
    return jit(functools.partial(decoding.prefill, config=config)), jit(decode)


class Sampler:
    """Host-side handle of the cache; see the module docstring.

    Args:
      params: the policy's parameters (not copied).
      config: the architecture.
      settings: shapes and sampling settings.
      adapters: LoRA adapters' stacked weights, or None.
      seed: the run's seed.
      dtype: of the cached keys and values; None is that of the weights.
      stop_table: automaton of the stop strings, [A, V] (see ``decoding.decode``), or None.
    """

    def __init__(
        self,
        params: Any,
        config: QwenConfig,
        settings: SamplerConfig,
        *,
        adapters: Any = None,
        seed: int = 0,
        dtype: Any = None,
        stop_table: np.ndarray | None = None,
    ) -> None:
        self.params, self.adapters = params, adapters
        self.config, self.settings, self.seed = config, settings, seed
        self.slots, self.work = settings.slots, Work()
        weights = params["embed"].dtype
        self._cache = decoding.empty_cache(
            config, settings.slots, settings.spans[-1], dtype or weights, weights
        )
        self._stop_table = None if stop_table is None else jnp.asarray(stop_table, jnp.int32)
        self._rows = Residents(settings.slots, settings.capacity, share=settings.share)
        self._prefill, self._decode = programs(config, settings)
        self._going: dict[int, _Response] = {}  # the longest waiting first
        self._flight: tuple[list[int], decoding.Block] | None = None
        self._prefilled: jax.Array | None = None  # there when the last prefill is done

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in the cache, per slot."""
        return self._rows.length

    def reset(self, slot: int) -> None:
        """Forgets a slot's tokens, and its response if one is growing."""
        self._going.pop(slot, None)
        self._rows.reset(slot)

    def extend(self, requests: Mapping[int, np.ndarray]) -> None:
        """Appends ids to slots; an empty slot takes over the longest prefix that is cached.

        Raises:
          ValueError: a slot would grow beyond the capacity.
        """
        began = time.perf_counter()
        for level in self._rows.place(requests):
            self.work.reused += sum(p.start for p in level if p.source != p.slot)
            while level:
                level = self._chunk(level)
        self.work.prefill_s += time.perf_counter() - began

    def _chunk(self, rest: Sequence[Placement]) -> list[Placement]:
        """Prefills one chunk of every placement; returns what is left of them."""
        widths: dict[int, list[Placement]] = {}
        for placement in rest:
            width = _fit(len(placement.ids), self.settings.widths)
            widths.setdefault(width, []).append(placement)
        left = []
        for width, chosen in widths.items():
            rows = self.settings.prefill // width
            for first in range(0, len(chosen), rows):
                self._prefill_call(chosen[first : first + rows], rows, width)
            left += [
                Placement(p.slot, p.slot, p.start + width, p.ids[width:])
                for p in chosen
                if len(p.ids) > width
            ]
        return left

    def _prefill_call(self, part: Sequence[Placement], rows: int, width: int) -> None:
        tokens = np.zeros((rows, width), np.int32)
        count, start, source = (np.zeros(rows, np.int32) for _ in range(3))
        target = np.full(rows, self.slots, np.int32)
        for row, p in enumerate(part):
            ids = p.ids[:width]
            tokens[row, : len(ids)], count[row] = ids, len(ids)
            start[row], source[row], target[row] = p.start, p.source, p.slot
        self._cache, self._prefilled = self._prefill(
            self.params,
            self.adapters,
            self._cache,
            tokens,
            count,
            start,
            source,
            target,
            span=self._span(int((start + count).max())),
        )
        self.work.prefilled += int(count.sum())

    def _span(self, length: int) -> int:
        return next(span for span in self.settings.spans if span >= length)

    def start(self, requests: Mapping[int, tuple[Key, int]]) -> None:
        """Begins one response per slot.

        Args:
          requests: slot -> ((iteration, task, replica, turn), largest number of tokens).

        Raises:
          ValueError: a slot is empty, has a response growing, or lacks room for this one.
        """
        for slot, (key, most) in requests.items():
            length = int(self._rows.length[slot])
            if length == 0 or slot in self._going:
                what = "is empty" if length == 0 else "has a response growing"
                raise ValueError(f"slot {slot} {what}; extend it, or collect first")
            if length + most > self.settings.capacity:
                raise ValueError(
                    f"slot {slot} holds {length} tokens and a response may have {most}, its cache "
                    f"{self.settings.capacity}; raise prompt.max_context"
                )
            self._going[slot] = _Response(key, most)

    def launch(self) -> None:
        """Starts a decode block for the slots that have been waiting longest, if any, and returns
        at once."""
        if self._flight is not None or not self._going:
            return
        began = time.perf_counter()
        rows = self.settings.decode_rows
        chosen = list(self._going)[:rows]
        whole = rows == self.slots  # then row and slot are one
        place = chosen if whole else range(len(chosen))
        slots = np.arange(rows, dtype=np.int32) if whole else np.full(rows, self.slots, np.int32)
        active = np.zeros(rows, bool)
        length, first, limit, automaton = (np.zeros(rows, np.int32) for _ in range(4))
        keys = np.zeros((rows, 4), np.int32)
        for row, slot in zip(place, chosen, strict=True):
            response = self._going[slot]
            slots[row], active[row], keys[row] = slot, True, response.key
            length[row], first[row] = self._rows.length[slot], response.size
            limit[row], automaton[row] = response.limit, response.automaton
        self._cache, block = self._decode(
            self.params,
            self.adapters,
            self._cache,
            slots,
            active,
            length,
            keys,
            first,
            limit,
            automaton,
            np.int32(self.seed),
            np.float32(self.settings.temperature),
            self._stop_table,
            span=self._span(int(length.max())),
        )
        self._flight = (chosen, block)
        self.work.decode_s += time.perf_counter() - began

    def collect(self) -> dict[int, Generated]:
        """Waits for the launched block; returns the responses that ended in it."""
        if self._flight is None:
            return {}
        began = time.perf_counter()
        if self._prefilled is not None:
            self._prefilled.block_until_ready()
            self._prefilled = None
        between = time.perf_counter()
        (chosen, block), self._flight = self._flight, None
        tokens, logp, count, ended, automaton = (
            np.asarray(x)
            for x in (block.tokens, block.logp, block.count, block.ended, block.automaton)
        )
        whole = len(count) == self.slots
        out = {}
        for row, slot in enumerate(chosen):
            at, response = slot if whole else row, self._going.get(slot)
            if response is None:
                continue  # reset meanwhile
            n = int(count[at])
            response.ids.append(tokens[at, :n])
            response.logp.append(logp[at, :n])
            response.size, response.automaton = response.size + n, int(automaton[at])
            self._rows.append(slot, tokens[at, :n])
            self.work.decoded += n
            if ended[at] == decoding.GOING and response.size < response.limit:
                continue
            stop = {decoding.STOP_ID: "stop", decoding.STOP_STRING: "string"}
            out[slot] = Generated(
                np.concatenate(response.ids),
                np.concatenate(response.logp),
                stop.get(int(ended[at]), "length"),
            )
            del self._going[slot]
        self.work.computed += len(count) * int(count.max())
        self.work.prefill_s += between - began
        self.work.decode_s += time.perf_counter() - between
        return out

    def generate(self, requests: Mapping[int, tuple[Key, int]]) -> dict[int, Generated]:
        """Begins responses and waits for all of them."""
        self.start(requests)
        out: dict[int, Generated] = {}
        while len(out) < len(requests):
            self.launch()
            out |= self.collect()
        return out

    def warm_up(self) -> None:
        """Compiles every program; no call after it compiles another, whatever the lengths."""
        for span in self.settings.spans:
            for width in self.settings.widths:
                rows = self.settings.prefill // width
                zero = np.zeros(rows, np.int32)
                self._cache, _ = self._prefill(
                    self.params,
                    self.adapters,
                    self._cache,
                    np.zeros((rows, width), np.int32),
                    zero,
                    zero,
                    zero,
                    np.full(rows, self.slots, np.int32),
                    span=span,
                )
            rows = self.settings.decode_rows
            zero = np.zeros(rows, np.int32)
            slots = np.arange(rows, dtype=np.int32)
            self._cache, _ = self._decode(
                self.params,
                self.adapters,
                self._cache,
                slots,
                zero.astype(bool),
                zero,
                np.zeros((rows, 4), np.int32),
                zero,
                zero,
                zero,
                np.int32(self.seed),
                np.float32(self.settings.temperature),
                self._stop_table,
                span=span,
            )


def _fit(size: int, options: Iterable[int]) -> int:
    """The smallest option that holds ``size`` if half of it is used, else the largest below."""
    below = None
    for option in options:
        if option >= size:
            return option if below is None or 2 * size >= option else below
        below = option
    assert below is not None
    return below
