"""The splash kernel against plain attention: values, gradients and mass, in interpret mode."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.attention import plain, splash
from models.attention.case import Case, Messages


@pytest.mark.parametrize(
    ("T", "H", "G", "h", "M"),
    [(200, 4, 2, 64, 150), pytest.param(256, 2, 2, 128, 5, marks=pytest.mark.slow)],
)
def test_splash_equals_plain(T, H, G, h, M):
    B = 2
    keys = jax.random.split(jax.random.key(T), 5)
    shapes = [(B, T, H, h), (B, T, G, h), (B, T, G, h), (B, T, H, h)]
    q, k, v, w = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=False))
    segments = np.ones((B, T), np.int32)
    segments[0, T // 3 :] = 2  # packed, and padding on the right of the other row
    segments[-1, T - T // 5 :] = 0
    ids = jax.random.randint(keys[4], (B, T), -1, M)
    weight = jnp.arange(1.0, H + 1) / (H * (H + 1) / 2)
    case = Case(q.shape, G, q.dtype, "tpu", n_messages=M)
    messages = Messages(ids, weight, M)

    def both(attend, **options):
        def f(q, k, v):
            out, mass = attend(case, q, k, v, jnp.asarray(segments), messages, **options)
            return jnp.sum(out * w), (out, mass)

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    got, want = both(splash.attend, interpret=True), both(plain.attend)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5)


def test_splash_is_chosen_on_a_tpu_and_refuses_by_name():
    tpu = Case((2, 64, 4, 128), 2, jnp.bfloat16, "tpu")
    assert attention.select(tpu).name == "splash"
    for change, words in (
        ({"backend": "gpu"}, "needs a TPU"),
        ({"dtype": jnp.float16}, "float16"),
        ({"shape": (2, 64, 4, 80)}, "80"),
    ):
        case = dataclasses.replace(tpu, **change)
        assert attention.select(case).name == "chunked"
        with pytest.raises(ValueError, match=words):
            attention.select(case, "splash")
