"""The audit: its truth against enumeration, its measures on estimators that are known."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcredit import batching, credit
from jaxcredit.credit import METHODS, make
from jaxcredit.episodes import SIGNAL_AXES, Episode, Signals, Status, Step, as_fields
from launch.__main__ import main
from launch.audit import imitate, measure, report, run, signals
from launch.audit.exact import solve
from launch.audit.problems import PROBLEMS, Problem, build
from launch.audit.run import NOISE, TRUTH, Settings, audit
from launch.audit.sample import sample, to_batch, vocabulary


def slippery() -> Problem:
    """Three cells in a row; a move slips in three of ten cases; four steps to reach the last."""
    return build(
        "slippery",
        horizon=4,
        actions=("on", "back"),
        starts=[0, 1],
        step=lambda s, a: [(0.7, s + 1), (0.3, s)] if a == "on" else [(1.0, max(s - 1, 0))],
        done=lambda s: s == 2,
        success=lambda s: s == 2,
        progress=lambda s: s / 2,
        weights=lambda s: {"on": 1.0 + s},
        observe=str,
    )


def paths(problem: Problem, start: int, t: int = 0) -> list[tuple[float, list, int]]:
    """Every way to go on from ``start`` at step t: (probability, [(t, s, a), ...], final state)."""
    if t == problem.horizon or problem.terminal[start]:
        return [(1.0, [], start)]
    found = []
    for a, after in itertools.product(range(len(problem.actions)), range(len(problem.states))):
        p = problem.policy[start, a] * problem.transition[start, a, after]
        if p > 0:
            for rest, steps, final in paths(problem, after, t + 1):
                found.append((p * rest, [(t, start, a), *steps], final))
    return found


@pytest.mark.parametrize(
    "problem",
    [slippery(), PROBLEMS["late_mistake"](2), PROBLEMS["detour"](1)],
    ids=lambda p: p.name,
)
def test_the_truth_agrees_with_enumeration(problem: Problem) -> None:
    exact = solve(problem)
    share = 1 / len(problem.starts)
    every = [(share * p, *rest) for s in problem.starts for p, *rest in paths(problem, int(s))]
    assert sum(p for p, *_ in every) == pytest.approx(1)
    mean = sum(p * problem.outcome[final] for p, _, final in every)
    assert exact.success == pytest.approx(mean)

    reach = np.zeros_like(exact.reach)
    ends: dict[tuple[int, int, int], dict[int, float]] = {}  # (t, s, a) -> final state -> mass
    for p, steps, final in every:
        for t, s, a in steps:
            reach[t, s] += p
            masses = ends.setdefault((t, s, a), {})
            masses[final] = masses.get(final, 0.0) + p
    np.testing.assert_allclose(exact.reach, reach, atol=1e-12)

    for (t, s, a), masses in ends.items():
        q = sum(p * problem.outcome[f] for f, p in masses.items()) / sum(masses.values())
        here = [ends[t, s, b] for b in range(len(problem.actions))]
        v = sum(p * problem.outcome[f] for m in here for f, p in m.items()) / reach[t, s]
        assert exact.q[t, s, a] == pytest.approx(q)
        assert exact.v[t, s] == pytest.approx(v)
        assert exact.advantage[t, s, a] == pytest.approx(q - v, abs=1e-12)
        for final, mass in masses.items():
            posterior = mass / sum(m.get(final, 0.0) for m in here)
            place = (np.array(x) for x in (t, s, a, final))
            assert np.exp(exact.posterior_logp(problem, *place)) == pytest.approx(posterior)


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_gradient_agrees_with_finite_differences(name: str) -> None:
    problem = PROBLEMS[name]()
    exact, logits, step = solve(problem), np.log(problem.policy), 1e-5

    def success(moved: np.ndarray) -> float:
        pi = np.exp(moved) / np.exp(moved).sum(axis=1, keepdims=True)
        return solve(dataclasses.replace(problem, policy=pi)).success

    rng = np.random.default_rng(0)
    for flat in rng.choice(logits.size, 12, replace=False):
        nudge = np.zeros(logits.size)
        nudge[flat] = step
        nudge = nudge.reshape(logits.shape)
        slope = (success(logits + nudge) - success(logits - nudge)) / (2 * step)
        assert exact.gradient.flat[flat] == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_problems_are_proper_and_hold_steps_that_matter(name: str) -> None:
    for size in (3, 5):
        problem = PROBLEMS[name](size)
        np.testing.assert_allclose(problem.transition.sum(axis=2), 1)
        np.testing.assert_allclose(problem.policy.sum(axis=1), 1)
        assert (problem.progress[problem.outcome == 1] == 1).all()
        assert (problem.terminal[problem.outcome == 1]).all()
        exact = solve(problem)
        assert 0.3 < exact.success < 0.8
        assert np.abs(exact.advantage).max() > 0.1


def test_sampled_episodes_follow_the_distribution() -> None:
    problem = PROBLEMS["late_mistake"]()
    exact = solve(problem)
    episodes = sample(problem, 4000, 2, np.random.default_rng(0))
    assert problem.outcome[episodes.last].mean() == pytest.approx(exact.success, abs=0.02)
    for t in range(problem.horizon):
        going = episodes.mask[:, t]
        counts = np.bincount(episodes.state[going, t], minlength=len(problem.states))
        np.testing.assert_allclose(counts / 8000, exact.reach[t], atol=0.02)
    starts = episodes.state[:, 0].reshape(4000, 2)
    assert (starts[:, 0] == starts[:, 1]).all(), "a group is attempts at one task"


def test_batches_are_those_of_ragged_episodes() -> None:
    """The packing of the library itself, one episode at a time, gives the same arrays."""
    problem, steps = PROBLEMS["late_mistake"](3), 11
    words = vocabulary([problem])
    drawn = sample(problem, 4, 3, np.random.default_rng(1))
    ragged = []
    for i in range(12):
        rows = []
        for k in range(int(drawn.n_steps[i])):
            s, a = drawn.state[i, k], drawn.action[i, k]
            seen = words[problem.observations[s]]
            rows.append(
                Step(
                    context_ids=np.array([words["task late_mistake"], seen][k > 0 :]),
                    response_ids=np.array([words[problem.actions[a]]]),
                    behaviour_logp=np.log(problem.policy[s, a])[None],
                    sampled=np.array([True]),
                    stop="stop",
                    observation_span=(0, 1) if k else (0, 0),
                    action=problem.actions[a],
                    valid=bool(problem.valid[s, a]),
                    progress=problem.progress[drawn.state[i, k + 1]],
                    state=str(s),
                )
            )
        won = bool(problem.outcome[drawn.last[i]])
        status = Status.SUCCESS if won else Status.STEP_LIMIT
        first = problem.progress[drawn.state[i, 0]]
        ragged.append(
            Episode("", int(drawn.group[i]), i, tuple(rows), float(won), won, status, first)
        )
    want = batching.batch_episodes(ragged, max_steps=steps, length_multiple=2 * steps + 2)
    have = to_batch(problem, drawn, steps, words)
    for field in dataclasses.fields(want):
        mine, theirs = (np.asarray(getattr(x, field.name)) for x in (have, want))
        if field.name in ("state", "action"):  # ids are arbitrary: equal where theirs are equal
            group = np.repeat(drawn.group, steps).reshape(-1, steps)[want.step_mask]
            pairs = set(zip(group, mine[want.step_mask], theirs[want.step_mask], strict=True))
            assert len(pairs) == len({p[:2] for p in pairs}) == len({p[::2] for p in pairs})
            continue
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, err_msg=field.name)
        assert mine.dtype == theirs.dtype, field.name


def a_source(noise: float = 0.0, name: str = "detour", n: int = 8) -> signals.Source:
    problem = PROBLEMS[name]()
    drawn = sample(problem, 8, 8, np.random.default_rng(2))
    rng = np.random.default_rng(3)
    k = problem.horizon + 2
    graph = np.tril(rng.random((64, 2, 2, k, k)), -1) / (2 * k)
    return signals.Source(problem, solve(problem), drawn, n, noise, 0, lambda: graph)


def test_every_signal_has_a_source_of_the_right_shape() -> None:
    assert sorted(signals.PRODUCERS) == sorted(SIGNAL_AXES)
    source, k = a_source(0.1), PROBLEMS["detour"]().horizon + 2
    sizes = {"N": 64, "B": 64, "T": 2 * k + 2, "K": k, "K+1": k + 1, "L": 2, "2": 2}
    for name, axes in SIGNAL_AXES.items():
        made = signals.make(source, name, k)
        assert list(made.shape) == [sizes[letter] for letter in axes.split()], name
        assert np.isfinite(made).all(), name
        np.testing.assert_array_equal(made, signals.make(source, name, k), err_msg=name)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_gets_what_it_needs(name: str) -> None:
    source, method = a_source(0.1), make(name)
    k = source.problem.horizon + 2
    batch = to_batch(source.problem, source.episodes, k, vocabulary([source.problem]))
    needs = sorted(method.needs & set(SIGNAL_AXES))
    given = Signals(**as_fields({x: signals.make(source, x, k) for x in needs}))
    found, _ = jax.eval_shape(method.estimate, batch, given, method.init())
    assert found.step_advantage.shape == (64, k)


def test_signals_without_noise_are_exact() -> None:
    source = a_source()
    t, s, a = source.here
    exact, mask = source.exact, source.episodes.mask
    for name, truth in {
        "value": exact.v[t, s],
        "q_value": exact.q[t, s, a][..., None],
        "v_value": exact.v[t, s][..., None],
        "promise": exact.q[t, s, a],
        "predicted_return": exact.v[t + 1, source.episodes.state[:, 1:]],
    }.items():
        made = signals.PRODUCERS[name](source)
        np.testing.assert_array_equal(made, np.broadcast_to(truth, made.shape), err_msg=name)
    gain = signals.IMPLICIT_BETA * (signals.reward_logp(source) - signals.logp(source))
    pi, q = source.problem.policy[s], exact.q[t, s]
    soft = signals.IMPLICIT_BETA * np.log((pi * np.exp(q / signals.IMPLICIT_BETA)).sum(axis=-1))
    np.testing.assert_allclose(gain[mask], (exact.q[t, s, a] - soft)[mask], atol=1e-9)
    judged = signals.judge_score(source)
    assert ((judged == -1).sum(axis=1) <= 1).all()
    assert (np.abs(exact.advantage[t, s, a])[mask & (judged != 0)] > signals.JUDGE).all()
    assert (judged[~mask] == 0).all()


def test_errors_belong_to_the_state_and_to_the_batch() -> None:
    source = a_source(0.1)
    t, s, _ = source.here
    error = signals.value(source) - source.exact.v[t, s]
    seen: dict[tuple, float] = {}
    for i, k in np.ndindex(error.shape):
        key = (i // 8, k, s[i, k])
        assert seen.setdefault(key, error[i, k]) == pytest.approx(error[i, k])
    assert np.std(list(seen.values())) == pytest.approx(0.1, rel=0.2)


def test_rollouts_hindsight_progress_and_flow() -> None:
    source = a_source(name="key_door")
    episodes, problem = source.episodes, source.problem
    ends = np.arange(64), episodes.n_steps
    rollouts = signals.mc_value(source)
    assert not rollouts[ends].any(), "the outcome is earned by the last step, not after it"
    assert np.unique(rollouts * signals.ROLLOUTS).tolist() == list(range(10))
    # Knowing that the door was opened in the end makes the opening likelier than it was.
    hindsight = signals.hindsight_logp(source)
    won = np.flatnonzero(problem.outcome[episodes.last])
    opening = won, episodes.n_steps[won] - 1
    assert (hindsight[opening] > signals.logp(source)[opening] + 0.01).all()
    assert (hindsight <= 1e-12).all() and (hindsight[~episodes.mask] == 0).all()
    fitted = np.where(episodes.mask, signals.predicted_progress(source), 0.0).sum(axis=1)
    assert np.corrcoef(fitted, problem.outcome[episodes.last])[0, 1] > 0.5
    flow, real = signals.token_flow(source), np.arange(source.graph().shape[-1])
    assert (flow[np.arange(64), episodes.n_steps - 1] == 1).all()
    assert (flow[real >= episodes.n_steps[:, None]] == 0).all()
    graph = source.graph().sum(axis=2)[0]
    last = int(episodes.n_steps[0]) - 1
    by_hand = [graph[:, last, last - 1], graph[:, last, last - 2]]
    by_hand[1] = by_hand[1] + by_hand[0] * graph[:, last - 1, last - 2]
    np.testing.assert_allclose(flow[0, [last - 1, last - 2]], np.mean(by_hand, axis=1))


def test_gradients_agree_with_automatic_differentiation() -> None:
    rng = np.random.default_rng(4)
    state, action = rng.integers(0, 3, (2, 5, 4)), rng.integers(0, 2, (2, 5, 4))
    mask, c = rng.random((2, 5, 4)) < 0.8, rng.normal(size=(2, 5, 4))
    logits = jnp.asarray(rng.normal(size=(3, 2)))

    def objective(theta: jax.Array, b: int) -> jax.Array:
        logp = jax.nn.log_softmax(theta)[state[b], action[b]]
        return jnp.where(mask[b], c[b] * logp, 0.0).sum() / 5

    found = measure.gradients(c, mask, state, action, np.asarray(jax.nn.softmax(logits)))
    for b in range(2):
        np.testing.assert_allclose(
            found[b], jax.grad(objective)(logits, b).ravel(), rtol=1e-4, atol=1e-6
        )


def test_the_ratio_of_signal_to_noise_of_a_known_distribution() -> None:
    rng = np.random.default_rng(5)
    mean = np.array([3.0, 0.0, 4.0])
    found = measure.gradient_measures(mean + rng.normal(size=(4000, 3)), mean)
    assert found["snr"] == pytest.approx(25 / 3, rel=0.05)
    assert found["cosine_mean"] == pytest.approx(1, abs=1e-3)
    # With few batches the noise of the mean alone would look like a signal of 1 / R.
    few = [measure.gradient_measures(rng.normal(size=(4, 50)), np.ones(50)) for _ in range(100)]
    assert np.mean([x["snr"] for x in few]) < 0.05
    nothing = measure.gradient_measures(np.zeros((4, 3)), mean)
    assert nothing == {"cosine": 0.0, "cosine_mean": 0.0, "snr": None}


SMALL = Settings(
    methods=("grpo",),
    problems=("detour",),
    group=4,
    batches=16,
    curve=(8, 32),
    sizes={"detour": (2,)},
    updates=4,
)


def true_advantage() -> credit.CreditEstimator:
    """Q - V of the first critic: without noise, the truth."""

    def apply(batch, given, flow):
        found = given.q_value[..., 0] - given.v_value[..., 0]
        return dataclasses.replace(flow, step_advantage=found)

    needs = ["q_value", "v_value"]
    made = credit.stage("q_minus_v", apply, needs=needs, writes=["step_advantage"])
    return credit.estimator("truth", made, credit.broadcast())


def test_the_truth_is_recognised_through_the_whole_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "mine", true_advantage)
    settings = dataclasses.replace(SMALL, methods=("mine", "grpo"), noise=0.0)
    found = audit(settings)["methods"]
    for name in (TRUTH, "mine"):
        row = found[name]["detour"]
        assert row["bias2"] == pytest.approx(0, abs=1e-6)
        assert row["variance"] == pytest.approx(0, abs=1e-6)
        assert row["rank"] == pytest.approx(1)
        assert row["sign"] == 1
        assert row["cosine_mean"] > 0.99
        assert row["snr"]["32"] > 2 * row["snr"]["8"] > 0
    assert found["mine"]["detour"]["snr"] == pytest.approx(found[TRUTH]["detour"]["snr"], rel=1e-4)
    noise = found[NOISE]["detour"]
    assert noise["bias2"] == pytest.approx(1, abs=0.2)
    assert noise["variance"] == pytest.approx(1, abs=0.2)
    assert abs(noise["rank"]) < 0.1
    assert noise["sign"] == pytest.approx(0.5, abs=0.1)
    assert noise["snr"]["32"] < 0.2
    grpo = found["grpo"]["detour"]
    assert 0 < grpo["rank"] < 0.9
    assert noise["snr"]["32"] < grpo["snr"]["32"] < found[TRUTH]["detour"]["snr"]["32"]
    assert list(grpo["snr_by_horizon"]) == ["6", "10"]


def test_a_noisy_critic_costs_what_noise_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors belong to (t, s, a), so they are part of the variance, not of the bias."""
    monkeypatch.setitem(METHODS, "mine", true_advantage)
    settings = dataclasses.replace(SMALL, methods=("mine",), noise=0.1, batches=128, curve=(8,))
    row = audit(settings)["methods"]["mine"]["detour"]
    exact = solve(PROBLEMS["detour"]())
    power = np.einsum("ts,sa,tsa->", exact.reach, PROBLEMS["detour"]().policy, exact.advantage**2)
    power /= exact.reach.sum()
    # z has unit spread, so what is left of A in it is rho = sqrt(power / (power + 2 noise^2)).
    rho = np.sqrt(power / (power + 2 * 0.1**2))
    assert row["bias2"] == pytest.approx((1 - rho) ** 2, abs=0.03)
    assert row["variance"] == pytest.approx(1 - rho**2, abs=0.06)


