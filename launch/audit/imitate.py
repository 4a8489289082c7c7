"""A tiny transformer that imitates the sampling policies, so that attention is real attention.

It reads what an agent reads (the task's name, observations and its own actions, one token each)
and learns to predict the sampled actions. Observations can hide what was done before (whether the
key was taken), so predicting well needs attention to earlier steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxcredit.batching import Slice, take_rows
from jaxcredit.episodes import EpisodeBatch
from launch.audit.problems import Problem
from launch.audit.sample import generator, sample, to_batch
from launch.schedules import learning_rate_schedule
from launch.sft import make_step
from models.config import QwenConfig
from models.params import init_params
from models.policy import Policy
from models.score import ScoreConfig, score

LAYERS = 2
ROWS = 64  # per update


@dataclasses.dataclass(frozen=True)
class Imitator:
    """The trained policy, its last loss per action token, and the least loss there is.

    ``loss`` and ``floor`` are means over the last updates' rows: -log p of the sampled actions
    under the imitator, and under the policies that sampled them.
    """

    policy: Policy
    trainable: Any
    loss: float
    floor: float

    def step_graph(self, batch: EpisodeBatch) -> np.ndarray:
        """[M, L, 2, K, K] of these episodes, one row each."""
        width = batch.tokens.shape[1]
        config = ScoreConfig((width,), tokens=256 * width, layers=tuple(range(LAYERS)))
        signals = score(
            self.policy, self.trainable, None, batch, config, step_graph=True, head=False
        )
        return np.asarray(signals.step_graph)


def train(
    problems: list[Problem], words: Mapping[str, int], *, steps: int, updates: int, seed: int
) -> Imitator:
    """Trains on fresh episodes of all problems in turn; deterministic for a seed."""
    config = QwenConfig(
        vocab_size=len(words) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=10_000.0,
        max_position_embeddings=2 * steps + 2,
    )
    policy = Policy(config)
    trainable = {"params": init_params(config, jax.random.key(seed))}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(learning_rate_schedule(5e-3, "cosine", min(20, updates // 2), updates)),
    )
    opt_state = optimizer.init(trainable)
    step = make_step(policy, None, optimizer, context_weight=0.0)
    per_problem = -(-updates // len(problems)) * ROWS
    data = [
        to_batch(p, sample(p, per_problem, 1, generator(seed, p, "imitation")), steps, words)
        for p in problems
    ]
    losses, floors = [], []
    for number in range(updates):
        batch, start = data[number % len(data)], number // len(data) * ROWS
        part = Slice(np.arange(start, start + ROWS), ROWS, batch.tokens.shape[1])
        rows = take_rows(batch, part)
        trainable, opt_state, loss = step(trainable, opt_state, rows)
        losses.append(loss)
        floors.append(-rows["behaviour_logp"][rows["trainable"]].mean())
    tail = slice(-max(1, updates // 5), None)
    last = float(np.mean([float(x) for x in losses[tail]]))
    return Imitator(policy, trainable, last, float(np.mean(floors[tail])))
