"""Monte-Carlo values: the policy plays on from every step of its episodes, again and again.

An environment cannot be put back into an earlier state, so each fresh attempt starts anew and
takes the episode's steps again up to the one in question. That takes no sampling, but a call of
the environment per step; the attempts themselves are what costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from envs.pool import Pool
from envs.protocol import Task
from envs.rollout import Diverged, Job, Player, Sampler
from jaxcredit.episodes import Episode, Status, Step
from launch.errors import user_errors

Prefix = tuple[int, tuple[bytes, ...]]  # group, and the responses given


def mc_values(
    player: Player,
    sampler: Sampler,
    pool: Pool,
    tasks: Sequence[Task],
    episodes: Sequence[Episode],
    *,
    attempts: int,
    iteration: int,
    max_steps: int,
    gamma: float = 1.0,
    rewards: str = "outcome",
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """[N, K + 1], V_k the mean return of fresh attempts from before step k, 0 after the last.

        return of an attempt with n steps from before step k  =  sum_{m=k}^n gamma^(m - k) r_m

    r_n holds the outcome. Episodes of one task that gave the same responses so far share their
    attempts, so V_1 is one number per task. Where the environment spoils all attempts from a step,
    the episode's own return from there stands in. A spoiled episode gets zeros.

    Args:
      player, sampler, pool: as in ``Player.collect``; the sampler holds the policy that played.
      tasks: those of the episodes.
      episodes: finished ones, in the order of an iteration's jobs.
      attempts: how many from every step.
      iteration: part of every sampling key.
      max_steps: K.
      gamma: discount per step.
      rewards: "outcome", or "outcome+steps" to add the environment's step rewards.
      progress: called with (finished, all).

    Raises ``UserError`` if the environment does not repeat itself.
    """
    by_id = {task.id: task for task in tasks}
    # Replicas number the attempts at a task. The episodes' own numbers are taken.
    first = 1 + max((episode.replica for episode in episodes), default=0)
    taken: dict[int, int] = {}
    jobs: list[Job] = []
    numbers: dict[Prefix, range] = {}
    for episode in episodes:
        for k in range(_playable(episode)):
            prefix = _prefix(episode, k)
            if prefix not in numbers:
                numbers[prefix] = range(len(jobs), len(jobs) + attempts)
                start = taken.setdefault(episode.group, first)
                taken[episode.group] = start + attempts
                jobs += [
                    Job(by_id[episode.task_id], episode.group, start + j, episode.steps[:k])
                    for j in range(attempts)
                ]
    with user_errors("credit: Monte-Carlo values", Diverged):
        played = player.collect(sampler, pool, jobs, iteration=iteration, progress=progress)

    def value(episode: Episode, k: int) -> float:
        fresh = [played[j] for j in numbers[_prefix(episode, k)]]
        kept = [e for e in fresh if e.status != Status.ENV_ERROR] or [episode]
        return float(np.mean([_return(e, k, gamma, rewards) for e in kept]))

    found = np.zeros((len(episodes), max_steps + 1), np.float32)
    for i, episode in enumerate(episodes):
        for k in range(_playable(episode)):
            found[i, k] = value(episode, k)
    return found


def _playable(episode: Episode) -> int:
    return 0 if episode.status == Status.ENV_ERROR else len(episode.steps)


def _prefix(episode: Episode, k: int) -> Prefix:
    return episode.group, tuple(step.response_ids.tobytes() for step in episode.steps[:k])


def _return(episode: Episode, k: int, gamma: float, rewards: str) -> float:
    def earned(step: Step) -> float:
        return step.reward if rewards == "outcome+steps" else 0.0

    steps = episode.steps[k:]
    total = sum(gamma**m * earned(step) for m, step in enumerate(steps))
    return total + gamma ** max(len(steps) - 1, 0) * episode.outcome
