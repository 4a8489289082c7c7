"""Live comparison with transformers, both directions: theirs -> ours -> theirs.

Random tiny policies always; real weights where JAXCREDIT_QWEN names a folder that holds them
(twice their float32 size in memory at worst).
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf, lora, peft, qwen
from models.config import QwenConfig
from models.params import init_params
from models.sampler import Sampler, SamplerConfig
from models.step_graph import Capture

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def golden_script():
    path = Path(__file__).parent / "golden" / "make_golden.py"
    spec = importlib.util.spec_from_file_location("make_golden", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def our_logits(config, params, tokens, **options):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, graph = qwen.forward(
        params, config, tokens, positions, jnp.ones_like(tokens), **options
    )
    return np.asarray(qwen.unembed(params, config, hidden)), graph


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens)).long()).logits.numpy()


def read_by_theirs(folder):
    """The folder through transformers, the class chosen by config.json alone."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tied", {}),
        ("untied", {}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": False}),
    ],
    ids=["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied"],
)
def test_theirs_to_ours_to_theirs(golden_script, name, changes, tmp_path):
    theirs = golden_script.build(name, **changes)
    theirs.save_pretrained(tmp_path / "a", max_shard_size=50_000)
    config, params = hf.load_policy(tmp_path / "a")
    tokens = np.random.default_rng(1).integers(2, config.vocab_size, (2, 700))
    want = their_logits(theirs, tokens)
    np.testing.assert_allclose(our_logits(config, params, tokens)[0], want, atol=1e-4, rtol=0)

    hf.save_policy(tmp_path / "b", config, params, jnp.float32, max_shard_bytes=40_000)
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert (folder / "model.safetensors.index.json").is_file()
    back = read_by_theirs(tmp_path / "b")
    assert type(back) is type(theirs)
    assert back.config.tie_word_embeddings == config.tie_word_embeddings == ("head" not in params)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    for key in before:
        assert torch.equal(before[key], after[key]), key
    np.testing.assert_allclose(their_logits(back, tokens), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_ours_to_theirs_in_bfloat16(model_type, tmp_path):
    config = QwenConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # not hidden_size / heads
        rope_theta=50_000.0,
        tie_word_embeddings=False,
        eos_token_ids=(4, 6),
        model_type=model_type,
    )
    params = init_params(config, jax.random.key(0))
    hf.save_policy(tmp_path, config, params, jnp.bfloat16)
    theirs = read_by_theirs(tmp_path)
    assert type(theirs).__name__ == config.family.architecture
    assert theirs.generation_config.eos_token_id == [4, 6]
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    tokens = np.random.default_rng(2).integers(0, 97, (2, 50))
    np.testing.assert_allclose(
        our_logits(config, rounded, tokens)[0], their_logits(theirs, tokens), atol=1e-4, rtol=0
    )


@pytest.fixture(scope="module", params=[("untied", lora.TARGETS), ("qwen3", lora.TARGETS[4:])])
def trained(request, golden_script, tmp_path_factory):
    """A policy of theirs with trained adapters of ours, and the logits of the two together."""
    name, targets = request.param
    folder = tmp_path_factory.mktemp(name)
    golden_script.build(name).save_pretrained(folder / "base")
    config, params = hf.load_policy(folder / "base")
    fresh = lora.init_adapters(config, jax.random.key(0), 4, 6.0, targets)
    rng = np.random.default_rng(5)
    adapters = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), fresh)
    tokens = rng.integers(2, config.vocab_size, (2, 300))
    want, _ = our_logits(config, params, tokens, adapters=adapters)
    base, _ = our_logits(config, params, tokens)
    assert np.abs(want - base).max() > 0.5
    return folder, config, params, adapters, tokens, want


def test_merged_adapters_give_the_trained_logits(trained, tmp_path):
    _, config, params, adapters, tokens, want = trained
    hf.save_policy(tmp_path, config, lora.merge(params, adapters), jnp.float32)
    theirs = read_by_theirs(tmp_path)
    np.testing.assert_allclose(their_logits(theirs, tokens), want, atol=1e-4, rtol=0)


def test_exported_adapters_give_the_trained_logits(trained, tmp_path):
    """PEFT's definition by hand: W + (alpha / r) lora_B lora_A in the module that a key names."""
    from safetensors.torch import load_file

    folder, config, _, adapters, tokens, want = trained
    peft.save_adapters(tmp_path, config, adapters, base=str(folder / "base"))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    theirs = read_by_theirs(settings["base_model_name_or_path"])
    low = load_file(tmp_path / "adapter_model.safetensors")
    prefix, suffix = "base_model.model.", ".lora_A.weight"
    names = [key.removeprefix(prefix).removesuffix(suffix) for key in low if "lora_A" in key]
    assert len(names) == config.num_hidden_layers * len(settings["target_modules"]) == len(low) / 2
    with torch.no_grad():
        for name in names:
            assert name.rpartition(".")[2] in settings["target_modules"]
            a, b = (low[f"{prefix}{name}.lora_{x}.weight"] for x in "AB")
            theirs.get_submodule(name).weight += settings["lora_alpha"] / settings["r"] * (b @ a)
    np.testing.assert_allclose(their_logits(theirs, tokens), want, atol=1e-4, rtol=0)


def test_peft_itself_loads_exported_adapters(trained, tmp_path):
    their_peft = pytest.importorskip("peft", reason="peft is not installed")
    folder, config, _, adapters, tokens, want = trained
    peft.save_adapters(tmp_path, config, adapters)
    theirs = their_peft.PeftModel.from_pretrained(read_by_theirs(folder / "base"), tmp_path)
    np.testing.assert_allclose(their_logits(theirs, tokens), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["untied", "qwen3"])
