"""The sharded policy computes what one device computes."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models import attention, hf, lora, qwen
from models.attention import divisible_heads
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


MESHES = [(d, t, 8 // (d * t)) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * t <= 8]


def loss(adapters, params, tokens, positions, segments, capture, *, config):
    """Everything a mesh could change: hidden states, step graph, log-probabilities, gradients."""
    hidden, graph = qwen.forward(
        params, config, tokens, positions, segments, adapters=adapters, capture=capture
    )
    wanted = (capture.action_step >= 0) & (segments > 0)
    logp, entropy = token_logprobs(
        params, config, hidden, tokens, mask=wanted, chunk=64, entropy=True
    )
    return jnp.sum(jnp.sin(logp)), (hidden, graph, logp, entropy)


@functools.cache
def case(model_type):
    """Arguments of ``loss`` and its value and gradients on one device; half the rows are packed."""
    B, T, K = 8, 32, 3
    config = dataclasses.replace(CONFIG, model_type=model_type)
    params = jax.jit(lambda k: init_params(config, k))(jax.random.key(0))
    adapters = lora.init_adapters(config, jax.random.key(1), 2, 4.0)
    adapters = jax.tree.map(lambda x: x + 0.05, adapters)
    tokens = jax.random.randint(jax.random.key(2), (B, T), 0, 64)
    index = jnp.broadcast_to(jnp.arange(T), (B, T))
    second = (jnp.arange(B) % 2 == 1)[:, None] & (index >= 10)
    segments = jnp.where(index < 28, 1 + second, 0)
    positions = jnp.where(second, index - 10, index)
    step = jnp.where(index % 8 < 3, index // 10, -1)
    capture = Capture((1,), K, step, jnp.where(step < 0, index // 10, -1))
    arguments = (adapters, params, tokens, positions, segments, capture)
    f = jax.value_and_grad(functools.partial(loss, config=config), (0, 1), has_aux=True)
    return config, arguments, f, jax.jit(f)(*arguments)


@pytest.mark.parametrize(
    ("model_type", "data", "tensor", "context"),
    [*(("qwen2", *mesh) for mesh in MESHES), ("qwen3", 2, 2, 2), ("qwen3", 1, 8, 1)],
)
def test_mesh_equals_one_device(model_type, data, tensor, context):
    config, (adapters, params, *rest, capture), f, want = case(model_type)
    mesh = make_mesh(data, tensor, context)
    rows = batch_sharding(mesh)
    specs = lora.adapter_specs(config, 2)
    placed = (
        adapters.replace(
            weights=jax.device_put(adapters.weights, tree_shardings(specs, config, mesh))
        ),
        jax.device_put(params, param_shardings(config, mesh)),
        *(jax.device_put(x, rows) for x in rest),
        jax.tree.map(lambda x: jax.device_put(x, rows), capture),
    )
    with jax.set_mesh(mesh):
        got = jax.jit(f)(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5)


def test_weights_are_split_over_data_and_tensor():
    mesh = make_mesh(2, 2, 2)
    specs = param_specs(CONFIG)
    assert spec_partition(specs["layers"]["gate"], CONFIG, mesh) == P(None, "data", "tensor")
    assert spec_partition(specs["embed"], CONFIG, mesh) == P("tensor", "data")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "want"),
    [
        (28, 4, 4, (1, 7)),  # 7B on four: nothing to repeat
        (28, 4, 8, (2, 8)),  # two copies of each key-value head, one head of padding per group
        (14, 2, 7, (7, 7)),  # 0.5B on seven: one query head each
        (12, 2, 3, (3, 6)),
        (4, 2, 1, (1, 2)),
    ],
)
def test_heads_are_repeated_and_padded_until_they_divide(heads, kv_heads, devices, want):
    copies, per_head = divisible_heads(heads, kv_heads, devices)
    assert (copies, per_head) == want
    assert kv_heads * copies % devices == 0
    assert kv_heads * per_head % devices == 0
    assert per_head % copies == 0  # no query head is apart from its key-value head
    assert per_head * kv_heads >= heads


def test_a_row_that_does_not_split_names_its_width():
    q = jnp.zeros((2, 6, 4, 4))
    with jax.set_mesh(make_mesh(2, 1, 4)), pytest.raises(ValueError, match=r"6 tokens .*context=4"):
        attention.attend(q, q, q, jnp.ones((2, 6), jnp.int32))


def test_logits_are_never_gathered():
    """On a mesh the vocabulary stays split: no device holds a chunk's logits for all ids."""
    _, (adapters, params, *rest, capture), f, _ = case("qwen2")
    mesh = make_mesh(2, 4, 1)
    shardings = param_shardings(CONFIG, mesh)
    placed = jax.device_put(params, shardings)
    rows = [jax.device_put(x, batch_sharding(mesh)) for x in rest]
    with jax.set_mesh(mesh):
        text = jax.jit(f).lower(adapters, placed, *rows, capture).compile().as_text()
    logits = re.findall(r"f32\[(?:\d+,)*64\]", text)  # 64 ids, or 64 tokens of a chunk
    assert "f32[4,16,16]" in text  # rows, tokens of two replicas' chunks, a quarter of the ids
    assert not [x for x in logits if x.count(",") == 2], set(logits)


@pytest.mark.parametrize("name", ["tied", "untied", "qwen3"])
def test_each_device_reads_its_own_part_of_the_files(monkeypatch, name):
    folder = Path(__file__).parent / "golden" / name
    config, want = hf.load_policy(folder)
    mesh = make_mesh(2, 2, 2)
    read = []
    part = hf._part

    def counted(read_, hf_name, flip, index, dtype):
        out = part(read_, hf_name, flip, index, dtype)
        read.append((hf_name, out.size))
        return out

    monkeypatch.setattr(hf, "_part", counted)
    _, got = hf.load_policy(folder, shardings=functools.partial(param_shardings, mesh=mesh))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for leaf, place in zip(
        jax.tree.leaves(got), jax.tree.leaves(param_shardings(config, mesh)), strict=True
    ):
        assert leaf.sharding == place
    parts = [size for hf_name, size in read if hf_name.endswith("gate_proj.weight")]
    layer = want["layers"]["gate"][0].size
    assert set(parts) == {layer // 4}, "a device read more than its quarter of a matrix"


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
