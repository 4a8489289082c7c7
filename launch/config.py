"""The schema of every config file. Keys, units and defaults are stated here and nowhere else.

A file is YAML; ``--set a.b=c`` overrides one key (``launch.loading`` reads both). Relative
paths are relative to the current directory. ``null`` leaves a choice to the default that the
comment states.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_serializer,
    model_validator,
)

from envs.scienceworld.jvm import OPTIONS
from envs.scienceworld.tasks import KINDS, check_kinds, check_simplifications
from launch.errors import UserError


def _address(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s@/]+(/[^\s@]*)?", url):
        # The value may hold a password: it is not shown.
        raise ValueError("expected http://HOST/... or https://HOST/... without a password")
    return url


def _power_of_two(number: int) -> int:
    if number < 16 or number & (number - 1):
        raise ValueError("expected a power of two of at least 16")
    return number


PowerOfTwo = Annotated[int, AfterValidator(_power_of_two)]
Address = Annotated[str, AfterValidator(_address)]
ROW_MULTIPLE = 64  # tokens: rows are padded to multiples of it

Fraction = Annotated[float, Field(ge=0, le=1)]
Split = Literal["train", "valid_seen", "valid_unseen", "dev", "test"]
# Of each environment: the splits that exist, and those that are evaluated by default.
SPLITS: dict[str, tuple[str, ...]] = {
    "alfworld": ("train", "valid_seen", "valid_unseen"),
    "scienceworld": ("train", "dev", "test"),
}
HELD_OUT = {"alfworld": ("valid_seen", "valid_unseen"), "scienceworld": ("dev",)}
Kind = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
Schedule = Literal["constant", "cosine", "linear"]
Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]


class Section(BaseModel):
    """A part of a config: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )


