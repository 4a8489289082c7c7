"""Loop-by-loop versions of the group-relative methods; see oracles.py for the rules."""

from __future__ import annotations

import math
from collections import defaultdict

from oracles import (
    EPS,
    Result,
    Trial,
    masked,
    normalise,
    over_episodes,
    over_steps,
    plus,
    returns_of,
    spread_over_tokens,
    terminal,
    whiten,
)

GOAL = "goal"


def result(trials: list[Trial], rewards: list, advantage: list) -> Result:
    return Result(masked(trials, rewards), spread_over_tokens(trials, advantage))


def outcomes(trials: list[Trial]) -> list[float]:
    return [trial.outcome for trial in trials]


def counted(trials: list[Trial]) -> list[tuple[int, int]]:
    return [(i, k) for i, t in enumerate(trials) if t.weight > 0 for k in range(t.n)]


def nothing(trials: list[Trial]) -> list[list[float]]:
    return [[0.0] * trial.n for trial in trials]


def dr_grpo(trials: list[Trial]) -> Result:
    advantage = over_episodes(trials, outcomes(trials), None)
    return result(trials, [terminal(t) for t in trials], advantage)


def rloo(trials: list[Trial]) -> Result:
    advantage = nothing(trials)
    for i, trial in enumerate(trials):
        others = [
            other.outcome
            for j, other in enumerate(trials)
            if j != i and other.weight > 0 and other.task == trial.task
        ]
        if trial.weight > 0 and others:
            advantage[i] = [trial.outcome - sum(others) / len(others)] * trial.n
    return result(trials, [terminal(t) for t in trials], advantage)


def dapo(
    trials: list[Trial], max_tokens: float | None = None, buffer: float | None = None
) -> Result:
    rewards = [terminal(t) for t in trials]
    for trial, r in zip(trials, rewards):
        if max_tokens is not None:
            length = sum(sum(flags) for flags in trial.tokens)
            if length > max_tokens:
                r[-1] -= 1.0
            elif length > max_tokens - buffer:
                r[-1] -= (length - (max_tokens - buffer)) / buffer
    advantage = over_episodes(trials, [sum(r) for r in rewards])
    for trial, numbers in zip(trials, advantage):
        seen = {t.outcome for t in trials if t.weight > 0 and t.task == trial.task}
        if len(seen) < 2:
            numbers[:] = [0.0] * trial.n
    return result(trials, rewards, advantage)


def reinforce_pp(trials: list[Trial]) -> Result:
    rewards = [terminal(t) for t in trials]
    raw = spread_over_tokens(trials, [returns_of(r, 1.0) for r in rewards])
    return Result(masked(trials, rewards), whiten(trials, raw))


def hgpo(trials: list[Trial], c: int = 2, alpha: float = 1.0, gamma: float = 0.95) -> Result:
    rewards = [terminal(t) for t in trials]
    returns = [returns_of(r, gamma) for r in rewards]
    terms = defaultdict(list)
    for length in range(1, c + 2):
        groups = defaultdict(list)
        for i, k in counted(trials):
            if k + 1 >= length:
                history = tuple(trials[i].states[k + 1 - length : k + 1])
                groups[trials[i].task, history].append((i, k))
        for members in groups.values():
            if len(members) > 1:
                found = normalise([returns[i][k] for i, k in members], "population")
                for place, a in zip(members, found):
                    terms[place].append(((length + 1) ** alpha, a))
    advantage = nothing(trials)
    for (i, k), pairs in terms.items():
        advantage[i][k] = sum(w * a for w, a in pairs) / sum(w for w, _ in pairs)
    return result(trials, rewards, advantage)


def distances(trials: list[Trial], task: int) -> dict:
    """Breadth-first from the goal, backwards along the transitions of one task."""
    into = defaultdict(set)
    for trial in trials:
        if trial.weight > 0 and trial.task == task:
            for k in range(trial.n - 1):
                into[trial.states[k + 1]].add(trial.states[k])
            if trial.success:
                into[GOAL].add(trial.states[-1])
    d, wave = {GOAL: 0}, [GOAL]
    while wave:
        reached = wave.pop(0)
        for s in into[reached]:
            if s not in d:
                d[s] = d[reached] + 1
                wave.append(s)
    return d


