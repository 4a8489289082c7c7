"""The training loop: collect, score, credit, update, record."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
import optax

from envs.meter import Meter
from envs.pool import Pool
from envs.protocol import Task
from jaxcredit import batching, checkpoint, credit
from jaxcredit.credit import CreditEstimator
from jaxcredit.episodes import Episode, EpisodeBatch, Signals, Status, as_fields
from jaxcredit.heads import STEP_HEADS
from jaxcredit.update import LossConfig, TrainState, make_update
from launch import assemble, branch, evaluate, games, metrics, placement, progress, runs, sampling
from launch.config import ROW_MULTIPLE, TrainConfig
from launch.errors import UserError, user_errors
from launch.export import export
from launch.judge import judge_of
from launch.learn import Setup, plain, signals_for, update_policy
from launch.schedules import learning_rate_schedule
from models.score import ScoreConfig, buckets_for, score


def make_estimator(config: TrainConfig) -> CreditEstimator:
    """The configured credit method, with the penalty for invalid actions if there is one."""
    with user_errors("credit", ValueError, TypeError):
        method = credit.make(config.credit.method, **config.credit.options)
    if not config.invalid_penalty:
        return method
    penalty = credit.chain(
        credit.invalid_action_penalty(config.invalid_penalty), credit.broadcast()
    )
    return credit.estimator(method.name, credit.add(method, penalty))


def make_optimizer(
    config: TrainConfig, *, beside: Collection[str] = ()
) -> optax.GradientTransformation:
    """AdamW with warm-up, schedule and clipping.

    What is learned ``beside`` the policy ("heads", "reward") is clipped by itself: a large
    gradient of theirs must not shorten the policy's step. Step heads have a rate of their own.
    """
    options = config.optimizer
    episodes = config.rollout.tasks_per_iteration * config.rollout.group_size
    per_pass = -(-episodes // (options.minibatch_episodes or episodes))
    total = config.iterations * options.epochs * per_pass

    def adamw(rate: float) -> optax.GradientTransformation:
        return optax.chain(
            optax.identity()
            if options.clip_norm is None
            else optax.clip_by_global_norm(options.clip_norm),
            optax.adamw(
                learning_rate_schedule(rate, options.schedule, options.warmup, total),
                b1=options.b1,
                b2=options.b2,
                weight_decay=options.weight_decay,
            ),
        )

    policy = adamw(options.learning_rate)
    if not beside:
        return policy
    rates = {"heads": options.head_learning_rate, "reward": options.learning_rate}
    return optax.partition(
        {"policy": policy, **{name: adamw(rates[name]) for name in beside}},
        lambda tree: {name: name if name in beside else "policy" for name in tree},
    )


def checked_estimator(config: TrainConfig) -> CreditEstimator:
    """The credit method of a config whose parts fit together; ``UserError`` if they do not."""
    if config.engine is not None:
        raise UserError(
            f"engine: training cannot play through {config.engine.url}: the server does not get "
            "the weights that every update changes; set engine=null"
        )
    estimator = make_estimator(config)
    if "step_graph" in estimator.needs and config.prompt.context != "conversation":
        raise UserError(
            f"credit: {estimator.name} needs step graphs, which need prompt.context=conversation"
        )
    if config.rollout.top_p < 1.0 or config.rollout.top_k > 0 or config.rollout.temperature <= 0:
        raise UserError(
            "rollout: training needs temperature > 0, top_p = 1 and top_k = 0: the update scores "
            "every token under the distribution it was sampled from, without filters"
        )
    if "token_flow" in estimator.needs:
        raise UserError(
            f"credit: {estimator.name} needs token_flow, which no run computes; use "
            "flowtracer_step, or call jaxcredit.credit.token_flow in a program of your own"
        )
    return estimator


def prepare(config: TrainConfig) -> Setup:
    """Checks the config and builds what it names; then writes missing games, and nothing else."""
    estimator = checked_estimator(config)
    judge = judge_of(config, estimator.needs)
    parts = assemble.build(config, **beside_policy(estimator))
    setup = setup_of(config, parts, estimator)
    games.ensure(config.env)
    return dataclasses.replace(setup, tasks=assemble.tasks_of(config.env, "train"), judge=judge)


def beside_policy(estimator: CreditEstimator) -> dict[str, Any]:
    """What a credit method trains beside the policy: options of ``launch.assemble.policy_of``."""
    return {
        "critic": "value" in estimator.needs,
        "step_heads": tuple(name for name in STEP_HEADS if name in estimator.needs),
        "reward_model": "reward_logp" in estimator.needs,
    }


def setup_of(config: TrainConfig, parts: assemble.Parts, estimator: CreditEstimator) -> Setup:
    """The device side of a run: its programs and shapes. Looks at no weight."""
    layers = assemble.step_graph_layers(config.policy, parts.policy.config.num_hidden_layers)
    policy = dataclasses.replace(
        parts.policy,
        temperature=config.rollout.temperature,
        entropy=config.loss.entropy != 0 or "entropy" in estimator.needs,
    )
    beside = {"heads": bool(policy.step_heads), "reward": policy.reward_model}
    optimizer = make_optimizer(config, beside=[name for name, yes in beside.items() if yes])
    loss = LossConfig(
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        kl=config.loss.kl,
        value=config.loss.value if policy.value_head else 0.0,
        entropy=config.loss.entropy,
        head=config.loss.head if policy.step_heads else 0.0,
        reward=float(policy.reward_model),
    )
    shardings = placement.state_shardings(policy, parts.specs, optimizer, estimator.init())
    return Setup(
        config=config,
        parts=dataclasses.replace(parts, policy=policy),
        estimator=estimator,
        scoring=ScoreConfig(
            buckets=buckets_for(config.prompt.max_context, multiple=ROW_MULTIPLE),
            tokens=config.optimizer.microbatch_tokens,
            layers=layers,
        ),
        optimizer=optimizer,
        shardings=shardings,
        update=make_update(policy.evaluate, optimizer, loss, shardings),
    )


def initial_state(setup: Setup) -> TrainState:
    """The state before the first iteration."""
    return placement.initial_state(
        setup.parts.trainable, setup.optimizer, setup.estimator.init(), setup.shardings
    )


def latest_state(setup: Setup) -> TrainState | None:
    """The newest checkpoint of the run, or None; the run may be training meanwhile."""
    with user_errors("checkpoint"):
        return checkpoint.read_latest(setup.config.run / "checkpoints", initial_state(setup))


def collect(
    setup: Setup, state: TrainState, pool: Pool
) -> tuple[list[Episode], dict[str, np.ndarray], Meter]:
    """Plays the iteration's episodes with the current policy.

    Also returns the signals that take more playing (``mc_value``, if the method needs it), and
    what the episodes took.
    """
    config, iteration = setup.config, int(state.iteration)
    sampler = sampling.make_sampler(
        setup.parts, state.trainable, config, temperature=config.rollout.temperature
    )
    jobs = assemble.training_jobs(
        setup.tasks,
        seed=config.seed,
        iteration=iteration,
        count=config.rollout.tasks_per_iteration,
        group_size=config.rollout.group_size,
    )
    meter = Meter()
    with progress.episodes(f"iteration {iteration}: episodes") as update:
        episodes = setup.parts.player.collect(
            sampler,
            pool,
            jobs,
            iteration=iteration,
            policy_version=int(state.updates),
            meter=meter,
            progress=update,
        )
    if "mc_value" not in setup.estimator.needs:
        return episodes, {}, meter
    with progress.episodes(f"iteration {iteration}: attempts from every step") as update:
        values = branch.mc_values(
            setup.parts.player,
            sampler,
            pool,
            [job.task for job in jobs],
            episodes,
            attempts=config.rollout.value_attempts,
            iteration=iteration,
            max_steps=config.env.max_steps,
            progress=update,
            # As the estimator discounts and adds, so must its values.
            **config.credit.options,
        )
    return episodes, {"mc_value": values}, meter


def rollout_metrics(episodes: Sequence[Episode], batch: EpisodeBatch) -> dict[str, float]:
    """What happened in the iteration's episodes."""
    real = [e for e in episodes if e.status != Status.ENV_ERROR]
    steps = [step for e in real for step in e.steps]
    rates = {
        f"rollout/{status.name.lower()}": float(np.mean([e.status == status for e in episodes]))
        for status in Status
    }
    return {
        "rollout/outcome": float(np.mean([e.outcome for e in real])) if real else 0.0,
        "rollout/steps": len(steps) / max(len(real), 1),
        "rollout/valid": float(np.mean([s.valid for s in steps])) if steps else 0.0,
        "rollout/progress": float(np.mean([e.steps[-1].progress for e in real if e.steps] or [0])),
        "rollout/row_tokens": float(batching.row_lengths(batch).mean()),
        "rollout/trained_tokens": float(np.asarray(batch.trainable).sum()),
        **rates,
    }


