"""FlowTracer: the flow through a graph, the signal made of it, and the weights made of that."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_cases import (
    Shape,
    low_effort_compilation,  # noqa: F401
    nested,
    pack,
    random_trial,
    random_trials,
)
from oracles import oracles_paper
from test_credit_methods import check
from test_credit_paper import credit_of

from jaxcredit.credit import (
    assign,
    estimator,
    flow_weight,
    flowtracer,
    flowtracer_step,
    grpo,
    ratio_mask,
    throughput,
    token_flow,
)
from jaxcredit.credit.tracing import reach, reweight
from jaxcredit.episodes import Kind

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
compiled = jax.jit(throughput)


def random_graphs(seed: int, n: int = 8, m: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sparse causal graphs whose rows sum to at most 1, with sources early and sinks late."""
    rng = np.random.default_rng(seed)
    graph = np.tril(rng.random((n, m, m)), -1) * (rng.random((n, m, m)) < 0.6)
    graph /= np.maximum(graph.sum(axis=2, keepdims=True), 1.0)
    place = np.arange(m)
    source = (place < m // 2) & (rng.random((n, m)) < 0.7)
    sink = (place > m // 2) & (rng.random((n, m)) < 0.5)
    return graph.astype(np.float32), source, sink


# Edges into 1: .5 from 0. Into 2: .2 from 0, .4 from 1. Into 3: .25 from 0, .5 from 2. Node 4
# reads 3 alone. 0 is the prompt, 3 the answer: 4 comes after it and must not count.
SMALL = np.zeros((1, 5, 5), np.float32)
SMALL[0, 1, 0] = 0.5
SMALL[0, 2, :2] = [0.2, 0.4]
SMALL[0, 3, :3] = [0.25, 0.0, 0.5]
SMALL[0, 4, 3] = 1.0
SOURCE = np.arange(5)[None] == 0
SINK = np.arange(5)[None] == 3


def test_flow_by_hand():
    # h2 = .5, h1 = .4 h2 = .2, h0 = .25 + .5 h1 + .2 h2 = .45.
    np.testing.assert_allclose(reach(SMALL, SINK)[0], [0.45, 0.2, 0.5, 1.0, 0.0], **CLOSE)
    p = np.asarray(reweight(SMALL, SINK))[0]
    np.testing.assert_allclose(p[0], [0, 0.1 / 0.45, 0.1 / 0.45, 0.25 / 0.45, 0], **CLOSE)
    np.testing.assert_allclose(p[1], [0, 0, 1, 0, 0], **CLOSE)
    through = 0.1 / 0.45
    expected = [1, through, 2 * through, 1, 0]
    np.testing.assert_allclose(compiled(SMALL, SOURCE, SINK)[0], expected, **CLOSE)


@pytest.mark.parametrize("seed", range(5))
def test_flow_agrees_with_pushing_it_from_node_to_node(seed: int):
    graph, source, sink = random_graphs(seed)
    found = compiled(graph, source, sink)
    for g, s, e, x in zip(graph, source, sink, found):
        expected = oracles_paper.carried_flow(g, set(np.flatnonzero(s)), set(np.flatnonzero(e)))
        np.testing.assert_allclose(x, expected, **CLOSE)


@pytest.mark.parametrize("seed", range(5))
def test_reweighted_rows_sum_to_one_and_flow_is_conserved(seed: int):
    graph, source, sink = random_graphs(seed, m=12)
    h, p, x = (np.asarray(f) for f in (reach(graph, sink), reweight(graph, sink),
                                       compiled(graph, source, sink)))  # fmt: skip
    inner = (h > 0) & ~sink
    np.testing.assert_allclose(p.sum(axis=2), inner, atol=1e-5)
    assert (p >= 0).all() and not np.triu(p.swapaxes(1, 2)).any()
    # What enters a node leaves it: sources get their share of the unit from outside.
    total = np.where(source, h, 0).sum(axis=1, keepdims=True)
    outside = np.where(source & (total > 0), h / np.maximum(total, 1e-30), 0)
    entering = outside + (x[:, :, None] * p).sum(axis=1)
    np.testing.assert_allclose(entering, x, atol=1e-5)
    np.testing.assert_allclose(np.where(sink, x, 0).sum(axis=1), total[:, 0] > 0, atol=1e-5)
    assert x.min() >= 0 and x.max() <= 1 + 1e-5


def test_what_cannot_reach_the_answer_changes_nothing():
    graph, source, sink = random_graphs(0)
    dead = np.asarray(reach(graph, sink)) == 0
    pruned = np.where(dead[:, None, :] | dead[:, :, None], 0, graph)
    assert (pruned != graph).any()
    np.testing.assert_allclose(
        compiled(graph, source, sink), compiled(pruned, source, sink), **CLOSE
    )
    assert not np.asarray(compiled(graph, source, sink & False)).any()
    assert not np.asarray(compiled(0 * graph, source, sink)).any()


@pytest.mark.parametrize("window", [False, True], ids=["conversation", "window"])
def test_token_flow_runs_from_the_prompt_to_the_last_message(window: bool):
    trials = random_trials(3)
    packed = pack(trials, window=window)
    batch = packed.batch
    kind, step, trainable = (np.asarray(x) for x in (batch.kind, batch.step, batch.trainable))
    rows, size = kind.shape
    rng = np.random.default_rng(0)
    attention = rng.random((rows, size, size)).astype(np.float32) / size
    real = kind != Kind.PAD
    seen = np.tri(size, k=-1, dtype=bool) & real[:, :, None] & real[:, None, :]
    found = jax.jit(token_flow)(batch, np.where(seen, attention, np.nan))
    counted = {at for (i, _, _), at in packed.place.items() if trials[i].weight > 0}
    for b in range(rows):
        action = [t for t in range(size) if kind[b, t] == Kind.ACTION]
        mine = [t for t in action if trainable[b, t] and (b, t) in counted]
        if not mine:
            assert not np.asarray(found[b]).any()
            continue
        answer = {t for t in mine if step[b, t] == step[b, mine[-1]]}
        expected = oracles_paper.carried_flow(
            np.where(seen[b], attention[b], 0), set(range(action[0])), answer
        )
        np.testing.assert_allclose(found[b], expected, rtol=1e-4, atol=1e-5)


def test_the_top_forty_percent_weigh_more():
    given = {"task": [0, 0, 0], "outcome": [1.0, 0.0, 0.0], "n_steps": [5, 6, 2]}
    flow = np.array([[1, 3, 2, 3, 3, 9], [0, 0, 0, 0, 0, 0.1], [0, 0, 9, 9, 9, 9]])
    found = assign(flowtracer(), token_flow=flow, **given)
    # 2 of 5, the earlier of equals; 3 of 6, of which one has flow; none of 2, without flow.
    expected = [[1, 1.5, 1, 1.5, 1, 0], [1, 1, 1, 1, 1, 1.5], [1, 1, 0, 0, 0, 0]]
    np.testing.assert_allclose(found.token_weight, expected)
    np.testing.assert_allclose(found.diagnostics["flow_raised"], 3 / 13, rtol=1e-6)
    plain = assign(grpo(), **given)
    np.testing.assert_array_equal(found.step_advantage, plain.step_advantage)
    for share in (0.0, 1.0):
        found = assign(flowtracer(share=share, weight=2.0), token_flow=flow + 1, **given)
        real = np.arange(6) < np.array(given["n_steps"])[:, None]
        np.testing.assert_allclose(found.token_weight, np.where(real, 1.0 + share, 0.0))


def test_equal_tokens_are_taken_in_their_order_however_rows_lie():
    trials = [
        random_trial(np.random.default_rng(i), i, tokens=[[True, True], [True], [True, True]])
        for i in range(4)
    ]
    for trial in trials:
        trial.weight, trial.token_flow = 1.0, [[0.5, 0.5], [0.5], [0.5, 0.5]]
    for seed in range(4):
        packed = pack(trials, window=True, seed=seed)
        weight = nested(trials, packed, credit_of(flowtracer(), packed).token_weight)
        assert weight == [[[1.5, 1.5], [1.0], [1.0, 1.0]]] * 4


def test_weights_multiply():
    method = estimator("both", grpo(), ratio_mask(), flow_weight())
    other = estimator("both", grpo(), flow_weight(), ratio_mask())
    given = {"task": [0], "outcome": [1.0], "n_steps": [5]}
    arrays = {
        "token_flow": [[5.0, 4.0, 3.0, 2.0, 1.0]],
        "logp": np.log([[0.1, 1.0, 0.1, 1.0, 1.0]]),
        "behaviour_logp": np.zeros((1, 5)),
    }
    for each in (method, other):
        found = assign(each, **given, **arrays)
        np.testing.assert_allclose(found.token_weight, [[0, 1.5, 0, 1, 1]])


def test_step_flow_by_hand():
    # Step 3 reads steps 1 and 2 with .25 and .5, step 2 reads step 1 with .5 (G halves sums).
    graph = np.zeros((1, 2, 2, 3, 3))
    graph[:, :, 0, 2, :2] = [0.25, 0.5]
    graph[:, :, 1, 2, :2] = [0.25, 0.5]
    graph[:, 0, :, 1, 0] = 1.0  # the other layer reads nothing: the mean is .5
    given = {"task": [0], "outcome": [1.0], "n_steps": [3], "step_graph": graph}
    # h = .5, .5, 1. From everywhere: g = 1, 1.5, 1 + .25 + .75; total 2: x = .25, .375, 1.
    found = assign(flowtracer_step(share=0.6, weight=3.0), **given)
    np.testing.assert_allclose(found.token_weight, [[1, 3, 3]])
    # From the first alone: x = 1, .5, 1.
    found = assign(flowtracer_step(share=0.6, weight=3.0, source="first"), **given)
    np.testing.assert_allclose(found.token_weight, [[3, 1, 3]])


def test_steps_fed_from_the_first_agree_with_the_oracle():
    method = flowtracer_step(source="first")
    estimate = jax.jit(method.estimate)
    for seed in range(8):
        trials = random_trials(seed)
        packed = pack(trials, window=seed % 2 == 1, seed=seed)
        found, _ = estimate(packed.batch, packed.signals, method.init())
        check(found, trials, packed, oracles_paper.flowtracer_step(trials, source="first"))


def test_without_attention_only_the_last_step_is_raised():
    trials = [dataclasses.replace(t, weight=1.0) for t in random_trials(2)]
    packed = pack(trials, Shape(n=9, k=5, b=9, t=60))
    silent = packed.signals.replace(step_graph=jnp.zeros_like(packed.signals.step_graph))
    found = credit_of(flowtracer_step(), dataclasses.replace(packed, signals=silent))
    for trial, steps in zip(trials, nested(trials, packed, found.token_weight)):
        for k, (flags, weights) in enumerate(zip(trial.tokens, steps)):
            assert weights == [(1.5 if k == trial.n - 1 else 1.0) * f for f in flags]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.5}, r"share=1.5 must lie in \[0.0, 1.0\]"),
        ({"weight": 0.0}, "weight=0.0"),
        ({"source": "frist"}, "did you mean 'first'"),
    ],
)
def test_flow_options_are_checked(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        flowtracer_step(**options)
