"""The step graph against explicit attention matrices, recorded and recomputed in NumPy."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, hf, qwen
from models.step_graph import Capture, aggregate, default_layers, message_ids

GOLDEN = Path(__file__).parent / "golden"


def explicit_graph(p, action, observation, K):
    """Double loop over steps, straight from the definition; p is [heads, T, T] of one episode."""
    graph = np.zeros((2, K, K))
    mean = p.mean(axis=0)
    for j in range(K):
        queries = np.flatnonzero(action == j)
        for k in range(j):
            for which, owner in enumerate((action, observation)):
                keys = np.flatnonzero(owner == k)
                if len(queries) and len(keys):
                    graph[which, j, k] = mean[np.ix_(queries, keys)].sum(axis=1).mean()
    return graph


def layout(T, steps, prompt=5, message=3, reply=4, missing=()):
    """Prompt, then per step a message and (unless missing) an observation, then the rest none."""
    action, observation = np.full(T, -1), np.full(T, -1)
    at = prompt
    for k in range(steps):
        action[at : at + message] = k
        at += message + 1  # one template token between, of no message
        if k not in missing:
            observation[at : at + reply] = k
            at += reply
    assert at <= T
    return action, observation


def capture_of(rows, layers, K):
    action = jnp.asarray(np.stack([r[0] for r in rows]))
    observation = jnp.asarray(np.stack([r[1] for r in rows]))
    return Capture(layers=layers, n_steps=K, action_step=action, observation_step=observation)


@pytest.mark.parametrize("name", ["tied", "untied", "qwen3"])
@pytest.mark.parametrize("implementation", ["chunked", "xla"])
def test_graph_equals_recorded_attention(name, implementation):
    config, params = hf.load_policy(GOLDEN / name)
    data = np.load(GOLDEN / f"{name}.npz")
    tokens = jnp.asarray(data["prompt_tokens"])
    T, K = tokens.shape[1], 7
    row = layout(T, 6, missing=(2,))
    layers = tuple(range(config.num_hidden_layers))[::-1]
    hidden, graph = qwen.forward(
        params,
        config,
        tokens,
        jnp.arange(T)[None],
        jnp.ones_like(tokens),
        capture=capture_of([row], layers, K),
        attention=implementation,
    )
    assert graph.shape == (1, len(layers), 2, K, K)
    for i, layer in enumerate(layers):
        want = explicit_graph(data["prompt_attention"][layer], *row, K)
        np.testing.assert_allclose(np.asarray(graph[0, i]), want, atol=2e-6)
        assert want[0].max() > 0.05
        assert want[1].max() > 0.05
    plain, _ = qwen.forward(params, config, tokens, jnp.arange(T)[None], jnp.ones_like(tokens))
    np.testing.assert_allclose(np.asarray(hidden), np.asarray(plain), atol=1e-5)


def numpy_attention(q, k, segments):
    """[H, T, T] probabilities of one row; heads repeated and masked the plain way."""
    T, H, h = q.shape
    k = np.repeat(k, H // k.shape[1], axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(h)
    mask = np.tril(np.ones((T, T), bool)) & (segments[:, None] == segments[None]) & (segments > 0)
    scores = np.where(mask, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = p / p.sum(axis=-1, keepdims=True)
    return np.where(mask, p, 0)


@pytest.mark.parametrize(
    ("T", "steps", "K", "missing"),
    [
        (90, 10, 12, (0, 4)),  # more messages than the head size, two observations missing
        (40, 1, 1, ()),  # a single step has no earlier one
        (333, 40, 40, ()),  # several blocks of queries
    ],
)
@pytest.mark.parametrize("implementation", ["chunked", "xla"])
def test_graph_equals_numpy(T, steps, K, missing, implementation):
    rng = np.random.default_rng(steps)
    B, H, G, h = 2, 4, 2, 4
    q, k, v = (rng.normal(size=(B, T, n, h)).astype(np.float32) * 1.5 for n in (H, G, G))
    segments = np.ones((B, T), np.int32)
    segments[1, T - 3 :] = 0
    rows = [layout(T, steps, missing=missing), layout(T, max(1, steps // 2), message=2)]
    capture = capture_of(rows, (0,), K)
    out, mass = attention.attend(
        *map(jnp.asarray, (q, k, v, segments)),
        message_ids(capture),
        2 * K,
        name=implementation,
    )
    graph = np.asarray(aggregate(mass, capture))
    for b in range(B):
        p = numpy_attention(q[b].astype(np.float64), k[b].astype(np.float64), segments[b])
        np.testing.assert_allclose(graph[b], explicit_graph(p, *rows[b], K), atol=2e-6)
        values = np.repeat(v[b], H // G, axis=1)
        np.testing.assert_allclose(
            np.asarray(out[b]), np.einsum("hts,shd->thd", p, values), atol=2e-5
        )
    assert (graph >= 0).all()
    assert (graph.sum(axis=(1, 3)) <= 1 + 1e-6).all()
    assert (np.triu(graph) == 0).all()
    for k_missing in missing:
        assert (graph[0, 1, :, k_missing] == 0).all()
    if K == 1:
        assert (graph == 0).all()


def test_packed_rows_have_the_graphs_of_their_parts():
    """Two episodes in one row see each other in nothing; steps of the second follow the first's."""
    rng = np.random.default_rng(5)
    B, T, H, G, h, K = 1, 80, 4, 2, 4, 8
    q, k, v = (rng.normal(size=(B, T, n, h)).astype(np.float32) * 1.5 for n in (H, G, G))
    first, second = layout(45, 4), layout(35, 3, missing=(1,))
    shifted = [np.where(x >= 0, x + 4, -1) for x in second]
    row = [np.concatenate(pair) for pair in zip(first, shifted, strict=True)]
    segments = np.repeat([1, 2], [45, 35])[None]
    capture = capture_of([row], (0,), K)
    for name in ("chunked", "xla"):
        _, mass = attention.attend(
            *map(jnp.asarray, (q, k, v, segments)), message_ids(capture), 2 * K, name=name
        )
        graph = np.asarray(aggregate(mass, capture))[0]
        for part, rows, steps in (
            (slice(0, 45), first, slice(0, 4)),
            (slice(45, 80), second, slice(4, 7)),
        ):
            p = numpy_attention(
                q[0, part].astype(float), k[0, part], np.ones(part.stop - part.start)
            )
            want = explicit_graph(p, *rows, steps.stop - steps.start)
            np.testing.assert_allclose(graph[:, steps, steps], want, atol=2e-6)
        assert (graph[:, 4:, :4] == 0).all()


