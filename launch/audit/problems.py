"""Small decision problems whose true advantages are known.

Each is finite, ends after ``horizon`` steps at the latest, pays 1 at the end for success and 0
otherwise, and comes with the stochastic policy under which its episodes are sampled. ``size``
lengthens a problem without changing its nature.

| problem | what is hard about it |
| --- | --- |
| key_door | an early step (the key) matters only much later; walking back and forth is harmless |
| detour | two decisions matter; between them lie steps whose choice does not |
| late_mistake | good work is ruined near the end, and nothing afterwards can help |
| two_objects | two sub-goals with an acceptance check each, in either order |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

State = Any  # a hashable description of a situation


@dataclasses.dataclass(frozen=True)
class Problem:
    """S states, A actions, G start states (tasks).

    Attributes:
      name: of the family.
      horizon: an episode has at most so many steps.
      states: what each state stands for; equal states are the anchors of state-grouped methods.
      actions: names.
      observations: what the agent is shown in each state. It may hide what the agent did before.
      transition: [S, A, S] probabilities.
      valid: [S, A], whether the action does anything; one that does not leaves the state alone.
      terminal: [S], whether the episode ends on reaching the state.
      progress: [S], fraction of acceptance checks that pass.
      outcome: [S], what an episode that ends there is worth: 1 for success, else 0.
      starts: [G] ids of start states; each episode's is drawn uniformly.
      policy: [S, A] probabilities of the sampling policy, all positive.
    """

    name: str
    horizon: int
    states: tuple[State, ...]
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    transition: np.ndarray
    valid: np.ndarray
    terminal: np.ndarray
    progress: np.ndarray
    outcome: np.ndarray
    starts: np.ndarray
    policy: np.ndarray


Moves = Sequence[tuple[float, State]]  # (probability, next state)


def build(
    name: str,
    *,
    horizon: int,
    actions: Sequence[str],
    starts: Sequence[State],
    step: Callable[[State, str], Moves],
    done: Callable[[State], bool],
    success: Callable[[State], bool],
    progress: Callable[[State], float],
    weights: Callable[[State], Mapping[str, float]],
    observe: Callable[[State], str],
) -> Problem:
    """Tables of everything that can be reached from ``starts``.

    ``weights`` gives how much the policy likes each action; one that is left out weighs 1.
    An action is valid if it can change the state.
    """
    ids: dict[Hashable, int] = {state: i for i, state in enumerate(starts)}
    found = list(starts)
    moves: list[list[Moves]] = []
    for state in found:  # grows while it is walked
        moves.append([[(1.0, state)] if done(state) else step(state, a) for a in actions])
        for _, after in (pair for row in moves[-1] for pair in row):
            if after not in ids:
                ids[after] = len(found)
                found.append(after)
    transition = np.zeros((len(found), len(actions), len(found)))
    for s, rows in enumerate(moves):
        for a, row in enumerate(rows):
            for probability, after in row:
                transition[s, a, ids[after]] += probability
    liked = np.array([[weights(s).get(a, 1.0) for a in actions] for s in found])
    own = np.arange(len(found))
    return Problem(
        name=name,
        horizon=horizon,
        states=tuple(found),
        actions=tuple(actions),
        observations=tuple(observe(s) for s in found),
        transition=transition,
        valid=transition[own, :, own] < 1.0,
        terminal=np.array([done(s) for s in found]),
        progress=np.array([progress(s) for s in found]),
        outcome=np.array([float(success(s)) for s in found]),
        starts=np.arange(len(starts)),
        policy=liked / liked.sum(axis=1, keepdims=True),
    )


def key_door(size: int = 4) -> Problem:
    """A corridor: the key lies at its left end, the door it opens is at the right end.

    State: (cell, key in hand, door open). The agent sees its cell alone. Starts: every cell but
    the first. Checks: key taken, door open.
    """
    last = size - 1

    def step(state: State, action: str) -> Moves:
        cell, key, _ = state
        if action == "left":
            cell = max(cell - 1, 0)
        elif action == "right":
            cell = min(cell + 1, last)
        elif action == "take":
            key = key or cell == 0
        return [(1.0, (cell, key, action == "open" and key and cell == last))]

    def weights(state: State) -> dict[str, float]:
        cell, key, _ = state
        if key:
            return {"open" if cell == last else "right": 5.0}
        return {"take" if cell == 0 else "left": 5.0}

    return build(
        "key_door",
        horizon=3 * size,
        actions=("left", "right", "take", "open"),
        starts=[(cell, False, False) for cell in range(1, size)],
        step=step,
        done=lambda state: state[2],
        success=lambda state: state[2],
        progress=lambda state: (state[1] + state[2]) / 2,
        weights=weights,
        observe=lambda state: "open door" if state[2] else f"cell {state[0]}",
    )


def detour(size: int = 4) -> Problem:
    """A fork with a sign, a short or a long row of rooms, and a gate with a pit behind it.

    Following the sign leads through ``size`` rooms, the other way through twice as many, which
    leaves no time to look around. In a room every action leads on, so none matters; at fork and
    gate looking costs a step. At the gate left is the goal and right the pit. Starts: the sign
    says left, or right. Checks: gate reached, goal reached.
    """
    rooms = {"short": size, "long": 2 * size}

    def step(state: State, action: str) -> Moves:
        place, where = state
        if place in rooms:
            on = where + 1
            return [(1.0, (place, on) if on < rooms[place] else ("gate", 0))]
        if action == "look":
            return [(1.0, state)]
        if place == "fork":
            return [(1.0, ("short" if action == where else "long", 0))]
        return [(1.0, ("goal" if action == "left" else "pit", 0))]

    def weights(state: State) -> dict[str, float]:
        place, where = state
        return {where: 2.0} if place == "fork" else {"left": 3.0} if place == "gate" else {}

    def observe(state: State) -> str:
        place, where = state
        return f"fork, sign {where}" if place == "fork" else "room" if place in rooms else place

    return build(
        "detour",
        horizon=2 * size + 2,
        actions=("left", "right", "look"),
        starts=[("fork", "left"), ("fork", "right")],
        step=step,
        done=lambda state: state[0] in ("goal", "pit"),
        success=lambda state: state[0] == "goal",
        progress=lambda state: {"gate": 0.5, "goal": 1.0, "pit": 0.5}.get(state[0], 0.0),
        weights=weights,
        observe=observe,
    )


def late_mistake(size: int = 6) -> Problem:
    """``size`` stages of work; rushing is as good as working until the last two, where it breaks
    the piece four times in five. A broken piece stays broken until the horizon.

    State: (stage, broken). The agent does not see that the piece is broken. Starts: stage 0, 1 or
    2. Checks: one per stage, all of them lost when the piece breaks.
    """

    def step(state: State, action: str) -> Moves:
        stage, broken = state
        if broken or action == "idle":
            return [(1.0, state)]
        if action == "rush" and stage >= size - 2:
            return [(0.8, (stage, True)), (0.2, (stage + 1, False))]
        return [(1.0, (stage + 1, False))]

    return build(
        "late_mistake",
        horizon=size + 6,
        actions=("work", "rush", "idle"),
        starts=[(stage, False) for stage in range(3)],
        step=step,
        done=lambda state: state[0] == size,
        success=lambda state: state[0] == size,
        progress=lambda state: 0.0 if state[1] else state[0] / size,
        weights=lambda state: {"work": 4.0, "rush": 3.0},
        observe=lambda state: "finished" if state[0] == size else f"stage {state[0]}",
    )


def two_objects(size: int = 3) -> Problem:
    """A row of rooms: a cup in the first, a book in the last, a box in the middle for both.

    State: (room, where the cup is, where the book is), "there", "held" or "boxed". One thing can
    be held at a time. The agent sees the room and what lies in it. Starts: every room. Checks: cup
    boxed, book boxed.
    """
    last, middle = size - 1, size // 2
    home = {"cup": 0, "book": last}

    def step(state: State, action: str) -> Moves:
        room, things = state[0], dict(zip(home, state[1:], strict=True))
        if action == "left":
            room = max(room - 1, 0)
        elif action == "right":
            room = min(room + 1, last)
        for thing, place in things.items():
            free = "held" not in things.values()
            if action == "take" and free and place == "there" and room == home[thing]:
                things[thing] = "held"
            elif action == "put" and place == "held" and room == middle:
                things[thing] = "boxed"
        return [(1.0, (room, *things.values()))]

    def weights(state: State) -> dict[str, float]:
        room, *places = state
        if "held" in places:
            goal, act = middle, "put"
        else:
            ends = [home[thing] for thing, p in zip(home, places, strict=True) if p == "there"]
            goal, act = min(ends, key=lambda end: abs(end - room), default=room), "take"
        return {act if room == goal else "left" if goal < room else "right": 5.0}

    def observe(state: State) -> str:
        room, *places = state
        seen = [t for t, p in zip(home, places, strict=True) if p == "there" and room == home[t]]
        return " ".join([f"room {room}", *seen])

    return build(
        "two_objects",
        horizon=5 * size - 1,
        actions=("left", "right", "take", "put"),
        starts=[(room, "there", "there") for room in range(size)],
        step=step,
        done=lambda state: state[1:] == ("boxed", "boxed"),
        success=lambda state: state[1:] == ("boxed", "boxed"),
        progress=lambda state: state[1:].count("boxed") / 2,
        weights=weights,
        observe=observe,
    )


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "key_door": key_door,
    "detour": detour,
    "late_mistake": late_mistake,
    "two_objects": two_objects,
}