class InitConfig(Section):
    """Sizes of a fresh Qwen2.5-style policy. The vocabulary comes from the tokenizer."""

    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_hidden_layers: PositiveInt = 3
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt | None = None  # null: hidden_size / num_attention_heads
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: PositiveInt = 4096  # tokens

    @model_validator(mode="after")
    def _sizes_divide(self) -> InitConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must divide hidden_size "
                f"{self.hidden_size}, or set head_dim"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters on a frozen base."""

    rank: PositiveInt = 64
    alpha: PositiveFloat = 64.0  # the update is scaled by alpha / rank
    targets: tuple[Projection, ...] = ("q", "k", "v", "o", "gate", "up", "down")


class PolicyConfig(Section):
    """The policy: a Hugging Face folder or a fresh model, exactly one of them."""

    path: Path | None = None  # folder with config.json and *.safetensors
    init: InitConfig | None = None
    lora: LoraConfig | None = None  # null: every parameter is trained
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forward pass; updates are float32
    step_graph_layers: tuple[NonNegativeInt, ...] | None = None  # null: the paper's, by depth
    # auto: the first that can.
    attention: Literal["auto", "cudnn", "splash", "chunked", "xla"] = "auto"
    # What the backward pass computes again instead of keeping: each layer, all but its weight
    # products, or nothing.
    remat: Literal["full", "dots", "none"] = "none"

    @model_validator(mode="after")
    def _one_source(self) -> PolicyConfig:
        if (self.path is None) == (self.init is None):
            both = "both are set" if self.path is not None else "neither is set"
            raise ValueError(f"set exactly one of path and init ({both}); null unsets a key")
        return self


class MeshConfig(Section):
    """How the policy is spread over the devices of this host."""

    # Replicas of the batch, each with a share of every weight; -1: all devices that are left.
    data: Annotated[int, Field(ge=-1)] = -1
    tensor: PositiveInt = 1  # parts of each matrix, of the heads and of the vocabulary
    context: PositiveInt = 1  # parts of each row's tokens

    @model_validator(mode="after")
    def _sizes(self) -> MeshConfig:
        if self.data == 0:
            raise ValueError("data is 0; expected -1 or a positive size")
        if ROW_MULTIPLE % self.context:
            raise ValueError(
                f"context is {self.context}; it must divide {ROW_MULTIPLE}, because rows are "
                "padded to multiples of that many tokens"
            )
        return self


class GamesConfig(Section):
    """How many household games to generate, and how large."""

    train: NonNegativeInt = 64  # games
    valid_seen: NonNegativeInt = 32  # games, in rooms of the training games
    valid_unseen: NonNegativeInt = 32  # games, in rooms no training game uses
    receptacles: PositiveInt | None = 6  # per room; null: as many as the room has
    distractors: NonNegativeInt = 3  # objects that the goal does not need
    kinds: tuple[Kind, ...] | None = None  # null: all six
    seed: NonNegativeInt = 0


class ScienceWorldConfig(Section):
    """ScienceWorld: which tasks, how simple, and its Java process."""

    tasks: tuple[str, ...] | None = None  # such as [boil, find-animal]; null: all 30
    variations: PositiveInt | None = None  # the first so many of each task in a split; null: all
    simplifications: tuple[str, ...] = ("easy",)  # or some of its parts, such as [openDoors]
    progress: Literal["score", "subgoals"] = "score"  # the engine's score, or required subgoals
    surroundings: bool = False  # add room and inventory to every observation
    gold: Path | None = None  # folder for gold paths; null: below ~/.cache
    jvm: tuple[str, ...] = OPTIONS  # of java: every worker has one process of it

    @model_validator(mode="after")
    def _tasks_and_simplifications(self) -> ScienceWorldConfig:
        kinds = KINDS if self.tasks is None else check_kinds(self.tasks)
        check_simplifications(self.simplifications, kinds)
        return self


class EnvConfig(Section):
    """The environment and its worker processes."""

    name: Literal["alfworld", "scienceworld"] = "alfworld"
    scienceworld: ScienceWorldConfig | None = None  # null: its defaults; for that name only
    data: Path | None = None  # folder that holds json_2.1.1/; null: $ALFWORLD_DATA
    generate: GamesConfig | None = None  # not null: make these games in `data` if they are absent
    kinds: tuple[Kind, ...] | None = None  # task kinds to play; null: all
    max_steps: PositiveInt = 50  # actions per episode
    workers: PositiveInt = 2  # processes
    deadline_s: PositiveFloat = 120.0  # seconds per message before a worker is replaced
    python: Path | None = None  # interpreter of the workers; null: the one that runs this

    @model_validator(mode="after")
    def _keys_of_the_named_one(self) -> EnvConfig:
        if self.name == "alfworld":
            given = ["scienceworld"] if self.scienceworld is not None else []
        else:
            given = [k for k in ("data", "generate", "kinds") if getattr(self, k) is not None]
        if given:
            raise ValueError(
                f"{given[0]} is set, but name is {self.name}, which has no such key; "
                f"set env.{given[0]}=null or another env.name"
            )
        return self

    def data_folder(self) -> Path:
        """The folder of games. Raises ``UserError`` if neither key nor variable names one."""
        if self.data is not None:
            return self.data
        if folder := os.environ.get("ALFWORLD_DATA"):
            return Path(folder)
        raise UserError(
            "env.data: null, and ALFWORLD_DATA is not set; set one of them to a folder that holds "
            "json_2.1.1/, or make one with `python -m launch games FOLDER`"
        )


class PromptConfig(Section):
    """What the policy is shown."""

    template: str = "household"  # name of a prompt template
    context: Literal["conversation", "window"] = "window"  # one growing row, or one row per step
    history: NonNegativeInt = 2  # past steps shown in a window
    think: bool = True  # ask for <think> before <action>
    show_admissible: bool = True  # list the admissible actions
    max_context: PositiveInt = 4096  # tokens of a row, prompt and responses together


class RolloutConfig(Section):
    """Collection of episodes. An iteration plays tasks_per_iteration x group_size of them."""

    tasks_per_iteration: PositiveInt = 16
    group_size: PositiveInt = 8  # episodes per task
    value_attempts: PositiveInt = 9  # fresh attempts from every step, for vineppo
    slots: PositiveInt = 32  # episodes held by the decoder at once
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1: off
    top_k: NonNegativeInt = 0  # 0: off
    max_response_tokens: PositiveInt = 512  # per step
    end_on_format_error: bool = False  # a reply without an action ends the episode, outcome 0
    stop_strings: tuple[str, ...] = ()  # texts that end a response, such as </action>
    # A prompt that leaves no room for a response: end the episode (status CONTEXT_LIMIT), or first
    # drop the oldest steps that a window shows.
    overlength: Literal["stop", "drop"] = "stop"
    decode_rows: PositiveInt | None = None  # slots per device call; null: all
    decode_block: PositiveInt = 8  # tokens decoded per device call
    prefill_tokens: PowerOfTwo = 128  # prompt tokens per device call, padding included
    cache_dtype: Literal["float32", "bfloat16"] | None = None  # null: policy.dtype


class CreditConfig(Section):
    """The credit method: a name, or a mapping ``{method: name, **hyperparameters}``.

    Hyperparameters are checked by ``jaxcredit.credit.make``.
    """

    method: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"method": value}
        if isinstance(value, dict) and set(value) != {"method", "options"}:
            options = {key: v for key, v in value.items() if key != "method"}
            return {k: v for k, v in value.items() if k == "method"} | {"options": options}
        return value

    @model_serializer
    def _to_flat(self) -> dict[str, Any]:
        return {"method": self.method} | self.options


class JudgeConfig(Section):
    """A judge of turns behind an OpenAI-compatible chat endpoint; for methods with judge_score."""

    url: Address  # such as http://localhost:8000/v1; /chat/completions is appended
    model: str  # its name at the endpoint
    key_variable: str | None = None  # environment variable with the API key; null: no key is sent
    deadline_s: PositiveFloat = 60.0  # seconds per episode, all tries together


class LossConfig(Section):
    """Coefficients of the update's loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # ratio is clipped to [1 - clip_low,
    clip_high: PositiveFloat = 0.2  # 1 + clip_high]
    kl: NonNegativeFloat = 0.01  # to the initial policy
    value: NonNegativeFloat = 0.5  # critic's squared error; for methods with a critic
    head: NonNegativeFloat = 0.5  # step heads' squared error; for methods that learn a model
    entropy: float = 0.0  # bonus
    # Log-probabilities that the ratio starts from: computed anew by the trainer, or the sampler's.
    old_logp: Literal["trainer", "sampler"] = "trainer"
    reduce: Literal["token", "episode"] = "episode"  # mean over tokens, or over episodes' means


