"""Architectures of published Qwen checkpoints by folder name, for plans without weights.

Sizes are those of the checkpoints' config.json files (Qwen2.5 Technical Report, arXiv 2412.15115,
Table 1; Qwen3 Technical Report, arXiv 2505.09388, Table 1). What a plan does not depend on (stop
ids, epsilon) keeps its default.
"""

from __future__ import annotations

import re

from models.config import QwenConfig

# hidden, intermediate, layers, query heads, key-value heads, head size, vocabulary, tied
_QWEN25 = {
    "0.5B": (896, 4864, 24, 14, 2, 64, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 128, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 128, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 128, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 128, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 128, 152_064, False),
    "72B": (8192, 29_568, 80, 64, 8, 128, 152_064, False),
}
_QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "4B": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "8B": (4096, 12_288, 36, 32, 8, 128, 151_936, False),
    "14B": (5120, 17_408, 40, 40, 8, 128, 151_936, False),
    "32B": (5120, 25_600, 64, 64, 8, 128, 151_936, False),
}
_NAME = re.compile(
    r"(?P<family>Qwen2\.5|Qwen3)(-Coder|-Math)?-(?P<size>[\d.]+B)(-Base|-Instruct)?(-\d{4})?",
    re.IGNORECASE,
)


def known_names() -> tuple[str, ...]:
    """The names without variants, in order of family and size."""
    return (*(f"Qwen2.5-{size}" for size in _QWEN25), *(f"Qwen3-{size}" for size in _QWEN3))


def known_config(name: str) -> QwenConfig:
    """The architecture of a published checkpoint.

    Args:
      name: such as "Qwen2.5-7B-Instruct", "Qwen2.5-Coder-32B" or "Qwen3-4B-Instruct-2507".

    Raises:
      ValueError: the name is none of a known checkpoint.
    """
    found = _NAME.fullmatch(name)
    table = {"qwen2.5": _QWEN25, "qwen3": _QWEN3}
    row = None
    if found is not None:
        row = table[found["family"].lower()].get(found["size"].upper())
    if found is None or row is None:
        raise ValueError(
            f"{name!r} is the name of no known checkpoint; known are {', '.join(known_names())} "
            "and their Instruct, Coder and Math variants"
        )
    sizes = dict(
        zip(
            (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "vocab_size",
                "tie_word_embeddings",
            ),
            row,
            strict=True,
        )
    )
    third = found["family"].lower() == "qwen3"
    return QwenConfig(
        **sizes,  # type: ignore[arg-type]
        model_type="qwen3" if third else "qwen2",
        max_position_embeddings=40_960 if third else 32_768,
    )