def agreement(
    setup: Setup, state: TrainState, batch: EpisodeBatch, signals: Signals
) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the sampler's.

    Where nothing else needs the trainer's, ``agreement.rows`` rows are scored for this alone.
    More tokens beyond the tolerance than ``agreement.max_share`` are told, or are a ``UserError``.
    """
    options, logp = setup.config.agreement, signals.logp
    if logp is None:
        rows = len(batch.tokens)
        chosen = np.unique(np.linspace(0, rows - 1, min(rows, options.rows)).astype(int))
        batch = batching.some_rows(batch, chosen)
        policy = plain(setup.parts.policy)
        logp = score(policy, state.trainable, setup.parts.frozen, batch, setup.scoring).logp
    gap = np.abs(np.asarray(logp) - batch.behaviour_logp)[np.asarray(batch.trainable)]
    if not gap.size:
        return {}
    share = float((gap > options.tolerance).mean())
    if share > options.max_share:
        message = (
            f"agreement: {100 * share:.1f} % of the sampled tokens have log-probabilities that "
            f"differ by more than {options.tolerance} between sampler and trainer (largest "
            f"{gap.max():.2g}, agreement.max_share {options.max_share}); compare policy.dtype and "
            "rollout.cache_dtype, or raise agreement.tolerance"
        )
        if options.beyond == "stop":
            raise UserError(message)
        print(f"warning: {message}", file=sys.stderr, flush=True)
    return {
        "agreement/mean_abs": float(gap.mean()),
        "agreement/max_abs": float(gap.max()),
        "agreement/share_beyond": share,
    }


def iterate(
    setup: Setup, state: TrainState, pool: Pool, estimate: Any
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """One iteration of the line; returns the new state, metrics and episode rows."""
    clock = [time.perf_counter()]
    episodes, played, meter = collect(setup, state, pool)
    clock.append(time.perf_counter())
    batch = batching.batch_episodes(
        episodes,
        max_steps=setup.config.env.max_steps,
        length_multiple=ROW_MULTIPLE,
        groups=setup.config.rollout.group_size,
    )
    signals = signals_for(setup, state, episodes, batch)
    signals = dataclasses.replace(signals, **as_fields(played))
    agreed = agreement(setup, state, batch, signals)
    clock.append(time.perf_counter())
    found, credit_state = estimate(batch, signals, state.credit_state)
    found = jax.tree.map(np.asarray, found)
    iteration = int(state.iteration)
    state, update = update_policy(setup, state, batch, signals, found)
    state = dataclasses.replace(state, credit_state=credit_state, iteration=state.iteration + 1)
    clock.append(time.perf_counter())
    values = {
        **rollout_metrics(episodes, batch),
        **meter.metrics(),
        **{f"credit/{k}": float(v) for k, v in found.diagnostics.items()},
        **{f"update/{k}": v for k, v in update.items()},
        **agreed,
    }
    for name, start, end in zip(("rollout", "score", "update"), clock, clock[1:], strict=False):
        values[f"seconds/{name}"] = end - start
    rows = [
        {
            "iteration": iteration,
            **evaluate.episode_summary(episode),
            "actions": [step.action for step in episode.steps],
            "credit": [round(float(x), 4) for x in found.step_advantage[i, : len(episode.steps)]],
        }
        for i, episode in enumerate(episodes)
    ]
    return state, values, rows


def main(config: TrainConfig) -> None:
    """``python -m launch train CONFIG``."""
    setup = prepare(config)
    held_out = evaluate.tasks_by_split(config)
    stored = config.run / "config.yaml"
    if stored.exists():
        runs.check_same_run(config, stored)
    restored = latest_state(setup)  # before anything is written: it may not fit
    run = runs.open_run(config, config.run)
    try:
        with (
            assemble.open_pool(config.env, config.prompt) as pool,
            checkpoint.open_checkpoints(
                run.checkpoints, keep=config.checkpoint.keep
            ) as checkpoints,
        ):
            state = initial_state(setup) if restored is None else restored
            if restored is not None:
                print(f"go on after iteration {int(state.iteration)}", flush=True)
            start = int(state.iteration)
            runs.resume_rows(run.episodes, start)
            runs.resume_rows(run.evaluations, start + 1)
            log = metrics.open_metrics(run.metrics, start)
            estimate = jax.jit(setup.estimator.estimate)
            _evaluate(setup, state, pool, run, held_out)
            for iteration in range(start, config.iterations):
                state, values, rows = iterate(setup, state, pool, estimate)
                log.record(iteration, values)
                runs.append_rows(run.episodes, rows)
                _print(iteration, config.iterations, values)
                last = iteration + 1 == config.iterations
                if last or (iteration + 1) % config.checkpoint.every == 0:
                    checkpoint.save(checkpoints, state)
                every = config.evaluate.every
                if last or (every and (iteration + 1) % every == 0):
                    _evaluate(setup, state, pool, run, held_out)
            log.close()
            _finish(setup, state, run)
    finally:
        run.close()


def _evaluate(
    setup: Setup, state: TrainState, pool: Pool, run: runs.Run, tasks: dict[str, tuple[Task, ...]]
) -> None:
    """Evaluates unless the run already has this iteration's rows."""
    iteration = int(state.iteration)
    rows = [row for row in runs.read_rows(run.evaluations) if row["iteration"] == iteration]
    if not rows:
        sampler = sampling.make_sampler(
            setup.parts,
            state.trainable,
            setup.config,
            temperature=setup.config.evaluate.temperature,
        )
        rows = evaluate.play(
            setup.parts.player, sampler, pool, setup.config, tasks, iteration=iteration
        )
        runs.append_rows(run.evaluations, rows)
    evaluate.report(rows, f"after {iteration} iterations")