def test_credit_that_says_nothing_is_no_number() -> None:
    rng = np.random.default_rng(6)
    advantage, cells = rng.normal(size=200), np.arange(200) // 4
    found = measure.step_measures(np.zeros(200), advantage, cells, np.arange(200) % 2 == 0)
    assert found["rank"] is None and found["sign"] == 0.5
    assert found["bias2"] + found["variance"] == pytest.approx(1, abs=1e-4)
    against = measure.step_measures(-advantage, advantage, cells, np.arange(200) % 2 == 0)
    assert against["rank"] == pytest.approx(-1) and against["sign"] == 0
    assert against["bias2"] + against["variance"] == pytest.approx(4, abs=1e-3)


def test_a_batch_is_what_it_is_however_many_others_there_are() -> None:
    """Episodes of weight 0 that fill a batch up change nothing."""
    source = a_source(0.1)
    k = source.problem.horizon
    batch = to_batch(source.problem, source.episodes, k, vocabulary([source.problem]))
    rows = np.arange(64).reshape(8, 8)
    filled = np.concatenate([rows, np.repeat(rows[:, :1], 5, axis=1)], axis=1)
    value = signals.make(source, "value", k)
    _, program = run._program(make("ppo"))
    given = [Signals(**as_fields({"value": value[r]})) for r in (rows, filled)]
    few = program(run.pick(batch, rows, 8), given[0])
    many = program(run.pick(batch, filled, 8), given[1])
    np.testing.assert_allclose(few, many[:, :8], rtol=1e-5, atol=1e-6)
    assert not np.asarray(many[:, 8:]).any()


