"""Drawn batches: hypothesis decides the structure of ragged episodes, a drawn seed the signals.

Every draw is packed to one static shape, so that a method compiles once for all of them. Draws are
hashable and what is made of one is kept: all methods see the same batches.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from credit_cases import STEP_SIGNALS, TOKEN_SIGNALS, Packed, pack, random_trial
from hypothesis import strategies as st
from oracles import Trial

CHECKS = 4
"""Progress is drawn in quarters."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What is drawn of one step. ``tokens`` says which response tokens the policy sampled."""

    tokens: tuple[bool, ...]
    state: int
    action: int
    accepted: bool
    checks: int
    judge: int


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What is drawn of one episode of 1 to 5 steps."""

    task: int
    outcome: float
    success: bool
    counts: bool
    checks: int
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class Draw:
    """A batch. ``signals`` are random; or rounded, so that many are equal; or all constant with
    steps that pay no attention to each other."""

    attempts: tuple[Attempt, ...]
    signals: str
    window: bool
    seed: int


_turn = st.builds(
    Turn,
    tokens=st.lists(st.booleans(), min_size=1, max_size=4).map(tuple),
    state=st.integers(0, 2),
    action=st.integers(0, 1),
    accepted=st.booleans(),
    checks=st.integers(0, CHECKS),
    judge=st.integers(-1, 1),
)
_attempt = st.builds(
    Attempt,
    task=st.sampled_from([3, -7, 10**6]),
    outcome=st.sampled_from([0.0, 0.25, 1.0]),
    success=st.booleans(),
    counts=st.integers(0, 5).map(bool),
    checks=st.integers(0, CHECKS),
    turns=st.lists(_turn, min_size=1, max_size=5).map(tuple),
)
draws = st.builds(
    Draw,
    attempts=st.lists(_attempt, min_size=3, max_size=9).map(tuple),
    signals=st.sampled_from(["random", "random", "rounded", "constant"]),
    window=st.booleans(),
    seed=st.integers(0, 2**16),
)
"""Batches of 3 to 9 episodes of up to three tasks, some of them spoiled."""


def trials_of(draw: Draw) -> list[Trial]:
    """The drawn episodes with their signals filled in."""
    rng = np.random.default_rng(draw.seed)
    return [_trial(attempt, draw.signals, rng) for attempt in draw.attempts]


@functools.cache
def built(draw: Draw) -> tuple[list[Trial], Packed]:
    """The drawn episodes, and the same packed. Nobody may change them."""
    trials = trials_of(draw)
    return trials, pack(trials, window=draw.window, seed=draw.seed)


def _trial(attempt: Attempt, signals: str, rng: np.random.Generator) -> Trial:
    turns = attempt.turns
    trial = random_trial(rng, attempt.task, tokens=[list(turn.tokens) for turn in turns])
    trial = dataclasses.replace(
        trial,
        outcome=attempt.outcome,
        success=attempt.success,
        weight=float(attempt.counts),
        progress=[checks / CHECKS for checks in (attempt.checks, *(t.checks for t in turns))],
        states=[turn.state for turn in turns],
        actions=[turn.action for turn in turns],
        accepted=[turn.accepted for turn in turns],
        judge=[turn.judge for turn in turns],
    )
    if signals == "random":
        return trial
    names = (*TOKEN_SIGNALS, "behaviour", *STEP_SIGNALS.values(), "mc_value")
    change = _round if signals == "rounded" else _constant
    levelled = {name: change(getattr(trial, name)) for name in names if name != "judge"}
    graph = trial.graph if signals == "rounded" else 0 * trial.graph
    return dataclasses.replace(trial, graph=graph, **levelled)


def _round(x: list | float) -> list | float:
    return [_round(y) for y in x] if isinstance(x, list) else round(x, 1)


def _constant(x: list | float) -> list | float:
    return [_constant(y) for y in x] if isinstance(x, list) else 0.5
