"""Policies as Hugging Face folders (``config.json`` and safetensors), without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from models.config import QwenConfig, token_ids
from models.params import Params, is_spec, param_specs

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Our name within a layer -> (Hugging Face name, whether the matrix is stored transposed).
LAYER_TENSORS = {
    "input_norm": ("input_layernorm.weight", False),
    "q": ("self_attn.q_proj.weight", True),
    "q_bias": ("self_attn.q_proj.bias", False),
    "k": ("self_attn.k_proj.weight", True),
    "k_bias": ("self_attn.k_proj.bias", False),
    "v": ("self_attn.v_proj.weight", True),
    "v_bias": ("self_attn.v_proj.bias", False),
    "q_norm": ("self_attn.q_norm.weight", False),
    "k_norm": ("self_attn.k_norm.weight", False),
    "o": ("self_attn.o_proj.weight", True),
    "post_norm": ("post_attention_layernorm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
}
_TOP = {
    "embed": ("model.embed_tokens.weight", False),
    "final_norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
}


def load_policy(
    folder: str | os.PathLike[str],
    dtype: Any = jnp.float32,
    shardings: Callable[[QwenConfig], Params] | None = None,
) -> tuple[QwenConfig, Params]:
    """Reads a Qwen2.5 or Qwen3 policy.

    Args:
      folder: holds config.json, model.safetensors or its sharded index, and optionally
        generation_config.json, whose end-of-message ids are added to those of config.json.
      dtype: dtype of the returned weights, whatever the files hold.
      shardings: gives the tree of ``jax.sharding.Sharding`` that the weights should have; each
        process then reads the bytes of its own devices only. None: whole, on the default device.

    Returns:
      ``(config, params)`` with layers stacked.

    Raises:
      FileNotFoundError: the folder, its config or its weights are missing.
      ValueError: the architecture is unsupported, or tensors are missing, unexpected or of
        another shape than config.json implies; the message names each.
    """
    folder = Path(folder)
    config = load_config(folder)
    with ExitStack() as stack:
        read, shapes = _open(folder, stack)
        expected = {name: shape for name, shape, _ in _hf_tensors(config)}
        _compare(folder, config, shapes, expected)
        specs = param_specs(config)
        places = jax.tree.map(lambda _: None, specs, is_leaf=is_spec)
        if shardings is not None:
            places = shardings(config)
        params: Params = {
            name: _array(partial(_part, read, hf, flip), specs[name].shape, dtype, places[name])
            for name, (hf, flip) in _TOP.items()
            if name in specs
        }
        params["layers"] = {
            name: _array(
                partial(_stacked_part, read, hf, flip, config.num_hidden_layers),
                specs["layers"][name].shape,
                dtype,
                places["layers"][name],
            )
            for name, (hf, flip) in LAYER_TENSORS.items()
            if name in specs["layers"]
        }
    return config, params


def load_config(folder: str | os.PathLike[str]) -> QwenConfig:
    """The architecture alone, end-of-message ids of generation_config.json included."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"policy folder {folder} does not exist; give a Hugging Face folder"
        )
    hf = _read_json(folder / "config.json")
    hf["eos_token_id"] = list(stop_ids(folder))
    return QwenConfig.from_hf(hf)


