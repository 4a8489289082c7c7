"""Builds the parts of a run from its config: policy, tokenizer, environments, tasks."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envs.chat import ChatFormat, chat_format
from envs.pool import Pool
from envs.prompts import Prompt
from envs.protocol import EnvSpec, Task, task_list_hash
from envs.rollout import Job, Limits, Player
from envs.stops import stop_table
from launch import environments
from launch.config import (
    ROW_MULTIPLE,
    EnvConfig,
    MeshConfig,
    PolicyConfig,
    PromptConfig,
    SftConfig,
    TrainConfig,
)
from launch.errors import UserError, user_errors
from models import heads, hf, lora, params, sharding, value
from models.attention import Case, select
from models.config import QwenConfig
from models.policy import Policy, weight_specs
from models.step_graph import check_layers, default_layers


@dataclasses.dataclass(frozen=True)
class Parts:
    """What training and evaluation share."""

    chat: ChatFormat
    player: Player
    policy: Policy
    trainable: Any
    frozen: Any
    specs: Any  # of ``trainable``
    stop_ids: tuple[int, ...]
    stop_table: np.ndarray | None = None  # of the configured stop strings


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a policy folder, exactly as its tokenizer.json says.

    Not by ``AutoTokenizer``: for a folder whose config.json says qwen2 it puts Qwen's own
    splitting rules in the place of the file's.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that torch is absent
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"tokenizer: {folder} holds no tokenizer.json; name a folder that does")
    with user_errors(f"tokenizer: {folder}", OSError, ValueError):
        return PreTrainedTokenizerFast.from_pretrained(folder)


def tokenizer_for(config: TrainConfig | SftConfig) -> Any:
    """The configured tokenizer; a policy made from scratch gets the environment's words."""
    folder = config.tokenizer or config.policy.path
    if folder is not None:
        return load_tokenizer(folder)
    from envs.tokenizer import word_tokenizer

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return word_tokenizer(environments.family(config.env).words())


def make_prompt(config: PromptConfig) -> Prompt:
    """The prompt of a config."""
    with user_errors("prompt"):
        return Prompt(
            template=config.template,
            context=config.context,
            history=config.history,
            think=config.think,
            show_admissible=config.show_admissible,
        )


def fresh_sizes(config: PolicyConfig, tokenizer: Any, stop_id: int) -> QwenConfig:
    """The architecture of a policy made from scratch."""
    assert config.init is not None
    init = config.init
    with user_errors("policy.init"):
        return QwenConfig(
            vocab_size=len(tokenizer),
            hidden_size=init.hidden_size,
            intermediate_size=init.intermediate_size,
            num_hidden_layers=init.num_hidden_layers,
            num_attention_heads=init.num_attention_heads,
            num_key_value_heads=init.num_key_value_heads,
            head_dim=init.head_dim or init.hidden_size // init.num_attention_heads,
            rms_norm_eps=init.rms_norm_eps,
            rope_theta=init.rope_theta,
            tie_word_embeddings=init.tie_word_embeddings,
            max_position_embeddings=init.max_position_embeddings,
            eos_token_ids=(stop_id,),
            pad_token_id=int(tokenizer.pad_token_id or 0),
        )


def load_base(
    config: PolicyConfig, tokenizer: Any, stop_id: int, seed: int, mesh: Mesh | None = None
) -> tuple[QwenConfig, Any]:
    """The architecture and its weights, read from a folder or drawn from the seed.

    Weights that are trained are float32, those below adapters have the forward pass's dtype.
    """
    dtype = jnp.dtype(config.dtype if config.lora else "float32")
    place = None if mesh is None else functools.partial(sharding.param_shardings, mesh=mesh)
    if config.path is not None:
        with user_errors(f"policy.path: {config.path}", OSError, ValueError, KeyError):
            return hf.load_policy(config.path, dtype, place)
    sizes = fresh_sizes(config, tokenizer, stop_id)
    weights = params.init_params(sizes, jax.random.key(seed), dtype)
    return sizes, weights if place is None else jax.device_put(weights, place(sizes))


