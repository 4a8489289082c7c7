"""What samples in a run: the sampler in this process, or the client of a server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from envs.engine import Engine, EngineSettings
from envs.rollout import Player
from launch.assemble import Parts
from launch.config import TrainConfig
from launch.errors import UserError, user_errors
from launch.keys import api_key
from models import hf, params, sharding
from models.programs import replicas
from models.sampler import Sampler, SamplerConfig


def sampler_settings(
    config: TrainConfig, mesh: Mesh | None, stop_ids: tuple[int, ...], temperature: float
) -> SamplerConfig:
    """The shapes and settings that each replica of a mesh samples with: its share, rounded up."""
    rollout, among = config.rollout, replicas(mesh)
    rows = rollout.decode_rows
    return SamplerConfig(
        slots=-(-rollout.slots // among),
        capacity=config.prompt.max_context,
        max_response=rollout.max_response_tokens,
        rows=None if rows is None else -(-rows // among),
        block=rollout.decode_block,
        prefill=rollout.prefill_tokens,
        stop_ids=stop_ids,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )


def cache_dtype(config: TrainConfig) -> Any:
    """Of the sampler's keys and values."""
    return jnp.dtype(config.rollout.cache_dtype or config.policy.dtype)


def sampler_places(parts: Parts, adapters: Any) -> tuple[Any, Any]:
    """Shardings of the sampler's weights and of these adapters (None without any) on the mesh."""
    assert parts.policy.mesh is not None
    to = functools.partial(
        sharding.tree_shardings,
        config=parts.policy.config,
        mesh=parts.policy.mesh,
        rules=sharding.SAMPLER_RULES,
    )
    if adapters is not None:
        adapters = dataclasses.replace(adapters, weights=to(parts.specs["adapters"]))
    return to(params.param_specs(parts.policy.config)), adapters


def make_sampler(
    parts: Parts, trainable: Any, config: TrainConfig, *, temperature: float
) -> Sampler:
    """A sampler that holds the given weights."""
    weights, adapters = parts.policy.weights(trainable, parts.frozen)
    sizes, mesh = parts.policy.config, parts.policy.mesh
    settings = sampler_settings(config, mesh, parts.stop_ids, temperature)
    return Sampler(
        weights,
        sizes,
        settings,
        adapters=adapters,
        seed=config.seed,
        dtype=cache_dtype(config),
        stop_table=parts.stop_table,
        mesh=mesh,
        places=None if mesh is None else sampler_places(parts, adapters),
    )


def closing(sampler: Any) -> contextlib.AbstractContextManager[Any]:
    """Ends a served policy's requests at the end; nothing for a sampler in this process."""
    return sampler if isinstance(sampler, Engine) else contextlib.nullcontext()


def make_engine(player: Player, config: TrainConfig, *, temperature: float) -> Engine:
    """The client of the configured server; reads no weights and does not connect yet.

    Raises ``UserError`` if no folder names the policy's end-of-message ids, or the key is missing.
    """
    options, rollout, folder = config.engine, config.rollout, config.policy.path
    assert options is not None
    if folder is None:
        raise UserError(
            f"engine: {options.url} holds weights alone; name the folder of its policy's "
            "tokenizer with --policy FOLDER"
        )
    key = None
    if options.key_variable is not None:
        key = api_key("engine.key_variable", options.key_variable)
    with user_errors(f"policy.path: {folder}", OSError, ValueError):
        stop_ids = {*hf.stop_ids(folder), player.chat.end_id}
    settings = EngineSettings(
        url=options.url,
        model=options.model,
        slots=rollout.slots,
        stop_ids=tuple(sorted(stop_ids)),
        stop_strings=rollout.stop_strings,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        key=key,
        deadline_s=options.deadline_s,
        concurrency=options.concurrency,
    )
    return Engine(settings, seed=config.seed)