class OptimizerConfig(Section):
    """AdamW and how an iteration's episodes are cut into updates."""

    learning_rate: PositiveFloat = 1e-6
    head_learning_rate: PositiveFloat = 1e-3  # of step heads
    schedule: Schedule = "constant"  # to zero at the last iteration, unless constant
    warmup: NonNegativeInt = 0  # updates of linear warm-up
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat | None = 1.0  # global gradient norm; null: no clipping
    epochs: PositiveInt = 1  # passes over an iteration's episodes
    minibatch_episodes: PositiveInt | None = None  # episodes per update; null: all
    microbatch_tokens: PositiveInt = 8192  # tokens per gradient call, padding included


class CheckpointConfig(Section):
    """Checkpoints of the whole training state."""

    every: PositiveInt = 10  # iterations
    keep: PositiveInt = 2  # newest ones


class AgreementConfig(Section):
    """How far the sampler's log-probabilities may be from the trainer's."""

    tolerance: PositiveFloat = 0.1  # of one token, in nats
    max_share: Fraction = 0.01  # of an iteration's tokens beyond the tolerance
    beyond: Literal["warn", "stop"] = "warn"  # what happens when there are more
    rows: PositiveInt = 64  # scored for this, where nothing else needs the trainer's


class EvaluateConfig(Section):
    """Evaluation on frozen task lists."""

    splits: tuple[Split, ...] = ()  # none given: the held-out ones of the environment
    games: PositiveInt | None = None  # the first so many of a split; null: all
    temperature: NonNegativeFloat = 0.0  # 0: greedy
    every: NonNegativeInt = 0  # iterations; 0: after the last one only


