"""From episodes to an update: the signals that credit needs, then the optimiser's steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from envs.protocol import Task
from jaxcredit import batching, credit, heads, losses
from jaxcredit.credit import CreditEstimator
from jaxcredit.episodes import Credit, Episode, EpisodeBatch, Signals, as_fields
from jaxcredit.update import MicroBatch, TrainState, Update
from launch.assemble import Parts
from launch.config import ROW_MULTIPLE, TrainConfig
from launch.judge import Judge, judge_scores
from models.policy import Policy
from models.score import ScoreConfig, score
from models.sharding import place_rows


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that is fixed during a run."""

    config: TrainConfig
    parts: Parts
    estimator: CreditEstimator
    scoring: ScoreConfig
    optimizer: optax.GradientTransformation
    update: Update
    tasks: tuple[Task, ...] = ()
    judge: Judge | None = None
    shardings: TrainState | None = None  # of the state, on a mesh


def signals_for(
    setup: Setup, state: TrainState, episodes: Sequence[Episode], batch: EpisodeBatch
) -> Signals:
    """The signals that the estimator and the loss need, and no others.

    ``logp`` is always the trainer's; it is absent where neither asks for it.
    """
    parts, needs = setup.parts, setup.estimator.needs
    signals = Signals()
    policy, step_graph, head = first_pass(setup)
    if head or step_graph:
        signals = score(
            policy,
            state.trainable,
            parts.frozen,
            batch,
            setup.scoring,
            step_graph=step_graph,
            head=head,
        )
    if wants_reference(setup):
        signals = dataclasses.replace(signals, ref_logp=_reference_logp(setup, batch))
    if "hindsight_logp" in needs:
        other = batching.batch_episodes(
            episodes,
            max_steps=setup.config.env.max_steps,
            length_multiple=ROW_MULTIPLE,
            hindsight=True,
        )
        policy = plain(policy)
        # A hindsight prompt may be longer than the one it replaces.
        scoring = setup.scoring
        if other.tokens.shape[1] > scoring.buckets[-1]:
            wider = (*scoring.buckets, other.tokens.shape[1])
            scoring = dataclasses.replace(scoring, buckets=wider)
        found = score(policy, state.trainable, parts.frozen, other, scoring)
        mean = credit.step_mean(other, jnp.asarray(found.logp))
        signals = dataclasses.replace(signals, hindsight_logp=mean)
    if "judge_score" in needs:
        assert setup.judge is not None
        scores = judge_scores(setup.judge, episodes, max_steps=setup.config.env.max_steps)
        signals = dataclasses.replace(signals, **as_fields({"judge_score": scores}))
    return signals


def first_pass(setup: Setup) -> tuple[Policy, bool, bool]:
    """The first scoring pass: its policy; whether it takes step graphs, and log-probabilities."""
    needs = setup.estimator.needs
    said = {"logp", "value", "entropy", "reward_logp", *heads.STEP_HEADS}
    head = setup.config.loss.old_logp == "trainer" or bool(needs & said)
    policy = dataclasses.replace(setup.parts.policy, entropy="entropy" in needs)
    return policy, "step_graph" in needs, head


def wants_reference(setup: Setup) -> bool:
    """Whether log-probabilities of the initial policy are needed."""
    return bool(setup.config.loss.kl) or "ref_logp" in setup.estimator.needs


def reference(setup: Setup) -> tuple[Policy, Any]:
    """The initial policy and its weights; with LoRA that is the base without adapters."""
    parts = setup.parts
    policy = dataclasses.replace(plain(parts.policy), adapter_scale=None)
    weights = parts.trainable if parts.policy.adapter_scale is None else parts.frozen
    return policy, {"params": weights["params"]}


def _reference_logp(setup: Setup, batch: EpisodeBatch) -> Array | None:
    policy, weights = reference(setup)
    return score(policy, weights, None, batch, setup.scoring).logp


def plain(policy: Policy) -> Policy:
    """The policy without what reads its states or stands beside it."""
    return dataclasses.replace(
        policy, value_head=False, step_heads=(), reward_model=False, entropy=False
    )


def minibatches(setup: Setup, iteration: int) -> Iterator[np.ndarray]:
    """Episode ids of each mini-batch; the order depends on the seed and the iteration alone."""
    config = setup.config
    episodes = config.rollout.tasks_per_iteration * config.rollout.group_size
    size = config.optimizer.minibatch_episodes or episodes
    for epoch in range(config.optimizer.epochs):
        order = np.random.default_rng((config.seed, iteration, epoch)).permutation(episodes)
        for start in range(0, episodes, size):
            yield order[start : start + size]


def update_policy(
    setup: Setup, state: TrainState, batch: EpisodeBatch, signals: Signals, found: Credit
) -> tuple[TrainState, dict[str, float]]:
    """One optimiser step per mini-batch; returns the new state and the mean metrics."""
    sampler = setup.config.loss.old_logp == "sampler"
    given = {
        "advantage": found.token_advantage,
        "old_logp": batch.behaviour_logp if sampler else signals.logp,
        "ref_logp": signals.ref_logp,
        "target": found.token_target,
        "old_value": signals.value,
        "reward_slope": found.reward_slope,
    }
    arrays = {name: np.asarray(x) for name, x in given.items() if x is not None}
    targets = found.step_target or {}
    read = {name: heads.read_tokens(batch, name) for name in targets}
    head_target = {
        name: heads.to_tokens(batch, read[name], np.asarray(x)) for name, x in targets.items()
    }
    lengths = batching.row_lengths(batch)
    owner = np.asarray(batch.episode).max(axis=1)
    token_weight = np.asarray(found.token_weight)
    mesh = setup.parts.policy.mesh
    rows: list[dict[str, Any]] = []
    for chosen in minibatches(setup, int(state.iteration)):
        reduce = setup.config.loss.reduce
        weight = losses.loss_weights(batch, token_weight, chosen, reduce)
        if not weight.any():
            continue
        head_weight = {
            name: heads.step_weights(batch, read[name], chosen, reduce) for name in targets
        }
        grads, sums = setup.update.zeros(state), []
        mine = np.flatnonzero(np.isin(owner, chosen))
        for part in batching.length_slices(
            lengths,
            tokens=setup.scoring.tokens,
            buckets=setup.scoring.buckets,
            rows=mine,
            multiple=1 if mesh is None else mesh.shape["data"],
        ):
            fields = batching.take_rows(batch, part)
            micro = MicroBatch(
                **as_fields(
                    {
                        "tokens": fields["tokens"],
                        "position": fields["position"],
                        "segment": fields["segment"],
                        "weight": part.take(weight),
                        **{name: part.take(array) for name, array in arrays.items()},
                    }
                ),
                head_target=as_fields({k: part.take(x) for k, x in head_target.items()}),
                head_weight=as_fields({k: part.take(x) for k, x in head_weight.items()}),
            )
            micro = place_rows(micro, mesh)
            grads, sum_ = setup.update.accumulate(state, setup.parts.frozen, grads, micro)
            sums.append(sum_)
        state, norm = setup.update.apply(state, grads)
        largest = [float(s.pop("max_abs_log_ratio")) for s in sums]
        row = jax.tree.map(lambda *x: float(sum(x)), *sums)
        rows.append(
            {**row, "max_abs_log_ratio": max(largest), "grad_norm": float(norm["grad_norm"])}
        )
    if not rows:
        return state, {}
    mean = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    # On-policy, the first update must see a ratio of one.
    mean["first_max_abs_log_ratio"] = rows[0]["max_abs_log_ratio"]
    return state, mean
