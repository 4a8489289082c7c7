"""The sampler on meshes of simulated devices samples what one device samples."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from test_sampler import CONFIG, SETTINGS, play, sharp_params

from models import programs
from models.lora import adapter_specs, init_adapters
from models.params import param_specs
from models.sampler import Sampler
from models.sharding import SAMPLER_RULES, make_mesh, tree_shardings


def placed(mesh, params):
    specs = param_specs(CONFIG)
    return jax.device_put(params, tree_shardings(specs, CONFIG, mesh, SAMPLER_RULES))


def share(data, **changes):
    """Settings of a replica, so that all together have the slots and rows of one device."""
    return dataclasses.replace(
        SETTINGS, slots=SETTINGS.slots // data, rows=SETTINGS.rows // data, **changes
    )


@pytest.mark.parametrize(("data", "tensor", "context"), [(2, 2, 2), (4, 1, 1), (1, 4, 1)])
def test_a_mesh_samples_what_one_device_samples(data, tensor, context):
    """Several turns, slots on all replicas, prompts of several chunks, fewer rows than slots."""
    params, mesh = sharp_params(), make_mesh(data, tensor, context)
    table = np.zeros((2, CONFIG.vocab_size), np.int32)
    table[:, 6:15], table[1, 20:29] = 1, -1
    alone = Sampler(params, CONFIG, SETTINGS, seed=1, stop_table=table)
    meshed = Sampler(placed(mesh, params), CONFIG, share(data), seed=1, stop_table=table, mesh=mesh)
    assert meshed.slots == alone.slots == 8
    (rows, spans), (want_rows, want_spans) = (play(s, slots=range(8)) for s in (meshed, alone))
    assert rows == want_rows
    stops = set()
    for slot in rows:
        for (start, got), (want_start, want) in zip(spans[slot], want_spans[slot], strict=True):
            assert (start, got.stop) == (want_start, want.stop)
            np.testing.assert_allclose(got.logp, want.logp, atol=1e-4)
            stops.add(got.stop)
    assert {"string", "length"} <= stops
    np.testing.assert_array_equal(meshed.lengths, alone.lengths)
    assert meshed.work.prefilled == alone.work.prefilled


def test_every_replica_holds_its_slots_and_its_heads():
    mesh = make_mesh(2, 2, 2)
    sampler = Sampler(placed(mesh, sharp_params()), CONFIG, share(2), mesh=mesh)
    sampler.extend({s: np.arange(6, 30) for s in range(8)})
    sampler.generate({s: ((0, s, 0, 0), 5) for s in range(8)})
    cache = sampler._cache
    for x in (*cache.keys, *cache.values):
        assert x.shape == (8, 2, 256, 8)
        assert x.sharding.shard_shape(x.shape) == (4, 1, 256, 8)
    assert cache.hidden.sharding.shard_shape(cache.hidden.shape) == (4, 32)
    # Heads that tensor does not divide are held whole.
    whole = programs.cache_shardings(CONFIG, make_mesh(2, 4, 1)).keys[0]
    assert whole.shard_shape((8, 2, 256, 8)) == (4, 2, 256, 8)


def test_prefixes_are_shared_within_a_replica():
    """Four rows of one prompt per replica: each replica reads it once, the others its last id."""
    mesh = make_mesh(2, 1, 1)
    sampler = Sampler(placed(mesh, sharp_params()), CONFIG, share(2), mesh=mesh)
    prompt = np.arange(6, 56)
    sampler.extend(dict.fromkeys(range(8), prompt))
    assert sampler.work.prefilled == 2 * (50 + 3)
    assert sampler.work.reused == 2 * 3 * 49
    sampler.extend({6: prompt[:10]})  # one replica alone
    out = sampler.generate({1: ((0, 0, 0, 0), 9), 6: ((0, 0, 0, 0), 9), 7: ((0, 0, 0, 0), 9)})
    assert out[1].ids.tolist() == out[7].ids.tolist()
    np.testing.assert_array_equal(sampler.lengths[[0, 1, 5]], [50, 50 + len(out[1].ids), 50])


def test_adapters_take_part_on_a_mesh():
    params, mesh = sharp_params(), make_mesh(2, 2, 1)
    adapters = init_adapters(CONFIG, jax.random.key(3), rank=4, alpha=8.0)
    weights = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(4), x.shape) * 0.3, adapters.weights
    )
    adapters = dataclasses.replace(adapters, weights=weights)
    specs = adapter_specs(CONFIG, 4)
    there = dataclasses.replace(
        adapters,
        weights=jax.device_put(weights, tree_shardings(specs, CONFIG, mesh, SAMPLER_RULES)),
    )
    meshed = Sampler(placed(mesh, params), CONFIG, share(2), adapters=there, seed=1, mesh=mesh)
    alone = Sampler(params, CONFIG, SETTINGS, adapters=adapters, seed=1)
    plain = Sampler(params, CONFIG, SETTINGS, seed=1)
    rows, want, other = (play(s, turns=1)[0] for s in (meshed, alone, plain))
    assert rows == want != other


def test_no_program_compiles_after_warm_up_on_a_mesh():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        mesh = make_mesh(2, 2, 1)
        settings = share(2, capacity=150, prefill=32)
        table = np.zeros((1, CONFIG.vocab_size), np.int32)
        sampler = Sampler(
            placed(mesh, sharp_params()), CONFIG, settings, stop_table=table, mesh=mesh
        )
        sampler.warm_up()
        assert compiled, "the listener hears nothing"
        compiled.clear()
        rng = np.random.default_rng(0)
        for turn in range(15):
            slots = rng.choice(8, rng.integers(1, 9), replace=False).tolist()
            for slot in slots:
                if rng.random() < 0.3 or sampler.lengths[slot] > 100:
                    sampler.reset(slot)
            room = {s: 150 - 12 - int(sampler.lengths[s]) for s in slots}
            sampler.extend({s: rng.integers(6, 61, rng.integers(1, room[s] + 1)) for s in slots})
            sampler.generate({s: ((turn, s, 0, 0), int(rng.integers(1, 13))) for s in slots})
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()
