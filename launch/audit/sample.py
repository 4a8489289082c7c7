"""Episodes of a problem under its policy, drawn together and packed as the library takes them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxcredit.episodes import EpisodeBatch, Kind, Status, as_fields
from launch.audit.problems import Problem


@dataclasses.dataclass(frozen=True)
class Episodes:
    """M episodes of at most H steps, groups of equal start one after the other.

    Attributes:
      state: [M, H + 1], before each step and after the last; it stays as it is after the end.
      action: [M, H], 0 after the end.
      n_steps: [M].
      group: [M], one id per group of attempts at one task.
    """

    state: np.ndarray
    action: np.ndarray
    n_steps: np.ndarray
    group: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """[M, H], True where a step was taken."""
        return np.arange(self.action.shape[1]) < self.n_steps[:, None]

    @property
    def last(self) -> np.ndarray:
        """[M], the state in which each episode ended."""
        return self.state[:, -1]

    def first(self, m: int) -> Episodes:
        """The first ``m`` episodes."""
        return Episodes(self.state[:m], self.action[:m], self.n_steps[:m], self.group[:m])

    def cells(self, problem: Problem) -> np.ndarray:
        """[M, H] ids of (start, step, state, action): what a step's true advantage and the
        distribution of its credit depend on."""
        h = problem.horizon
        s, a = len(problem.states), len(problem.actions)
        where = (self.state[:, :1] * h + np.arange(h)) * s + self.state[:, :-1]
        return where * a + self.action


def generator(seed: int, problem: Problem, purpose: str) -> np.random.Generator:
    """Random numbers that depend on these three alone, not on what else is audited."""
    words = f"{problem.name} {problem.horizon} {purpose}"
    return np.random.default_rng((seed, zlib.crc32(words.encode())))


def sample(problem: Problem, groups: int, size: int, rng: np.random.Generator) -> Episodes:
    """``groups`` tasks, drawn uniformly among the starts, with ``size`` attempts each."""
    m, h = groups * size, problem.horizon
    choose = problem.policy.cumsum(axis=1)
    move = problem.transition.cumsum(axis=2)
    state, action = np.zeros((m, h + 1), int), np.zeros((m, h), int)
    state[:, 0] = np.repeat(rng.choice(problem.starts, groups), size)
    for t in range(h):
        now, going = state[:, t], ~problem.terminal[state[:, t]]
        a = _draw(choose[now], rng)
        action[:, t] = np.where(going, a, 0)
        state[:, t + 1] = np.where(going, _draw(move[now, a], rng), now)
    n_steps = (~problem.terminal[state[:, :-1]]).sum(axis=1)
    return Episodes(state, action, n_steps, np.repeat(np.arange(groups), size))


def _draw(cumulated: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One index per row of [M, n] cumulated probabilities."""
    return (rng.random((len(cumulated), 1)) * cumulated[:, -1:] >= cumulated).sum(axis=1)


def vocabulary(problems: list[Problem]) -> dict[str, int]:
    """An id from 1 for every prompt, observation and action; 0 is padding."""
    words: dict[str, int] = {}
    for problem in problems:
        for word in (f"task {problem.name}", *problem.observations, *problem.actions):
            words.setdefault(word, len(words) + 1)
    return words


def token_row(prompt: np.ndarray, action: np.ndarray, observation: np.ndarray) -> np.ndarray:
    """[M, 2 K + 2]: two prompt tokens, then action and observation of each step in turn."""
    steps = np.stack([action, observation], axis=2).reshape(len(action), -1)
    return np.concatenate([prompt, steps], axis=1)


ACTIONS = slice(2, None, 2)  # the action tokens of such a row


def to_batch(
    problem: Problem, episodes: Episodes, steps: int, words: Mapping[str, int]
) -> EpisodeBatch:
    """A conversation per episode with one token per action and per observation.

    The prompt is the task's name and the first observation; nobody acts on the observation after
    the last step, so it is not there. ``steps`` is K, at least H. Step rewards are zero: these
    problems pay at the end alone.
    """
    m, h = episodes.action.shape
    pad = ((0, 0), (0, steps - h))
    mask = np.pad(episodes.mask, pad)
    state = np.pad(episodes.state, pad, mode="edge")
    action = np.pad(episodes.action, pad)
    seen = np.array([words[o] for o in problem.observations])[state]
    done = np.array([words[a] for a in problem.actions])[action]
    name = np.full((m, 1), words[f"task {problem.name}"])
    column = np.broadcast_to(np.arange(steps), mask.shape)
    followed = np.pad(mask[:, 1:], ((0, 0), (0, 1)))

    def tokens(prompt: Any, act: Any, see: Any, fill: int) -> np.ndarray:
        return token_row(
            np.broadcast_to(prompt, (m, 2)),
            np.where(mask, act, fill),
            np.where(followed, see, fill),
        )

    real = tokens(1, 1, 1, 0)
    outcome = problem.outcome[episodes.last]
    ended = np.where(outcome > 0, Status.SUCCESS, Status.FAILURE)
    status = np.where(problem.terminal[episodes.last], ended, Status.STEP_LIMIT)
    fields = {
        "tokens": tokens(np.concatenate([name, seen[:, :1]], 1), done, seen[:, 1:], 0),
        "kind": tokens(Kind.CONTEXT, Kind.ACTION, Kind.OBSERVATION, Kind.PAD),
        "step": tokens(0, column, column, -1),
        "episode": np.where(real > 0, np.arange(m)[:, None], -1),
        "position": np.where(real > 0, np.arange(real.shape[1]), 0),
        "segment": real,
        "behaviour_logp": tokens(0, np.log(problem.policy[state[:, :-1], action]), 0, 0),
        "trainable": tokens(0, 1, 0, 0) > 0,
        "step_mask": mask,
        "step_reward": np.zeros(mask.shape),
        "progress": problem.progress[state],
        "state": np.where(mask, state[:, :-1], -1),
        "action": np.where(mask, action, -1),
        "action_valid": problem.valid[state[:, :-1], action] & mask,
        "task": episodes.group,
        "outcome": outcome,
        "success": outcome > 0,
        "status": status,
        "n_steps": episodes.n_steps,
        "weight": np.ones(m),
    }
    return EpisodeBatch(**as_fields({name: _narrow(x) for name, x in fields.items()}))


def _narrow(x: np.ndarray) -> np.ndarray:
    kinds = {"i": np.int32, "f": np.float32}
    return x.astype(kinds.get(x.dtype.kind, x.dtype))
