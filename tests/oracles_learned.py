"""Loop-by-loop versions of the methods that learn a model of the task (see ``oracles``)."""

from __future__ import annotations

import numpy as np
from oracles import (
    Result,
    Trial,
    masked,
    normalise,
    over_episodes,
    plus,
    spread_over_tokens,
    terminal,
    whiten,
    zeros_like_tokens,
)


def compared_over_the_task(trials: list[Trial], numbers: list) -> list:
    """Every step against all steps of all counted trials of its task."""
    out = [[0.0] * trial.n for trial in trials]
    for task in {trial.task for trial in trials}:
        members = [
            (i, k)
            for i, trial in enumerate(trials)
            if trial.task == task and trial.weight > 0
            for k in range(trial.n)
        ]
        for (i, k), a in zip(members, normalise([numbers[i][k] for i, k in members], "sample")):
            out[i][k] = a
    return out


def suffix_sums(rewards: list, gamma: float) -> list:
    out = []
    for r in rewards:
        g, carried = [], 0.0
        for x in reversed(r):
            carried = x + gamma * carried
            g.insert(0, carried)
        out.append(g)
    return out


def critic_pass(trials: list[Trial], rewards: list, between: float, inside: float, lam: float):
    """Raw advantages and targets, token by token from the end, with two discounts."""
    advantages, targets = [], []
    for trial, r in zip(trials, rewards):
        advantage, target = zeros_like_tokens(trial), zeros_like_tokens(trial)
        behind = None  # (step, value, advantage) of the token after this one
        for k in reversed(range(trial.n if trial.weight > 0 else 0)):
            trained = [j for j, yes in enumerate(trial.tokens[k]) if yes]
            for j in reversed(trained):
                here = trial.value[k][j]
                paid = r[k] if j == trained[-1] else 0.0
                if behind is None:
                    advantage[k][j] = paid - here
                else:
                    step, value, later = behind
                    discount = inside if step == k else between
                    advantage[k][j] = paid + discount * value - here + discount * lam * later
                target[k][j] = advantage[k][j] + here
                behind = (k, here, advantage[k][j])
        advantages.append(advantage)
        targets.append(target)
    return advantages, targets


def token_critic(
    trials: list[Trial], rewards: list, between: float, inside: float, step_target=None
) -> Result:
    advantage, target = critic_pass(trials, rewards, between, inside, 0.95)
    return Result(
        masked(trials, rewards), whiten(trials, advantage), target, step_target=step_target
    )


def poad(trials: list[Trial], gamma: float = 0.95) -> Result:
    return token_critic(trials, [terminal(trial) for trial in trials], gamma, 1.0)


def archer(trials: list[Trial], gamma: float = 0.95, lam: float = 0.0) -> Result:
    advantage, q_target, v_target = [], [], []
    for trial in trials:
        advantage.append([min(q) - min(v) for q, v in zip(trial.q_value, trial.v_value)])
        to_q = [[trial.outcome, trial.outcome]]
        for k in range(trial.n - 2, -1, -1):
            pairs = zip(trial.v_value[k + 1], to_q[0])
            to_q.insert(0, [gamma * ((1 - lam) * v + lam * later) for v, later in pairs])
        q_target.append(to_q)
        v_target.append([list(q) for q in trial.q_value])
    targets = {"q_value": q_target, "v_value": v_target}
    rewards = [terminal(trial) for trial in trials]
    return Result(
        masked(trials, rewards), spread_over_tokens(trials, advantage), step_target=targets
    )


def vineppo(trials: list[Trial]) -> Result:
    advantage = []
    for trial in trials:
        v = trial.mc_value
        a = [v[k + 1] - v[k] for k in range(trial.n)]
        a[-1] += trial.outcome
        advantage.append(a)
    rewards = [terminal(trial) for trial in trials]
    return Result(masked(trials, rewards), spread_over_tokens(trials, advantage))


