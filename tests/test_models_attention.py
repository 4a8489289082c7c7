"""Chunked attention equals plain attention, values and gradients, whatever the blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.attention import chunked, plain
from models.attention.case import Messages


def run(module, q, k, v, segments, messages=None, n=0, **options):
    """One implementation, all heads weighing the same."""
    case = attention.Case(q.shape, k.shape[2], q.dtype, "cpu", n_messages=n)
    asked = None
    if messages is not None:
        asked = Messages(messages, jnp.full(q.shape[2], 1 / q.shape[2]), n)
    return module.attend(case, q, k, v, segments, asked, **options)


def inputs(B, T, H, G, h, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(T), 4)
    shapes = [(B, T, H, h), (B, T, G, h), (B, T, G, h), (B, T, H, h)]
    q, k, v, w = (jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True))
    segments = np.ones((B, T), np.int32)
    segments[0, T // 3 :] = 2
    segments[-1, T - T // 5 :] = 0
    return q, k, v, w, jnp.asarray(segments)


@pytest.mark.parametrize(
    ("B", "T", "H", "G", "block"),
    [
        (2, 37, 4, 2, 16),  # a ragged last block
        (3, 100, 3, 1, 8),  # more blocks than spans: the inner loop over blocks
        (1, 5, 2, 2, 128),  # shorter than a block, no grouping
        (2, 64, 4, 1, 64),
    ],
)
def test_chunked_equals_plain(monkeypatch, B, T, H, G, block):
    monkeypatch.setattr(chunked, "_SPANS", 3)
    q, k, v, w, segments = inputs(B, T, H, G, 8)
    messages = jnp.asarray(np.random.default_rng(0).integers(-1, 5, (B, T)))

    def blocks(q, k, v):
        return run(chunked, q, k, v, segments, messages, 5, block=block)

    def whole(q, k, v):
        return run(plain, q, k, v, segments, messages, 5)

    for got, want in zip(jax.jit(blocks)(q, k, v), jax.jit(whole)(q, k, v), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-6)
    got, want = (
        jax.jit(jax.grad(lambda *a: jnp.sum(f(*a)[0] * w), (0, 1, 2)))(q, k, v)  # noqa: B023
        for f in (blocks, whole)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)


def test_few_rows_at_a_time_equal_all_rows(monkeypatch):
    q, k, v, w, segments = inputs(4, 32, 4, 2, 8)

    def result():
        f = lambda q: run(chunked, q, k, v, segments, block=16)[0]  # noqa: E731
        return jax.jit(lambda q: (f(q), jax.grad(lambda q: jnp.sum(f(q) * w))(q)))(q)

    monkeypatch.setattr(chunked, "_CACHE_BYTES", 1)
    assert chunked._rows_per_pass("cpu", 4, 4, 32, 16) == 1
    one = result()
    monkeypatch.setattr(chunked, "_CACHE_BYTES", 1 << 30)
    assert chunked._rows_per_pass("cpu", 4, 4, 32, 16) == 4
    for a, b in zip(one, result(), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)


def test_bfloat16_keeps_softmax_in_float32():
    q, k, v, _, segments = inputs(2, 200, 4, 2, 16)
    messages = jnp.asarray(np.random.default_rng(1).integers(0, 6, (2, 200)))
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    exact = [x.astype(jnp.float32) for x in half]
    want = jax.jit(lambda *a: run(plain, *a, segments, messages, 6))(*exact)
    blocks = jax.jit(lambda *a: run(chunked, *a, segments, messages, 6))
    out, mass = blocks(*half)
    assert out.dtype == jnp.bfloat16
    assert mass.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want[0]), atol=0.03)
    np.testing.assert_allclose(np.asarray(mass), np.asarray(want[1]), atol=0.004)


def test_padding_gradients_are_zero_even_for_garbage():
    q, k, v, w, segments = inputs(2, 40, 4, 2, 8)
    real = (segments != 0)[..., None, None]
    big = jnp.where(real, 0, 1e30)

    def loss(q, k, v):
        out = run(chunked, q, k, v, segments, block=16)[0]
        return jnp.sum(jnp.where(real, out * w, 0))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    gradients, clean = gradient(q + big, k + big, v + big), gradient(q, k, v)
    for g, c in zip(gradients, clean, strict=True):
        assert (np.asarray(jnp.where(real, 0, g)) == 0).all()
        np.testing.assert_allclose(
            np.asarray(jnp.where(real, g, 0)), np.asarray(jnp.where(real, c, 0)), atol=1e-6
        )


def test_selection_follows_order_and_names_reasons():
    gpu = attention.Case((2, 64, 4, 64), 2, jnp.bfloat16, "gpu", packed=False)
    assert attention.select(gpu).name == "cudnn"
    for change, words in (
        ({"backend": "cpu"}, "needs a GPU"),
        ({"dtype": jnp.float32}, "float32"),
        ({"shape": (2, 64, 4, 20)}, "20"),
        ({"packed": True}, "segments"),
    ):
        case = dataclasses.replace(gpu, **change)
        assert attention.select(case).name == "chunked"
        with pytest.raises(ValueError, match=words):
            attention.select(case, "cudnn")
    assert attention.select(gpu, "xla").name == "xla"


def test_spans_cover_the_row_and_stay_few():
    for T, block in ((128, 128), (512, 128), (4096, 128), (8448, 128), (24, 8)):
        spans = chunked._spans(T, block)
        assert len(spans) <= 16
        assert [lo for lo, _ in spans] == [0, *[hi for _, hi in spans[:-1]]]
        assert spans[-1][1] == T
        assert all((hi - lo) % block == 0 for lo, hi in spans)
