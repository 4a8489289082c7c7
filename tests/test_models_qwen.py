"""The forward pass against recorded logits of the reference, and its invariances."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf, lora, qwen
from models.config import QwenConfig
from models.params import abstract_params, init_params, param_count, param_specs

GOLDEN = Path(__file__).parent / "golden"
CONFIG = QwenConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    tie_word_embeddings=False,
)


def run(params, config, tokens, segments=None, positions=None, **options):
    tokens = jnp.asarray(tokens)
    segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    f = jax.jit(lambda p: qwen.forward(p, config, tokens, positions, segments, **options))
    return f(params)


@pytest.fixture(scope="module", params=["tied", "untied", "qwen3"])
def golden(request):
    config, params = hf.load_policy(GOLDEN / request.param)
    return config, params, dict(np.load(GOLDEN / f"{request.param}.npz"))


@pytest.fixture(scope="module")
def policy():
    return jax.jit(lambda k: init_params(CONFIG, k))(jax.random.key(0))


def random_adapters(key=1, targets=lora.TARGETS):
    rng = np.random.default_rng(key)
    shapes = jax.eval_shape(
        lambda k: lora.init_adapters(CONFIG, k, 3, 6.0, targets), jax.random.key(0)
    )
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes)


def test_short_padded_batch_equals_the_reference(golden):
    config, params, data = golden
    hidden, graph = run(params, config, data["short_tokens"], data["short_mask"])
    assert graph is None
    logits = np.asarray(qwen.unembed(params, config, hidden))
    real = data["short_mask"] == 1
    assert data["short_logits"][real].std() > 1  # a flat reference would prove nothing
    np.testing.assert_allclose(logits[real], data["short_logits"][real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["chunked", "xla"])
def test_long_prompt_equals_the_reference(golden, attention):
    config, params, data = golden
    assert data["long_tokens"].shape[1] >= 500
    hidden, _ = run(params, config, data["long_tokens"], attention=attention)
    logits = np.asarray(qwen.unembed(params, config, hidden[0, data["long_at"]]))
    np.testing.assert_allclose(logits, data["long_logits"], atol=1e-4, rtol=0)


def test_end_ids_of_both_files_are_merged(golden):
    assert golden[0].eos_token_ids == (1, 3)


def test_padding_may_hold_anything(golden):
    config, params, data = golden
    mask = data["short_mask"]
    garbage = np.where(mask == 1, data["short_tokens"], 10**6)
    clean, _ = run(params, config, data["short_tokens"], mask)
    dirty, _ = run(params, config, garbage, mask)
    np.testing.assert_array_equal(np.asarray(clean), np.asarray(dirty))
    # Longer padding is another program, hence another order of sums.
    wide = np.pad(garbage, ((0, 0), (0, 13)), constant_values=-7)
    longer, _ = run(params, config, wide, np.pad(mask, ((0, 0), (0, 13))))
    real = mask == 1
    np.testing.assert_allclose(
        np.asarray(longer)[:, : mask.shape[1]][real], np.asarray(clean)[real], atol=1e-5
    )


def test_unknown_real_token_is_loud(policy):
    hidden, _ = run(policy, CONFIG, [[1, 2, CONFIG.vocab_size], [1, 2, 3]])
    assert np.isnan(np.asarray(hidden)[0, 2]).all()
    assert np.isfinite(np.asarray(hidden)[1]).all()


@pytest.mark.parametrize("attention", ["chunked", "xla"])
def test_packed_segments_equal_separate_rows(policy, attention):
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 61, n) for n in (70, 90, 41)]
    row = np.concatenate(parts)[None]
    segments = np.repeat([1, 2, 3], [70, 90, 41])[None]
    positions = np.concatenate([np.arange(len(p)) for p in parts])[None]
    packed, _ = run(policy, CONFIG, row, segments, jnp.asarray(positions), attention=attention)
    start = 0
    for part in parts:
        alone, _ = run(policy, CONFIG, part[None])
        got = np.asarray(packed)[0, start : start + len(part)]
        np.testing.assert_allclose(got, np.asarray(alone)[0], atol=2e-5)
        start += len(part)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_gradient(policy, remat):
    tokens = np.random.default_rng(1).integers(0, 61, (2, 20))

    def gradient(kind):
        loss = lambda p: jnp.sum(jnp.tanh(run(p, CONFIG, tokens, remat=kind)[0]))  # noqa: E731
        return jax.jit(jax.grad(loss))(policy)

    for a, b in zip(
        jax.tree.leaves(gradient("none")), jax.tree.leaves(gradient(remat)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def test_unknown_remat_and_attention_are_named(policy):
    with pytest.raises(ValueError, match=r"'some'.*'dots'"):
        run(policy, CONFIG, [[1, 2]], remat="some")
    with pytest.raises(ValueError, match=r"'flash'.*chunked"):
        run(policy, CONFIG, [[1, 2]], attention="flash")
    with pytest.raises(ValueError, match=r"cudnn.*needs a GPU"):
        run(policy, CONFIG, [[1, 2]], attention="cudnn")


def test_bfloat16_stays_close(policy):
    tokens = np.random.default_rng(2).integers(0, 61, (2, 30))
    exact, _ = run(policy, CONFIG, tokens)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy)
    rough, _ = run(half, CONFIG, tokens)
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rough, np.float32), np.asarray(exact), atol=0.12)


def test_one_tree_gives_shapes_count_and_weights(policy):
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), policy)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(CONFIG))
    assert param_count(CONFIG) == sum(x.size for x in jax.tree.leaves(policy))
    assert "head" not in param_specs(hf.load_config(GOLDEN / "tied"))


def test_fresh_adapters_change_nothing(policy):
    tokens = np.random.default_rng(3).integers(0, 61, (2, 12))
    base, _ = run(policy, CONFIG, tokens)
    fresh = lora.init_adapters(CONFIG, jax.random.key(1), 4, 8.0)
    assert fresh.scale == 2.0
    same, _ = run(policy, CONFIG, tokens, adapters=fresh)
    np.testing.assert_array_equal(np.asarray(base), np.asarray(same))


@pytest.mark.parametrize("targets", [lora.TARGETS, ("gate", "up", "down")])
def test_merged_weights_equal_adapters(policy, targets):
    tokens = np.random.default_rng(4).integers(0, 61, (2, 12))
    adapters = random_adapters(targets=targets)
    base, _ = run(policy, CONFIG, tokens)
    adapted, _ = run(policy, CONFIG, tokens, adapters=adapters)
    merged, _ = run(jax.jit(lora.merge)(policy, adapters), CONFIG, tokens)
    assert np.abs(np.asarray(base) - np.asarray(adapted)).max() > 0.1
    np.testing.assert_allclose(np.asarray(merged), np.asarray(adapted), atol=2e-5)


def test_bad_adapters_are_refused():
    with pytest.raises(ValueError, match="'head'"):
        lora.adapter_specs(CONFIG, 4, ("q", "head"))
    with pytest.raises(ValueError, match="rank is 0"):
        lora.adapter_specs(CONFIG, 0)
