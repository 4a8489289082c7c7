"""Adapters in PEFT's layout: the files alone give the merged weights."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import hf, lora, peft
from models.config import QwenConfig
from models.params import init_params

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def tiny(model_type):
    return QwenConfig(
        vocab_size=37,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        model_type=model_type,
    )


def trained(config, targets, rank=3, alpha=5.0):
    adapters = lora.init_adapters(config, jax.random.key(1), rank, alpha, targets)
    return jax.tree.map(lambda x: x + 0.1, adapters)


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [("qwen2", lora.TARGETS), ("qwen3", ("gate", "up", "down")), ("qwen3", ("q", "o"))],
)
def test_files_give_the_merged_weights(tmp_path, model_type, targets):
    config = tiny(model_type)
    params, adapters = init_params(config, jax.random.key(0)), trained(config, targets)
    hf.save_policy(tmp_path / "base", config, params, jnp.float32)
    hf.save_policy(tmp_path / "merged", config, lora.merge(params, adapters), jnp.float32)
    peft.save_adapters(tmp_path / "adapters", config, adapters, base="base")
    base, merged = (load_file(tmp_path / x / "model.safetensors") for x in ("base", "merged"))
    low = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert settings["base_model_name_or_path"] == "base"
    assert (settings["r"], settings["lora_alpha"]) == (3, 5)
    assert settings["target_modules"] == sorted(MODULES[t].split(".")[1] for t in targets)
    changed = {f"model.layers.{i}.{MODULES[t]}" for i in (0, 1) for t in targets}
    assert low.keys() == {
        f"base_model.model.{name}.lora_{x}.weight" for name in changed for x in "AB"
    }
    for key, weight in base.items():
        name = key.removesuffix(".weight")
        if name not in changed:
            np.testing.assert_array_equal(merged[key], weight)
            continue
        a, b = (low[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        assert a.shape == (3, weight.shape[1])
        assert np.abs(merged[key] - weight).max() > 0.01
        want = weight + settings["lora_alpha"] / settings["r"] * b @ a
        np.testing.assert_allclose(merged[key], want, atol=1e-6)


def test_alpha_keeps_its_value(tmp_path):
    config = tiny("qwen3")
    for rank, alpha in ((49, 1.0), (3, 0.5), (7, 64.0)):
        folder = tmp_path / f"{rank}"
        peft.save_adapters(folder, config, trained(config, ("v",), rank, alpha))
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert settings["lora_alpha"] == pytest.approx(alpha, rel=1e-12)
        assert isinstance(settings["lora_alpha"], int) == (alpha != 0.5)
        assert settings["base_model_name_or_path"] is None


def test_other_shapes_and_full_folders_are_refused(tmp_path):
    config = tiny("qwen2")
    adapters = trained(config, ("q", "down"))
    wide = QwenConfig(**{**config.__dict__, "intermediate_size": 16})
    with pytest.raises(ValueError, match=r"down\.a has shape \(2, 12, 3\).*\(2, 16, 3\)"):
        peft.save_adapters(tmp_path, wide, adapters)
    peft.save_adapters(tmp_path, config, adapters, dtype=jnp.bfloat16)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {x.dtype.name for x in stored.values()} == {"bfloat16"}
    with pytest.raises(FileExistsError, match="already holds"):
        peft.save_adapters(tmp_path, config, adapters)
