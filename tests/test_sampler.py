"""The sampler against full forward passes: cache, log-probabilities, stops, keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import qwen
from models.config import QwenConfig
from models.decoding import filtered_logp
from models.lora import init_adapters
from models.params import init_params
from models.sampler import Sampler, SamplerConfig

CONFIG = QwenConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
SETTINGS = SamplerConfig(
    slots=8, capacity=256, max_response=12, stop_ids=(3, 5), rows=4, block=5, prefill=64
)


def sharp_params(seed=0, adapters=False):
    """Weights with a spread large enough that samples differ and positions matter, but attention
    scores stay in the hundreds: float32 keeps them to 1e-4."""
    params = init_params(CONFIG, jax.random.key(seed))
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)


def full_logp(params, ids, temperature=1.0, adapters=None):
    """log p of every token from one forward pass over the whole row."""
    padded = np.zeros((1, SETTINGS.capacity), np.int32)
    padded[0, : len(ids)] = ids
    logits = _logits(params, padded, np.int32(len(ids)), adapters)[0, : len(ids)] / temperature
    return np.asarray(jax.nn.log_softmax(logits, -1))


@jax.jit
def _logits(params, tokens, length, adapters):
    position = jnp.arange(tokens.shape[1])[None]
    segment = (position < length).astype(jnp.int32)
    hidden, _ = qwen.forward(params, CONFIG, tokens, position, segment, adapters=adapters)
    return qwen.unembed(params, CONFIG, hidden)


def play(sampler, turns=3, limit=12, slots=(0, 2, 3, 5, 6), seed=0):
    """Several turns on several slots; returns rows and (start, response) per turn."""
    rng = np.random.default_rng(seed)
    rows = {s: [] for s in slots}
    spans = {s: [] for s in slots}
    for turn in range(turns):
        new = {s: rng.integers(6, 61, size=rng.integers(1, 60)) for s in slots}
        sampler.extend(new)
        out = sampler.generate({s: ((0, s, 7, turn), limit) for s in slots})
        for s in slots:
            rows[s].extend(int(i) for i in new[s])
            spans[s].append((len(rows[s]), out[s]))
            rows[s].extend(int(i) for i in out[s].ids)
    return rows, spans


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_over_turns_equal_one_forward_pass(temperature):
    params = sharp_params()
    settings = dataclasses.replace(SETTINGS, temperature=temperature)
    rows, spans = play(Sampler(params, CONFIG, settings, seed=1))
    lengths = set()
    for slot, ids in rows.items():
        logp = full_logp(params, ids, temperature)
        for start, generated in spans[slot]:
            lengths.add(len(generated.ids))
            for i, (token, found) in enumerate(zip(generated.ids, generated.logp, strict=True)):
                assert abs(logp[start + i - 1, token] - found) < 1e-4
    assert len(lengths) > 1, "all responses have one length; the test shows little"


def test_adapters_take_part():
    params = sharp_params()
    adapters = init_adapters(CONFIG, jax.random.key(3), rank=4, alpha=8.0)
    weights = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(4), x.shape) * 0.3, adapters.weights
    )
    adapters = dataclasses.replace(adapters, weights=weights)
    rows, spans = play(Sampler(params, CONFIG, SETTINGS, adapters=adapters, seed=1), turns=2)
    for slot, ids in rows.items():
        with_adapters = full_logp(params, ids, adapters=adapters)
        base = full_logp(params, ids)
        start, generated = spans[slot][1]
        picked = [with_adapters[start + i - 1, t] for i, t in enumerate(generated.ids)]
        np.testing.assert_allclose(picked, generated.logp, atol=1e-4)
        assert abs(base[start - 1, generated.ids[0]] - generated.logp[0]) > 1e-3


def test_greedy_decoding_equals_prefill():
    """Each greedy token is the argmax of a pass over all tokens before it."""
    params = sharp_params()
    settings = dataclasses.replace(SETTINGS, temperature=0.0)
    rows, spans = play(Sampler(params, CONFIG, settings), turns=2)
    for slot, ids in rows.items():
        logp = full_logp(params, ids)
        for start, generated in spans[slot]:
            best = logp[start - 1 : start - 1 + len(generated.ids)].argmax(-1)
            np.testing.assert_array_equal(best, generated.ids)


def test_stops():
    params = sharp_params()
    _, spans = play(Sampler(params, CONFIG, SETTINGS, seed=5), turns=3, limit=9)
    seen = set()
    for turns in spans.values():
        for _, generated in turns:
            seen.add(generated.stop)
            *body, last = generated.ids.tolist()
            assert not set(body) & {3, 5}
            if generated.stop == "stop":
                assert last in (3, 5)
            else:
                assert last not in (3, 5)
                assert len(generated.ids) == 9
    assert seen == {"stop", "length"}


def test_samples_depend_on_the_key_alone():
    """Another slot or other company change nothing; another key does."""
    params = sharp_params()
    prompt = np.arange(6, 20)
    key = (4, 2, 1, 0)

    def sample(slot, company, key):
        sampler = Sampler(params, CONFIG, SETTINGS, seed=9)
        requests = {slot: (key, 12)} | {s: ((0, 0, s, 0), 12) for s in company}
        sampler.extend({s: prompt if s == slot else prompt[: 3 + s] for s in requests})
        return sampler.generate(requests)[slot]

    alone = sample(0, (), key)
    for other in (sample(3, (), key), sample(1, (0, 2, 3, 4, 5, 7), key)):
        np.testing.assert_array_equal(alone.ids, other.ids)
        np.testing.assert_allclose(alone.logp, other.logp, atol=1e-5)
    different = [sample(0, (), (4, 2, 1, turn)).ids.tolist() for turn in range(1, 5)]
    assert any(ids != alone.ids.tolist() for ids in different)


def test_reset_forgets_and_neighbours_stay():
    params = sharp_params()
    settings = dataclasses.replace(SETTINGS, temperature=0.0)
    sampler = Sampler(params, CONFIG, settings)
    sampler.extend({0: np.arange(6, 40), 1: np.arange(10, 30)})
    sampler.reset(0)
    sampler.extend({0: np.arange(20, 31)})
    out = sampler.generate({0: ((0, 0, 0, 0), 8), 1: ((0, 1, 0, 0), 8)})
    for slot, prompt in ((0, np.arange(20, 31)), (1, np.arange(10, 30))):
        row = [*prompt, *out[slot].ids]
        best = full_logp(params, row)[len(prompt) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(best, out[slot].ids)


def test_a_full_cache_is_refused():
    sampler = Sampler(sharp_params(), CONFIG, SETTINGS)
    with pytest.raises(ValueError, match=r"257 tokens.*256.*max_context"):
        sampler.extend({0: np.zeros(257, np.int32)})


def test_sampling_frequencies_follow_the_filtered_distribution():
    """2,000 draws of a first token against its computed distribution (chi-square, p > 1e-4)."""
    from scipy import stats

    params = jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, sharp_params())
    settings = dataclasses.replace(
        SETTINGS, slots=500, rows=None, top_k=8, top_p=0.95, capacity=128
    )
    sampler = Sampler(params, CONFIG, settings, seed=2)
    prompt = np.arange(6, 14)
    sampler.extend(dict.fromkeys(range(500), prompt))
    counts = np.zeros(CONFIG.vocab_size)
    logps = {}
    for turn in range(4):
        out = sampler.generate({s: ((0, s, 0, turn), 1) for s in range(500)})
        for slot in range(500):
            token = int(out[slot].ids[0])
            counts[token] += 1
            logps[token] = float(out[slot].logp[0])
            sampler.reset(slot)
        sampler.extend(dict.fromkeys(range(500), prompt))
    logits = full_logp(params, prompt)[-1]
    expected = np.exp(
        np.asarray(filtered_logp(jnp.asarray(logits)[None], jnp.float32(1.0), 0.95, 8))[0]
    )
    for token, logp in logps.items():
        assert abs(np.log(expected[token]) - logp) < 1e-4
    kept = expected > 1e-9
    assert counts[~kept].sum() == 0
    assert 1 < kept.sum() <= 8
    share = expected[kept].astype(np.float64)
    p = stats.chisquare(counts[kept], share / share.sum() * counts.sum()).pvalue
    assert p > 1e-4


def test_filters_by_hand():
    """p = (0.5, 0.3, 0.15, 0.05): top-p 0.6 keeps the first two; top-k 3 the first three."""
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    one = jnp.float32(1.0)
    np.testing.assert_allclose(
        np.exp(filtered_logp(logits, one, 0.6, 0))[0], [0.625, 0.375, 0, 0], atol=1e-6
    )
    np.testing.assert_allclose(
        np.exp(filtered_logp(logits, one, 1.0, 3))[0], np.array([50, 30, 15, 0]) / 95, atol=1e-6
    )
    np.testing.assert_allclose(  # temperature 0.5 squares the probabilities
        np.exp(filtered_logp(logits, jnp.float32(0.5), 1.0, 0))[0],
        np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365,
        atol=1e-6,
    )


def test_a_shared_prefix_is_prefilled_once_and_changes_no_token():
    """Four rows of one prompt, then four longer ones, then a fresh window in a used slot."""
    params = sharp_params()
    rng = np.random.default_rng(0)
    head, tails = rng.integers(6, 61, 70), rng.integers(6, 61, (5, 30))
    tails[:, 0] = range(6, 11)  # they differ from the beginning
    shared = Sampler(params, CONFIG, SETTINGS, seed=1)
    apart = Sampler(params, CONFIG, dataclasses.replace(SETTINGS, share=False), seed=1)
    found = []
    for sampler in (shared, apart):
        sampler.extend(dict.fromkeys(range(4), head))
        out = [sampler.generate({s: ((0, 0, s, 0), 9) for s in range(4)})]
        sampler.extend({s: np.concatenate([head, tails[s - 4]]) for s in range(4, 8)})
        out.append(sampler.generate({s: ((0, 0, s, 0), 9) for s in range(4, 8)}))
        sampler.reset(5)
        sampler.extend({5: np.concatenate([head, tails[4]]), 2: tails[0]})
        out.append(sampler.generate({s: ((0, 1, s, 0), 9) for s in (5, 2)}))
        found.append([(o[s].ids.tolist(), o[s].logp) for o in out for s in sorted(o)])
    for (ids, logp), (same_ids, same_logp) in zip(*found, strict=True):
        assert ids == same_ids
        np.testing.assert_allclose(logp, same_logp, atol=1e-5)
    assert apart.work.prefilled == 4 * 70 + 4 * 100 + 100 + 30
    assert shared.work.prefilled == 70 + 3 * 1 + 4 * 30 + 30 + 30
    assert shared.work.prefilled + shared.work.reused == apart.work.prefilled


def test_no_program_compiles_after_warm_up():
    """Every length of prompt, extension and response, alone and in company."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        settings = dataclasses.replace(SETTINGS, slots=5, rows=3, capacity=200, top_k=50)
        sampler = Sampler(sharp_params(), CONFIG, settings)
        assert not compiled or len(compiled) < 100
        sampler.warm_up()
        assert compiled, "the listener hears nothing"
        compiled.clear()
        rng = np.random.default_rng(0)
        for turn in range(120):
            slots = rng.choice(5, rng.integers(1, 6), replace=False).tolist()
            for slot in slots:
                if rng.random() < 0.3 or sampler.lengths[slot] > 150:
                    sampler.reset(slot)
            room = {s: 200 - 12 - int(sampler.lengths[s]) for s in slots}
            sampler.extend({s: rng.integers(6, 61, rng.integers(1, room[s] + 1)) for s in slots})
            sampler.generate({s: ((turn, s, 0, 0), int(rng.integers(1, 13))) for s in slots})
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_misuse_is_told():
    sampler = Sampler(sharp_params(), CONFIG, SETTINGS)
    with pytest.raises(ValueError, match="slot 1 is empty"):
        sampler.start({1: ((0, 0, 0, 0), 4)})
    sampler.extend({1: np.arange(6, 20), 2: np.full(250, 7)})
    sampler.start({1: ((0, 0, 0, 0), 4)})
    with pytest.raises(ValueError, match="slot 1 has a response growing"):
        sampler.start({1: ((0, 0, 0, 0), 4)})
    with pytest.raises(ValueError, match=r"slot 2 holds 250 tokens.*may have 12.*256"):
        sampler.start({2: ((0, 0, 0, 0), 12)})


