"""The jaxcredit side of step_graph.py and model.py: prepares programs and runs them on demand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import SIZES, agent_row, serve

from jaxcredit.update import MicroBatch
from models import hf, lora
from models.config import QwenConfig
from models.params import init_params
from models.policy import Policy
from models.score import scoring_program
from models.step_graph import default_layers


def policy_weights(spec: dict[str, Any]) -> tuple[QwenConfig, Any]:
    """Weights from ``spec["weights"]``, or drawn from the seed; exported where that is asked."""
    if spec["weights"]:
        config, params = hf.load_policy(spec["weights"])
    else:
        shape = SIZES[spec["size"]]
        head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        config = QwenConfig(
            **shape, head_dim=head_dim, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True
        )
        params = init_params(config, jax.random.key(spec["seed"]))
    if spec["export"]:
        hf.save_policy(spec["export"], config, params, jnp.float32)
    return config, params


def run(compiled: Any, arguments: tuple[Any, ...]) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: {name: np.asarray(x) for name, x in compiled(*arguments).items()}


def temporaries(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def scoring(spec: dict[str, Any], config: QwenConfig, params: Any) -> Any:
    """``models.score``'s program with and without the step graph, per row length."""
    policy, weights, programs, temps = Policy(config), {"params": params}, {}, {}
    layers = default_layers(config.num_hidden_layers)
    for length in spec["lengths"]:
        row = agent_row(length, spec["steps"], config.vocab_size, spec["seed"])
        for name, captured in (("without", ()), ("with", layers)):
            program = scoring_program(policy, captured, spec["steps"], True)

            def named(trainable: Any, rows: Any, program: Any = program) -> dict[str, Any]:
                output, graph = program(trainable, None, rows)
                return {"logp": output.logp} | ({} if graph is None else {"graph": graph})

            rows = {key: jnp.asarray(value) for key, value in row.items()}
            compiled = jax.jit(named).lower(weights, rows).compile()
            programs[f"{name}-{length}"] = run(compiled, (weights, rows))
            temps[f"{name}-{length}"] = temporaries(compiled)
    return programs, {"temporary_bytes": temps, "layers": layers}


def lora_step(spec: dict[str, Any], config: QwenConfig, params: Any) -> Any:
    """Loss and adapter gradients of one row: mean negative log-probability of sampled tokens."""
    rank = spec["rank"]
    adapters = lora.init_adapters(config, jax.random.key(spec["seed"] + 1), rank, 2.0 * rank)
    policy = Policy(config, adapter_scale=adapters.scale, remat=spec["remat"])
    # B starts at zero, where half of the gradients vanish: draw it, so that all are compared.
    rng = np.random.default_rng(spec["seed"])
    for pair in adapters.weights.values():
        pair["b"] = jnp.asarray(0.02 * rng.standard_normal(pair["b"].shape), jnp.float32)
    if spec["export"]:
        from models.peft import save_adapters

        save_adapters(Path(spec["export"]) / "adapters", config, adapters)
    row = agent_row(spec["length"], spec["steps"], config.vocab_size, spec["seed"])
    weight = jnp.asarray(row["trainable"] / row["trainable"].sum(), jnp.float32)
    zeros = jnp.zeros(weight.shape, jnp.float32)
    fields = {name: jnp.asarray(row[name]) for name in ("tokens", "position", "segment")}
    micro = MicroBatch(**fields, weight=weight, advantage=zeros, old_logp=zeros)

    def step(trainable: Any, frozen: Any, micro: MicroBatch) -> dict[str, Any]:
        def loss(trainable: Any) -> Any:
            return -jnp.sum(policy.evaluate(trainable, frozen, micro).logp * micro.weight)

        value, gradient = jax.value_and_grad(loss)(trainable)
        norms = {
            f"{name}_{part}": jnp.sqrt(jnp.sum(jnp.square(g)))
            for name, pair in gradient["adapters"].items()
            for part, g in pair.items()
        }
        return {"loss": value, **norms}, gradient

    arguments = ({"adapters": adapters.weights}, {"params": params}, micro)
    compiled = jax.jit(step).lower(*arguments).compile()

    def once() -> dict[str, np.ndarray]:
        numbers, gradient = compiled(*arguments)
        jax.block_until_ready(gradient)
        return {name: np.asarray(x) for name, x in numbers.items()}

    return {"step": once}, {"temporary_bytes": {"step": temporaries(compiled)}}


def main() -> None:
    spec = json.loads(sys.argv[1])
    config, params = policy_weights(spec)
    jax.block_until_ready(params)
    programs, info = {"score": scoring, "lora": lora_step}[spec["task"]](spec, config, params)
    bytes_ = sum(x.nbytes for x in jax.tree.leaves(params))
    shape = {name: getattr(config, name) for name in SIZES["0.5b"]}
    serve(programs, {**info, "weight_bytes": bytes_, "shape": shape})


if __name__ == "__main__":
    main()