def learned(trials: list[Trial], rewards: list, targets: dict, baseline: str, gamma: float):
    if baseline == "critic":
        return token_critic(trials, rewards, gamma, gamma, targets)
    advantage = compared_over_the_task(trials, suffix_sums(rewards, gamma))
    return Result(
        masked(trials, rewards), spread_over_tokens(trials, advantage), step_target=targets
    )


def rudder(
    trials: list[Trial], baseline: str = "group", exact: bool = True, early: float = 0.1
) -> Result:
    rewards, targets = [], []
    for trial in trials:
        before, r = 0.0, []
        for g in trial.predicted_return:
            r.append(g - before)
            before = g
        if exact:
            rest = trial.outcome - before
            r = [x + rest / trial.n for x in r]
        rewards.append(r)
        weights = [early] * (trial.n - 1) + [1.0]
        targets.append(
            [(1 - w) * g + w * trial.outcome for w, g in zip(weights, trial.predicted_return)]
        )
    return learned(trials, rewards, {"predicted_return": targets}, baseline, 1.0)


def spa_rl(trials: list[Trial], baseline: str = "group") -> Result:
    rewards, targets = [], []
    for trial in trials:
        c = trial.predicted_progress
        rewards.append([x + (0.5 if ok else 0.0) for x, ok in zip(c, trial.accepted)])
        targets.append([x + (trial.outcome - sum(c)) / trial.n for x in c])
    gamma = 1.0 if baseline == "critic" else 0.0
    return learned(trials, rewards, {"predicted_progress": targets}, baseline, gamma)


def agentprm(
    trials: list[Trial], baseline: str = "group", outcome: bool = True, td_gamma: float = 1.0
) -> Result:
    rewards, targets = [], []
    for trial in trials:
        m = trial.promise
        r = [m[0]] + [m[k] - m[k - 1] for k in range(1, trial.n)]
        r[-1] += trial.outcome if outcome else 0.0
        rewards.append(r)
        # The recursive form of the lambda-return: T_k = gamma ((1 - lam) M_{k+1} + lam T_{k+1}).
        to = [trial.outcome]
        for k in range(trial.n - 2, -1, -1):
            to.insert(0, td_gamma * (0.05 * m[k + 1] + 0.95 * to[0]))
        targets.append(to)
    return learned(trials, rewards, {"promise": targets}, baseline, 1.0)


def istar(trials: list[Trial], alpha: float = 1.0) -> Result:
    rewards = []
    for trial in trials:
        r = []
        for k, flags in enumerate(trial.tokens):
            gaps = [
                trial.reward_logp[k][j] - trial.logp[k][j] for j, yes in enumerate(flags) if yes
            ]
            r.append(0.05 * sum(gaps))
        rewards.append(r)
    step = compared_over_the_task(trials, rewards)
    episode = over_episodes(trials, [trial.outcome for trial in trials])
    advantage = spread_over_tokens(trials, plus(episode, step, alpha))
    return Result(masked(trials, rewards), advantage, slope=preference_slope(trials, rewards))


def preference_slope(trials: list[Trial], rewards: list) -> list:
    """Pair by pair: the better attempt's tokens are pulled up, the worse one's down."""
    pairs = [
        (i, j)
        for i, better in enumerate(trials)
        for j, worse in enumerate(trials)
        if better.task == worse.task
        and better.weight * worse.weight > 0
        and better.outcome > worse.outcome
    ]
    pull = [0.0] * len(trials)
    for i, j in pairs:
        doubt = 1 / (1 + np.exp(sum(rewards[i]) - sum(rewards[j])))
        pull[i] -= 0.05 * doubt / len(pairs)
        pull[j] += 0.05 * doubt / len(pairs)
    return spread_over_tokens(trials, [[p] * t.n for p, t in zip(pull, trials)])


ORACLES = {
    "poad": poad,
    "archer": archer,
    "vineppo": vineppo,
    "rudder": rudder,
    "spa_rl": spa_rl,
    "agentprm": agentprm,
    "istar": istar,
}
