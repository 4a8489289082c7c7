"""The types that cross rooms: episodes on the host, batches on the device.

Shapes use these letters: N episodes, K steps (padded), B token rows, T tokens per row,
L captured layers. A *step* is one assistant message and the observation it caused.
A token row is a whole conversation or one windowed step; the token-to-(episode, step)
map makes both the same to everything downstream.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import cast, get_args, get_type_hints

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


class Kind(enum.IntEnum):
    """What a token is. Only ``ACTION`` tokens can be trained on."""

    PAD = 0
    CONTEXT = 1
    ACTION = 2
    OBSERVATION = 3


class Status(enum.IntEnum):
    """How an episode ended. A truncated episode is not a failed one."""

    SUCCESS = 0
    FAILURE = 1
    STEP_LIMIT = 2
    CONTEXT_LIMIT = 3
    FORMAT_ERROR = 4
    ENV_ERROR = 5


@dataclasses.dataclass(frozen=True)
class Step:
    """One decision: the ids added before it, the ids sampled, and what the world said.

    Attributes:
      context_ids: ids that precede the response and are new to this row. In a
        conversation these are the ids added since the previous response; in a window
        they are the whole prompt.
      response_ids: the policy's message, injected ids included.
      behaviour_logp: per response id, log-probability under the settings it was sampled with.
      sampled: per response id, whether the policy sampled it (injected ids are never trained on).
      stop: "stop" if the policy ended its message, "length" if it was cut.
      observation_span: the slice of ``context_ids`` that is the observation caused by the
        *previous* step; (0, 0) if there is none.
      action: the action parsed from the response, or None if the format was broken.
      valid: whether the environment accepted the action.
      reward: environment reward of this step, the outcome not included.
      progress: fraction of acceptance checks that pass after this step.
      state: anchor-state key before the action (equal keys are equal states).
      observation: text shown before the action (a record, never re-tokenised for training).
      hindsight_ids: replacement of ``context_ids`` in the outcome-augmented context of
        RELACE, or None where it is unchanged.
    """

    context_ids: np.ndarray
    response_ids: np.ndarray
    behaviour_logp: np.ndarray
    sampled: np.ndarray
    stop: str
    observation_span: tuple[int, int] = (0, 0)
    action: str | None = None
    valid: bool = True
    reward: float = 0.0
    progress: float = 0.0
    state: str = ""
    observation: str = ""
    hindsight_ids: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Episode:
    """One rollout of one task, ragged and on the host.

    Attributes:
      task_id: the environment's own name for the task.
      group: id of the task group; episodes with equal ``group`` are compared.
      replica: which of the group's attempts this is.
      steps: the decisions, in order.
      outcome: task outcome R in [0, 1].
      success: whether the task was solved.
      status: how the episode ended.
      initial_progress: fraction of acceptance checks that pass before the first step.
      final_observation: text of the last observation (a record, as in ``Step``).
      goal: the task in words (a record).
      context: "conversation" (one growing row) or "window" (one row per step).
      policy_version: number of the update that produced the sampling policy.
    """

    task_id: str
    group: int
    replica: int
    steps: tuple[Step, ...]
    outcome: float
    success: bool
    status: Status
    initial_progress: float = 0.0
    final_observation: str = ""
    goal: str = ""
    context: str = "conversation"
    policy_version: int = 0


@struct.dataclass
class EpisodeBatch:
    """Static-shape arrays of N episodes. Rows are padded on the right.

    ``episode`` and ``step`` are -1 where a token belongs to none. An observation token
    carries the step that *caused* it. ``weight`` is 0 for padding and for episodes that an
    environment error spoiled; such episodes enter no statistic and no loss.
    ``step_reward`` excludes the outcome, which is given once, in ``outcome``. Steps of one task
    with equal ``state`` (before the action) or equal ``action`` ids are the same state or action.
    """

    tokens: Int[Array, "B T"]
    kind: Int[Array, "B T"]
    step: Int[Array, "B T"]
    episode: Int[Array, "B T"]
    position: Int[Array, "B T"]
    segment: Int[Array, "B T"]
    behaviour_logp: Float[Array, "B T"]
    trainable: Bool[Array, "B T"]

    step_mask: Bool[Array, "N K"]
    step_reward: Float[Array, "N K"]
    progress: Float[Array, "N K+1"]
    state: Int[Array, "N K"]
    action: Int[Array, "N K"]
    action_valid: Bool[Array, "N K"]

    task: Int[Array, "N"]
    outcome: Float[Array, "N"]
    success: Bool[Array, "N"]
    status: Int[Array, "N"]
    n_steps: Int[Array, "N"]
    weight: Float[Array, "N"]


@struct.dataclass
class Signals:
    """What a model said about a batch; each field is present only if an estimator needs it.

    Token arrays are aligned with the token they describe: ``logp[b, t]`` is the
    log-probability of ``tokens[b, t]`` given the tokens before it, ``value[b, t]`` the value
    of the state in which that token was chosen.

    ``step_graph[n, l, 0]`` is G_AA and ``step_graph[n, l, 1]`` is G_AO of AttnSR (Section
    3.1): row j, column k < j, the attention mass that step j's message puts on step k's
    message, and on the observation that step k caused.
    ``hindsight_logp`` is the mean over a step's tokens of their log-probability in the
    outcome-augmented context (RELACE, Eqs. 2-3).

    The others come from models of their own, one number per step unless their shape says more:
    ``reward_logp`` of an implicit reward model (iStar), ``token_flow`` through each token
    (FlowTracer), ``mc_value`` the mean Monte-Carlo return from before step k, and after the last
    (VinePPO), ``q_value`` and ``v_value`` of two critics each (ArCHer), ``predicted_return`` after
    the step (RUDDER), ``predicted_progress`` made by the step (SPA-RL), ``promise`` after the
    step (AgentPRM), ``judge_score`` in {-1, 0, 1} (TARL).
    """

    logp: Float[Array, "B T"] | None = None
    ref_logp: Float[Array, "B T"] | None = None
    value: Float[Array, "B T"] | None = None
    entropy: Float[Array, "B T"] | None = None
    step_graph: Float[Array, "N L 2 K K"] | None = None
    hindsight_logp: Float[Array, "N K"] | None = None
    reward_logp: Float[Array, "B T"] | None = None
    token_flow: Float[Array, "B T"] | None = None
    mc_value: Float[Array, "N K+1"] | None = None
    q_value: Float[Array, "N K 2"] | None = None
    v_value: Float[Array, "N K 2"] | None = None
    predicted_return: Float[Array, "N K"] | None = None
    predicted_progress: Float[Array, "N K"] | None = None
    promise: Float[Array, "N K"] | None = None
    judge_score: Float[Array, "N K"] | None = None


# The axes of every signal as its annotation states them: "B T", "N K", ...
SIGNAL_AXES: dict[str, str] = {
    name: get_args(hint)[0].dim_str for name, hint in get_type_hints(Signals).items()
}


def as_fields(arrays: dict[str, np.ndarray]) -> dict[str, Array]:
    """Host arrays as fields of a batch, unchanged.

    The fields are typed as traced code sees them; on the host they hold NumPy arrays, which
    jitted functions take as they are.
    """
    return cast(dict[str, Array], arrays)


@struct.dataclass
class Credit:
    """What an estimator returns: one number per step, broadcast once to tokens.

    ``token_weight`` multiplies a token's loss; ``token_target`` is the critic's regression
    target (None for critic-free methods); ``step_target`` maps a signal that is learned from
    these episodes to what it should have been, in the signal's shape (None if there is none);
    ``reward_slope`` is dL / d reward_logp, L the loss of a learned reward model (None without one).
    ``diagnostics`` holds scalars for the metrics.
    """

    step_reward: Float[Array, "N K"]
    step_advantage: Float[Array, "N K"]
    token_advantage: Float[Array, "B T"]
    token_weight: Float[Array, "B T"]
    token_target: Float[Array, "B T"] | None = None
    step_target: dict[str, Float[Array, "N K ..."]] | None = None
    reward_slope: Float[Array, "B T"] | None = None
    diagnostics: dict[str, Array] = struct.field(default_factory=dict)
