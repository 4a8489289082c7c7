"""A sampler whose key-value cache lives across the turns of an episode.

A slot holds the cached row of one episode. A turn prefills its new tokens only, and a new row takes
over the longest prefix that some slot holds. Responses grow by blocks: ``launch`` starts a block on
the device for the rows that have been waiting longest, ``collect`` waits for it and hands out the
responses that ended. Slots join and leave between blocks, each at its own pace.

Programs have a small fixed set of shapes (rows and widths of a prefill, rows of a decode block,
spans of the cache). Sampling keys are functions of (seed, iteration, task, replica, turn, token),
so what an episode samples depends neither on its slot nor on its company.

On a mesh every replica holds its share of the slots, and all replicas are called together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from models import decoding, programs, sharding
from models.config import QwenConfig
from models.prefix import Placement, Residents
from models.programs import SamplerConfig

__all__ = ["Generated", "Key", "Sampler", "SamplerConfig", "Work"]

# (iteration, task, replica, turn)
Key = tuple[int, int, int, int]


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


class Sampler:
    """Host-side handle of the cache; see the module docstring.

    Args:
      params: the policy's parameters; the layers are copied (``programs.by_layer``).
      config: the architecture.
      settings: shapes of a replica, and sampling settings.
      adapters: LoRA adapters' stacked weights, or None.
      seed: the run's seed.
      dtype: of the cached keys and values; None is that of the weights.
      stop_table: automaton of the stop strings, [A, V] (see ``decoding.decode``), or None.
      mesh: the devices that weights and cache are spread over; None: a single one.
      places: shardings of params and adapters to sample with; None: where they lie.
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
        mesh: Mesh | None = None,
        places: Any = None,
    ) -> None:
        self.params, self.adapters = programs.by_layer(params, adapters, config, places)
        self.config, self.settings, self.seed = config, settings, seed
        self.replicas, self.work = programs.replicas(mesh), Work()
        self.slots = self.replicas * settings.slots
        weights = params["embed"].dtype
        # Made where it will lie: one device may not hold a whole cache.
        self._cache = jax.jit(
            functools.partial(
                programs.empty_cache, config, settings, dtype or weights, weights, mesh
            ),
            out_shardings=programs.cache_shardings(config, mesh),
        )()
        self._stop_table = None
        if stop_table is not None:
            whole = None if mesh is None else sharding.replicated(mesh)
            self._stop_table = jax.device_put(stop_table.astype(np.int32), whole)
        self._rows = [
            Residents(settings.slots, settings.capacity, share=settings.share)
            for _ in range(self.replicas)
        ]
        self._prefill, self._decode = programs.jitted(config, settings, mesh)
        self._going: dict[int, _Response] = {}  # the longest waiting first
        # The block on the device, and which of its rows belongs to which slot.
        self._flight: tuple[list[tuple[int, int]], decoding.Block] | None = None
        self._prefilled: jax.Array | None = None  # there when the last prefill is done

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in the cache, per slot."""
        return np.concatenate([rows.length for rows in self._rows])

    def _at(self, slot: int) -> tuple[Residents, int]:
        """A slot's replica, and its number there."""
        replica, place = divmod(slot, self.settings.slots)
        return self._rows[replica], place

    def reset(self, slot: int) -> None:
        """Forgets a slot's tokens, and its response if one is growing."""
        self._going.pop(slot, None)
        rows, place = self._at(slot)
        rows.reset(place)

    def extend(self, requests: Mapping[int, np.ndarray]) -> None:
        """Appends ids to slots; an empty slot takes over the longest prefix that its replica holds.

        Raises:
          ValueError: a slot would grow beyond the capacity.
        """
        began = time.perf_counter()
        wanted: list[dict[int, np.ndarray]] = [{} for _ in self._rows]
        for slot, ids in requests.items():
            replica, place = divmod(slot, self.settings.slots)
            wanted[replica][place] = ids
        plans = [rows.place(part) for rows, part in zip(self._rows, wanted, strict=True)]
        self.work.reused += sum(map(len, requests.values()))  # minus what is prefilled
        for levels in itertools.zip_longest(*plans, fillvalue=()):
            self.work.reused -= sum(len(p.ids) for p in itertools.chain(*levels))
            rest: list[Sequence[Placement]] = list(levels)
            while any(rest):
                rest = self._chunk(rest)
        self.work.prefill_s += time.perf_counter() - began

    def _chunk(self, rest: Sequence[Sequence[Placement]]) -> list[Sequence[Placement]]:
        """Prefills one chunk of every replica's every placement; returns what is left of them."""
        widths: dict[int, list[list[Placement]]] = {}
        for replica, placements in enumerate(rest):
            for p in placements:
                width = _fit(len(p.ids), self.settings.widths)
                widths.setdefault(width, [[] for _ in rest])[replica].append(p)
        left: list[list[Placement]] = [[] for _ in rest]
        for width, chosen in widths.items():
            rows = self.settings.prefill // width
            for first in range(0, max(map(len, chosen)), rows):
                self._prefill_call([part[first : first + rows] for part in chosen], width)
            for replica, part in enumerate(chosen):
                left[replica] += [
                    Placement(p.slot, p.slot, p.start + width, p.ids[width:])
                    for p in part
                    if len(p.ids) > width
                ]
        return list(left)

    def _prefill_call(self, parts: Sequence[Sequence[Placement]], width: int) -> None:
        arrays = programs.idle_prefill(self.settings, width, self.replicas)
        tokens, count, start, source, target = arrays
        for replica, part in enumerate(parts):
            for row, p in enumerate(part, replica * (self.settings.prefill // width)):
                ids = p.ids[:width]
                tokens[row, : len(ids)], count[row] = ids, len(ids)
                start[row], source[row], target[row] = p.start, p.source, p.slot
        span = self._span(int((start + count).max()))
        self._cache, self._prefilled = self._prefill(
            self.params, self.adapters, self._cache, *arrays, span=span
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
            rows, place = self._at(slot)
            length = int(rows.length[place])
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
        whole = rows == self.settings.slots  # then row and slot are one
        arrays = programs.idle_decode(self.settings, self.replicas)
        slots, active, length, keys, first, limit, automaton = arrays
        taken = [0] * self.replicas
        chosen = []
        for slot, response in self._going.items():
            replica, place = divmod(slot, self.settings.slots)
            if taken[replica] == rows:
                continue
            row = replica * rows + (place if whole else taken[replica])
            taken[replica] += 1
            chosen.append((row, slot))
            slots[row], active[row], keys[row] = place, True, response.key
            length[row], first[row] = self._rows[replica].length[place], response.size
            limit[row], automaton[row] = response.limit, response.automaton
        self._cache, block = self._call_decode(arrays, self._span(int(length.max())))
        self._flight = (chosen, block)
        self.work.decode_s += time.perf_counter() - began

    def _call_decode(self, arrays: Sequence[np.ndarray], span: int) -> Any:
        return self._decode(
            self.params,
            self.adapters,
            self._cache,
            *arrays,
            np.int32(self.seed),
            np.float32(self.settings.temperature),
            self._stop_table,
            span=span,
        )

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
        out = {}
        for row, slot in chosen:
            response = self._going.get(slot)
            if response is None:
                continue  # reset meanwhile
            n = int(count[row])
            response.ids.append(tokens[row, :n])
            response.logp.append(logp[row, :n])
            response.size, response.automaton = response.size + n, int(automaton[row])
            rows, place = self._at(slot)
            rows.append(place, tokens[row, :n])
            self.work.decoded += n
            if ended[row] == decoding.GOING and response.size < response.limit:
                continue
            stop = {decoding.STOP_ID: "stop", decoding.STOP_STRING: "string"}
            out[slot] = Generated(
                np.concatenate(response.ids),
                np.concatenate(response.logp),
                stop.get(int(ended[row]), "length"),
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
                arrays = programs.idle_prefill(self.settings, width, self.replicas)
                self._cache, _ = self._prefill(
                    self.params, self.adapters, self._cache, *arrays, span=span
                )
            arrays = programs.idle_decode(self.settings, self.replicas)
            self._cache, _ = self._call_decode(arrays, span)


def _fit(size: int, options: Iterable[int]) -> int:
    """The smallest option that holds ``size`` if half of it is used, else the largest below."""
    below = None
    for option in options:
        if option >= size:
            return option if below is None or 2 * size >= option else below
        below = option
    assert below is not None
    return below
