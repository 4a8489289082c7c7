"""The audit: every method on every problem, with the same episodes and signals for all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxcredit import credit
from jaxcredit.credit import CreditEstimator
from jaxcredit.episodes import SIGNAL_AXES, EpisodeBatch, Signals, as_fields
from launch.audit import imitate, measure
from launch.audit.exact import Exact, solve
from launch.audit.problems import PROBLEMS, Problem
from launch.audit.sample import Episodes, generator, sample, to_batch, vocabulary
from launch.audit.signals import Source, make
from launch.errors import user_errors

TRUTH, NOISE = "(true advantage)", "(noise)"  # the ends of every scale, in place of an estimator


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an audit runs on.

    Attributes:
      methods: names of registered methods.
      problems: names among PROBLEMS.
      seed: of episodes, signals and the imitator.
      noise: standard deviation of the errors of learned models; outcomes are 0 or 1.
      group: attempts per task.
      batches: R, batches of each size.
      curve: N, episodes per batch, for the gradient's noise against the number of episodes; all
        else is measured at the largest.
      sizes: further problem sizes, for the gradient's noise against the horizon.
      updates: of the imitator.
    """

    methods: tuple[str, ...]
    problems: tuple[str, ...] = tuple(PROBLEMS)
    seed: int = 0
    noise: float = 0.1
    group: int = 8
    batches: int = 64
    curve: tuple[int, ...] = (8, 32, 128)
    sizes: Mapping[str, tuple[int, ...]] = dataclasses.field(
        default_factory=lambda: {"key_door": (2, 6), "detour": (2, 8)}
    )
    updates: int = 400


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem, the truth about it, and the episodes that every method is given."""

    problem: Problem
    exact: Exact
    episodes: Episodes
    batch: EpisodeBatch
    graph: Callable[[], np.ndarray]


def audit(
    settings: Settings, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """All measures as plain data, in the layout that docs/audit.md describes.

    ``progress`` is told (done, total) after each method on each problem and batch size. Raises
    ``UserError`` for a method that does not exist.
    """
    with user_errors("--methods"):
        programs = {name: _program(credit.make(name)) for name in settings.methods}
    base = [PROBLEMS[name]() for name in settings.problems]
    other = [PROBLEMS[name](s) for name in settings.problems for s in settings.sizes.get(name, ())]
    steps = max(problem.horizon for problem in (*base, *other))
    words = vocabulary([*base, *other])
    imitator = functools.cache(
        lambda: imitate.train(
            [*base, *other], words, steps=steps, updates=settings.updates, seed=settings.seed
        )
    )
    found: dict[str, Any] = {
        name: {p.name: {"snr": {}, "snr_by_horizon": {}} for p in base}
        for name in (TRUTH, NOISE, *settings.methods)
    }
    about: dict[str, Any] = {}
    largest = max(settings.curve)
    done, total = 0, (len(base) * len(settings.curve) + len(other)) * len(found)
    for problem in (*base, *other):
        setting = prepare(problem, settings, steps, words, imitator)
        first = problem.name not in about
        if first:
            about[problem.name] = facts(setting)
        for n in settings.curve if first else (largest,):
            for name, values in measured(setting, settings, n, programs):
                row, snr = found[name][problem.name], values.pop("snr")
                if first:
                    row["snr"][str(n)] = snr
                if n == largest:
                    row["snr_by_horizon"][str(problem.horizon)] = snr
                if first and n == largest:
                    row.update(values)
                done += 1
                progress(done, total)
    for rows in found.values():
        for row in rows.values():
            curve = row["snr_by_horizon"]
            row["snr_by_horizon"] = {h: curve[h] for h in sorted(curve, key=int)}
    shown = {k: v for k, v in dataclasses.asdict(settings).items() if k != "methods"}
    trained = imitator() if imitator.cache_info().currsize else None
    return {
        "settings": shown | {"threshold": measure.THRESHOLD},
        "imitator": trained and {"loss": trained.loss, "floor": trained.floor},
        "problems": about,
        "methods": found,
    }


def prepare(
    problem: Problem,
    settings: Settings,
    steps: int,
    words: Mapping[str, int],
    imitator: Callable[[], imitate.Imitator],
) -> Setting:
    """Solves the problem and plays it; the step graph waits until somebody needs it."""
    groups = max(settings.curve) * settings.batches // settings.group
    rng = generator(settings.seed, problem, "episodes")
    episodes = sample(problem, groups, settings.group, rng)
    batch = to_batch(problem, episodes, steps, words)
    graph = functools.cache(lambda: imitator().step_graph(batch))
    return Setting(problem, solve(problem), episodes, batch, graph)


def facts(setting: Setting) -> dict[str, Any]:
    """What a reader should know of a problem; averages over steps are exact."""
    problem, exact = setting.problem, setting.exact
    weight = exact.reach[:, :, None] * problem.policy
    steps = float(exact.reach.sum())
    clear = np.abs(exact.advantage) > measure.THRESHOLD
    return {
        "horizon": problem.horizon,
        "states": len(problem.states),
        "actions": len(problem.actions),
        "tasks": len(problem.starts),
        "success": exact.success,
        "steps": steps,
        "clear_steps": float((weight * clear).sum()) / steps,
        "idle_steps": float((weight * (exact.advantage == 0)).sum()) / steps,
        "gradient_norm": float(np.linalg.norm(exact.gradient)),
    }


def measured(
    setting: Setting, settings: Settings, n: int, programs: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yields (name, measures) of the references and of every method, ``n`` episodes a batch."""
    problem, exact, r = setting.problem, setting.exact, settings.batches
    episodes = setting.episodes.first(n * r)
    source = Source(problem, exact, episodes, n, settings.noise, settings.seed, setting.graph)
    t, s, a = source.here
    mask, truth, cells = episodes.mask, exact.advantage[t, s, a], episodes.cells(problem)
    half = np.broadcast_to(source.batch[:, None] % 2 == 0, mask.shape)

    def measures(c: np.ndarray) -> dict[str, float | None]:
        cut = [x.reshape(r, n, -1) for x in (c, mask, s, a)]
        found = measure.gradients(cut[0], cut[1], cut[2], cut[3], problem.policy)
        return {
            **measure.step_measures(c[mask], truth[mask], cells[mask], half[mask]),
            **measure.gradient_measures(found, exact.gradient.ravel()),
        }

    yield TRUTH, measures(truth)
    yield NOISE, measures(source.rng("noise").normal(size=truth.shape))
    # A program is compiled for one shape: a smaller batch is filled up with episodes of weight 0.
    slots = np.arange(n * r).reshape(r, n)
    fill = np.repeat(slots[:, :1], max(settings.curve) - n, axis=1)
    rows = np.concatenate([slots, fill], axis=1)
    batch = pick(setting.batch, rows, n)
    steps = setting.batch.step_mask.shape[1]
    signal = functools.cache(lambda name: make(source, name, steps)[rows])
    for name, (estimator, program) in programs.items():
        given = {x: signal(x) for x in sorted(estimator.needs & set(SIGNAL_AXES))}
        found = np.asarray(program(batch, Signals(**as_fields(given))), float)
        yield name, measures(found[:, :n, : problem.horizon].reshape(n * r, -1))


def pick(batch: EpisodeBatch, rows: np.ndarray, n: int) -> EpisodeBatch:
    """Batches of the episodes ``rows`` [R, C]; each batch's episodes after ``n`` weigh nothing."""
    chosen = jax.tree.map(lambda x: x[rows], batch)
    slot = np.arange(rows.shape[1])
    owner = np.where(chosen.episode >= 0, slot[:, None].astype(np.int32), -1)
    weight = np.broadcast_to((slot < n).astype(np.float32), rows.shape)
    return dataclasses.replace(chosen, episode=owner, weight=weight)


def _program(estimator: CreditEstimator) -> tuple[CreditEstimator, Any]:
    """With its compiled credit of R batches, one after the other, [R, C, K]; each batch starts
    from a fresh state."""

    def step_credit(given: tuple[EpisodeBatch, Signals]) -> Float[Array, "C K"]:
        batch, signals = given
        found, _ = estimator.estimate(batch, signals, estimator.init())
        return credit.step_mean(batch, found.token_weight * found.token_advantage)

    return estimator, jax.jit(lambda *given: jax.lax.map(step_credit, given))
