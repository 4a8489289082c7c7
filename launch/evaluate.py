"""Plays frozen task lists once each and reports success with 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.engine import EngineError
from envs.pool import Pool
from envs.protocol import Task
from envs.rollout import Job, Player, Sampler
from jaxcredit.episodes import Episode
from launch import assemble, games, progress, runs, sampling, statistics
from launch.config import TrainConfig
from launch.errors import UserError, user_errors


def play(
    player: Player,
    sampler: Sampler,
    pool: Pool,
    config: TrainConfig,
    tasks: Mapping[str, Sequence[Task]],
    *,
    iteration: int,
) -> list[dict[str, Any]]:
    """One row per game: split, task, kind, success, status, steps, valid actions.

    ``sampler`` holds the policy and samples at ``evaluate.temperature``; ``tasks`` maps a split to
    its games. Rows carry the hash of the task list, the temperature and the iteration, so that a
    result says what it measured.
    """
    listed = [(split, task) for split, chosen in tasks.items() for task in chosen]
    jobs = [Job(task, group) for group, (_, task) in enumerate(listed)]
    with progress.episodes(f"evaluate after {iteration} iterations") as update:
        episodes = player.collect(sampler, pool, jobs, iteration=iteration, progress=update)
    hashes = {split: assemble.split_hash(chosen) for split, chosen in tasks.items()}
    return [
        {
            "iteration": iteration,
            "split": split,
            "tasks": hashes[split],
            "temperature": config.evaluate.temperature,
            **episode_summary(episode),
            "kind": task.kind,
        }
        for (split, task), episode in zip(listed, episodes, strict=True)
    ]


def episode_summary(episode: Episode) -> dict[str, Any]:
    """What a report needs of an episode, without its tokens."""
    return {
        "task": episode.task_id,
        "replica": episode.replica,
        "success": episode.success,
        "status": episode.status.name,
        "steps": len(episode.steps),
        "valid": sum(step.valid for step in episode.steps),
        "progress": episode.steps[-1].progress if episode.steps else episode.initial_progress,
    }


def tasks_by_split(config: TrainConfig) -> dict[str, tuple[Task, ...]]:
    """The configured evaluation games."""
    return {
        split: assemble.tasks_of(config.env, split, config.evaluate.games)
        for split in config.evaluate.splits
    }


def success_by_task(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Task id -> 0 or 1."""
    return {row["task"]: float(row["success"]) for row in rows}


def report(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Prints success by split, with Wilson 95 % intervals."""
    for split in [*dict.fromkeys(row["split"] for row in rows), "all"]:
        chosen = [row for row in rows if split in ("all", row["split"])]
        rate = statistics.wilson(sum(row["success"] for row in chosen), len(chosen))
        steps = sum(row["steps"] for row in chosen)
        valid = sum(row["valid"] for row in chosen) / max(steps, 1)
        print(
            f"{title:<24} {split:<13} {100 * rate.estimate:5.1f} % success "
            f"[{100 * rate.low:.1f}, {100 * rate.high:.1f}] of {len(chosen)} games, "
            f"{steps / len(chosen):.1f} steps, {100 * valid:.0f} % valid actions",
            flush=True,
        )


def compare(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
    """Prints the paired change over the same games, with a bootstrap 95 % interval."""
    first, second = statistics.paired(success_by_task(before), success_by_task(after))
    gain = statistics.paired_bootstrap(first, second)
    p = statistics.mcnemar(first > 0.5, second > 0.5)
    print(
        f"gain {100 * gain.estimate:+.1f} points, paired 95 % interval "
        f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}], McNemar p = {p:.2g}",
        flush=True,
    )


def main(config: TrainConfig, policy: Path | None) -> None:
    """``python -m launch evaluate CONFIG [--policy FOLDER]``."""
    from launch import train

    folder: Path | None = None  # of the run, if it is the run's policy that plays
    sampler: Sampler
    iteration, title, temperature = 0, str(policy), config.evaluate.temperature
    if policy is not None:
        source = config.policy.model_copy(update={"path": policy, "init": None})
        config = config.model_copy(update={"policy": source})
    if config.engine is not None:
        player = assemble.make_player(config)
        sampler = sampling.make_engine(player, config, temperature=temperature)
        games.ensure(config.env)
        title = config.engine.model
    elif policy is not None:
        parts = train.prepare(config).parts
        player = parts.player
        sampler = sampling.make_sampler(parts, parts.trainable, config, temperature=temperature)
    else:
        if not (config.run / "config.yaml").exists():
            raise UserError(
                f"run: {config.run} holds no run; train first, or name weights with --policy FOLDER"
            )
        runs.check_same_run(config, config.run / "config.yaml", free=["evaluate"])
        setup = train.prepare(config)
        state = train.latest_state(setup)
        if state is None:
            raise UserError(f"run: {config.run} has no checkpoint yet; train first, or --policy")
        player, iteration, folder = setup.parts.player, int(state.iteration), config.run
        sampler = sampling.make_sampler(
            setup.parts, state.trainable, config, temperature=temperature
        )
        title = f"after {iteration} iterations"
    tasks = tasks_by_split(config)
    with (
        assemble.open_pool(config.env, config.prompt) as pool,
        user_errors("engine", EngineError),
        sampling.closing(sampler),
    ):
        rows = play(player, sampler, pool, config, tasks, iteration=iteration)
    report(rows, title)
    if folder is not None:
        runs.append_rows(folder / "played.jsonl", rows)
