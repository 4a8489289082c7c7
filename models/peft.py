"""LoRA adapters in PEFT's layout on disk, which transformers and serving engines load.

    adapter_config.json         rank, alpha and the names of the adapted modules
    adapter_model.safetensors   base_model.model.model.layers.N.MODULE.lora_A.weight   [r, in]
                                base_model.model.model.layers.N.MODULE.lora_B.weight   [out, r]

A module computes x W^T + (alpha / r) (x lora_A^T) lora_B^T: ours are the transposes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.config import QwenConfig
from models.hf import LAYER_TENSORS, write_json, write_tensors
from models.lora import Adapters, adapter_specs

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def save_adapters(
    folder: str | os.PathLike[str],
    config: QwenConfig,
    adapters: Adapters,
    *,
    base: str | None = None,
    dtype: Any = jnp.float32,
) -> None:
    """Writes adapters without their base.

    Args:
      folder: created if needed; must not hold weights already.
      config: the architecture that the adapters belong to.
      adapters: one pair of matrices or more; all have one rank.
      base: name or folder of the base weights, for loaders that look it up; None leaves it open.
      dtype: stored dtype (float32, bfloat16 or float16).

    Raises:
      FileExistsError: the folder already holds safetensors.
      ValueError: a matrix does not have the shape that ``config`` implies.
    """
    folder = Path(folder)
    rank = int(next(iter(adapters.weights.values()))["a"].shape[-1])
    specs = adapter_specs(config, rank, tuple(adapters.weights))
    modules, tensors = [], {}
    for name, pair in adapters.weights.items():
        module = LAYER_TENSORS[name][0].removesuffix(".weight")
        modules.append(module.rpartition(".")[2])
        for part, letter in (("a", "A"), ("b", "B")):
            stacked = np.asarray(pair[part], np.dtype(dtype))
            if stacked.shape != specs[name][part].shape:
                raise ValueError(
                    f"adapter {name}.{part} has shape {stacked.shape}; config implies "
                    f"{specs[name][part].shape}"
                )
            for layer, matrix in enumerate(stacked):
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{letter}.weight"
                tensors[key] = np.ascontiguousarray(matrix.T)
    folder.mkdir(parents=True, exist_ok=True)
    if list(folder.glob("*.safetensors")):
        raise FileExistsError(f"{folder} already holds weights; choose another folder")
    write_tensors(folder / WEIGHTS, tensors)
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": _alpha(adapters.scale, rank),
            "lora_dropout": 0.0,
            "target_modules": sorted(modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "layers_to_transform": None,
            "rank_pattern": {},
            "alpha_pattern": {},
        },
    )


def _alpha(scale: float, rank: int) -> float:
    """scale * rank, as the whole number it was where it was one: readers may expect an int."""
    alpha = scale * rank
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha
