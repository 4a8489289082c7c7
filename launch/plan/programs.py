"""The device programs of a run, from abstract shapes: the trainer's own functions, no weights.

Every program is taken at its largest shape: full rows of ``prompt.max_context`` tokens, as many
as a slice holds, and a cache that is full. Narrower programs of the same run have no more tokens
and need no more memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from envs.stops import stop_states
from jaxcredit import batching
from jaxcredit.episodes import Episode, Status, Step
from jaxcredit.update import MicroBatch, TrainState
from launch import assemble, learn, sampling, train
from launch.assemble import Parts
from launch.config import TrainConfig
from launch.errors import UserError, user_errors
from launch.learn import Setup
from launch.plan.hardware import Topology
from launch.plan.ledger import bytes_per_device
from models import hf, sharding
from models import programs as samplers
from models.config import QwenConfig
from models.known import known_config
from models.params import is_spec, param_count
from models.score import scoring_program


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that can be traced and compiled.

    Attributes:
      name: such as "update: accumulate".
      shape: rows and tokens of its largest call, over all devices.
      calls: calls per iteration if every row is full; None where only the episodes decide.
      function: the jitted function.
      args: abstract arguments with their shardings.
      static: keyword arguments.
      live: bytes per device of everything that is held meanwhile, its own arguments included.
      rounds: how often its loop over new tokens runs; it reads its arguments that often.
      differentiated: whether a backward pass follows the forward pass.
    """

    name: str
    shape: tuple[int, int]
    calls: int | None
    function: Any
    args: tuple[Any, ...]
    static: Mapping[str, Any]
    live: Mapping[str, float]
    rounds: int = 1
    differentiated: bool = False

    @property
    def phase(self) -> str:
        """ "rollout", "score" or "update"."""
        return self.name.partition(":")[0]


PHASES = ("rollout", "score", "update")


def architecture(config: TrainConfig) -> tuple[QwenConfig, str]:
    """The policy's sizes, and where they were taken from; weights are not read.

    Raises:
      UserError: ``policy.path`` holds no config.json and is not the name of a known checkpoint.
    """
    path = config.policy.path
    if path is None:
        tokenizer = assemble.tokenizer_for(config)
        return assemble.fresh_sizes(config.policy, tokenizer, 0), "policy.init"
    if (Path(path) / "config.json").is_file():
        with user_errors(f"policy.path: {path}", OSError, ValueError, KeyError):
            return hf.load_config(path), f"{path}/config.json"
    try:
        return known_config(path.name), f"the published sizes of {path.name} ({path} is not here)"
    except ValueError as error:
        raise UserError(f"policy.path: {path} holds no config.json, and {error}") from error


def about(config: TrainConfig, setup: Setup, topology: Topology) -> dict[str, Any]:
    """What a plan is of, in words and numbers."""
    policy, parts = setup.parts.policy, setup.parts
    total = param_count(policy.config)
    trained = sum(math.prod(x.shape) for x in jax.tree.leaves(parts.trainable))
    options = config.policy.lora
    how = "every weight is trained" if options is None else f"LoRA of rank {options.rank}"
    _, source = architecture(config)
    words = (
        f"{total / 1e9:.3g} B parameters by {source}; {how} ({trained / 1e6:.4g} M trained), "
        f"{policy.dtype}, remat {policy.remat}"
    )
    mesh = "mesh: null, so one device is used"
    if policy.mesh is not None:
        sizes = " x ".join(f"{name} {size}" for name, size in policy.mesh.shape.items())
        mesh = f"mesh {sizes}"
    return {
        "platform": topology.platform,
        "mesh": mesh,
        "policy": words,
        "parameters": total,
        "trained_parameters": trained,
        "credit": setup.estimator.name,
        "context_tokens": config.prompt.max_context,
    }


def abstract_setup(config: TrainConfig, topology: Topology, devices: list[Any]) -> Setup:
    """The run's setup with shapes in the place of weights, for the devices of a topology.

    Raises:
      UserError: the config is one that ``train`` refuses, or its mesh does not fit the topology.
    """
    estimator = train.checked_estimator(config)
    sizes, _ = architecture(config)
    assemble.check_attention(config.policy, sizes, topology.platform)
    mesh = assemble.open_mesh(config.mesh, devices)
    policy, specs, frozen_specs = assemble.policy_of(
        config.policy, sizes, mesh, **train.beside_policy(estimator)
    )
    policy = dataclasses.replace(policy, backend=topology.platform)

    def shapes(tree: Any, dtype: Any) -> Any:
        if tree is None:
            return None
        if mesh is None:
            one = SingleDeviceSharding(devices[0])
            places = jax.tree.map(lambda _: one, tree, is_leaf=is_spec)
        else:
            places = sharding.tree_shardings(tree, sizes, mesh)
        return jax.tree.map(
            lambda spec, place: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=place),
            tree,
            places,
            is_leaf=is_spec,
        )

    parts = Parts(
        chat=None,  # type: ignore[arg-type]  # no program needs the tokenizer
        player=None,  # type: ignore[arg-type]
        policy=policy,
        trainable=shapes(specs, jnp.float32),
        frozen=shapes(frozen_specs, jnp.dtype(config.policy.dtype)),
        specs=specs,
        stop_ids=sizes.eos_token_ids or (0,),
    )
    return train.setup_of(config, parts, estimator)


