"""Warm start: imitation of ALFWorld's hand-coded expert.

The result is a folder in Hugging Face's layout with its tokenizer, ready for ``policy.path``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from envs.demonstrations import Habit, demonstrate
from jaxcredit import batching, losses
from jaxcredit.episodes import Episode, EpisodeBatch
from jaxcredit.update import TrainState
from launch import assemble, games, metrics, placement, runs
from launch.config import ROW_MULTIPLE, SftConfig
from launch.errors import UserError
from launch.schedules import learning_rate_schedule
from models import hf, lora
from models.policy import Policy
from models.score import buckets_for
from models.sharding import place_rows


def collect(config: SftConfig, parts: assemble.Parts) -> list[Episode]:
    """The expert's successful episodes on the training games."""
    tasks = assemble.tasks_of(config.env, "train", config.sft.games)
    habit = config.sft.habit
    with assemble.open_pool(config.env, config.prompt) as pool:
        episodes = demonstrate(
            parts.player,
            pool,
            tasks,
            noise=config.sft.noise,
            habit=None if habit is None else Habit(habit.word, habit.chance),
            seed=config.seed,
        )
    won = [episode for episode in episodes if episode.success]
    print(f"expert: {len(won)} of {len(episodes)} games won; those are imitated", flush=True)
    if not won:
        raise UserError("sft: the expert won no game; raise env.max_steps or lower sft.noise")
    return won


def make_step(
    policy: Policy,
    frozen: Any,
    optimizer: optax.GradientTransformation,
    context_weight: float,
    shardings: TrainState | None = None,
) -> Any:
    """Jitted maximum-likelihood step on one slice of rows.

    The loss is the weighted mean of -log p: weight 1 on the expert's tokens, ``context_weight``
    on all others (prompts and observations teach a small policy to copy names).
    """

    out = None if shardings is None else (shardings.trainable, shardings.opt_state, None)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=out)
    def step(trainable: Any, opt_state: Any, rows: dict[str, Any]) -> Any:
        def loss(trainable: Any) -> tuple[Any, Any]:
            hidden, _ = policy.hidden(
                trainable, frozen, rows["tokens"], rows["position"], rows["segment"]
            )
            target = rows["trainable"]
            weight = jnp.where(target, 1.0, context_weight * (rows["segment"] > 0))
            output = policy.read(trainable, frozen, hidden, rows["tokens"], weight != 0)
            mean = -losses.weighted_sum(weight, output.logp) / jnp.maximum(weight.sum(), 1.0)
            on_target = -jnp.sum(losses.masked(target, output.logp))
            return mean, on_target / jnp.maximum(target.sum(), 1)

        (_, value), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
        updates, opt_state = optimizer.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state, value

    return step


def batches(batch: EpisodeBatch, config: SftConfig, buckets: Sequence[int]) -> Any:
    """Endless slices of ``sft.batch`` rows of similar length, in a seeded order."""
    lengths = batching.row_lengths(batch)
    edges = np.searchsorted(np.asarray(buckets), lengths)
    epoch = 0
    while config.sft.epochs is None or epoch < config.sft.epochs:
        rng = np.random.default_rng((config.seed, epoch))
        order = rng.permutation(len(lengths))
        groups = []
        for bucket in np.unique(edges):
            rows = order[edges[order] == bucket]
            for start in range(0, len(rows), config.sft.batch):
                part = rows[start : start + config.sft.batch]
                padded = np.resize(part, config.sft.batch)
                groups.append(batching.Slice(padded, len(part), int(buckets[bucket])))
        for index in rng.permutation(len(groups)):
            yield batching.take_rows(batch, groups[index])
        epoch += 1


def main(config: SftConfig) -> None:
    """``python -m launch sft CONFIG``."""
    if config.output.exists():
        raise UserError(
            f"output: {config.output} exists; name another with --set output=FOLDER or remove it"
        )
    games.ensure(config.env)
    parts = assemble.build(config, critic=False)
    run = runs.open_run(config, config.run)
    log = metrics.open_metrics(run.metrics, 0)
    episodes = collect(config, parts)
    batch = batching.batch_episodes(
        episodes, max_steps=config.env.max_steps, length_multiple=ROW_MULTIPLE
    )
    buckets = buckets_for(int(batching.row_lengths(batch).max()), multiple=ROW_MULTIPLE)
    per_epoch = sum(1 for _ in batches(batch, _one_epoch(config), buckets))
    total = config.sft.steps or per_epoch * (config.sft.epochs or 1)
    schedule = learning_rate_schedule(
        config.sft.learning_rate, config.sft.schedule, config.sft.warmup, total
    )
    clip = config.sft.clip_norm
    optimizer = optax.chain(
        optax.identity() if clip is None else optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b2=0.98, weight_decay=config.sft.weight_decay),
    )
    shardings = placement.state_shardings(parts.policy, parts.specs, optimizer, ())
    step = make_step(parts.policy, parts.frozen, optimizer, config.sft.context_weight, shardings)
    state = placement.initial_state(parts.trainable, optimizer, (), shardings)
    trainable, opt_state = state.trainable, state.opt_state
    started, window = time.time(), []
    for number, rows in enumerate(batches(batch, config, buckets)):
        if number >= total:
            break
        rows = place_rows(rows, parts.policy.mesh)
        trainable, opt_state, loss = step(trainable, opt_state, rows)
        window.append(loss)
        if (number + 1) % 50 == 0 or number + 1 == total:
            mean = float(np.mean([float(x) for x in window]))
            log.record(number, {"sft/loss": mean, "sft/seconds": time.time() - started})
            print(f"step {number + 1}/{total}: loss {mean:.4f}", flush=True)
            window = []
    log.close()
    weights, adapters = parts.policy.weights(trainable, parts.frozen)
    if adapters is not None:
        weights = lora.merge(weights, adapters)
    hf.save_policy(config.output, parts.policy.config, weights, jnp.dtype(config.sft.save_dtype))
    parts.chat.tokenizer.save_pretrained(config.output)
    run.close()
    print(f"policy written to {config.output}", flush=True)


def _one_epoch(config: SftConfig) -> SftConfig:
    return config.model_copy(
        update={"sft": config.sft.model_copy(update={"epochs": 1, "steps": None})}
    )
