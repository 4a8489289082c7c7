"""The transformers side of step_graph.py and model.py, run by an interpreter that has torch.

Nothing is made slower than a careful user would have it: logits are computed at the sampled tokens
only (``logits_to_keep``), no cache is kept, and without a step graph attention is the fused one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import agent_row, serve
from transformers import AutoModelForCausalLM


def load(spec: dict[str, Any], attention: str) -> Any:
    folder = spec["export"] or spec["weights"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).eval()
    for weight in model.parameters():  # own memory, not pages of a mapped file
        weight.data = weight.data.clone()
    return model


def sampled_logprobs(model: Any, row: dict[str, np.ndarray], **options: Any) -> Any:
    """Log-probabilities of the sampled tokens of one row, and the model's other outputs."""
    at = torch.from_numpy(np.flatnonzero(row["trainable"][0]))
    tokens = torch.from_numpy(row["tokens"]).long()
    out = model(tokens, logits_to_keep=at - 1, use_cache=False, **options)
    logits = out.logits[0].float()
    chosen = logits.gather(1, tokens[0, at][:, None])[:, 0]
    return chosen - torch.logsumexp(logits, dim=1), at, out


def scoring(spec: dict[str, Any]) -> Any:
    """Log-probabilities and the step graph out of the attention maps that the model returns."""
    model, K = load(spec, "eager"), spec["steps"]

    def program(row: dict[str, np.ndarray]) -> Callable[[], dict[str, np.ndarray]]:
        kind, step = row["kind"][0], row["step"][0]
        ids = np.arange(K)
        # [K, T] indicators; a message's row is scaled to the mean over its tokens.
        message = torch.from_numpy(((step == ids[:, None]) & (kind == 2)).astype(np.float32))
        seen = torch.from_numpy(((step == ids[:, None]) & (kind == 3)).astype(np.float32))
        mean = message / message.sum(1, keepdim=True)

        def once() -> dict[str, np.ndarray]:
            with torch.no_grad():
                logp, at, out = sampled_logprobs(model, row, output_attentions=True)
                graphs = []
                for layer in spec["layers"]:
                    p = mean @ out.attentions[layer][0].mean(dim=0)
                    graphs.append(torch.stack([(p @ x.T).tril(-1) for x in (message, seen)]))
            full = np.zeros(row["tokens"].shape, np.float32)
            full[0, at.numpy()] = logp.numpy()
            return {"logp": full, "graph": torch.stack(graphs)[None].numpy()}

        return once

    programs = {
        f"with-{length}": program(agent_row(length, K, model.config.vocab_size, spec["seed"]))
        for length in spec["lengths"]
    }
    return programs, model


def lora_step(spec: dict[str, Any]) -> Any:
    """Loss and adapter gradients through PEFT."""
    import peft

    base = load(spec, "sdpa")
    adapters = Path(spec["export"]) / "adapters"
    model = peft.PeftModel.from_pretrained(base, adapters, is_trainable=True)
    low = {name: p for name, p in model.named_parameters() if p.requires_grad}
    row = agent_row(spec["length"], spec["steps"], base.config.vocab_size, spec["seed"])

    def once() -> dict[str, np.ndarray]:
        model.zero_grad(set_to_none=True)
        logp, _, _ = sampled_logprobs(model, row)
        loss = -logp.mean()
        loss.backward()
        squares: dict[str, float] = {}
        for name, weight in low.items():
            module = name.split(".lora_")[0].rpartition(".")[2].removesuffix("_proj")
            key = f"{module}_{'a' if 'lora_A' in name else 'b'}"
            squares[key] = squares.get(key, 0.0) + float(weight.grad.square().sum())
        norms = {name: np.sqrt(np.float32(x)) for name, x in squares.items()}
        return {"loss": loss.detach().numpy(), **norms}

    return {"step": once}, model


def main() -> None:
    spec = json.loads(sys.argv[1])
    programs, model = {"score": scoring, "lora": lora_step}[spec["task"]](spec)
    bytes_ = sum(
        p.numel() * p.element_size()
        for p in model.parameters()
        if not p.requires_grad or spec["task"] == "score"
    )
    serve(programs, {"weight_bytes": bytes_, "threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
