"""config.json: every published size is read, and what is not computed is refused by name."""

from __future__ import annotations

import pytest

from models.config import QwenConfig
from models.params import param_count

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "use_mrope": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3 = {
    **{k: v for k, v in QWEN2.items() if k != "use_mrope"},
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "sliding_window": None,
}
# D, F, L, H, G, V, tied, and the number of weights that the model cards and files state.
SIZES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True, 494_032_768),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True, 1_543_714_304),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True, 3_085_938_688),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False, 14_770_033_664),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, False, 32_763_876_352),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 152064, False, 72_706_203_648),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151936, True, 596_049_920),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151936, True, 1_720_574_976),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True, 4_022_468_096),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 151936, False, 8_190_735_360),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, 151936, False, 14_768_307_200),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 151936, False, 32_762_123_264),
}


def published(name):
    """The config.json of a published size, apart from keys that nothing reads."""
    D, F, L, H, G, V, tied, _ = SIZES[name]
    return {
        **(QWEN3 if name.startswith("Qwen3") else QWEN2),
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "vocab_size": V,
        "tie_word_embeddings": tied,
    }


@pytest.mark.parametrize("name", SIZES)
def test_every_published_size_is_read(name):
    config = QwenConfig.from_hf(published(name))
    assert param_count(config) == SIZES[name][-1]
    assert config.head_dim == (64 if name == "Qwen2.5-0.5B" else 128)
    assert QwenConfig.from_hf(config.to_hf()) == config
    written = config.to_hf()
    for key, value in published(name).items():
        if key not in ("max_window_layers", "sliding_window", "use_mrope", "bos_token_id"):
            assert written.get(key) == ([value] if key == "eos_token_id" else value), key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe', a mixture of experts"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', a mixture of experts"),
        ({"model_type": "qwen2_vl"}, "'qwen2_vl', a vision-language"),
        ({"model_type": "qwen2_5_vl"}, "'qwen2_5_vl', a vision-language"),
        ({"model_type": "qwen3_vl_moe"}, "'qwen3_vl_moe', a vision-language"),
        ({"model_type": "qwen2_audio"}, "'qwen2_audio', an audio-language"),
        ({"model_type": "qwen3_omni_moe"}, "'qwen3_omni_moe', a model of text, images and sound"),
        ({"model_type": "llama"}, r"model_type is 'llama'; expected one of \['qwen2', 'qwen3'\]"),
        ({"model_type": None}, "lacks model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling asks for 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.*'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling asks for 'linear'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"factor": 4.0}}, r"rope_scaling holds \['factor'\]"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.*'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"use_mrope": True}, "use_mrope is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"eos_token_id": 999_999}, "999999"),
    ],
)
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-0.6B"])
def test_what_is_not_computed_is_refused_by_name(name, change, words):
    with pytest.raises(ValueError, match=words) as caught:
        QwenConfig.from_hf({**published(name), **change})
    assert "\n" not in str(caught.value)


def test_families_are_not_mixed_up():
    two, three = published("Qwen2.5-0.5B"), published("Qwen3-0.6B")
    with pytest.raises(ValueError, match=r"attention_bias is False, but qwen2 has biases"):
        QwenConfig.from_hf({**two, "attention_bias": False})
    with pytest.raises(ValueError, match=r"attention_bias is True, but qwen3 has no biases"):
        QwenConfig.from_hf({**three, "attention_bias": True})
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM.*model_type is 'qwen3'"):
        QwenConfig.from_hf({**three, "architectures": two["architectures"]})
    with pytest.raises(ValueError, match="lacks head_dim"):
        QwenConfig.from_hf({**three, "head_dim": None})
    assert QwenConfig.from_hf({**two, "attention_bias": True}) == QwenConfig.from_hf(two)
    with pytest.raises(ValueError, match="'qwen3_moe', a mixture of experts"):
        QwenConfig(61, 16, 24, 3, 4, 2, 4, model_type="qwen3_moe")


def test_rotary_base_is_found_in_either_place():
    for hf in (published("Qwen2.5-0.5B"), published("Qwen3-0.6B")):
        assert QwenConfig.from_hf({**hf, "rope_theta": 5e4}).rope_theta == 5e4
        newer = {k: v for k, v in hf.items() if k not in ("rope_theta", "rope_scaling")}
        newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e4}
        assert QwenConfig.from_hf(newer).rope_theta == 7e4
        with pytest.raises(ValueError, match="lacks rope_theta"):
            QwenConfig.from_hf({k: v for k, v in newer.items() if k != "rope_parameters"})