def test_stop_strings_end_a_response():
    """A table by hand: state 1 after an id of 6 to 14, complete when one of 20 to 28 follows,
    whatever block they fall in."""
    table = np.zeros((2, CONFIG.vocab_size), np.int32)
    table[:, 6:15] = 1
    table[1, 20:29] = -1
    params = sharp_params()
    settings = dataclasses.replace(SETTINGS, stop_ids=(3,), temperature=1.5)
    plain = Sampler(params, CONFIG, settings, seed=4)
    stopping = Sampler(params, CONFIG, settings, seed=4, stop_table=table)
    cut = set()
    for turn in range(12):
        prompts = {s: np.arange(6, 12) + s for s in range(8)}
        both = []
        for sampler in (plain, stopping):
            for slot in range(8):
                sampler.reset(slot)
            sampler.extend(prompts)
            both.append(sampler.generate({s: ((turn, s, 0, 0), 12) for s in range(8)}))
        for slot in range(8):
            whole, found = (out[slot] for out in both)
            pairs = list(zip(whole.ids, whole.ids[1:], strict=False))
            complete = [6 <= a <= 14 and 20 <= b <= 28 for a, b in pairs]
            end = complete.index(True) + 2 if any(complete) else len(whole.ids)
            np.testing.assert_array_equal(found.ids, whole.ids[:end])
            np.testing.assert_allclose(found.logp, whole.logp[:end], atol=1e-5)
            assert found.stop == ("string" if any(complete) else whole.stop)
            cut |= {end} if any(complete) else set()
    assert len(cut) > 2, "no stop string came up at different places"