def abstract_state(setup: Setup, device: Any) -> TrainState:
    """The shapes of the training state, with their shardings."""
    parts = setup.parts

    def initial(trainable: Any) -> TrainState:
        inside = dataclasses.replace(parts, trainable=trainable)
        return train.initial_state(dataclasses.replace(setup, parts=inside, shardings=None))

    state = jax.eval_shape(initial, parts.trainable)
    places = setup.shardings
    if places is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(device), state)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
    )


def programs(setup: Setup, devices: list[Any]) -> Iterator[Program]:
    """Every program of an iteration, in the order of the line.

    Args:
      setup: from :func:`abstract_setup`.
      devices: of the topology.
    """
    state = abstract_state(setup, devices[0])
    parts = setup.parts
    always = {
        "parameters": bytes_per_device((state.trainable, parts.frozen)),
        "initial copy": bytes_per_device(parts.trainable),
        "optimiser": bytes_per_device(state.opt_state),
    }
    yield from _rollout(setup, state, always, devices[0])
    yield from _scoring(setup, state, always, devices[0])
    yield from _update(setup, state, always, devices[0])


def _slice_shape(setup: Setup) -> tuple[int, int]:
    """Rows and width of the widest slice."""
    rows = _full_slice(setup)["tokens"].shape
    return rows[0], rows[1]


def _full_slice(setup: Setup) -> dict[str, np.ndarray]:
    """A slice of full rows as the trainer itself cuts it."""
    mesh, width = setup.parts.policy.mesh, setup.scoring.buckets[-1]
    ids = np.zeros(width - 1, np.int32)
    last = np.zeros(1, np.float32)
    step = Step(ids, ids[:1], last, last == 0, "stop")
    episode = Episode("", 0, 0, (step,), 0.0, False, Status.FAILURE)
    batch = batching.batch_episodes([episode], max_steps=1, length_multiple=1)
    (widest,) = batching.length_slices(
        batching.row_lengths(batch),
        tokens=setup.scoring.tokens,
        buckets=setup.scoring.buckets,
        multiple=1 if mesh is None else mesh.shape["data"],
    )
    return batching.take_rows(batch, widest)


def _abstract_rows(setup: Setup, rows: Mapping[str, Any], device: Any) -> dict[str, Any]:
    mesh = setup.parts.policy.mesh
    place = SingleDeviceSharding(device) if mesh is None else sharding.batch_sharding(mesh)
    return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for n, x in rows.items()}


def _row_count(config: TrainConfig, episodes: int) -> int | None:
    """Rows of so many episodes; in windows there is one per step, and only the episodes know."""
    return episodes if config.prompt.context == "conversation" else None