def stop_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Every end-of-message id of config.json and generation_config.json, of any architecture.

    A file that is missing names none.
    """
    paths = [Path(folder) / name for name in ("config.json", "generation_config.json")]
    found = [token_ids(_read_json(p).get("eos_token_id")) for p in paths if p.is_file()]
    return tuple(dict.fromkeys(token for ids in found for token in ids))


def save_policy(
    folder: str | os.PathLike[str],
    config: QwenConfig,
    params: Params,
    dtype: Any = jnp.bfloat16,
    *,
    max_shard_bytes: int = 4 * 1024**3,
) -> None:
    """Writes config.json, generation_config.json and safetensors that transformers can load.

    Args:
      folder: created if needed; must not hold weights already.
      config, params: the policy; merge adapters first (``models.lora.merge``).
      dtype: stored dtype (float32, bfloat16 or float16).
      max_shard_bytes: a new file starts when a tensor would not fit; a single file has no index.

    Raises:
      FileExistsError: the folder already holds safetensors.
      ValueError: a tensor of ``params`` does not have the shape that ``config`` implies.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if list(folder.glob("*.safetensors")):
        raise FileExistsError(f"{folder} already holds weights; choose another folder")
    stored = np.dtype(dtype)
    tensors = list(_hf_tensors(config))
    sizes = [int(np.prod(shape)) * stored.itemsize for _, shape, _ in tensors]
    shards: list[list[int]] = [[]]
    used = 0
    for i, size in enumerate(sizes):
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(i)
        used += size
    names = [_SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    weight_map = {}
    for file, members in zip(names, shards, strict=True):
        content = {}
        for i in members:
            name, shape, pick = tensors[i]
            value = np.asarray(pick(params), dtype=stored)
            if value.shape != shape:
                raise ValueError(f"{name} has shape {value.shape}; config implies {shape}")
            content[name] = np.ascontiguousarray(value)
            weight_map[name] = file
        write_tensors(folder / file, content)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_json(folder / _INDEX, index)
    write_json(folder / "config.json", {**config.to_hf(), "dtype": stored.name})
    eos = list(config.eos_token_ids)
    generation = {"eos_token_id": eos, "pad_token_id": config.pad_token_id}
    if eos:
        write_json(folder / "generation_config.json", generation)


Pick = Callable[[Params], np.ndarray]


def _hf_tensors(config: QwenConfig) -> Iterator[tuple[str, tuple[int, ...], Pick]]:
    """Name, stored shape and getter of every tensor in a Hugging Face file of ``config``."""
    specs = param_specs(config)
    for name, (hf, flip) in _TOP.items():
        if name in specs:
            shape = specs[name].shape
            yield hf, shape[::-1] if flip else shape, partial(_pick_top, name, flip)
    for layer in range(config.num_hidden_layers):
        for name, (hf, flip) in LAYER_TENSORS.items():
            if name not in specs["layers"]:
                continue
            shape = specs["layers"][name].shape[1:]
            yield (
                f"model.layers.{layer}.{hf}",
                shape[::-1] if flip else shape,
                partial(_pick_layer, name, layer, flip),
            )


def _pick_top(name: str, flip: bool, params: Params) -> np.ndarray:
    return _oriented(np.asarray(params[name]), flip)


def _pick_layer(name: str, layer: int, flip: bool, params: Params) -> np.ndarray:
    return _oriented(np.asarray(params["layers"][name][layer]), flip)


def _oriented(x: np.ndarray, flip: bool) -> np.ndarray:
    return x.T if flip else x


Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]  # the part of a stored tensor that an index names


def _array(
    part: Callable[[Index, Any], np.ndarray],
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """An array whose parts are read by index, as its sharding asks for them."""
    dtype = np.dtype(dtype)
    if sharding is None:
        return jnp.asarray(part(tuple(slice(0, n) for n in shape), dtype))
    return jax.make_array_from_callback(shape, sharding, lambda index: part(index or (), dtype))


def _part(read: Read, hf: str, flip: bool, index: Index, dtype: np.dtype[Any]) -> np.ndarray:
    # Copied, so that the result does not hold on to the file.
    return np.array(_oriented(read(hf, index[::-1] if flip else index), flip), dtype)


def _stacked_part(
    read: Read, hf: str, flip: bool, count: int, index: Index, dtype: np.dtype[Any]
) -> np.ndarray:
    # Filled layer by layer: the peak is one stacked part, not two copies of it.
    layers, *rest = index
    names = [f"model.layers.{i}.{hf}" for i in range(count)[layers]]
    first = _part(read, names[0], flip, tuple(rest), dtype)
    out = np.empty((len(names), *first.shape), dtype)
    out[0] = first
    for i, name in enumerate(names[1:], 1):
        out[i] = _part(read, name, flip, tuple(rest), dtype)
    return out


def _open(folder: Path, stack: ExitStack) -> tuple[Read, dict[str, tuple[int, ...]]]:
    """Opens the weights lazily: a reader by name and index, and the shape of every tensor."""
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / _INDEX} has no weight_map; download the index again")
        files = sorted(set(weight_map.values()))
        missing = [f for f in files if not (folder / f).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, named by {_INDEX}")
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise FileNotFoundError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}; pickled .bin weights are not read, "
            "so save the model as safetensors"
        )
    where, shapes = {}, {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(folder / file, framework="numpy"))
        except Exception as error:
            raise ValueError(
                f"{folder / file} is not a readable safetensors file: {error}"
            ) from error
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            if name.endswith("rotary_emb.inv_freq"):
                continue
            where[name] = handle
            shapes[name] = tuple(handle.get_slice(name).get_shape())
    return (lambda name, index: where[name].get_slice(name)[index]), shapes


def _compare(
    folder: Path,
    config: QwenConfig,
    found: dict[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
) -> None:
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    if config.tie_word_embeddings:
        extra = [name for name in extra if name != "lm_head.weight"]  # a copy of the table
    wrong = [n for n in expected if n in found and found[n] != expected[n]]
    problems = []
    if missing:
        problems.append(f"missing {_some(missing)}")
    if missing == ["lm_head.weight"]:
        problems.append("(set tie_word_embeddings if the head is the embedding table)")
    if extra:
        problems.append(f"unexpected {_some(extra)}")
    if wrong:
        shapes = [f"{n} found {found[n]}, expected {expected[n]}" for n in wrong]
        problems.append(f"wrong shape: {_some(shapes)}")
    if problems:
        raise ValueError(f"weights in {folder} do not fit its config.json: {'; '.join(problems)}")


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; a policy folder needs it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file, as readable as its folder."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library writes for the owner alone


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


assert ml_dtypes  # registers bfloat16 with numpy, which the files may hold
