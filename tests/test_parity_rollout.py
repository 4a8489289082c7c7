"""Greedy episodes, turn by turn, against reading the whole row again and against ``generate`` of
transformers."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import CONFIG
from test_rollout import CHAT, jobs_for
from test_rollout_engine import Loose

from envs.chat import chat_format
from envs.pool import Pool
from envs.protocol import EnvSpec
from envs.rollout import Limits, Player
from jaxcredit.batching import episode_rows
from models import hf
from models.params import init_params
from models.sampler import Sampler, SamplerConfig

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _workers_find_this_file(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def play(config, params, player, stop_ids, jobs, **changes):
    """Greedy episodes with fewer slots than jobs, decoded in pieces."""
    limits = player.limits
    settings = SamplerConfig(
        slots=3,
        capacity=limits.max_context,
        max_response=limits.max_response,
        stop_ids=stop_ids,
        block=3,
        temperature=0.0,
        **changes,
    )
    sampler = Sampler(params, config, settings)
    with Pool(EnvSpec("test_rollout:make"), 2, deadline_s=300) as pool:
        return player.collect(sampler, pool, jobs)


def compare(folder, episodes, stop_ids, most):
    """Every response is what transformers says to the row before it; returns their number."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=most, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0]
    )
    count = 0
    for episode in episodes:
        row: list[int] = []
        for step in episode.steps:
            row = [] if episode.context == "window" else row
            row += step.context_ids.tolist()
            ids = torch.tensor([row])
            with torch.no_grad():
                found = theirs.generate(ids, attention_mask=torch.ones_like(ids))[0, len(row) :]
            assert step.response_ids[step.sampled].tolist() == found.tolist()
            row += step.response_ids.tolist()
            count += 1
    return count


def read_again(config, params, episodes, stop_ids, limits):
    """Every response is what a fresh cache says after reading the row before it from the start."""
    settings = SamplerConfig(
        slots=1,
        capacity=limits.max_context,
        max_response=limits.max_response,
        stop_ids=stop_ids,
        temperature=0.0,
        share=False,
    )
    sampler = Sampler(params, config, settings)
    for episode in episodes:
        row: list[int] = []
        for step in episode.steps:
            row = [] if episode.context == "window" else row
            row += step.context_ids.tolist()
            sampler.reset(0)
            sampler.extend({0: np.asarray(row)})
            found = sampler.generate({0: ((0, 0, 0, 0), limits.max_response)})[0]
            assert step.response_ids[step.sampled].tolist() == found.ids.tolist()
            row += step.response_ids.tolist()
    whole = sum(len(row.tokens) for e in episodes for row in episode_rows(e))
    assert sampler.work.prefilled > (whole if episode.context == "conversation" else 0)


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_tiny_episodes(context, tmp_path):
    params = jax.tree.map(
        lambda x: x * 3 if x.ndim > 1 else x, init_params(CONFIG, jax.random.key(3))
    )
    hf.save_policy(tmp_path, CONFIG, params, jnp.float32)
    prompt = Loose(template="bare", context=context, think=False, show_admissible=False)
    player = Player(CHAT, prompt, Limits(max_steps=8, max_context=512, max_response=8))
    episodes = play(CONFIG, params, player, (CHAT.end_id,), jobs_for(4, 6, 90, replicas=2))
    assert len({s.response_ids.tobytes() for e in episodes for s in e.steps}) > 3
    read_again(CONFIG, params, episodes, (CHAT.end_id,), player.limits)
    assert compare(tmp_path, episodes, (CHAT.end_id,), 8) > 20


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_real_episodes(context):
    """Ours are played first and freed: both policies at once would not fit everywhere."""
    folder = os.environ.get("JAXCREDIT_QWEN")
    if not folder:
        pytest.skip("JAXCREDIT_QWEN names no folder with the weights of a Qwen2.5 or Qwen3 model")
    from launch.assemble import load_tokenizer

    chat = chat_format(load_tokenizer(Path(folder)))
    config, params = hf.load_policy(folder)
    prompt = Loose(template="household", context=context, think=False, show_admissible=True)
    player = Player(chat, prompt, Limits(max_steps=4, max_context=1024, max_response=16))
    stop_ids = tuple(sorted({*config.eos_token_ids, chat.end_id}))
    episodes = play(config, params, player, stop_ids, jobs_for(4, 90, replicas=2), rows=2)
    read_again(config, params, episodes, stop_ids, player.limits)
    del params
    gc.collect()
    jax.clear_caches()
    assert compare(folder, episodes, stop_ids, 16) >= 8
    assert np.mean([s.stop == "stop" for e in episodes for s in e.steps]) > 0
