"""The architecture of a dense Qwen policy, read from and written to a ``config.json``.

Two families share every function of this room: Qwen2.5 (``qwen2``) and Qwen3 (``qwen3``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets one family apart; everything else is a size that config.json states.

    Attributes:
      architecture: name of the class in transformers.
      qkv_bias: whether the projections of queries, keys and values have a bias.
      qk_norm: whether each head's queries and keys are normalised before they are rotated.
    """

    architecture: str
    qkv_bias: bool
    qk_norm: bool


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False),  # Qwen2.5 says qwen2 too
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True),
}

# A part of a model_type, between underscores, and what such a model is.
_REFUSED = {
    "vl": "a vision-language model",
    "audio": "an audio-language model",
    "omni": "a model of text, images and sound",
    "moe": "a mixture of experts",
}


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """Shape and constants of a decoder-only Qwen model. Hashable, so jit may treat it as static.

    Attributes:
      vocab_size: rows of the embedding table, V (may exceed the tokenizer's vocabulary).
      hidden_size: width of the residual stream, D.
      intermediate_size: width of the gated MLP, F.
      num_hidden_layers: number of blocks, L.
      num_attention_heads: query heads, H.
      num_key_value_heads: key-value heads, G; divides H.
      head_dim: size of one head, h (even); H h need not be D.
      rms_norm_eps: epsilon inside every root-mean-square norm.
      rope_theta: base of the rotary frequencies.
      tie_word_embeddings: whether the output head is the transposed embedding table.
      max_position_embeddings: longest context the weights were trained for, in tokens.
      eos_token_ids: every id that ends a message.
      pad_token_id: id written into padding; no mask is ever derived from it.
      model_type: key of ``FAMILIES``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 32768
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    model_type: str = "qwen2"

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ValueError(_unsupported_type(self.model_type))
        for name in (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}, which does not divide "
                f"num_attention_heads {self.num_attention_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; rotary embedding needs an even size, "
                "so change head_dim or hidden_size / num_attention_heads"
            )
        for name, ids in (("pad_token_id", (self.pad_token_id,)), ("eos", self.eos_token_ids)):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{name} id {token} lies outside the vocabulary of {self.vocab_size}; "
                        "fix the id or vocab_size"
                    )

    @property
    def family(self) -> Family:
        """What the model type implies."""
        return FAMILIES[self.model_type]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> QwenConfig:
        """Reads the ``config.json`` of a ``Qwen2ForCausalLM`` or a ``Qwen3ForCausalLM``.

        Args:
          hf: the parsed JSON object; both the ``rope_theta`` key and the newer
            ``rope_parameters`` mapping are understood.

        Raises:
          ValueError: a key is missing, or names something this port does not compute (another
            architecture, experts, images or sound, sliding windows, scaled rotary embeddings,
            another activation, biases that the family does not have).
        """
        _refuse_unsupported(hf)
        # Qwen2's head size follows from its width; that of Qwen3 does not.
        required = (*_REQUIRED, *(("head_dim",) if hf["model_type"] == "qwen3" else ()))
        missing = [name for name in required if hf.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}; add the missing keys")
        rope = _rope(hf)
        heads = int(hf["num_attention_heads"])
        head_dim = hf.get("head_dim")
        if head_dim is None:
            if hf["hidden_size"] % heads:
                raise ValueError(
                    f"hidden_size {hf['hidden_size']} is not a multiple of num_attention_heads "
                    f"{heads}; give head_dim explicitly"
                )
            head_dim = hf["hidden_size"] // heads
        eos = token_ids(hf.get("eos_token_id"))
        pad = hf.get("pad_token_id")
        return cls(
            vocab_size=int(hf["vocab_size"]),
            hidden_size=int(hf["hidden_size"]),
            intermediate_size=int(hf["intermediate_size"]),
            num_hidden_layers=int(hf["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(hf.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            max_position_embeddings=int(hf.get("max_position_embeddings", 32768)),
            eos_token_ids=eos,
            pad_token_id=int(pad) if pad is not None else (eos[0] if eos else 0),
            model_type=hf["model_type"],
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` object of this architecture, readable by transformers 4 and 5."""
        # Qwen2's configuration has no such key: its biases are fixed.
        bias = {} if self.family.qkv_bias else {"attention_bias": False}
        return {
            "architectures": [self.family.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            **bias,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
        }


def token_ids(value: Any) -> tuple[int, ...]:
    """Normalises an ``eos_token_id`` entry: absent, one id, or a list of ids."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)


def _rope(hf: Mapping[str, Any]) -> float:
    parameters = hf.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json lacks rope_theta (or rope_parameters.rope_theta); add it")
    return float(theta)


def _unsupported_type(model_type: Any) -> str:
    parts = str(model_type).split("_")
    kind = next((f", {what}" for part, what in _REFUSED.items() if part in parts), "")
    return (
        f"model_type is {model_type!r}{kind}; expected one of {sorted(FAMILIES)}, "
        "so choose a dense Qwen2.5 or Qwen3 checkpoint"
    )


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    model_type = hf.get("model_type")
    if model_type is None:
        raise ValueError(f"config.json lacks model_type; add one of {sorted(FAMILIES)}")
    if model_type not in FAMILIES:
        raise ValueError(_unsupported_type(model_type))
    family = FAMILIES[model_type]
    names = hf.get("architectures") or [family.architecture]
    if list(names) != [family.architecture]:
        raise ValueError(
            f"architectures is {names} but model_type is {model_type!r}; only "
            f"{family.architecture} is supported, so convert or choose another checkpoint"
        )
    bias = hf.get("attention_bias")
    if bias is not None and bool(bias) != family.qkv_bias:
        raise ValueError(
            f"attention_bias is {bias}, but {model_type} has "
            f"{'' if family.qkv_bias else 'no '}biases on queries, keys and values; "
            "remove the key or choose another checkpoint"
        )
    if hf.get("use_sliding_window"):
        raise ValueError(
            "use_sliding_window is true; only full causal attention is supported, so set it to "
            "false (contexts must then be no longer than the window)"
        )
    other = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise ValueError(f"layer_types holds {other}; only 'full_attention' is supported")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {hf['hidden_act']!r}; only 'silu' is supported")
    for key in ("rope_scaling", "rope_parameters"):
        _refuse_scaling(key, hf.get(key) or {})
    if hf.get("use_mrope"):
        raise ValueError("use_mrope is true; only one-dimensional positions are supported")
    if hf.get("quantization_config"):
        raise ValueError(
            "quantization_config is set; only unquantised weights are supported, so choose the "
            "checkpoint that this one was made from"
        )


def _refuse_scaling(key: str, entry: Mapping[str, Any]) -> None:
    fix = f"so remove {key} (contexts then end at max_position_embeddings)"
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{key} asks for {kind!r}; only 'default' rotary embedding is supported, {fix}"
        )
    factor = entry.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ValueError(f"{key}.partial_rotary_factor is {factor}; only 1.0 is supported")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    other = sorted(set(entry) - known)
    if other:  # such as a factor without a kind, or mrope_section under kind 'default'
        raise ValueError(
            f"{key} holds {other}; only 'default' rotary embedding is supported, {fix}"
        )
