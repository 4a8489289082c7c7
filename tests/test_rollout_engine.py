"""The sampler, the schedule and environments together: exactness, reproducibility, economy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import CONFIG, plain
from test_rollout import CHAT, LIMITS, PROMPT, TOKENIZER, jobs_for

from envs.meter import Meter
from envs.pool import Pool
from envs.prompts import Prompt
from envs.protocol import EnvSpec
from envs.rollout import Player
from envs.stops import stop_table
from jaxcredit.batching import batch_episodes, episode_rows
from jaxcredit.episodes import Status
from models import qwen
from models.params import init_params
from models.sampler import Sampler, SamplerConfig

SLOW = pytest.mark.slow  # a hung worker is waited for until its deadline
CAPACITY = 512
SETTINGS = SamplerConfig(
    slots=4,
    capacity=CAPACITY,
    max_response=8,
    stop_ids=(CHAT.end_id,),
    rows=4,
    block=3,
    prefill=64,
    temperature=0.0,
)


@pytest.fixture(autouse=True)
def _workers_find_this_file(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(__import__("pathlib").Path(__file__).parent))


class Loose(Prompt):
    """Reads an action out of whatever a random policy says."""

    def action(self, text):
        return ("go up", "go up", "go sideways", "go down", None)[sum(map(ord, text)) % 5]


class Up(Prompt):
    """Whatever is said means: go up."""

    def action(self, text):
        return "go up"


def prompt_of(kind, context="conversation", history=2):
    changed = dataclasses.replace(PROMPT, context=context, history=history)
    return kind(**{f.name: getattr(changed, f.name) for f in dataclasses.fields(Prompt)})


@functools.cache
def weights():
    params = init_params(CONFIG, jax.random.key(3))
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)


@jax.jit
def _logits(tokens, length):
    position = jnp.arange(CAPACITY)[None]
    segment = (position < length).astype(jnp.int32)
    hidden, _ = qwen.forward(weights(), CONFIG, tokens, position, segment)
    return qwen.unembed(weights(), CONFIG, hidden)[0]


def logits(row):
    """From one pass over the whole row, no cache anywhere."""
    padded = np.zeros((1, CAPACITY), np.int32)
    padded[0, : len(row)] = row
    return np.asarray(_logits(padded, np.int32(len(row))))[: len(row)]


def collect(
    jobs,
    *,
    prompt=None,
    context="conversation",
    workers=2,
    limits=None,
    meter=None,
    progress=None,
    table=None,
    **changes,
):
    """Episodes of the weights above; ``changes`` are of ``SETTINGS``."""
    limits = limits or dataclasses.replace(LIMITS, max_steps=6, max_context=CAPACITY)
    settings = dataclasses.replace(SETTINGS, **changes)
    sampler = Sampler(weights(), CONFIG, settings, seed=5, stop_table=table)
    player = Player(CHAT, prompt or prompt_of(Loose, context), limits)
    with Pool(EnvSpec("test_rollout:make"), workers, deadline_s=300) as pool:
        return player.collect(sampler, pool, jobs, iteration=2, meter=meter, progress=progress)


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_greedy_episodes_are_those_of_reading_every_row_from_its_beginning(context):
    episodes = collect(jobs_for(2, 4, 6, replicas=2), context=context)
    said = set()
    for episode in episodes:
        for row in episode_rows(episode):
            found = logits(row.tokens)
            at = np.flatnonzero(row.sampled)
            np.testing.assert_array_equal(found[at - 1].argmax(-1), row.tokens[at])
            want = np.asarray(jax.nn.log_softmax(found))[at - 1, row.tokens[at]]
            np.testing.assert_allclose(row.behaviour_logp[at], want, atol=1e-4)
        said |= {step.response_ids.tobytes() for step in episode.steps}
    assert len(said) > 6, "the policy says one thing"
    assert sum(len(e.steps) for e in episodes) > 12


def assert_same(found, want):
    """Everything is equal, log-probabilities up to rounding."""

    def apart(episodes):
        steps = [[dataclasses.replace(s, behaviour_logp=None) for s in e.steps] for e in episodes]
        logp = [s.behaviour_logp for e in episodes for s in e.steps]
        return plain([dataclasses.replace(e, steps=()) for e in episodes]), plain(steps), logp

    *found, found_logp = apart(found)
    *want, want_logp = apart(want)
    assert found == want
    np.testing.assert_allclose(np.concatenate(found_logp), np.concatenate(want_logp), atol=1e-5)


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_episodes_are_the_same_for_any_number_of_workers(context):
    jobs = jobs_for(2, 4, 6, replicas=3)
    first, *rest = (collect(jobs, context=context, workers=n, temperature=1.0) for n in (1, 2, 4))
    for episodes in rest:
        assert_same(episodes, first)


def _turn_and_token(episode, at):
    """Which turn's response position ``at`` of the row is in, and where in it."""
    before = 0
    for turn, step in enumerate(episode.steps):
        start = before + len(step.context_ids)
        before = start + len(step.response_ids)
        if at < before:
            assert at >= start, "rows differ where nothing was sampled"
            return turn, at - start
    raise AssertionError("beyond the row")


