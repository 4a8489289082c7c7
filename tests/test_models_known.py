"""Known architectures have the published numbers of parameters."""

from __future__ import annotations

import pytest

from models.known import known_config, known_names
from models.params import param_count

# Totals that the checkpoints' own safetensors metadata state.
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
}


def test_every_known_checkpoint_has_its_published_size():
    assert {name: param_count(known_config(name)) for name in known_names()} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("qwen2.5-coder-32b-instruct", "Qwen2.5-32B"),
        ("Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("Qwen3-8B-Base", "Qwen3-8B"),
    ],
)
def test_variants_share_their_sizes(name, same):
    assert known_config(name) == known_config(same)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen2.5-VL-7B", "Qwen2.5-4B", "Llama-3-8B"])
def test_other_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"no known checkpoint; known are Qwen2.5-0.5B"):
        known_config(name)
