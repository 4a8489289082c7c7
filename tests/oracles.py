"""Slow, loop-by-loop NumPy versions of every credit method, over ragged Python lists.

They share no code with the library and know nothing of padding, masks or batches: an episode
that does not count is simply skipped. Float64 throughout.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import numpy as np
import oracles_paper

EPS = 1e-6


@dataclasses.dataclass
class Trial:
    """One episode of n steps. ``tokens[k][j]`` says whether response token j of step k is
    trained on; every token signal has the same nesting. ``graph`` is [L, 2, n, n]."""

    task: int
    outcome: float
    success: bool
    rewards: list[float]
    progress: list[float]
    states: list[int]
    actions: list[int]
    accepted: list[bool]
    tokens: list[list[bool]]
    value: list[list[float]]
    logp: list[list[float]]
    entropy: list[list[float]]
    reward_logp: list[list[float]]
    token_flow: list[list[float]]
    hindsight: list[float]
    mc_value: list[float]  # n + 1
    q_value: list[list[float]]  # n x 2
    v_value: list[list[float]]  # n x 2
    predicted_return: list[float]
    predicted_progress: list[float]
    promise: list[float]
    judge: list[int]
    graph: np.ndarray
    behaviour: list[list[float]]
    weight: float = 1.0

    @property
    def n(self) -> int:
        return len(self.rewards)


@dataclasses.dataclass
class Result:
    """Per episode: step rewards, then per-token advantages, targets and weights nested by step.

    ``weight`` is None if every trained token of a counted episode weighs 1. ``step_target`` has
    the per-step targets of each learned signal, ``slope`` the reward model's gradient per token.
    """

    step_reward: list[list[float]]
    advantage: list[list[list[float]]]
    target: list[list[list[float]]] | None = None
    weight: list[list[list[float]]] | None = None
    step_target: dict[str, list] | None = None
    slope: list[list[list[float]]] | None = None


def zeros_like_tokens(trial: Trial) -> list[list[float]]:
    return [[0.0] * len(step) for step in trial.tokens]


def spread_over_tokens(trials: list[Trial], per_step: list[list[float]]) -> list:
    out = []
    for trial, numbers in zip(trials, per_step):
        nested = zeros_like_tokens(trial)
        if trial.weight > 0:
            for k, flags in enumerate(trial.tokens):
                for j, trained in enumerate(flags):
                    if trained:
                        nested[k][j] = numbers[k]
        out.append(nested)
    return out


def normalise(values: list[float], std: str | None) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    size = max(1.0, max(abs(v) for v in values))
    if max(values) - min(values) <= 1e-6 * size:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    if std is None:
        return [v - mean for v in values]
    below = len(values) - 1 if std == "sample" else len(values)
    sigma = math.sqrt(sum((v - mean) ** 2 for v in values) / below)
    return [(v - mean) / (sigma + EPS) for v in values]


def over_episodes(trials: list[Trial], scores: list[float], std: str | None = "sample") -> list:
    groups = defaultdict(list)
    for i, trial in enumerate(trials):
        if trial.weight > 0:
            groups[trial.task].append(i)
    out = [0.0] * len(trials)
    for members in groups.values():
        for i, a in zip(members, normalise([scores[i] for i in members], std)):
            out[i] = a
    return [[a] * trial.n for a, trial in zip(out, trials)]


def over_steps(trials: list[Trial], returns: list, by_state: bool, std: str | None) -> list:
    groups = defaultdict(list)
    for i, trial in enumerate(trials):
        if trial.weight > 0:
            for k in range(trial.n):
                key = (trial.task, trial.states[k]) if by_state else trial.task
                groups[key].append((i, k))
    out = [[0.0] * trial.n for trial in trials]
    for members in groups.values():
        for (i, k), a in zip(members, normalise([returns[i][k] for i, k in members], std)):
            out[i][k] = a
    return out


def terminal(trial: Trial) -> list[float]:
    return [0.0] * (trial.n - 1) + [trial.outcome]


def returns_of(rewards: list[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (later - k) * rewards[later] for later in range(k, len(rewards)))
        for k in range(len(rewards))
    ]


def plus(a: list, b: list, factor: float = 1.0) -> list:
    return [[x + factor * y for x, y in zip(p, q)] for p, q in zip(a, b)]


def masked(trials: list[Trial], per_step: list) -> list:
    return [
        [x if trial.weight > 0 else 0.0 for x in numbers]
        for trial, numbers in zip(trials, per_step)
    ]


def grpo(trials: list[Trial]) -> Result:
    advantage = over_episodes(trials, [trial.outcome for trial in trials])
    rewards = [terminal(trial) for trial in trials]
    return Result(masked(trials, rewards), spread_over_tokens(trials, advantage))


def gigpo(trials: list[Trial], gamma: float = 0.95, omega: float = 1.0) -> Result:
    rewards = [terminal(trial) for trial in trials]
    episode = over_episodes(trials, [trial.outcome for trial in trials])
    step = over_steps(trials, [returns_of(r, gamma) for r in rewards], True, "sample")
    return Result(masked(trials, rewards), spread_over_tokens(trials, plus(episode, step, omega)))


def procredit(trials: list[Trial], c: float = 0.5) -> Result:
    rewards, scores = [], []
    for trial in trials:
        r = [c * (trial.progress[k + 1] - trial.progress[k]) for k in range(trial.n)]
        scores.append(trial.outcome + sum(r))
        r[-1] += trial.outcome
        rewards.append(r)
    trajectory = over_episodes(trials, scores)
    turn = over_steps(trials, [returns_of(r, 1.0) for r in rewards], False, None)
    return Result(masked(trials, rewards), spread_over_tokens(trials, plus(trajectory, turn)))


def relace_weights(trial: Trial) -> list[float]:
    u = []
    for k in range(trial.n):
        logs = [x for x, trained in zip(trial.logp[k], trial.tokens[k]) if trained]
        p = math.exp(sum(logs) / len(logs)) if logs else 1.0
        u.append(math.exp(trial.hindsight[k]) / (p + EPS))
    mean = sum(u) / len(u)
    return [min(max(x / (mean + EPS), 0.8), 1.2) for x in u]


def relace(
    trials: list[Trial], gamma: float = 0.6, alpha: float = 0.5, variant: str = "full"
) -> Result:
    def smooth(q: list[float]) -> list[float]:
        return [alpha * q[k] + (1 - alpha) * q[min(k + 1, len(q) - 1)] for k in range(len(q))]

    plain, weighted = [], []
    for trial in trials:
        q = [gamma ** (trial.n - 1 - k) * trial.outcome for k in range(trial.n)]
        if trial.weight == 0:
            rho = [1.0] * trial.n
        elif variant == "score":
            rho = [math.exp(h) for h in trial.hindsight]
        else:
            rho = relace_weights(trial)
        plain.append(q)
        weighted.append(smooth([a * b for a, b in zip(rho, q)]))
    if variant == "focal":
        hindsight = focal_over_states(trials, weighted, plain)
    else:
        hindsight = over_steps(trials, weighted, True, "sample")
    for trial, numbers in zip(trials, hindsight):
        if trial.success:
            numbers[:] = [max(x, 0.0) for x in numbers]
    episode = over_episodes(trials, [trial.outcome for trial in trials])
    rewards = [terminal(trial) for trial in trials]
    return Result(masked(trials, rewards), spread_over_tokens(trials, plus(episode, hindsight)))


def focal_over_states(trials: list[Trial], focal: list, base: list) -> list:
    out = [[0.0] * trial.n for trial in trials]
    for i, trial in enumerate(trials):
        for k in range(trial.n):
            group = [
                base[j][m]
                for j, other in enumerate(trials)
                for m in range(other.n)
                if other.weight > 0
                and other.task == trial.task
                and other.states[m] == trial.states[k]
            ]
            if trial.weight == 0 or not any(normalise(group, None)):
                continue
            mean = sum(group) / len(group)
            sigma = math.sqrt(sum((g - mean) ** 2 for g in group) / (len(group) - 1))
            out[i][k] = (focal[i][k] - mean) / (sigma + EPS)
    return out


def token_gae(
    trials: list[Trial], rewards: list, gamma: float = 1.0, lam: float = 0.95
) -> tuple[list, list]:
    """Raw advantages and targets on the trained tokens, in order, of each episode."""
    advantages, targets = [], []
    for trial, r in zip(trials, rewards):
        advantage, target = zeros_like_tokens(trial), zeros_like_tokens(trial)
        order = [(k, j) for k in range(trial.n) for j, yes in enumerate(trial.tokens[k]) if yes]
        last_of_step = dict(order)
        carried, next_value = 0.0, 0.0
        for k, j in reversed(order if trial.weight > 0 else []):
            here = trial.value[k][j]
            paid = r[k] if last_of_step[k] == j else 0.0
            carried = paid + gamma * next_value - here + gamma * lam * carried
            next_value = here
            advantage[k][j] = carried
            target[k][j] = carried + here
        advantages.append(advantage)
        targets.append(target)
    return advantages, targets


def whiten(trials: list[Trial], advantages: list) -> list:
    flat = [
        a
        for trial, nested in zip(trials, advantages)
        if trial.weight > 0
        for flags, numbers in zip(trial.tokens, nested)
        for a, trained in zip(numbers, flags)
        if trained
    ]
    new = iter(normalise(flat, "sample"))
    out = []
    for trial in trials:
        fresh = zeros_like_tokens(trial)
        if trial.weight > 0:
            for k, flags in enumerate(trial.tokens):
                for j, trained in enumerate(flags):
                    if trained:
                        fresh[k][j] = next(new)
        out.append(fresh)
    return out


def actor_critic(trials: list[Trial], rewards: list) -> Result:
    advantages, targets = token_gae(trials, rewards)
    return Result(masked(trials, rewards), whiten(trials, advantages), targets)


def ppo(trials: list[Trial]) -> Result:
    return actor_critic(trials, [terminal(trial) for trial in trials])


def mean_outcome(trials: list[Trial]) -> float:
    counted = [trial.outcome for trial in trials if trial.weight > 0]
    return sum(counted) / len(counted) if counted else 0.0


def standard_scores(x: list[float]) -> list[float]:
    mean = sum(x) / len(x)
    std = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x))
    return [0.0] * len(x) if len(x) == 1 or std < 1e-6 else [(v - mean) / std for v in x]


def softmax(x: list[float]) -> list[float]:
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def allocation(graph: np.ndarray, confidence: str = "focus") -> dict:
    """Shares of the first n - 1 steps, C, and m, phi per layer, kappa. Needs n >= 2."""
    layers, _, n, _ = graph.shape
    per_layer, abars, m, phi, f = [], [], [], [], []
    for layer in range(layers):
        g = 0.5 * graph[layer, 0] + 0.5 * graph[layer, 1]
        a = [0.0] * n
        a[n - 1] = 1.0
        for k in range(n - 2, -1, -1):
            a[k] = 0.9 * sum(a[j] * g[j][k] for j in range(k + 1, n))
        inner = a[: n - 1]
        relevance = standard_scores([math.log(max(x, 1e-8)) for x in inner])
        age = standard_scores([float(n - 1 - k) for k in range(n - 1)])
        per_layer.append(softmax([x + 0.5 * d for x, d in zip(relevance, age)]))
        m.append(sum(graph[layer, 0, n - 1, k] + graph[layer, 1, n - 1, k] for k in range(n - 1)))
        total = sum(inner)
        if total == 0:
            phi.append(0.0)
            f.append(0.0)
            continue
        abar = [x / total for x in inner]
        abars.append(abar)
        h = -sum(x * math.log(x) for x in abar if x > 0)
        phi.append(1.0 if n == 2 else 1 - h / math.log(n - 1))
        f.append(min(m[-1] / 0.2, 1.0))
        if confidence == "focus":
            f[-1] *= min(max(phi[-1], 0.0) / 0.2, 1.0)
    q = [math.exp(sum(math.log(max(p[k], 1e-8)) for p in per_layer) / layers) for k in range(n - 1)]
    kappa = 0.0
    for k in range(n - 1):
        if abars:
            kappa += math.prod(abar[k] for abar in abars) ** (1 / len(abars))
    c = sum(f) / layers * min(kappa / 0.9, 1.0)
    if confidence == "const":
        c = 1.0
    return {"share": [x / sum(q) for x in q], "C": c, "m": m, "phi": phi, "kappa": kappa}


def attnsr(trials: list[Trial], baseline: float | None = None, confidence: str = "focus") -> Result:
    rbar = mean_outcome(trials) if baseline is None else baseline
    rewards = []
    for trial in trials:
        r = terminal(trial)
        if trial.n > 1 and trial.weight > 0:
            found = allocation(trial.graph, confidence)
            budget = 0.25 * found["C"] * (trial.outcome - rbar)
            for k in range(trial.n - 1):
                r[k] = budget * found["share"][k]
        rewards.append(r)
    return actor_critic(trials, rewards)


def linear(trials: list[Trial], baseline: float | None = None) -> Result:
    rbar = mean_outcome(trials) if baseline is None else baseline
    rewards = []
    for trial in trials:
        r = terminal(trial)
        for k in range(1, trial.n):
            r[k - 1] = 0.25 * (trial.outcome - rbar) * k / sum(range(1, trial.n))
        rewards.append(r)
    return actor_critic(trials, rewards)


def attnsr_grpo(trials: list[Trial], alpha: float = 0.25) -> Result:
    advantage = over_episodes(trials, [trial.outcome for trial in trials])
    for trial, numbers in zip(trials, advantage):
        if trial.n == 1 or trial.weight == 0:
            continue
        found = allocation(trial.graph)
        v = [
            1 + found["C"] * ((trial.n - 1) * found["share"][k] - 1) for k in range(trial.n - 1)
        ] + [1.0]
        weights = [v[k] for k in range(trial.n) for trained in trial.tokens[k] if trained]
        mean = sum(weights) / len(weights) if weights else 1.0
        numbers[:] = [a * ((1 - alpha) + alpha * v[k] / mean) for k, a in enumerate(numbers)]
    rewards = [terminal(trial) for trial in trials]
    return Result(masked(trials, rewards), spread_over_tokens(trials, advantage))


ORACLES = {
    "ppo": ppo,
    "grpo": grpo,
    "gigpo": gigpo,
    "attnsr": attnsr,
    "attnsr_grpo": attnsr_grpo,
    "linear": linear,
    "procredit": procredit,
    "relace": relace,
    **oracles_paper.ORACLES,
}

from oracles_groups import ORACLES as GROUPS  # noqa: E402 (they use the helpers above)
from oracles_learned import ORACLES as LEARNED  # noqa: E402

ORACLES |= GROUPS | LEARNED
