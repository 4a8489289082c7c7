"""Builds the parts of a run from its config: policy, tokenizer, environments, sampler, tasks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.chat import ChatFormat, chat_format
from envs.pool import Pool
from envs.prompts import Prompt
from envs.protocol import EnvSpec, Task, task_list_hash
from envs.rollout import Job, Limits, Player
from launch import environments
from launch.config import EnvConfig, PolicyConfig, PromptConfig, SftConfig, TrainConfig
from launch.errors import UserError, user_errors
from models import hf, lora, params, value
from models.config import QwenConfig
from models.policy import Policy
from models.sampler import Sampler, SamplerConfig
from models.step_graph import check_layers, default_layers


@dataclasses.dataclass(frozen=True)
class Parts:
    """What training and evaluation share."""

    chat: ChatFormat
    player: Player
    policy: Policy
    trainable: Any
    frozen: Any
    stop_ids: tuple[int, ...]


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


def load_base(
    config: PolicyConfig, tokenizer: Any, stop_id: int, seed: int
) -> tuple[QwenConfig, Any]:
    """The architecture and its weights, read from a folder or drawn from the seed."""
    if config.path is not None:
        with user_errors(f"policy.path: {config.path}", OSError, ValueError, KeyError):
            return hf.load_policy(config.path, jnp.float32)
    assert config.init is not None
    init = config.init
    with user_errors("policy.init"):
        sizes = QwenConfig(
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
    return sizes, params.init_params(sizes, jax.random.key(seed))


def build(config: TrainConfig | SftConfig, *, critic: bool) -> Parts:
    """Loads the policy and everything that turns text into its tokens.

    Raises ``UserError`` first of all if the environment cannot run here.

    Args:
      config: the run.
      critic: add a value head.
    """
    environments.family(config.env).check(config.env)
    tokenizer = tokenizer_for(config)
    with user_errors("tokenizer"):
        chat = chat_format(tokenizer)
    prompt = make_prompt(config.prompt)
    sizes, base = load_base(config.policy, tokenizer, chat.end_id, config.seed)
    if len(tokenizer) > sizes.vocab_size:
        raise UserError(
            f"tokenizer: {len(tokenizer)} ids, but the policy's vocabulary has {sizes.vocab_size}; "
            "use the tokenizer that belongs to policy.path"
        )
    rollout = config.rollout if isinstance(config, TrainConfig) else None
    limits = Limits(
        max_steps=config.env.max_steps,
        max_context=config.prompt.max_context,
        max_response=rollout.max_response_tokens if rollout else 1,  # demonstrations: unused
        end_on_format_error=rollout is not None and rollout.end_on_format_error,
    )
    trainable: dict[str, Any]
    frozen = None
    scale = None
    if config.policy.lora is None:
        trainable = {"params": base}
    else:
        options = config.policy.lora
        with user_errors("policy.lora"):
            adapters = lora.init_adapters(
                sizes,
                jax.random.fold_in(jax.random.key(config.seed), 1),
                options.rank,
                options.alpha,
                options.targets,
            )
        dtype = jnp.dtype(config.policy.dtype)
        trainable, scale = {"adapters": adapters.weights}, adapters.scale
        frozen = {"params": jax.tree.map(lambda x: x.astype(dtype), base)}
    if critic:
        trainable["value"] = value.init_value_head(sizes)
    policy = Policy(config=sizes, adapter_scale=scale, value_head=critic, dtype=config.policy.dtype)
    return Parts(
        chat=chat,
        player=Player(chat, prompt, limits),
        policy=policy,
        trainable=trainable,
        frozen=frozen,
        stop_ids=tuple(sorted({*sizes.eos_token_ids, chat.end_id})),
    )


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


def make_sampler(
    parts: Parts, trainable: Any, config: TrainConfig, *, temperature: float
) -> Sampler:
    """A sampler that holds the given weights."""
    weights, adapters = parts.policy.weights(trainable, parts.frozen)
    rollout = config.rollout
    settings = SamplerConfig(
        waves=rollout.waves,
        slots=-(-rollout.slots // rollout.waves),
        capacity=config.prompt.max_context,
        max_response=rollout.max_response_tokens,
        block=rollout.decode_block,
        stop_ids=parts.stop_ids,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )
    return Sampler(
        weights,
        parts.policy.config,
        settings,
        adapters=adapters,
        seed=config.seed,
        dtype=jnp.dtype(config.policy.dtype),
    )
