"""Oracles of the methods near the three papers: ablations, HCAPO, FlowTracer, TARL.

As in ``oracles``: loops over ragged lists, no code of the library, float64. The two modules import
each other; ``from oracles import oracles_paper`` starts at the right end.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import oracles


def attnsr_async(trials: list, baseline: float | None = None) -> oracles.Result:
    rbar = oracles.mean_outcome(trials) if baseline is None else baseline
    rewards, advantages, targets, weights = [], [], [], []
    for trial in trials:
        r = oracles.terminal(trial)
        advantage, target = oracles.zeros_like_tokens(trial), oracles.zeros_like_tokens(trial)
        weight = oracles.zeros_like_tokens(trial)
        if trial.weight > 0:
            if trial.n > 1:
                found = oracles.allocation(trial.graph)
                for k in range(trial.n - 1):
                    r[k] = 0.25 * found["C"] * (trial.outcome - rbar) * found["share"][k]
            order = [(k, j) for k in range(trial.n) for j, yes in enumerate(trial.tokens[k]) if yes]
            last_of_step = dict(order)
            lam = 1 - 1 / (1.5 * len(order)) if order else 0.0
            carried, to_go, next_value = 0.0, 0.0, 0.0
            for k, j in reversed(order):
                paid = r[k] if last_of_step[k] == j else 0.0
                carried = paid + next_value - trial.value[k][j] + lam * carried
                to_go += paid  # lambda 1: the target is the plain sum of what is still to come
                next_value = trial.value[k][j]
                advantage[k][j], target[k][j] = carried, to_go
                ratio = math.exp(trial.logp[k][j] - trial.behaviour[k][j])
                weight[k][j] = 1.0 if 0.7 <= ratio <= 6.0 else 0.0
        rewards.append(r)
        advantages.append(advantage)
        targets.append(target)
        weights.append(weight)
    return oracles.Result(
        oracles.masked(trials, rewards),
        oracles.whiten(trials, advantages),
        targets,
        weight=weights,
    )


def procredit(
    trials: list,
    c: float = 0.5,
    gamma: float = 1.0,
    turn_weight: float = 1.0,
    turn_return: str = "progress+outcome",
    turn_group: str = "task",
    level: str = "turn",
) -> oracles.Result:
    """ProCredit with each of its ablations; one unit (turn or token) at a time."""
    rewards, scores, units = [], [], []
    for trial in trials:
        gain = [c * (trial.progress[k + 1] - trial.progress[k]) for k in range(trial.n)]
        scores.append(trial.outcome + sum(gain))
        rewards.append([*gain[:-1], gain[-1] + trial.outcome])
        bonus = trial.outcome if turn_return == "progress+outcome" else 0.0
        if level == "turn":
            paid = [(k, None, gain[k]) for k in range(trial.n)]
            paid[-1] = (trial.n - 1, None, gain[-1] + bonus)
        else:
            paid = []
            for k, flags in enumerate(trial.tokens):
                trained = [j for j, yes in enumerate(flags) if yes]
                for j in trained:
                    extra = bonus if k == trial.n - 1 and j == trained[-1] else 0.0
                    paid.append((k, j, gain[k] / len(trained) + extra))
        units.append(paid)

    groups = defaultdict(list)
    for i, trial in enumerate(trials):
        if trial.weight == 0:
            continue
        for at, (k, j, _) in enumerate(units[i]):
            key = {"task": 0, "state": trial.states[k], "progress": round(trial.progress[k], 5)}
            later = units[i][at:]
            value = sum(gamma**age * r for age, (_, _, r) in enumerate(later))
            groups[trial.task, key[turn_group]].append((i, k, j, value))
    trajectory = oracles.over_episodes(trials, scores)
    advantage = oracles.spread_over_tokens(trials, trajectory)
    for members in groups.values():
        centred = oracles.normalise([value for *_, value in members], None)
        for (i, k, j, _), a in zip(members, centred):
            for at, trained in enumerate(trials[i].tokens[k]):
                if trained and j in (None, at):
                    advantage[i][k][at] += turn_weight * a
    return oracles.Result(oracles.masked(trials, rewards), advantage)


def hcapo(
    trials: list, gamma: float = 0.95, tau: float = 5.0, alpha: float = 0.5
) -> oracles.Result:
    returns = []
    for trial in trials:
        likelihood = [math.exp(h / tau) for h in trial.hindsight]
        mean = sum(likelihood) / trial.n
        q = []
        for k in range(trial.n):
            rho = min(max(likelihood[k] / (mean + oracles.EPS), 0.8), 1.2)
            q.append(rho * gamma ** (trial.n - 1 - k) * trial.outcome)
        returns.append(
            [alpha * q[k] + (1 - alpha) * (q[k + 1] if k + 1 < trial.n else q[k])
             for k in range(trial.n)]
        )  # fmt: skip
    micro = oracles.over_steps(trials, returns, False, "sample")
    for trial, numbers in zip(trials, micro):
        if trial.success:
            numbers[:] = [0.0 if a < 0 else a for a in numbers]
    macro = oracles.over_episodes(trials, [trial.outcome for trial in trials])
    return oracles.Result(
        oracles.masked(trials, [oracles.terminal(trial) for trial in trials]),
        oracles.spread_over_tokens(trials, oracles.plus(macro, micro)),
    )


def most(flows: list[float], raise_to: float = 1.5) -> list[float]:
    """1.5 for the ceil(2 n / 5) largest flows that are not 0, else 1."""
    ranked = sorted(range(len(flows)), key=lambda at: (-flows[at], at))
    top = set(ranked[: -(-2 * len(flows) // 5)])
    return [raise_to if at in top and flows[at] > 0 else 1.0 for at in range(len(flows))]


def flowtracer(trials: list) -> oracles.Result:
    weights = []
    for trial in trials:
        weight = oracles.zeros_like_tokens(trial)
        if trial.weight > 0:
            order = [(k, j) for k in range(trial.n) for j, yes in enumerate(trial.tokens[k]) if yes]
            raised = most([trial.token_flow[k][j] for k, j in order])
            for (k, j), w in zip(order, raised):
                weight[k][j] = w
        weights.append(weight)
    plain = oracles.grpo(trials)
    return oracles.Result(plain.step_reward, plain.advantage, weight=weights)


def hitting(graph: np.ndarray, sinks: set[int]) -> list[float]:
    """Weight of the paths from each node to the sinks, in which they end. graph[j][k]: k to j."""
    size = len(graph)
    h = [0.0] * size
    for k in reversed(range(size)):
        if k in sinks:
            h[k] = 1.0
        else:
            h[k] = sum(graph[j][k] * h[j] for j in range(k + 1, size))
    return h


def carried_flow(graph: np.ndarray, sources: set[int], sinks: set[int]) -> list[float]:
    """Pushes a unit of flow from node to node along the transformed edges."""
    size, h = len(graph), hitting(graph, sinks)
    total = sum(h[s] for s in sources)
    if total == 0:
        return [0.0] * size
    x = [h[i] / total if i in sources else 0.0 for i in range(size)]
    for k in range(size):
        if k in sinks or h[k] == 0:
            continue
        for j in range(k + 1, size):
            x[j] += x[k] * graph[j][k] * h[j] / h[k]
    return x


def flowtracer_step(trials: list, source: str = "all") -> oracles.Result:
    per_step = []
    for trial in trials:
        layers = len(trial.graph)
        g = (
            sum(0.5 * trial.graph[at, 0] + 0.5 * trial.graph[at, 1] for at in range(layers))
            / layers
        )
        sources = set(range(trial.n)) if source == "all" else {0}
        per_step.append(most(carried_flow(g, sources, {trial.n - 1})))
    plain = oracles.grpo(trials)
    return oracles.Result(
        plain.step_reward, plain.advantage, weight=oracles.spread_over_tokens(trials, per_step)
    )


def tarl(trials: list, c: float = 0.5, variant: str = "turn", gamma: float = 1.0) -> oracles.Result:
    rewards = []
    for trial in trials:
        r, seen = [], False
        for score in trial.judge:
            if score < 0 and seen:
                score = 0
            seen = seen or score < 0
            r.append(c * score / trial.n)
        r[-1] += trial.outcome
        rewards.append(r)
    if variant == "episode":
        advantage = oracles.over_episodes(trials, [sum(r) for r in rewards])
    else:
        returns = [oracles.returns_of(r, gamma) for r in rewards]
        advantage = oracles.over_steps(trials, returns, False, "sample")
    return oracles.Result(
        oracles.masked(trials, rewards), oracles.spread_over_tokens(trials, advantage)
    )


ORACLES = {
    "attnsr_async": attnsr_async,
    "hcapo": hcapo,
    "flowtracer": flowtracer,
    "flowtracer_step": flowtracer_step,
    "tarl": tarl,
}
