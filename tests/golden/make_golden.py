"""Writes the reference files of this folder with transformers and torch, on CPU in float32.

    python tests/golden/make_golden.py        # needs torch, transformers, safetensors, numpy

Three random policies: Qwen2's ``tied`` (2 layers, one key-value head) and ``untied`` (3 layers, 4
query and 2 key-value heads), and ``qwen3`` (2 layers, tied, heads that together are wider than
the stream). For each: the Hugging Face folder, logits of a short right-padded batch, a strided
subset of the logits of a 520-token prompt (rotary errors grow with position), and every attention
matrix of a 60-token prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
COMMON = {
    "vocab_size": 192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
POLICIES = {
    "tied": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "untied": {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "qwen3": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}
LENGTHS = (24, 17, 9)
LONG = 520
PROMPT = 60


def build(name: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(len(name))
    settings = {**COMMON, **POLICIES[name], **changes}
    if name == "qwen3":
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**settings), attn_implementation="eager")
    else:
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**settings), attn_implementation="eager")
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # Larger than a fresh model's, so that attention is peaked and logits spread out;
            # biases and norms away from 0 and 1, so that leaving one out shows.
            if "norm" in key:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            elif key.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
            else:
                weight.copy_(0.25 * torch.randn_like(weight))
    return model.eval()


def record(model: PreTrainedModel) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    short = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    mask = np.zeros_like(short)
    for row, length in enumerate(LENGTHS):
        short[row, :length] = rng.integers(2, COMMON["vocab_size"], length)
        mask[row, :length] = 1
    long = rng.integers(2, COMMON["vocab_size"], (1, LONG)).astype(np.int32)
    prompt = rng.integers(2, COMMON["vocab_size"], (1, PROMPT)).astype(np.int32)
    at = np.unique(np.append(np.arange(0, LONG, 24), LONG - 1))
    with torch.no_grad():
        a = model(torch.tensor(short).long(), attention_mask=torch.tensor(mask)).logits
        b = model(torch.tensor(long).long()).logits
        c = model(torch.tensor(prompt).long(), output_attentions=True)
    return {
        "short_tokens": short,
        "short_mask": mask,
        "short_logits": a.numpy(),
        "long_tokens": long,
        "long_at": at.astype(np.int32),
        "long_logits": b[0, at].numpy(),
        "prompt_tokens": prompt,
        "prompt_attention": np.stack([x[0].numpy() for x in c.attentions]),
    }


def main() -> None:
    for name in POLICIES:
        model = build(name)
        model.save_pretrained(HERE / name)
        np.savez_compressed(HERE / f"{name}.npz", **record(model))
        generation = {"eos_token_id": [1, 3], "pad_token_id": 0}
        (HERE / name / "generation_config.json").write_text(json.dumps(generation) + "\n")


if __name__ == "__main__":
    main()