def test_equal_settings_give_equal_results_and_another_seed_does_not() -> None:
    settings = dataclasses.replace(SMALL, methods=("attnsr", "grpo"), batches=4, curve=(8,))
    first, again = (report.rounded(audit(settings)) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    other = audit(dataclasses.replace(settings, seed=1))
    assert json.dumps(first["methods"]) != json.dumps(report.rounded(other)["methods"])
    assert first["imitator"]["loss"] > first["imitator"]["floor"] > 0
    alone = audit(dataclasses.replace(settings, methods=("grpo",)))
    assert alone["imitator"] is None, "nobody asked for attention"
    assert report.rounded(alone)["methods"]["grpo"] == first["methods"]["grpo"]


def test_the_imitator_comes_close_to_the_policy() -> None:
    problems = [PROBLEMS["detour"](1)]
    settings = {"steps": 4, "updates": 60, "seed": 0}
    found = imitate.train(problems, vocabulary(problems), **settings)
    assert found.floor < found.loss < found.floor + 0.1
    episodes = sample(problems[0], 2, 4, np.random.default_rng(0))
    graph = found.step_graph(to_batch(problems[0], episodes, 4, vocabulary(problems)))
    assert graph.shape == (8, imitate.LAYERS, 2, 4, 4)
    assert (graph.sum(axis=(2, 4)) <= 1 + 1e-5).all() and graph[:, :, :, 1, 0].min() > 0


def test_the_command_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.audit.Settings", functools.partial(small, SMALL))
    out = tmp_path / "a" / "audit"
    command = ["audit", "--methods", "grpo,gigpo", "--problems", "detour", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for name in ("method", TRUTH, "grpo", "gigpo", NOISE):
        assert f"| {name} " in printed
    assert sorted(path.name for path in out.iterdir()) == ["audit.json", "audit.md", "audit.png"]
    found = json.loads((out / "audit.json").read_text())
    assert list(found["methods"]) == [TRUTH, NOISE, "grpo", "gigpo"]
    assert found["problems"]["detour"]["success"] == pytest.approx(0.6485, abs=1e-4)
    assert printed.splitlines()[0] in (out / "audit.md").read_text()
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err


def small(base: Settings, **given: object) -> Settings:
    return dataclasses.replace(base, **given)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "gropo"], ["--methods", "gropo", "did you mean 'grpo'"]),
        (["--problems", "key_dor"], ["--problems", "key_dor", "did you mean 'key_door'"]),
        (["--methods", ","], ["--methods", "no name"]),
        (["--noise", "-1"], ["--noise"]),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err
