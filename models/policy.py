"""A policy as data: which weights are trained, and the pure functions the trainer calls.

``trainable`` is ``{"params": ...}`` or, with LoRA, ``{"adapters": ...}`` over a frozen base;
``{"value": ...}`` joins it when there is a critic, ``{"heads": ...}`` when there are step heads,
``{"reward": ...}``, of the same form as the policy's own weights, when there is a reward model.
``frozen`` is the base, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxcredit.episodes import Kind
from jaxcredit.update import MicroBatch, PolicyOutput
from models import heads, lora, qwen, value
from models.config import QwenConfig
from models.logprobs import token_logprobs
from models.params import param_specs
from models.sharding import traced_on
from models.step_graph import Capture


@dataclasses.dataclass(frozen=True)
class Policy:
    """The static half of a policy.

    Attributes:
      config: the architecture.
      adapter_scale: alpha / rank of LoRA, or None when every weight is trained.
      value_head: whether there is a critic.
      step_heads: names of the learned step signals.
      reward_model: whether there is a second set of weights that scores the same tokens.
      temperature: log-probabilities are taken at the temperature that was sampled with.
      attention: name of the attention implementation, or "auto".
      remat: rematerialisation of the backward pass: "none", "dots" or "full".
      dtype: of the forward pass.
      entropy: compute per-token entropies.
      backend: "cpu", "gpu" or "tpu" of the devices that will run it; None: JAX's default.
      mesh: the devices it is spread over (``models.sharding.make_mesh``); None: a single one.
    """

    config: QwenConfig
    adapter_scale: float | None = None
    value_head: bool = False
    step_heads: tuple[str, ...] = ()
    reward_model: bool = False
    temperature: float = 1.0
    attention: str = "auto"
    remat: qwen.Remat = "none"
    dtype: str = "float32"
    entropy: bool = False
    backend: str | None = None
    mesh: Mesh | None = None

    def weights(self, trainable: Any, frozen: Any) -> tuple[Any, Any]:
        """(parameters, adapters or None) in the forward pass's dtype."""
        dtype = jnp.dtype(self.dtype)
        cast = jax.tree.map(lambda x: x.astype(dtype), (trainable, frozen))
        if self.adapter_scale is None:
            return cast[0]["params"], None
        return cast[1]["params"], lora.Adapters(cast[0]["adapters"], self.adapter_scale)

    def hidden(
        self,
        trainable: Any,
        frozen: Any,
        tokens: Int[Array, "B T"],
        position: Int[Array, "B T"],
        segment: Int[Array, "B T"],
        capture: Capture | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B L 2 K K"] | None]:
        """Final hidden states, and the step graph where it is asked for."""
        params, adapters = self.weights(trainable, frozen)
        with traced_on(self.mesh):
            return qwen.forward(
                params,
                self.config,
                tokens,
                position,
                segment,
                adapters=adapters,
                capture=capture,
                attention=self.attention,
                remat=self.remat,
                backend=self.backend,
                packed=False,  # one conversation or window per row, padded on the right
            )

    def evaluate(self, trainable: Any, frozen: Any, micro: MicroBatch) -> PolicyOutput:
        """What the loss needs of a micro-batch (see ``jaxcredit.update.make_update``)."""
        row = (micro.tokens, micro.position, micro.segment)
        hidden, _ = self.hidden(trainable, frozen, *row)
        output = self.read(trainable, frozen, hidden, micro.tokens, micro.weight != 0)
        if self.reward_model and micro.reward_slope is not None:
            reward_logp = self.reward_logp(trainable, frozen, *row, micro.reward_slope != 0)
            output = dataclasses.replace(output, reward_logp=reward_logp)
        return output

    def reward_logp(
        self,
        trainable: Any,
        frozen: Any,
        tokens: Int[Array, "B T"],
        position: Int[Array, "B T"],
        segment: Int[Array, "B T"],
        mask: Array,
    ) -> Float[Array, "B T"]:
        """Log-probabilities of the masked tokens under the reward model."""
        alone = dataclasses.replace(self, value_head=False, step_heads=(), entropy=False)
        hidden, _ = alone.hidden(trainable["reward"], frozen, tokens, position, segment)
        return alone.read(trainable["reward"], frozen, hidden, tokens, mask).logp

    def read(
        self,
        trainable: Any,
        frozen: Any,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        mask: Array,
    ) -> PolicyOutput:
        """Log-probabilities, entropies and values of the masked tokens, read-outs of all."""
        params, _ = self.weights(trainable, frozen)
        with traced_on(self.mesh):
            logp, entropy = token_logprobs(
                params,
                self.config,
                hidden,
                tokens,
                mask=mask,
                temperature=self.temperature,
                entropy=self.entropy,
                backend=self.backend,
            )
        values = value.values(trainable["value"], hidden) if self.value_head else None
        found = heads.read(trainable["heads"], hidden) if self.step_heads else None
        return PolicyOutput(logp=logp, value=values, entropy=entropy, heads=found)


def weight_specs(
    config: QwenConfig,
    lora_on: tuple[int, Sequence[str]] | None,
    *,
    critic: bool,
    step_heads: Sequence[str] = (),
    reward_model: bool = False,
) -> tuple[Any, Any]:
    """Specifications of (trainable, frozen or None), the trees of the module docstring.

    Args:
      config: the architecture.
      lora_on: rank and targets of the adapters, or None when every weight is trained.
      critic: whether there is a value head.
      step_heads: names of the learned step signals.
      reward_model: whether there is a second set of trained weights.
    """
    base = {"params": param_specs(config)}
    trainable: dict[str, Any]
    if lora_on is None:
        trainable, frozen = base, None
    else:
        trainable, frozen = {"adapters": lora.adapter_specs(config, *lora_on)}, base
    if reward_model:
        trainable["reward"] = dict(trainable)
    if critic:
        trainable["value"] = value.value_specs(config)
    if step_heads:
        trainable["heads"] = heads.head_specs(config, step_heads)
    return trainable, frozen


def message_steps(kind: Int[Array, "B T"], step: Int[Array, "B T"]) -> tuple[Array, Array]:
    """(action_step, observation_step) of each token, -1 where it is in no such message."""
    action = jnp.where(kind == Kind.ACTION, step, -1)
    return action, jnp.where(kind == Kind.OBSERVATION, step, -1)