def graphgpo(trials: list[Trial], gamma: float = 0.1, relative: bool = False) -> Result:
    y = nothing(trials)
    for i, k in counted(trials):
        trial = trials[i]
        d = distances(trials, trial.task)
        if len(d) == 1:
            continue
        far = max(d.values()) + 1
        ended = GOAL if trial.success else None
        after = d.get(trial.states[k + 1] if k + 1 < trial.n else ended, far)
        if relative:
            after += 1 - d.get(trial.states[k], far)
        y[i][k] = 10.0 * gamma**after
    episode = over_episodes(trials, outcomes(trials))
    steps = over_steps(trials, y, True, "sample")
    return result(trials, [terminal(t) for t in trials], plus(episode, steps))


def ecpo(trials: list[Trial], kappa: float = 2.0, tau: float = 4.0, gamma: float = 0.95) -> Result:
    rewards = [terminal(t) for t in trials]
    returns = [returns_of(r, gamma) for r in rewards]
    groups = defaultdict(lambda: defaultdict(list))
    for i, k in counted(trials):
        trial = trials[i]
        groups[trial.task, trial.states[k]][trial.actions[k]].append((i, k))
    step = nothing(trials)
    for actions in groups.values():
        everything = [returns[i][k] for places in actions.values() for i, k in places]
        n, centre = len(everything), sum(everything) / len(everything)
        shrunk, between, within, places = [], 0.0, 0.0, []
        for tries in actions.values():
            own = [returns[i][k] for i, k in tries]
            mean = sum(own) / len(own)
            between += len(own) * (mean - centre) ** 2 / n
            within += sum((g - mean) ** 2 for g in own) / n
            for place in tries:
                shrunk.append((len(own) * mean + kappa * centre) / (len(own) + kappa))
                places.append(place)
        rho = math.tanh(n / tau) * between / (between + within + EPS)
        for (i, k), a in zip(places, normalise(shrunk, "sample")):
            step[i][k] = rho * a
    episode = over_episodes(trials, outcomes(trials))
    return result(trials, rewards, plus(episode, step))


def empg(trials: list[Trial], k: float = 1.0, zeta: float = 0.05) -> Result:
    entropy = {}
    for i, step in counted(trials):
        seen = [h for h, yes in zip(trials[i].entropy[step], trials[i].tokens[step]) if yes]
        if seen:
            entropy[i, step] = sum(seen) / len(seen)
    if not entropy:
        return result(trials, [terminal(t) for t in trials], nothing(trials))
    low, high = min(entropy.values()), max(entropy.values())
    g = {place: math.exp(-k * (h - low) / (high - low + EPS)) for place, h in entropy.items()}
    mean_g = sum(g.values()) / len(g)
    base = over_episodes(trials, outcomes(trials))
    raw = {
        (i, step): base[i][step] * g[i, step] / mean_g + zeta * g.get((i, step + 1), 0.0)
        for i, step in g
    }
    mean = sum(raw.values()) / len(raw)
    advantage = nothing(trials)
    for (i, step), a in raw.items():
        advantage[i][step] = a - mean
    return result(trials, [terminal(t) for t in trials], advantage)


def row_advantages(trials: list[Trial], penalty: float, size: float) -> list:
    rows = defaultdict(list)
    for i, k in counted(trials):
        score = size * trials[i].outcome - (0.0 if trials[i].accepted[k] else penalty)
        rows[trials[i].task].append((i, k, score))
    out = nothing(trials)
    for members in rows.values():
        if len(members) == 1:
            ((i, k, score),) = members
            out[i][k] = score / (1.0 + EPS)
            continue
        for (i, k, _), a in zip(members, normalise([s for *_, s in members], "sample")):
            out[i][k] = a
    return out


def verl_agent_grpo(trials: list[Trial], penalty: float = 0.1, size: float = 10.0) -> Result:
    rewards = [[size * r for r in terminal(t)] for t in trials]
    return result(trials, rewards, row_advantages(trials, penalty, size))


def verl_agent_gigpo(trials: list[Trial], penalty: float = 0.1, size: float = 10.0) -> Result:
    rewards = [[size * r for r in terminal(t)] for t in trials]
    returns = [
        [g - (0.0 if ok else penalty) for g, ok in zip(returns_of(r, 0.95), t.accepted)]
        for r, t in zip(rewards, trials)
    ]
    step = over_steps(trials, returns, True, "sample")
    return result(trials, rewards, plus(row_advantages(trials, penalty, size), step))


ORACLES = {
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "dapo": dapo,
    "reinforce_pp": reinforce_pp,
    "hgpo": hgpo,
    "graphgpo": graphgpo,
    "ecpo": ecpo,
    "empg": empg,
    "verl_agent_grpo": verl_agent_grpo,
    "verl_agent_gigpo": verl_agent_gigpo,
}
