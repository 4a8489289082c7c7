"""Every signal an estimator may ask for, from exact quantities, and where each one comes from.

Letters: V_t, Q_t, A_t exact values of the sampling policy pi; e an error N(0, noise^2).

A learned model errs by its input, not by its mood: its e is a fixed function of (t, s), or of
(t, s, a), drawn anew for every batch, as if each batch had its own critic. More episodes in a
batch do not average it away. Each model has errors of its own.

    logp, entropy       exact, of pi
    ref_logp            exact, of the uniform policy
    value               V_t(s) + e(t, s)
    mc_value            V by J = 9 rollouts: Binomial(J, V_t(s)) / J, anew for every prefix;
                        0 after the last step, where nothing more is earned
    q_value, v_value    Q_t(s, a) + e(t, s, a) and V_t(s) + e(t, s), two models of each
    promise             Q_t(s, a) + e(t, s, a)
    predicted_return    V_{t+1}(s') + e(t + 1, s'): the best prediction of R from the prefix
    predicted_progress  f(s, a), fitted by least squares so that its sum over an episode is R,
                        on 2,048 other episodes
    reward_logp         log of pi(a | s) exp((Q_t(s, a) + e(t, s, a)) / 0.05), normalised over a:
                        the policy whose log-ratio to pi is an implicit reward
    judge_score         1 where A + e > 0.05; -1 at the episode's least A + e if that is < -0.05;
                        else 0
    hindsight_logp      exact: log p(a | s, t, the state in which the episode ended)
    step_graph          attention of the trained imitator, all its layers
    token_flow          from step_graph: f_K = 1, f_k = sum_{j>k} f_j (G_AA + G_AO)[j, k],
                        mean over layers
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxcredit.episodes import SIGNAL_AXES
from launch.audit.exact import Exact
from launch.audit.problems import Problem
from launch.audit.sample import ACTIONS, Episodes, generator, sample

ROLLOUTS = 9  # J of VinePPO
IMPLICIT_BETA = 0.05  # of iStar's implicit reward
JUDGE = 0.05  # advantages below this size are nothing to a judge
FIT_EPISODES = 2048


@dataclasses.dataclass(frozen=True)
class Source:
    """What the producers below draw on: M episodes, ``n`` to a batch, H steps each.

    ``graph`` makes the step graph when it is asked for; the rest is known.
    """

    problem: Problem
    exact: Exact
    episodes: Episodes
    n: int
    noise: float
    seed: int
    graph: Callable[[], np.ndarray]

    @property
    def here(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(t, s, a) of every step, each [M, H]."""
        s, a = self.episodes.state[:, :-1], self.episodes.action
        return np.broadcast_to(np.arange(a.shape[1]), a.shape), s, a

    @property
    def batch(self) -> np.ndarray:
        """[M], which batch each episode is in."""
        return np.arange(len(self.episodes.action)) // self.n

    def rng(self, name: str) -> np.random.Generator:
        """Random numbers of one model; they depend on nothing that is asked for besides."""
        return generator(self.seed, self.problem, f"{name}, {self.n} episodes a batch")

    def error(self, name: str, *place: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """The error of model ``name`` at ``place``, indices into a table of ``sizes``."""
        batch = self.batch.reshape(-1, *[1] * (place[0].ndim - 1))
        table = self.rng(name).normal(scale=self.noise, size=(batch.max() + 1, *sizes))
        return table[(batch, *place)]

    def noisy_v(self, name: str) -> np.ndarray:
        t, s, _ = self.here
        return self.exact.v[t, s] + self.error(name, t, s, sizes=self.exact.v.shape)

    def noisy_q(self, name: str) -> np.ndarray:
        t, s, a = self.here
        return self.exact.q[t, s, a] + self.error(name, t, s, a, sizes=self.exact.q.shape)


def logp(source: Source) -> np.ndarray:
    _, s, a = source.here
    return np.log(source.problem.policy[s, a])


def ref_logp(source: Source) -> np.ndarray:
    return np.full(source.here[0].shape, -np.log(len(source.problem.actions)))


def entropy(source: Source) -> np.ndarray:
    pi = source.problem.policy
    return -(pi * np.log(pi)).sum(axis=1)[source.here[1]]


def value(source: Source) -> np.ndarray:
    return source.noisy_v("value")


def mc_value(source: Source) -> np.ndarray:
    state = source.episodes.state
    v = source.exact.v[np.broadcast_to(np.arange(state.shape[1]), state.shape), state]
    earned = source.rng("mc_value").binomial(ROLLOUTS, np.clip(v, 0.0, 1.0)) / ROLLOUTS
    over = np.arange(state.shape[1]) >= source.episodes.n_steps[:, None]
    return np.where(over, 0.0, earned)


def q_value(source: Source) -> np.ndarray:
    return np.stack([source.noisy_q(f"q_value {i}") for i in range(2)], axis=-1)


def v_value(source: Source) -> np.ndarray:
    return np.stack([source.noisy_v(f"v_value {i}") for i in range(2)], axis=-1)


def promise(source: Source) -> np.ndarray:
    return source.noisy_q("promise")


def predicted_return(source: Source) -> np.ndarray:
    t, after = source.here[0] + 1, source.episodes.state[:, 1:]
    sizes = source.exact.v.shape
    return source.exact.v[t, after] + source.error("predicted_return", t, after, sizes=sizes)


def predicted_progress(source: Source) -> np.ndarray:
    """A progress head fitted to outcomes alone, by ridge regression on visit counts."""
    problem = source.problem
    seen = sample(problem, FIT_EPISODES, 1, source.rng("predicted_progress"))
    s, a = len(problem.states), len(problem.actions)
    pair = seen.state[:, :-1] * a + seen.action
    row = np.broadcast_to(np.arange(FIT_EPISODES)[:, None], pair.shape)[seen.mask]
    visits = np.zeros((FIT_EPISODES, s * a))
    np.add.at(visits, (row, pair[seen.mask]), 1.0)
    outcome = problem.outcome[seen.last]
    fitted = np.linalg.solve(visits.T @ visits + np.eye(s * a), visits.T @ outcome)
    _, state, action = source.here
    return fitted[state * a + action]


def reward_logp(source: Source) -> np.ndarray:
    t, s, a = source.here
    sizes = source.exact.q.shape
    every = np.arange(sizes[2])
    place = np.broadcast_arrays(t[..., None], s[..., None], every)
    q = source.exact.q[t, s] + source.error("reward_logp", *place, sizes=sizes)
    score = np.log(source.problem.policy[s]) + q / IMPLICIT_BETA
    top = score.max(axis=-1, keepdims=True)
    total = top + np.log(np.exp(score - top).sum(axis=-1, keepdims=True))
    return np.take_along_axis(score - total, a[..., None], axis=-1)[..., 0]


def judge_score(source: Source) -> np.ndarray:
    t, s, a = source.here
    error = source.error("judge_score", t, s, a, sizes=source.exact.q.shape)
    seen = np.where(source.episodes.mask, source.exact.advantage[t, s, a] + error, 0.0)
    worst = np.arange(seen.shape[1]) == seen.argmin(axis=1)[:, None]
    return np.where(seen > JUDGE, 1.0, np.where(worst & (seen < -JUDGE), -1.0, 0.0))


def hindsight_logp(source: Source) -> np.ndarray:
    t, s, a = source.here
    final = np.broadcast_to(source.episodes.last[:, None], s.shape)
    out, real = np.zeros(s.shape), source.episodes.mask
    given = (x[real] for x in (t, s, a, final))
    out[real] = source.exact.posterior_logp(source.problem, *given)
    return out


def step_graph(source: Source) -> np.ndarray:
    return source.graph()[: len(source.episodes.action)]


def token_flow(source: Source) -> np.ndarray:
    """How likely a walk back along the attention, from the last step to the prompt, visits k."""
    edges = step_graph(source).sum(axis=2)
    m, layers, k, _ = edges.shape
    flow = np.zeros((m, layers, k))
    flow[np.arange(m), :, source.episodes.n_steps - 1] = 1.0
    for j in range(k - 1, 0, -1):
        flow += flow[:, :, j : j + 1] * edges[:, :, j]
    return flow.mean(axis=1)


PRODUCERS: dict[str, Callable[[Source], np.ndarray]] = {
    made.__name__: made
    for made in (
        logp,
        ref_logp,
        value,
        entropy,
        step_graph,
        hindsight_logp,
        reward_logp,
        token_flow,
        mc_value,
        q_value,
        v_value,
        predicted_return,
        predicted_progress,
        promise,
        judge_score,
    )
}


def make(source: Source, name: str, steps: int) -> np.ndarray:
    """[M, ...] of one signal, padded to K = ``steps``, or laid onto the action tokens."""
    found = PRODUCERS[name](source).astype(np.float32)
    axes = SIGNAL_AXES[name].split()[1:]
    sizes = {"T": steps, "K": steps, "K+1": steps + 1}
    pad = [(0, sizes.get(x, size) - size) for x, size in zip(axes, found.shape[1:], strict=True)]
    found = np.pad(found, [(0, 0), *pad])
    if "T" not in axes:
        return found
    row = np.zeros((len(found), 2 * steps + 2), np.float32)
    row[:, ACTIONS] = found
    return row
