"""Every method against its oracle, on ragged batches in both context regimes."""

from __future__ import annotations

import jax
import numpy as np
import oracles
import pytest
from credit_batches import Draw, built, draws
from credit_cases import (
    Packed,
    flatten,
    jitted,
    low_effort_compilation,  # noqa: F401
    nested,
    on_mesh,
    pack,
    random_trials,
    run,
)
from hypothesis import given, settings

from jaxcredit.credit import METHODS, make, relace
from jaxcredit.episodes import Credit

NAMES = sorted(METHODS)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def check(credit, trials: list[oracles.Trial], packed: Packed, expected: oracles.Result) -> None:
    advantage = flatten(nested(trials, packed, credit.token_advantage))
    np.testing.assert_allclose(advantage, flatten(expected.advantage), **TOLERANCE)
    rewards = [np.asarray(credit.step_reward)[i, : t.n].tolist() for i, t in enumerate(trials)]
    np.testing.assert_allclose(flatten(rewards), flatten(expected.step_reward), **TOLERANCE)
    weight = expected.weight or oracles.spread_over_tokens(trials, [[1.0] * t.n for t in trials])
    found = flatten(nested(trials, packed, credit.token_weight))
    np.testing.assert_allclose(found, flatten(weight), **TOLERANCE)
    if expected.target is None:
        assert credit.token_target is None
    else:
        target = flatten(nested(trials, packed, credit.token_target))
        np.testing.assert_allclose(target, flatten(expected.target), **TOLERANCE)
    assert (credit.step_target or {}).keys() == (expected.step_target or {}).keys()
    for name, targets in (expected.step_target or {}).items():
        found = np.asarray(credit.step_target[name])
        for i, trial in enumerate(trials):
            wanted = np.array(targets[i]) * (trial.weight > 0)
            np.testing.assert_allclose(found[i, : trial.n], wanted, **TOLERANCE)
    assert (credit.reward_slope is None) == (expected.slope is None)
    if expected.slope is not None:
        slope = flatten(nested(trials, packed, credit.reward_slope))
        np.testing.assert_allclose(slope, flatten(expected.slope), **TOLERANCE)


def test_there_is_an_oracle_for_every_method():
    assert sorted(oracles.ORACLES) == NAMES


def op_by_op(name: str, packed: Packed) -> Credit:
    with jax.disable_jit():
        return run(make(name), packed)


# How a method is run, and on how many drawn batches. Op by op means without jit, loops of JAX
# included: every operation is sent to the device on its own, which is slow.
WAYS = {"jit": (run, 200), "mesh": (on_mesh, 25), "no jit": (op_by_op, 4)}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_oracle(name: str, way: str):
    credit_by, batches = WAYS[way]

    @settings(max_examples=batches)
    @given(draws)
    def agrees(draw: Draw) -> None:
        trials, packed = built(draw)
        check(credit_by(name, packed), trials, packed, oracles.ORACLES[name](trials))

    agrees()


@pytest.mark.parametrize("variant", ["score", "focal"])
def test_relace_ablations_agree_with_the_oracle(variant: str):
    method = relace(variant=variant)
    estimate = jax.jit(method.estimate)
    for seed in range(10):
        trials = random_trials(seed)
        packed = pack(trials, seed=seed)
        credit, _ = estimate(packed.batch, packed.signals, method.init())
        check(credit, trials, packed, oracles.relace(trials, variant=variant))


@pytest.mark.parametrize("confidence", ["mass", "const"])
def test_attnsr_confidence_variants_agree_with_the_oracle(confidence: str):
    method = make("attnsr", confidence=confidence)
    estimate = jax.jit(method.estimate)
    for seed in range(10):
        trials = random_trials(seed)
        packed = pack(trials, seed=seed)
        credit, _ = estimate(packed.batch, packed.signals, method.init())
        check(credit, trials, packed, oracles.attnsr(trials, confidence=confidence))


@pytest.mark.parametrize("name", ["attnsr", "linear"])
def test_the_running_baseline_is_carried_from_batch_to_batch(name: str):
    method, estimate = jitted(name)
    state, rbar = method.init(), None
    for seed in range(4):
        trials = random_trials(seed)
        packed = pack(trials, seed=seed)
        credit, state = estimate(packed.batch, packed.signals, state)
        mean = oracles.mean_outcome(trials)
        rbar = mean if rbar is None else 0.99 * rbar + 0.01 * mean
        check(credit, trials, packed, oracles.ORACLES[name](trials, baseline=rbar))