class EngineConfig(Section):
    """A server that samples in place of this process, for ``evaluate`` and ``play``."""

    url: Address  # such as http://localhost:8000/v1; /completions is appended
    model: str  # the server's name for the policy
    key_variable: str | None = None  # environment variable with the key; null: none is sent
    deadline_s: PositiveFloat = 120.0  # seconds per response, further attempts included
    concurrency: PositiveInt | None = None  # requests at once; null: one per slot


class HabitConfig(Section):
    """Useless actions that the demonstrator mixes in and the policy imitates."""

    word: str  # how such an action begins: examine, look, inventory
    chance: Fraction  # per step


class SftOptions(Section):
    """Supervised warm start on the hand-coded expert's actions."""

    games: PositiveInt | None = None  # the first so many training games; null: all
    epochs: PositiveInt | None = None  # exactly one of epochs and steps
    steps: PositiveInt | None = None  # updates
    batch: PositiveInt = 16  # rows per update
    learning_rate: PositiveFloat = 1e-3
    schedule: Schedule = "cosine"
    warmup: NonNegativeInt = 20  # updates
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat | None = 1.0
    context_weight: NonNegativeFloat = 0.0  # loss weight of prompt and observation tokens
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the written weights
    noise: Fraction = 0.0  # chance per step to play a random action, which is not imitated
    habit: HabitConfig | None = None

    @model_validator(mode="after")
    def _one_length(self) -> SftOptions:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("set exactly one of epochs and steps")
        return self


class TrainConfig(Section):
    """A reinforcement-learning run: ``python -m launch train CONFIG``."""

    run: Path  # folder that this run, and no other, owns
    seed: NonNegativeInt = 0
    iterations: PositiveInt = 100
    policy: PolicyConfig
    mesh: MeshConfig | None = None  # null: one device
    tokenizer: Path | None = None  # null: policy.path's; with policy.init the env's word tokenizer
    env: EnvConfig = EnvConfig()
    prompt: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    credit: CreditConfig
    judge: JudgeConfig | None = None  # null: there is none
    invalid_penalty: NonNegativeFloat = 0.0  # taken off the advantage of steps with invalid actions
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    agreement: AgreementConfig = AgreementConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: EngineConfig | None = None  # null: the policy samples in this process

    @model_validator(mode="after")
    def _splits_of_the_environment(self) -> TrainConfig:
        known = SPLITS[self.env.name]
        if not self.evaluate.splits:
            filled = self.evaluate.model_copy(update={"splits": HELD_OUT[self.env.name]})
            object.__setattr__(self, "evaluate", filled)  # stored configs say what was evaluated
        if unknown := [split for split in self.evaluate.splits if split not in known]:
            raise ValueError(
                f"evaluate.splits has {unknown[0]}; {self.env.name} has {', '.join(known)}"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        if self.rollout.max_response_tokens >= self.prompt.max_context:
            raise ValueError(
                f"rollout.max_response_tokens {self.rollout.max_response_tokens} leaves no room "
                f"for a prompt in prompt.max_context {self.prompt.max_context}"
            )
        if self.rollout.overlength == "drop" and self.prompt.context == "conversation":
            raise ValueError(
                "rollout.overlength drop needs prompt.context window: a conversation is one "
                "growing row; set rollout.overlength to stop"
            )
        episodes = self.rollout.tasks_per_iteration * self.rollout.group_size
        minibatch = self.optimizer.minibatch_episodes or episodes
        if minibatch > episodes:
            raise ValueError(
                f"optimizer.minibatch_episodes {minibatch} is more than the {episodes} episodes "
                "of an iteration (rollout.tasks_per_iteration x rollout.group_size)"
            )
        return self


class SftConfig(Section):
    """A supervised run on expert demonstrations: ``python -m launch sft CONFIG``."""

    run: Path  # folder that this run, and no other, owns
    seed: NonNegativeInt = 0
    policy: PolicyConfig
    mesh: MeshConfig | None = None  # null: one device
    tokenizer: Path | None = None
    env: EnvConfig = EnvConfig()
    prompt: PromptConfig = PromptConfig()
    sft: SftOptions
    output: Path  # folder that receives the policy in Hugging Face's layout
