"""The sharded policy computes what one device computes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models import lora, qwen
from models.config import QwenConfig
from models.logprobs import token_logprobs
from models.params import init_params, param_specs
from models.sharding import (
    batch_sharding,
    constrain,
    make_mesh,
    param_shardings,
    spec_partition,
    tree_shardings,
)
from models.step_graph import Capture

CONFIG = QwenConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("data", "tensor", "context"), [(2, 2, 2), pytest.param(4, 2, 1, marks=pytest.mark.slow)]
)
def test_mesh_equals_one_device(model_type, data, tensor, context):
    B, T, K = 4, 32, 3
    config = dataclasses.replace(CONFIG, model_type=model_type)
    params = jax.jit(lambda k: init_params(config, k))(jax.random.key(0))
    adapters = lora.init_adapters(config, jax.random.key(1), 2, 4.0)
    adapters = jax.tree.map(lambda x: x + 0.05, adapters)
    tokens = jax.random.randint(jax.random.key(2), (B, T), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    segments = jnp.where(positions < 28, 1, 0)
    step = jnp.where(positions % 8 < 3, positions // 10, -1)
    capture = Capture((1,), K, step, jnp.where(step < 0, positions // 10, -1))

    def loss(adapters, params, tokens, positions, segments, capture):
        hidden, graph = qwen.forward(
            params, config, tokens, positions, segments, adapters=adapters, capture=capture
        )
        logp, _ = token_logprobs(
            params, config, hidden, tokens, mask=(step >= 0) & (segments > 0), chunk=32
        )
        return jnp.sum(jnp.sin(logp)), (hidden, graph, logp)

    f = jax.value_and_grad(loss, has_aux=True)
    want = jax.jit(f)(adapters, params, tokens, positions, segments, capture)

    mesh = make_mesh(data, tensor, context)
    rows = batch_sharding(mesh)
    specs = lora.adapter_specs(config, 2)
    placed = (
        adapters.replace(
            weights=jax.device_put(adapters.weights, tree_shardings(specs, config, mesh))
        ),
        jax.device_put(params, param_shardings(config, mesh)),
        *(jax.device_put(x, rows) for x in (tokens, positions, segments)),
        jax.tree.map(lambda x: jax.device_put(x, rows), capture),
    )
    with jax.set_mesh(mesh):
        got = jax.jit(f)(*placed)
    assert placed[1]["layers"]["gate"].sharding.spec == P(None, "data", "tensor")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5)


def test_heads_are_split_whole_or_not_at_all():
    mesh = make_mesh(2, 4, 1)
    layers = param_specs(CONFIG)["layers"]
    assert spec_partition(layers["q"], CONFIG, mesh) == P(None, "data", "tensor")
    # 8 key columns divide by 4, 2 key-value heads do not.
    assert spec_partition(layers["k"], CONFIG, mesh) == P(None, "data", None)


def test_too_many_devices_is_an_error_that_counts_them():
    with pytest.raises(ValueError, match="needs 64 devices and 8 are present"):
        make_mesh(16, 4, 1)


def test_unknown_axis_is_named():
    with jax.set_mesh(make_mesh(2)), pytest.raises(ValueError, match="'colour'"):
        constrain(jnp.zeros((2, 2)), "batch", "colour")
