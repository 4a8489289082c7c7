"""Log-probabilities, entropies, values; and the policy folder on disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import hf
from models.config import QwenConfig
from models.logprobs import token_logprobs
from models.params import init_params
from models.qwen import unembed
from models.value import init_value_head, values

GOLDEN = Path(__file__).parent / "golden"
CONFIG = QwenConfig(
    vocab_size=37,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    eos_token_ids=(3, 5),
    pad_token_id=2,
)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def policy(request):
    config = hf.QwenConfig(**{**CONFIG.__dict__, "tie_word_embeddings": request.param})
    init = jax.jit(lambda k: jax.tree.map(lambda x: 8 * x, init_params(config, k)))
    params = init(jax.random.key(0))
    return config, params


def direct(params, config, hidden, tokens, temperature):
    z = unembed(params, config, hidden[:, :-1]) / temperature
    all_logp = jax.nn.log_softmax(z, axis=-1)
    logp = jnp.take_along_axis(all_logp, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(all_logp) * all_logp, axis=-1)
    return jnp.pad(logp, ((0, 0), (1, 0))), jnp.pad(entropy, ((0, 0), (1, 0)))


def sample(B=3, T=23):
    keys = jax.random.split(jax.random.key(1), 3)
    hidden = jax.random.normal(keys[0], (B, T, CONFIG.hidden_size))
    tokens = jax.random.randint(keys[1], (B, T), 0, CONFIG.vocab_size)
    mask = jax.random.bernoulli(keys[2], 0.3, (B, T)).at[1].set(False).at[0, 0].set(True)
    return hidden, tokens, mask


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("masked", [True, False])
def test_chunked_logprobs_equal_direct(policy, chunk, masked):
    config, params = policy
    hidden, tokens, mask = sample()
    wanted = mask if masked else jnp.ones_like(mask)
    logp, entropy = token_logprobs(
        params,
        config,
        hidden,
        tokens,
        mask=mask if masked else None,
        temperature=0.7,
        chunk=chunk,
        entropy=True,
    )
    wanted = wanted.at[:, 0].set(False)
    for got, want in zip((logp, entropy), direct(params, config, hidden, tokens, 0.7), strict=True):
        assert float(jnp.abs(want).max()) > 1
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(jnp.where(wanted, want, 0)), atol=2e-5
        )


def test_chunked_gradients_equal_direct(policy):
    config, params = policy
    hidden, tokens, mask = sample()
    mask = mask.at[:, 0].set(False)

    def chunked(params, hidden):
        logp, h = token_logprobs(params, config, hidden, tokens, mask=mask, chunk=12, entropy=True)
        return jnp.sum(jnp.sin(logp)) + jnp.sum(h)

    def whole(params, hidden):
        logp, h = direct(params, config, hidden, tokens, 1.0)
        return jnp.sum(jnp.where(mask, jnp.sin(logp) + h, 0))

    got = jax.jit(jax.grad(chunked, (0, 1)))(params, hidden)
    want = jax.jit(jax.grad(whole, (0, 1)))(params, hidden)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def test_garbage_outside_the_mask_reaches_nothing(policy):
    config, params = policy
    hidden, tokens, mask = sample()
    used = jnp.pad(mask.at[:, 0].set(False)[:, 1:], ((0, 0), (0, 1)))  # states of wanted tokens

    def f(hidden, tokens):
        return jnp.sum(token_logprobs(params, config, hidden, tokens, mask=mask, chunk=9)[0])

    dirty_hidden = jnp.where(used[..., None], hidden, jnp.nan)
    dirty_tokens = jnp.where(mask, tokens, 10**6)
    assert float(f(dirty_hidden, dirty_tokens)) == pytest.approx(float(f(hidden, tokens)), rel=1e-6)
    gradient = np.asarray(jax.grad(f)(dirty_hidden, dirty_tokens))
    assert np.isfinite(gradient).all()
    assert (gradient[~np.asarray(used)] == 0).all()


def test_whole_vocabulary_times_row_never_exists():
    hidden = jax.ShapeDtypeStruct((4, 256, 8), jnp.float32)
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    params = jax.eval_shape(lambda k: init_params(CONFIG, k), jax.random.key(0))

    def loss(params, hidden, tokens):
        return jnp.sum(token_logprobs(params, CONFIG, hidden, tokens, chunk=64)[0])

    text = jax.jit(jax.grad(loss)).lower(params, hidden, tokens).as_text()
    assert "4x16x37xf32" in text
    assert "4x256x37xf32" not in text


def test_values_belong_to_the_state_before_the_token():
    hidden = jnp.asarray(np.arange(2 * 3 * 8).reshape(2, 3, 8), jnp.float32)
    assert (np.asarray(values(init_value_head(CONFIG), hidden)) == 0).all()
    head = {"w": jnp.eye(8)[2], "b": jnp.asarray(0.5)}
    np.testing.assert_array_equal(
        np.asarray(values(head, hidden)), [[0, 2.5, 10.5], [0, 26.5, 34.5]]
    )


@pytest.mark.parametrize(
    ("dtype", "shard", "files"),
    [(jnp.float32, 1 << 30, 1), (jnp.float32, 2000, 3), (jnp.bfloat16, 1000, 3)],
)
def test_folder_round_trip(policy, tmp_path, dtype, shard, files):
    config, params = policy
    hf.save_policy(tmp_path, config, params, dtype, max_shard_bytes=shard)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) >= files
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(shards) > 1)
    if len(shards) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        stored = sum(x.nbytes for s in shards for x in load_file(s).values())
        assert index["metadata"]["total_size"] == stored
        assert set(index["weight_map"].values()) == {s.name for s in shards}
    loaded, again = hf.load_policy(tmp_path)
    assert loaded == config
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b.astype(dtype), np.float32))


def test_loading_names_what_is_wrong(tmp_path):
    params = init_params(CONFIG, jax.random.key(0))
    with pytest.raises(FileNotFoundError, match="no-such"):
        hf.load_policy(tmp_path / "no-such")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load_policy(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        hf.load_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        hf.load_policy(tmp_path)

    hf.save_policy(tmp_path, CONFIG, params, jnp.float32)
    with pytest.raises(FileExistsError, match="already holds"):
        hf.save_policy(tmp_path, CONFIG, params, jnp.float32)
    good = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for tensors, words in (
        ({k: v for k, v in good.items() if k != name}, f"missing {name}"),
        ({**good, name: good[name].T.copy()}, rf"{name} found \(8, 12\), expected \(12, 8\)"),
        ({**good, "model.extra": good[name]}, r"unexpected model\.extra"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            hf.load_policy(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
        hf.load_policy(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        hf.load_policy(tmp_path)


def test_a_tied_folder_with_a_copied_head_loads(tmp_path):
    params = init_params(CONFIG, jax.random.key(0))
    hf.save_policy(tmp_path, CONFIG, params, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert "head" not in hf.load_policy(tmp_path)[1]


def test_an_untied_folder_without_head_says_so(tmp_path):
    hf.save_policy(tmp_path, CONFIG, init_params(CONFIG, jax.random.key(0)), jnp.float32)
    config = {**CONFIG.to_hf(), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lm_head\.weight; \(set tie_word_embeddings"):
        hf.load_policy(tmp_path)


def test_more_chunks_keep_no_more_copies_of_the_head():
    """A chunk's logits are recomputed from the one head, so small chunks need less memory."""
    config = dataclasses.replace(CONFIG, vocab_size=8192, hidden_size=64)
    params = jax.eval_shape(lambda k: init_params(config, k), jax.random.key(0))
    hidden = jax.ShapeDtypeStruct((1, 256, 64), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)

    def temporaries(chunk):
        def loss(hidden, params, tokens):
            return jnp.sum(token_logprobs(params, config, hidden, tokens, chunk=chunk)[0])

        compiled = jax.jit(jax.grad(loss)).lower(hidden, params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits, head = 4 * 256 * 8192, 4 * 64 * 8192
    assert temporaries(256) > logits
    assert temporaries(16) < logits / 4 + head