def _calls(setup: Setup, episodes: int) -> int | None:
    rows = _row_count(setup.config, episodes)
    return None if rows is None else -(-rows // _slice_shape(setup)[0])


def _episodes(config: TrainConfig) -> int:
    return config.rollout.tasks_per_iteration * config.rollout.group_size


def _rollout(
    setup: Setup, state: TrainState, always: dict[str, float], device: Any
) -> Iterator[Program]:
    config, parts = setup.config, setup.parts
    sizes, mesh = parts.policy.config, parts.policy.mesh
    settings = sampling.sampler_settings(config, mesh, parts.stop_ids, config.rollout.temperature)
    among, capacity = samplers.replicas(mesh), settings.spans[-1]
    weights, adapters = jax.eval_shape(parts.policy.weights, state.trainable, parts.frozen)
    dtype, own_dtype = sampling.cache_dtype(config), weights["embed"].dtype
    cache = jax.eval_shape(lambda: samplers.empty_cache(sizes, settings, dtype, own_dtype, mesh))

    if mesh is None:
        one = SingleDeviceSharding(device)
        places, cache_places = jax.tree.map(lambda _: one, ((weights, adapters), cache))
    else:
        places = sampling.sampler_places(parts, adapters)
        cache_places = samplers.cache_shardings(sizes, mesh)
    weights, adapters = samplers.by_layer(weights, adapters, sizes, places)
    cache = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), cache, cache_places
    )
    own = bytes_per_device((weights, adapters))
    if mesh is None or mesh.size == 1:  # outside the layers, what has the right type is not copied
        same = (state.trainable if parts.frozen is None else parts.frozen)["params"]
        outside = {name: part for name, part in same.items() if name != "layers"}
        own -= bytes_per_device(outside) if same["embed"].dtype == own_dtype else 0
    live = {**always, "sampler's weights": max(own, 0.0), "cache": bytes_per_device(cache)}
    prefill, decode = samplers.jitted(sizes, settings, mesh)
    held, span = (weights, adapters, cache), {"span": capacity}

    def arguments(arrays: Iterable[np.ndarray]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    for width in settings.widths:
        rows = arguments(samplers.idle_prefill(settings, width, among))
        shape = (rows[0].shape[0], width)
        name = f"rollout: prefill {settings.prefill // width} x {width}"
        yield Program(name, shape, None, prefill, (*held, *rows), span, live)
    strings = config.rollout.stop_strings
    table = (len(stop_states(strings)), sizes.vocab_size)
    rows = arguments(samplers.idle_decode(settings, among))
    yield Program(
        "rollout: decode",
        (rows[0].shape[0], settings.block),
        None,
        decode,
        (
            *held,
            *rows,
            jax.ShapeDtypeStruct((), np.int32),
            jax.ShapeDtypeStruct((), np.float32),
            jax.ShapeDtypeStruct(table, np.int32) if strings else None,
        ),
        span,
        live,
        rounds=settings.block,
    )


def _scoring(
    setup: Setup, state: TrainState, always: dict[str, float], device: Any
) -> Iterator[Program]:
    config, parts, needs = setup.config, setup.parts, setup.estimator.needs
    rows = _abstract_rows(setup, _full_slice(setup), device)
    live = {**always, "batch": bytes_per_device(rows)}
    shape, steps = _slice_shape(setup), config.env.max_steps
    calls = _calls(setup, _episodes(config))

    def scoring(
        name: str,
        policy: Any,
        weights: Any,
        frozen: Any,
        layers: Any,
        head: bool,
        calls: int | None = calls,
    ) -> Program:
        function = scoring_program(policy, layers, steps, head)
        return Program(name, shape, calls, function, (weights, frozen, rows), {}, live)

    policy, step_graph, head = learn.first_pass(setup)
    if head or step_graph:
        layers = setup.scoring.layers if step_graph else ()
        what = [
            *(["log-probabilities"] if head else []),
            *(["values"] if head and policy.value_head else []),
            *(["step graph"] if step_graph else []),
        ]
        name = f"score: {', '.join(what)}"
        yield scoring(name, policy, state.trainable, parts.frozen, layers, head)
    if not head:
        few = min(_episodes(config), config.agreement.rows)
        policy = learn.plain(setup.parts.policy)
        calls = _calls(setup, few)
        yield scoring("score: agreement", policy, state.trainable, parts.frozen, (), True, calls)
    if learn.wants_reference(setup):
        policy, weights = learn.reference(setup)
        yield scoring("score: reference", policy, weights, None, (), True)
    if "hindsight_logp" in needs:
        policy = learn.plain(setup.parts.policy)
        yield scoring("score: hindsight", policy, state.trainable, parts.frozen, (), True)


def _update(
    setup: Setup, state: TrainState, always: dict[str, float], device: Any
) -> Iterator[Program]:
    config, parts = setup.config, setup.parts
    rows = _full_slice(setup)
    names = ["weight", "advantage", "old_logp"]
    names += ["ref_logp"] if learn.wants_reference(setup) else []
    names += ["target", "old_value"] if parts.policy.value_head else []
    names += ["reward_slope"] if parts.policy.reward_model else []
    numbers = dict.fromkeys(names, np.zeros(rows["tokens"].shape, np.float32))
    ids = {name: rows[name] for name in ("tokens", "position", "segment")}
    micro = MicroBatch(**_abstract_rows(setup, {**ids, **numbers}, device))
    said = jax.eval_shape(parts.policy.evaluate, state.trainable, parts.frozen, micro)
    targets = said.heads or {}
    micro = dataclasses.replace(
        micro,
        head_target=_abstract_rows(setup, targets, device),
        head_weight=_abstract_rows(setup, dict.fromkeys(targets, numbers["weight"]), device),
    )
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), state.trainable
    )
    live = {**always, "gradients": bytes_per_device(grads)}
    size = config.optimizer.minibatch_episodes or _episodes(config)
    steps = -(-_episodes(config) // size) * config.optimizer.epochs
    calls = _calls(setup, size)
    yield Program(
        "update: accumulate",
        _slice_shape(setup),
        None if calls is None else calls * steps,
        setup.update.accumulate,
        (state, parts.frozen, grads, micro),
        {},
        {**live, "batch": bytes_per_device(micro)},
        differentiated=True,
    )
    yield Program("update: apply", (0, 0), steps, setup.update.apply, (state, grads), {}, live)