def test_step_graph_equals_their_attention(golden_script, name, tmp_path):
    theirs = golden_script.build(name)
    theirs.save_pretrained(tmp_path)
    config, params = hf.load_policy(tmp_path)
    T, K = 200, 9
    tokens = np.random.default_rng(3).integers(2, config.vocab_size, (1, T))
    owner = (np.arange(T) - 8) // 20  # from token 8: steps of 12 message and 8 reply tokens
    message = (np.arange(T) - 8) % 20 < 12
    inside = (owner >= 0) & (owner < K)
    action = np.where(inside & message, owner, -1)
    observation = np.where(inside & ~message, owner, -1)
    with torch.no_grad():
        attentions = theirs(torch.tensor(tokens).long(), output_attentions=True).attentions
    layers = (0, config.num_hidden_layers - 1)
    capture = Capture(layers, K, jnp.asarray(action[None]), jnp.asarray(observation[None]))
    _, graph = our_logits(config, params, tokens, capture=capture)
    for i, layer in enumerate(layers):
        p = attentions[layer][0].numpy().mean(axis=0)
        for j in range(K):
            for k in range(j):
                for which, keys in enumerate((action == k, observation == k)):
                    want = p[action == j][:, keys].sum(axis=1).mean()
                    assert float(graph[0, i, which, j, k]) == pytest.approx(want, abs=2e-6)


# --- real weights -------------------------------------------------------------------------------

LONG = 500  # tokens of the prompt whose logits are compared at every position
NEW = 64  # tokens of a greedy continuation
PROMPT = 12  # tokens of each prompt: of one length, so that neither side pads
PROMPTS = (
    "You are in the middle of a room. Looking quickly around you, you see a cabinet",
    "The three laws of thermodynamics can be stated in one sentence each. The first one",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "Die Hauptstadt von Frankreich ist Paris, und die Hauptstadt von Italien ist seit langem",
    "Put a clean mug on the desk. First I need to find a mug, then go to",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON orders.customer_id = customers.id",
    "Once upon a time there was an old lighthouse keeper who lived with his cat and",
    "The difference between a list and a tuple in Python is that a list can",
    "In the beginning of the twentieth century, physics was changed by two theories, namely",
)


@pytest.fixture(scope="module")
def real():
    """Ids, their logits and their greedy continuations; then our policy.

    Their weights are freed before ours are read: both at once would not fit everywhere.
    """
    folder = os.environ.get("JAXCREDIT_QWEN")
    if not folder:
        pytest.skip("JAXCREDIT_QWEN names no folder with the weights of a Qwen2.5 or Qwen3 model")
    from tokenizers import Tokenizer
    from transformers import GenerationConfig

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    # Words in the markup of a conversation. The bare file starts with a run of spaces, whose
    # activations are so large that float32 transformers is itself 2.6e-3 away from float64 there.
    words = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8").split()
    long = np.asarray([tokenizer.encode("<|im_start|>user\n" + " ".join(words)).ids[:LONG]])
    short = np.asarray([tokenizer.encode(prompt).ids[:PROMPT] for prompt in PROMPTS])
    assert long.shape == (1, LONG)
    assert short.shape == (len(PROMPTS), PROMPT)
    ends = hf.load_config(folder).eos_token_ids

    theirs = read_by_theirs(folder)
    logits = their_logits(theirs, long)[0]
    # Greedy and nothing else: a folder's own settings may penalise repetitions.
    theirs.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=NEW, eos_token_id=list(ends), pad_token_id=ends[0]
    )
    ids = torch.tensor(short).long()
    with torch.no_grad():
        rows = theirs.generate(ids, attention_mask=torch.ones_like(ids))[:, PROMPT:].tolist()
    stops = [next((i + 1 for i, t in enumerate(row) if t in ends), NEW) for row in rows]
    del theirs
    gc.collect()
    config, params = hf.load_policy(folder)
    continuations = [row[:stop] for row, stop in zip(rows, stops, strict=True)]
    return config, params, long, logits, short, continuations


def test_real_logits(real):
    config, params, long, want, *_ = real
    got = our_logits(config, params, long)[0][0]
    np.testing.assert_allclose(got, want, atol=1e-3, rtol=0)
    ours, theirs = got.argmax(-1), want.argmax(-1)
    at = np.arange(LONG)
    tie = (want[at, theirs] - want[at, ours] <= 1e-3) & (got[at, ours] - got[at, theirs] <= 1e-3)
    assert ((ours == theirs) | tie).all(), np.flatnonzero((ours != theirs) & ~tie)
    assert len(set(theirs.tolist())) > 50  # one token everywhere would prove nothing


def test_real_greedy_continuations(real):
    config, params, _, _, prompts, want = real
    settings = SamplerConfig(
        waves=1,
        slots=len(prompts),
        capacity=128,
        max_response=NEW,
        stop_ids=config.eos_token_ids,
        temperature=0.0,
    )
    sampler = Sampler(params, config, settings)
    sampler.extend(0, dict(enumerate(prompts)))
    out = sampler.generate(0, {s: ((0, s, 0, 0), NEW) for s in range(len(prompts))})
    for slot, row in enumerate(want):
        assert out[slot].ids.tolist() == row, PROMPTS[slot]
    assert max(map(len, want)) == NEW