def open_mesh(config: MeshConfig | None, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The run's share of the devices (default: all here); ``UserError`` if there are too few."""
    if config is None:
        return None
    with user_errors("mesh"):
        return sharding.make_mesh(config.data, config.tensor, config.context, devices)


def make_player(config: TrainConfig | SftConfig) -> Player:
    """Everything of a rollout that needs no weights: tokenizer, prompt and limits.

    Raises ``UserError`` first of all if the environment cannot run here.
    """
    environments.family(config.env).check(config.env)
    with user_errors("tokenizer"):
        chat = chat_format(tokenizer_for(config))
    rollout = config.rollout if isinstance(config, TrainConfig) else None
    limits = Limits(
        max_steps=config.env.max_steps,
        max_context=config.prompt.max_context,
        max_response=rollout.max_response_tokens if rollout else 1,  # demonstrations: unused
        end_on_format_error=rollout is not None and rollout.end_on_format_error,
        overlength=rollout.overlength if rollout else "stop",
    )
    return Player(chat, make_prompt(config.prompt), limits)


def policy_of(
    config: PolicyConfig,
    sizes: QwenConfig,
    mesh: Mesh | None,
    *,
    critic: bool,
    step_heads: Sequence[str] = (),
    reward_model: bool = False,
) -> tuple[Policy, Any, Any]:
    """The static half of the policy, and the specifications of (trained, frozen or no) weights."""
    options = config.lora
    with user_errors("policy.lora"):
        lora_on = None if options is None else (options.rank, options.targets)
        specs, frozen_specs = weight_specs(
            sizes, lora_on, critic=critic, step_heads=step_heads, reward_model=reward_model
        )
    policy = Policy(
        config=sizes,
        adapter_scale=None if options is None else options.alpha / options.rank,
        value_head=critic,
        step_heads=tuple(step_heads),
        reward_model=reward_model,
        attention=config.attention,
        remat=config.remat,
        dtype=config.dtype,
        mesh=mesh,
    )
    return policy, specs, frozen_specs


def build(
    config: TrainConfig | SftConfig,
    *,
    critic: bool,
    step_heads: Sequence[str] = (),
    reward_model: bool = False,
) -> Parts:
    """Loads the policy and everything that turns text into its tokens.

    Args:
      config: the run.
      critic: add a value head.
      step_heads: add a head for each of these signals.
      reward_model: add a second set of weights that starts as the policy's.
    """
    player = make_player(config)
    chat, tokenizer = player.chat, player.chat.tokenizer
    mesh = open_mesh(config.mesh)
    sizes, base = load_base(config.policy, tokenizer, chat.end_id, config.seed, mesh)
    if len(tokenizer) > sizes.vocab_size:
        raise UserError(
            f"tokenizer: {len(tokenizer)} ids, but the policy's vocabulary has {sizes.vocab_size}; "
            "use the tokenizer that belongs to policy.path"
        )
    check_attention(config.policy, sizes)
    policy, specs, _ = policy_of(
        config.policy,
        sizes,
        mesh,
        critic=critic,
        step_heads=step_heads,
        reward_model=reward_model,
    )
    options = config.policy.lora
    trainable: dict[str, Any]
    frozen = None
    if options is None:
        trainable = {"params": base}
    else:
        with user_errors("policy.lora"):
            key = jax.random.fold_in(jax.random.key(config.seed), 1)
            adapters = lora.init_adapters(sizes, key, options.rank, options.alpha, options.targets)
        trainable, frozen = {"adapters": adapters.weights}, {"params": base}
    if reward_model:
        trainable["reward"] = dict(trainable)
    if critic:
        trainable["value"] = value.init_value_head(sizes)
    if step_heads:
        key = jax.random.fold_in(jax.random.key(config.seed), 2)
        trainable["heads"] = heads.init_step_heads(sizes, step_heads, key)
    if mesh is not None:
        trainable = jax.device_put(trainable, sharding.tree_shardings(specs, sizes, mesh))
    return Parts(
        chat=chat,
        player=player,
        policy=policy,
        trainable=trainable,
        frozen=frozen,
        specs=specs,
        stop_ids=tuple(sorted({*sizes.eos_token_ids, chat.end_id})),
        stop_table=_stop_table(config, tokenizer, sizes.vocab_size),
    )


def _stop_table(
    config: TrainConfig | SftConfig, tokenizer: Any, vocabulary: int
) -> np.ndarray | None:
    strings = config.rollout.stop_strings if isinstance(config, TrainConfig) else ()
    if not strings:
        return None
    with user_errors("rollout.stop_strings"):
        return stop_table(tokenizer, vocabulary, strings)


def check_attention(config: PolicyConfig, sizes: QwenConfig, backend: str | None = None) -> None:
    """``UserError`` if the named attention cannot run on ``backend`` (default: what is here)."""
    case = Case(
        shape=(1, ROW_MULTIPLE, sizes.num_attention_heads, sizes.head_dim),
        kv_heads=sizes.num_key_value_heads,
        dtype=jnp.dtype(config.dtype),
        backend=backend or jax.default_backend(),
        packed=False,
    )
    with user_errors("policy.attention"):
        select(case, config.attention)


def step_graph_layers(config: PolicyConfig, num_hidden_layers: int) -> tuple[int, ...]:
    """The layers whose attention becomes the step graph; ``UserError`` if one does not exist."""
    layers = config.step_graph_layers
    if layers is None:
        return default_layers(num_hidden_layers)
    with user_errors("policy.step_graph_layers"):
        check_layers(layers, num_hidden_layers)
    return layers


def open_pool(config: EnvConfig, prompt: PromptConfig) -> Pool:
    """The environment's worker processes; the prompt says what they need to observe."""
    spec = EnvSpec(
        config.name,
        environments.family(config).options(config, prompt),
        None if config.python is None else str(config.python),
    )
    return Pool(spec, config.workers, deadline_s=config.deadline_s)


def tasks_of(config: EnvConfig, split: str, games: int | None = None) -> tuple[Task, ...]:
    """The first ``games`` tasks of a split, spread evenly over its kinds.

    Raises ``UserError`` if the split is missing or holds too few.
    """
    tasks = environments.family(config).tasks(config, split)
    if games is None:
        return tasks
    if games > len(tasks):
        raise UserError(
            f"{games} games of {split} are asked for, env has {len(tasks)}; ask for fewer, or "
            + (
                "generate more (env.generate)"
                if config.name == "alfworld"
                else "allow more tasks or variations (env.scienceworld)"
            )
        )
    kinds = sorted({task.kind for task in tasks})
    by_kind = {kind: [t for t in tasks if t.kind == kind] for kind in kinds}
    turn = [t for i in range(len(tasks)) for kind in kinds for t in by_kind[kind][i : i + 1]]
    return tuple(turn[:games])


def split_hash(tasks: Sequence[Task]) -> str:
    """First 12 digits of the task list's SHA-256: the name of the list in a result."""
    return task_list_hash(tasks)[:12]


def training_jobs(
    tasks: Sequence[Task], *, seed: int, iteration: int, count: int, group_size: int
) -> list[Job]:
    """The jobs of an iteration: a pure function of the seed and the iteration.

    Tasks are visited in a fresh order every epoch; no task comes twice before all came once.
    """
    jobs: list[Job] = []
    for group in range(count):
        epoch, index = divmod(iteration * count + group, len(tasks))
        order = np.random.default_rng((seed, epoch)).permutation(len(tasks))
        task = tasks[int(order[index])]
        jobs.extend(Job(task, group, replica) for replica in range(group_size))
    return jobs