def test_graph_of_8192_tokens():
    """Against the definition in float64, one block of rows of the attention matrix at a time."""
    rng = np.random.default_rng(7)
    T, steps, H, G, h = 8192, 50, 4, 2, 16
    q, k, v = (rng.normal(size=(1, T, n, h)).astype(np.float32) for n in (H, G, G))
    row = layout(T, steps, prompt=900, message=40, reply=100)
    capture = capture_of([row], (0,), steps)
    _, mass = jax.jit(
        lambda *x: attention.attend(*x, message_ids(capture), 2 * steps, name="chunked")
    )(*map(jnp.asarray, (q, k, v, np.ones((1, T), np.int32))))
    graph = np.asarray(aggregate(mass, capture))[0]
    keys = np.repeat(k[0].astype(float), H // G, axis=1)
    want = np.zeros((2, steps, steps))
    for j in range(steps):
        queries = np.flatnonzero(row[0] == j)
        scores = np.einsum("thd,shd->hts", q[0, queries].astype(float), keys) / np.sqrt(h)
        scores[:, np.arange(T)[None, :] > queries[:, None]] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mean = (p / p.sum(axis=-1, keepdims=True)).mean(axis=(0, 1))
        for which in range(2):
            for earlier in range(j):
                want[which, j, earlier] = mean[row[which] == earlier].sum()
    np.testing.assert_allclose(graph, want, atol=1e-5)
    assert want[0, -1].sum() > 0.1


def test_mass_carries_no_gradient_and_padding_no_mass():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 9, 2, 4)), jnp.float32) for _ in range(3))
    segments = jnp.asarray([[1] * 6 + [0] * 3])
    ids = jnp.asarray([[0, 0, 1, 1, 2, 2, 0, 1, 2]])

    for name in ("chunked", "xla"):
        mass = jax.jit(
            lambda q, name=name: attention.attend(q, k, v, segments, ids, 3, name=name)[1]
        )
        np.testing.assert_allclose(np.asarray(mass(q)[0, :6]).sum(-1), 1, atol=1e-6)
        assert (np.asarray(mass(q)[0, 6:]) == 0).all()
        assert (np.asarray(jax.jit(jax.grad(lambda q: jnp.sum(mass(q) ** 2)))(q)) == 0).all()  # noqa: B023


def test_layers_map_by_relative_depth():
    assert default_layers(28) == (8, 10, 12, 14, 16, 18)
    assert default_layers(36) == (10, 13, 16, 18, 21, 23)
    assert default_layers(3) == (1,)
    assert default_layers(1) == (0,)
    for n in range(1, 81):
        layers = default_layers(n)
        assert list(layers) == sorted(set(layers))
        assert 0 <= layers[0] <= layers[-1] < n


def test_impossible_layers_are_refused():
    config, params = hf.load_policy(GOLDEN / "tied")
    tokens = jnp.ones((1, 4), jnp.int32)
    for layers in ((2,), (0, 0), ()):
        capture = Capture(layers, 2, -tokens, -tokens)
        with pytest.raises(ValueError, match="capture layers"):
            qwen.forward(params, config, tokens, tokens, tokens, capture=capture)


def test_a_step_beyond_the_table_is_no_message():
    capture = Capture((0,), 2, jnp.asarray([[0, 2, 5, -1]]), jnp.asarray([[-1, -1, -1, 3]]))
    np.testing.assert_array_equal(np.asarray(message_ids(capture)), [[0, -1, -1, -1]])
