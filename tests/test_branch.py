"""Monte-Carlo values of the Stairs world, against attempts that are counted by hand."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
from episode_cases import random_episode
from test_rollout import (
    CHAT,
    LIMITS,
    PROMPT,
    Scripted,
    _workers_find_this_file,  # noqa: F401
    jobs_for,
)

from envs.pool import Pool
from envs.protocol import EnvSpec, Task
from envs.rollout import Player
from jaxcredit import credit
from jaxcredit.episodes import Status
from launch.branch import mc_values
from launch.errors import UserError

K = LIMITS.max_steps


def ups(group, replica, turn):
    """A policy whose draws are fixed: up or down, by attempt and turn."""
    return bool(np.random.default_rng((group, replica, turn)).random() < 0.6 or turn == 0)


def reply(group, replica, turn):
    return f"<action> go {'up' if ups(group, replica, turn) else 'down'} </action>", "stop"


def walk(floor: int, goal: int, turn: int, group: int, replica: int):
    """(status, number of steps) of an attempt that stands on ``floor`` before step ``turn``."""
    steps = 0
    while turn < K:
        floor += 1 if ups(group, replica, turn) else -1
        turn, steps = turn + 1, steps + 1
        if floor == goal:
            return "success", steps
        if floor < 0:
            return "spoiled", steps
    return "limit", steps


def play(jobs, context="conversation", attempts=4, **options):
    sampler = Scripted(reply)
    prompt = dataclasses.replace(PROMPT, context=context)
    with Pool(EnvSpec("test_rollout:make"), 2, deadline_s=30) as pool:
        player = Player(CHAT, prompt, dataclasses.replace(LIMITS, retries=0))
        episodes = player.collect(sampler, pool, jobs)
        sampler.keys.clear()
        values = mc_values(
            player,
            sampler,
            pool,
            [job.task for job in jobs],
            episodes,
            attempts=attempts,
            iteration=0,
            max_steps=K,
            **options,
        )
    return episodes, values, sampler.keys


def by_hand(episodes, goals, attempts, gamma):
    """The same numbers from the rules of the world alone."""
    values, numbers, following = np.zeros((len(episodes), K + 1)), {}, {}
    for i, episode in enumerate(episodes):
        if episode.status == Status.ENV_ERROR:
            continue
        actions = [step.action for step in episode.steps]
        goal = goals[episode.group]
        for k in range(len(actions)):
            key = (episode.group, *actions[:k])
            if key not in numbers:
                start = following.get(episode.group, 1 + max(e.replica for e in episodes))
                numbers[key] = range(start, start + attempts)
                following[episode.group] = start + attempts
            floor = sum(1 if action == "go up" else -1 for action in actions[:k])
            ends = [walk(floor, goal, k, episode.group, replica) for replica in numbers[key]]
            earned = [
                gamma ** (steps - 1) if status == "success" else 0.0
                for status, steps in ends
                if status != "spoiled"
            ]
            own = gamma ** (len(actions) - 1 - k) * episode.outcome
            values[i, k] = np.mean(earned) if earned else own
    return values, sum(len(x) for x in numbers.values())


@pytest.mark.parametrize("context", ["conversation", "window"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_values_are_the_mean_return_of_attempts_from_every_step(context: str, gamma: float):
    jobs = jobs_for(2, 3, 5, replicas=4)
    episodes, values, keys = play(jobs, context, gamma=gamma)
    expected, played = by_hand(episodes, (2, 3, 5), 4, gamma)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    statuses = {e.status for e in episodes}
    assert statuses == {Status.SUCCESS, Status.STEP_LIMIT, Status.ENV_ERROR}, "dull draws"
    assert len(np.unique(values)) > 5
    # Attempts have keys of their own, and those of equal beginnings are shared.
    assert len({key[1:3] for key in keys}) == played
    assert min(key[2] for key in keys) == 4
    assert played < 4 * sum(len(e.steps) for e in episodes)


def test_step_rewards_count_where_they_are_asked_for():
    """By hand, with a player that hands back attempts of known rewards."""
    whole = random_episode(np.random.default_rng(0), steps=3)
    paid = dataclasses.replace(
        whole,
        outcome=1.0,
        steps=tuple(
            dataclasses.replace(s, reward=r)
            for s, r in zip(whole.steps, (0.1, 0.2, 0.4), strict=True)
        ),
    )
    spoiled = dataclasses.replace(paid, status=Status.ENV_ERROR)
    nothing = dataclasses.replace(paid, outcome=0.0)
    # Two attempts from each of three steps.
    played = [paid, nothing, paid, spoiled, spoiled, spoiled]
    player = types.SimpleNamespace(collect=lambda *a, **k: played)
    for rewards, expected in (
        ("outcome", [0.25 / 2, 0.5, 0.0]),
        # 0.1 + 0.2 / 2 + 0.4 / 4 and the outcome; from the second step 0.2 + 0.4 / 2 and it.
        ("outcome+steps", [0.3 + 0.25 / 2, 0.4 + 0.5, 0.4]),
    ):
        (found,) = mc_values(
            player,
            None,
            None,
            [Task(whole.task_id, "")],
            [nothing],
            attempts=2,
            iteration=0,
            max_steps=4,
            gamma=0.5,
            rewards=rewards,
        )
        np.testing.assert_allclose(found, [*expected, 0.0, 0.0], rtol=1e-6)


def test_the_values_make_advantages_that_sum_to_what_was_earned_beyond_them():
    jobs = jobs_for(3, replicas=5)
    episodes, values, _ = play(jobs)
    n = [len(e.steps) for e in episodes]
    kept = [i for i, e in enumerate(episodes) if e.status != Status.ENV_ERROR]
    found = credit.assign(
        "vineppo",
        task=[0] * len(kept),
        outcome=[episodes[i].outcome for i in kept],
        n_steps=[n[i] for i in kept],
        mc_value=values[kept],
    )
    total = np.asarray(found.step_advantage).sum(axis=1)
    for row, i in enumerate(kept):
        np.testing.assert_allclose(total[row], episodes[i].outcome - values[i, 0], atol=1e-6)


def test_an_environment_that_does_not_repeat_itself_is_the_users_to_fix():
    jobs = jobs_for(2)
    sampler = Scripted(reply)
    with Pool(EnvSpec("test_rollout:make"), 1, deadline_s=30) as pool:
        player = Player(CHAT, PROMPT, LIMITS)
        (episode,) = player.collect(sampler, pool, jobs)
        first = episode.steps[0]
        other = dataclasses.replace(first, context_ids=first.context_ids[:-1])
        episode = dataclasses.replace(episode, steps=(other, *episode.steps[1:]))
        assert len(episode.steps) > 1
        with pytest.raises(UserError, match="credit: Monte-Carlo values: task room 2"):
            mc_values(
                player,
                sampler,
                pool,
                [job.task for job in jobs],
                [episode],
                attempts=1,
                iteration=0,
                max_steps=K,
            )
