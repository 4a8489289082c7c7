"""Qwen3 through everything that takes a policy; its logits are held in test_models_qwen.py."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxcredit.update import MicroBatch
from models import hf, lora, qwen
from models.config import QwenConfig
from models.params import init_params
from models.policy import Policy
from models.sampler import Sampler, SamplerConfig

CONFIG = QwenConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # the heads are twice as wide as the stream
    rope_theta=10_000.0,
    tie_word_embeddings=False,
    eos_token_ids=(3, 5),
    model_type="qwen3",
)


def random_tree(tree, seed, scale=0.3):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), tree)


@pytest.fixture(scope="module")
def params():
    """A fresh policy with every weight, norms included, moved off its initial value."""
    return random_tree(init_params(CONFIG, jax.random.key(0)), 0)


@pytest.fixture(scope="module")
def adapters():
    fresh = lora.init_adapters(CONFIG, jax.random.key(1), 3, 6.0)
    return dataclasses.replace(fresh, weights=random_tree(fresh.weights, 1, 0.1))


def test_queries_and_keys_are_normalised_per_head_and_before_they_turn(params):
    layer = jax.tree.map(lambda x: x[1], params["layers"])
    x = jax.random.normal(jax.random.key(2), (2, 5, CONFIG.hidden_size)) * 7
    at = jnp.broadcast_to(jnp.arange(5) * 11, (2, 5))
    still = qwen.project_qkv(layer, CONFIG, x, jnp.zeros_like(at))
    turned = qwen.project_qkv(layer, CONFIG, x, at)
    for z, rotated, name in zip(still, turned, ("q_norm", "k_norm", None), strict=True):
        if name is None:  # values are neither normalised nor turned
            np.testing.assert_array_equal(np.asarray(z), np.asarray(rotated))
            assert np.abs(np.asarray(z)).max() > 10
            continue
        unit = np.square(np.asarray(z / layer[name])).mean(axis=-1)
        np.testing.assert_allclose(unit, 1, atol=1e-4)
        assert np.abs(np.asarray(layer[name]) - 1).max() > 0.1
        want = qwen.rope(z, at, CONFIG.rope_theta)
        np.testing.assert_allclose(np.asarray(rotated), np.asarray(want), atol=1e-5)


def test_a_folder_is_read_as_it_was_written(params, tmp_path):
    hf.save_policy(tmp_path, CONFIG, params, jnp.float32, max_shard_bytes=30_000)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForCausalLM"]
    assert written["attention_bias"] is False
    assert written["head_dim"] == 16
    names = {k for file in tmp_path.glob("*.safetensors") for k in load_file(file)}
    assert {n for n in names if n.startswith("model.layers.1.self_attn.")} == {
        f"model.layers.1.self_attn.{part}.weight"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    config, again = hf.load_policy(tmp_path)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, again, params)
    written.update(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    del written["attention_bias"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"missing .*q_proj\.bias.*unexpected .*k_norm\.weight"):
        hf.load_policy(tmp_path)


@pytest.mark.parametrize("trained", ["all", "mlp"])
def test_every_trained_weight_gets_a_gradient(params, trained):
    """Log-probabilities, entropies and values of a policy; a zero gradient is an unused weight."""
    tokens = jax.random.randint(jax.random.key(3), (2, 12), 0, CONFIG.vocab_size)
    at = jnp.broadcast_to(jnp.arange(12), (2, 12))
    weight = jnp.where(at > 3, 1.0, 0.0)
    zeros = jnp.zeros_like(weight)
    micro = MicroBatch(
        tokens=tokens,
        position=at,
        segment=jnp.ones_like(at),
        weight=weight,
        advantage=zeros,
        old_logp=zeros,
    )
    head = {"w": jnp.linspace(-1, 1, CONFIG.hidden_size), "b": jnp.float32(0)}
    if trained == "all":
        policy = Policy(CONFIG, value_head=True, entropy=True)
        trainable, frozen = {"params": params, "value": head}, None
    else:
        low = lora.init_adapters(CONFIG, jax.random.key(1), 3, 6.0, ("gate", "up", "down"))
        policy = Policy(CONFIG, adapter_scale=low.scale, value_head=True, entropy=True)
        trainable = {"adapters": random_tree(low.weights, 2, 0.1), "value": head}
        frozen = {"params": params}

    def loss(trainable):
        out = policy.evaluate(trainable, frozen, micro)
        total = jnp.where(weight > 0, jnp.sin(out.logp) + out.entropy + jnp.tanh(out.value), 0)
        return total.sum()

    for path, g in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(trainable)):
        assert np.isfinite(np.asarray(g)).all(), path
        assert np.abs(np.asarray(g)).max() > 1e-6, path


def test_sampled_log_probs_equal_one_forward_pass(params, adapters):
    settings = SamplerConfig(
        waves=1, slots=2, capacity=64, max_response=9, stop_ids=(3, 5), block=4, prefill=(8, 16)
    )
    sampler = Sampler(params, CONFIG, settings, adapters=adapters, seed=3)
    rng = np.random.default_rng(4)
    rows, spans = ([], []), ([], [])
    for turn, size in enumerate((19, 6)):
        new = {s: rng.integers(6, 61, size=size + s) for s in (0, 1)}
        sampler.extend(0, new)
        out = sampler.generate(0, {s: ((0, s, 0, turn), 9) for s in (0, 1)})
        for s in (0, 1):
            rows[s].extend(new[s].tolist())
            spans[s].append((len(rows[s]), out[s]))
            rows[s].extend(out[s].ids.tolist())
    for s in (0, 1):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(rows[s])] = rows[s]
        at = jnp.arange(64)[None]
        hidden, _ = qwen.forward(
            params, CONFIG, jnp.asarray(padded), at, at * 0 + 1, adapters=adapters
        )
        logp = np.asarray(jax.nn.log_softmax(qwen.unembed(params, CONFIG, hidden[0]), -1))
        for start, found in spans[s]:
            want = logp[np.arange(start - 1, start - 1 + len(found.ids)), found.ids]
            np.testing.assert_allclose(found.logp, want, atol=1e-4)
            assert np.ptp(logp[start - 1]) > 1