def _print(iteration: int, total: int, values: dict[str, float]) -> None:
    seconds = sum(v for k, v in values.items() if k.startswith("seconds/"))
    print(
        f"iteration {iteration + 1}/{total}: success {100 * values['rollout/success']:.0f} %, "
        f"{values['rollout/steps']:.1f} steps, valid {100 * values['rollout/valid']:.0f} %, "
        f"grad norm {values.get('update/grad_norm', 0):.2f}, "
        f"old KL {values.get('update/old_kl', 0):.1e}, {seconds:.1f} s",
        flush=True,
    )


def _finish(setup: Setup, state: TrainState, run: runs.Run) -> None:
    """Draws the curve, compares before and after, exports the policy, prints the digest."""
    rows = list(runs.read_rows(run.evaluations))
    first, last = (
        [row for row in rows if row["iteration"] == i] for i in (0, int(state.iteration))
    )
    if first and last and int(state.iteration):
        evaluate.compare(first, last)
    metrics.learning_curve(
        run.metrics,
        run.folder / "learning_curve.png",
        {"rollout/outcome": "training success", "rollout/valid": "valid actions"},
        ylabel="fraction",
    )
    export(setup, state, run.folder / "policy")
    print(f"digest: {checkpoint.digest(state.trainable)}", flush=True)