def _gap(key, row, at, pair, temperature):
    """Distance of two candidates for position ``at``, as the sampler ranks them."""
    scores = np.asarray(jax.nn.log_softmax(logits(row)[at - 1]))
    if temperature:
        index, key_array = key[4], jax.random.key(5)
        for part in key[:4]:
            key_array = jax.random.fold_in(key_array, part)
        noise = jax.random.gumbel(jax.random.fold_in(key_array, index), scores.shape, jnp.float32)
        scores = scores + np.asarray(noise)
    return abs(float(scores[pair[0]] - scores[pair[1]]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slots_change_nothing_but_ties(temperature):
    """4, 8 and 16 slots; where tokens differ, the first two to do so are within 1e-4."""
    jobs = jobs_for(2, 3, 4, 5, 6, replicas=4)
    runs = [collect(jobs, temperature=temperature, slots=n, rows=None, block=4) for n in (4, 8, 16)]
    tokens = 0
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            row_a, row_b = (episode_rows(e)[0] for e in (a, b))
            tokens += int(row_a.sampled.sum())
            n = min(len(row_a.tokens), len(row_b.tokens))
            differ = np.flatnonzero(row_a.tokens[:n] != row_b.tokens[:n])
            if not differ.size:
                assert len(row_a.tokens) == len(row_b.tokens)
                continue
            at = int(differ[0])
            key = (2, a.group, a.replica, *_turn_and_token(a, at))
            pair = (row_a.tokens[at], row_b.tokens[at])
            gap = _gap(key, row_a.tokens, at, pair, temperature)
            assert gap < 1e-4, f"task {a.group}.{a.replica}, token {at}: {pair}, gap {gap}"
    assert tokens > 500


def test_twenty_turns_prefill_a_fifth_of_reading_everything_again():
    limits = dataclasses.replace(LIMITS, max_steps=20, max_context=CAPACITY)
    meter = Meter()
    jobs = jobs_for(600, 700, replicas=4)
    episodes = collect(jobs, prompt=prompt_of(Up), limits=limits, meter=meter, temperature=1.0)
    again = 0
    for episode in episodes:
        assert len(episode.steps) == 20
        before = 0
        for step in episode.steps:
            before += len(step.context_ids)
            again += before
            before += len(step.response_ids)
    counts = meter.metrics()
    assert counts["rollout/prefilled_tokens"] <= again / 5
    assert counts["rollout/reused_tokens"] > 0


def test_no_rollout_compiles_after_warm_up():
    """Two contexts, prompts and responses of many lengths, fewer rows than slots."""
    compiled = []
    settings = dataclasses.replace(SETTINGS, rows=3, temperature=1.0)
    sampler = Sampler(weights(), CONFIG, settings, seed=5)
    limits = dataclasses.replace(LIMITS, max_steps=12, max_context=CAPACITY)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        sampler.warm_up()
        assert compiled, "the listener hears nothing"
        compiled.clear()
        lengths = set()
        with Pool(EnvSpec("test_rollout:make"), 2, deadline_s=300) as pool:
            for context in ("conversation", "window"):
                player = Player(CHAT, prompt_of(Loose, context, history=9), limits)
                episodes = player.collect(sampler, pool, jobs_for(2, 4, 90, replicas=4))
                lengths |= {len(row.tokens) for e in episodes for row in episode_rows(e)}
        assert len(lengths) > 20
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_the_meter_adds_up():
    meter, seen = Meter(), []
    episodes = collect(
        jobs_for(4, 5, 6, replicas=4),
        prompt=prompt_of(Up),  # nothing fails, so every token is part of an episode
        meter=meter,
        progress=lambda m: seen.append((m.done, m.jobs, m.line())),
        temperature=1.0,
    )
    assert [done for done, _, _ in seen] == list(range(1, 13))
    for word in ("tokens/s", "/4 slots", "prefill", "decode", "environment", "waiting"):
        assert word in seen[-1][2]
    counts = meter.metrics()
    sampled = sum(int(s.sampled.sum()) for e in episodes for s in e.steps)
    assert counts["rollout/sampled_tokens"] == sampled
    parts = ("prefill", "decode", "environment", "waiting")
    total = sum(counts[f"rollout/{part}_seconds"] for part in parts)
    assert 0.8 * meter.seconds < total <= 1.01 * meter.seconds
    assert 0.3 < counts["rollout/occupancy"] <= 1
    assert 0 < counts["rollout/decode_efficiency"] <= 1


def test_a_window_drops_its_oldest_history_where_it_is_told_to():
    episodes = {}
    for policy in ("stop", "drop"):
        limits = dataclasses.replace(LIMITS, max_context=50, overlength=policy)
        meter = Meter()
        prompt = prompt_of(Up, "window", history=9)
        (episode,) = collect(jobs_for(90), prompt=prompt, limits=limits, meter=meter, capacity=50)
        episodes[policy] = episode
        assert (meter.metrics()["rollout/shortened_windows"] > 0) == (policy == "drop")
        assert all(len(row.tokens) <= 50 for row in episode_rows(episode))
    stopped, dropped = episodes["stop"], episodes["drop"]
    assert (stopped.status, len(stopped.steps)) == (Status.CONTEXT_LIMIT, 3)
    assert (dropped.status, len(dropped.steps)) == (Status.STEP_LIMIT, 6)
    for a, b in zip(stopped.steps, dropped.steps, strict=False):
        np.testing.assert_array_equal(a.context_ids, b.context_ids)
    for k, step in enumerate(dropped.steps):
        shown = CHAT.decode(step.context_ids)
        assert f"floor {k} ." in shown, "the newest is shown"
        assert ("floor 0 ." in shown) == (k < 3), "the oldest goes first"
    with pytest.raises(ValueError, match="'stop' or 'drop'"):
        dataclasses.replace(LIMITS, overlength="cut")


def test_stop_strings_end_messages():
    """The response ends with the string; the end of the message is then injected."""
    table = stop_table(TOKENIZER, CONFIG.vocab_size, ["up", "go"])
    words = [CHAT.decode([i]) for i in range(CONFIG.vocab_size)]
    ending = {i for i, word in enumerate(words) if "up" in word or "go" in word}
    episodes = collect(jobs_for(4, 6, replicas=4), temperature=1.0, table=table)
    stops = set()
    for step in (s for e in episodes for s in e.steps):
        stops.add(step.stop)
        said = step.response_ids[step.sampled].tolist()
        assert not ending & set(said[:-1])
        assert (said[-1] in ending) == (step.stop == "string")
        if step.stop == "string":
            assert step.response_ids[-1] == CHAT.end_id
            assert not step.sampled[-1]
    assert "string" in stops


@pytest.mark.parametrize(
    "faults",
    [["die", "raise", "garbage", "text", "nan", "other"], pytest.param(["hang"], marks=SLOW)],
)
def test_broken_environments_cost_their_own_episodes_alone(faults):
    """Tasks that die, hang, raise or answer garbage, beside healthy ones in the same workers."""
    jobs = jobs_for(*(f"3 {fault}" for fault in faults), 3, 4, replicas=2)
    limits = dataclasses.replace(LIMITS, max_context=CAPACITY, max_steps=8)
    healthy = {}
    for spec in ("test_rollout:make", "faulty_stairs:make"):
        meter = Meter()
        sampler = Sampler(weights(), CONFIG, dataclasses.replace(SETTINGS, slots=8), seed=5)
        with Pool(EnvSpec(spec), 2, deadline_s=30 if "hang" in faults else 300) as pool:
            player = Player(CHAT, prompt_of(Up), limits)
            episodes = player.collect(sampler, pool, jobs, meter=meter)
        healthy[spec] = [e for e in episodes if e.group >= len(faults)]
    assert {e.status for e in episodes if e.group >= len(faults)} == {Status.SUCCESS}
    assert_same(healthy["faulty_stairs:make"], healthy["test_rollout:make"])
    broken = [e for e in episodes if e.group < len(faults)]
    assert {e.status for e in broken} == {Status.ENV_ERROR}
    batch = batch_episodes(episodes, max_steps=8)
    assert batch.weight.tolist() == [0.0] * len(broken) + [1.0] * 4
    counts = meter.metrics()
    assert counts["rollout/episodes_given_up"] == len(broken)
    assert counts["rollout/episodes_retried"] == len(broken) * limits.retries
    assert counts["rollout/episodes_displaced"] > 0
