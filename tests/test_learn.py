"""What a run computes for its estimator and its loss, and with which settings it learns."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from episode_cases import random_episodes

from jaxcredit import checkpoint, credit
from jaxcredit.batching import batch_episodes
from jaxcredit.episodes import Credit, Signals
from jaxcredit.update import TrainState, Update
from launch import assemble, games, learn, sampling, train
from launch.config import TrainConfig
from launch.errors import UserError
from launch.learn import Setup, signals_for, update_policy
from launch.loading import validate
from launch.schedules import learning_rate_schedule
from models.config import QwenConfig
from models.params import init_params, param_specs
from models.policy import Policy
from models.score import ScoreConfig, score
from models.sharding import make_mesh, tree_shardings

TINY = QwenConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
INIT = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
EPISODES = random_episodes(0, groups=2, size=2)
BATCH = batch_episodes(EPISODES, max_steps=6, length_multiple=64)
ON = np.asarray(BATCH.trainable)


def config_of(folder: Path = Path("nowhere"), **changes) -> TrainConfig:
    plain = {
        "run": str(folder / "run"),
        "policy": {"init": INIT},
        "env": {"data": str(folder / "games"), "generate": {}, "max_steps": 6},
        "rollout": {"tasks_per_iteration": 2, "group_size": 2},
        "credit": "grpo",
    }
    return validate(TrainConfig, plain | changes, "test")


def method_needing(*needs: str) -> credit.CreditEstimator:
    signal = credit.stage("mine", lambda b, s, f: f, needs=needs, writes=["step_advantage"])
    return credit.estimator("mine", signal, credit.broadcast())


def setup_of(config: TrainConfig, estimator: credit.CreditEstimator, **changes) -> Setup:
    weights = {"params": init_params(TINY, jax.random.key(0))}
    parts = types.SimpleNamespace(policy=Policy(TINY), trainable=weights, frozen=None)
    return Setup(
        **{
            "config": config,
            "parts": parts,
            "estimator": estimator,
            "scoring": ScoreConfig(buckets=(128,), tokens=512, layers=(0, 1)),
            "optimizer": None,
            "update": None,
            "tasks": (),
            **changes,
        }
    )


def state_of(trainable, iteration: int = 0) -> TrainState:
    return TrainState(
        trainable=trainable,
        opt_state=(),
        credit_state=(),
        iteration=jnp.int32(iteration),
        updates=jnp.int32(0),
    )


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("old_logp", "kl", "needs", "passes"),
    [
        # Each pass: (step graph, log-probabilities, entropy); the reference's comes last.
        ("trainer", 0.0, [], [(False, True, False)]),
        ("sampler", 0.0, [], []),
        ("sampler", 0.0, ["step_graph"], [(True, False, False)]),
        ("trainer", 0.0, ["step_graph"], [(True, True, False)]),
        ("sampler", 0.0, ["logp"], [(False, True, False)]),
        ("sampler", 0.0, ["value"], [(False, True, False)]),
        ("sampler", 0.0, ["promise"], [(False, True, False)]),
        ("sampler", 0.0, ["entropy"], [(False, True, True)]),
        ("sampler", 0.5, [], [(False, True, False)]),
        ("sampler", 0.0, ["ref_logp"], [(False, True, False)]),
        ("trainer", 0.0, ["ref_logp"], [(False, True, False)] * 2),
    ],
)
def test_only_what_is_needed_is_computed(monkeypatch, old_logp, kl, needs, passes) -> None:
    seen = []

    def score(policy, trainable, frozen, batch, config, *, step_graph=False, head=True):
        seen.append((step_graph, head, policy.entropy))
        return Signals(logp=np.zeros(BATCH.tokens.shape, np.float32) if head else None)

    monkeypatch.setattr(learn, "score", score)
    config = config_of(loss={"old_logp": old_logp, "kl": kl})
    setup = setup_of(config, method_needing(*needs))
    signals = signals_for(setup, state_of(setup.parts.trainable), EPISODES, BATCH)
    assert seen == passes
    assert (signals.ref_logp is not None) == (kl > 0 or "ref_logp" in needs)
    assert (signals.logp is not None) == (old_logp == "trainer" or bool({*needs} & HEAD))


HEAD = {"logp", "value", "entropy", "promise"}


def test_entropy_and_reference_reach_an_estimator_that_needs_them() -> None:
    config = config_of(loss={"old_logp": "sampler", "kl": 0.0})
    setup = setup_of(config, method_needing("entropy", "ref_logp"))
    moved = jax.tree.map(lambda x: 1.5 * x, setup.parts.trainable)
    signals = signals_for(setup, state_of(moved), EPISODES, BATCH)
    assert np.asarray(signals.entropy)[ON].min() > 0
    assert (np.abs(signals.ref_logp - signals.logp)[ON] > 1e-4).any(), "the initial weights'"
    setup.estimator.estimate(BATCH, signals, setup.estimator.init())


def test_the_judges_scores_reach_an_estimator_that_needs_them() -> None:
    config = config_of(loss={"old_logp": "sampler", "kl": 0.0})
    setup = setup_of(config, credit.make("tarl"), judge=lambda turns, goal: [1] * len(turns))
    signals = signals_for(setup, state_of(setup.parts.trainable), EPISODES, BATCH)
    np.testing.assert_array_equal(signals.judge_score, BATCH.step_mask)
    found, _ = setup.estimator.estimate(BATCH, signals, setup.estimator.init())
    earned = np.asarray(found.step_reward).sum(axis=1) - BATCH.outcome
    np.testing.assert_allclose(earned, 0.5, atol=1e-6)


@pytest.mark.parametrize("old_logp", ["trainer", "sampler"])
def test_the_ratio_starts_from_the_configured_log_probabilities(old_logp: str) -> None:
    given = []

    def accumulate(state, frozen, grads, micro):
        given.append((micro.weight, micro.old_logp))
        return grads, {"max_abs_log_ratio": jnp.float32(0)}

    update = Update(
        zeros=lambda state: (),
        accumulate=accumulate,
        apply=lambda state, grads: (state, {"grad_norm": jnp.float32(0)}),
    )
    config = config_of(loss={"old_logp": old_logp})
    setup = setup_of(config, credit.make("grpo"), update=update)
    shape = BATCH.tokens.shape
    trainer = np.full(shape, -3.0, np.float32)
    zero = np.zeros(shape, np.float32)
    found = Credit(
        step_reward=zero,
        step_advantage=zero,
        token_advantage=zero,
        token_weight=ON.astype(np.float32),
        diagnostics={},
    )
    update_policy(setup, state_of({}), BATCH, Signals(logp=trainer), found)
    used = np.sort(np.concatenate([np.asarray(old)[w != 0] for w, old in given]))
    expected = trainer if old_logp == "trainer" else np.asarray(BATCH.behaviour_logp)
    np.testing.assert_array_equal(used, np.sort(expected[ON]))


def off_by(gap: float, first: float) -> Signals:
    """The trainer's log-probabilities: off by ``gap`` at every token, by ``first`` at one."""
    logp = np.where(ON, BATCH.behaviour_logp - gap, 99.0)
    row, column = np.argwhere(ON)[0]
    logp[row, column] = BATCH.behaviour_logp[row, column] + first
    return Signals(logp=logp)


def agreement(signals: Signals, **options) -> dict[str, float]:
    setup = setup_of(config_of(agreement=options), credit.make("grpo"))
    return train.agreement(setup, state_of(setup.parts.trainable), BATCH, signals)


def test_agreement_by_hand() -> None:
    found = agreement(off_by(0.25, 1.0), tolerance=0.3)
    assert found["agreement/max_abs"] == pytest.approx(1.0)
    assert found["agreement/mean_abs"] == pytest.approx(0.25 + 0.75 / ON.sum())
    assert found["agreement/share_beyond"] == pytest.approx(1 / ON.sum())


def test_too_little_agreement_is_told_or_ends_the_run(capsys) -> None:
    share = 1 / ON.sum()
    found = agreement(off_by(0.01, 1.0), max_share=1.01 * share, beyond="stop")
    assert found["agreement/share_beyond"] == pytest.approx(share)
    assert capsys.readouterr().err == ""
    found = agreement(off_by(0.01, 1.0), max_share=0.99 * share)
    assert found["agreement/share_beyond"] == pytest.approx(share)
    told = capsys.readouterr().err
    for word in ("warning: agreement: ", "0.1 between", "largest 1", "cache_dtype"):
        assert word in told
    with pytest.raises(UserError, match=r"agreement: .* % of the .* agreement\.max_share"):
        agreement(off_by(0.01, 1.0), max_share=0.99 * share, beyond="stop")


@pytest.mark.parametrize(("rows", "scored"), [(2, [0, -1]), (64, range(len(BATCH.tokens)))])
def test_rows_are_scored_for_agreement_where_nothing_else_needs_them(rows: int, scored) -> None:
    setup = setup_of(config_of(agreement={"rows": rows}), credit.make("grpo"))
    state = state_of(setup.parts.trainable)
    logp = np.asarray(score(setup.parts.policy, state.trainable, None, BATCH, setup.scoring).logp)
    chosen = np.zeros(len(BATCH.tokens), bool)
    chosen[list(scored)] = True
    gap = np.abs(logp - BATCH.behaviour_logp)[ON & chosen[:, None]]
    found = train.agreement(setup, state, BATCH, Signals())
    assert found["agreement/mean_abs"] == pytest.approx(gap.mean(), rel=1e-5)
    assert found["agreement/max_abs"] == pytest.approx(gap.max(), rel=1e-5)


# ---------------------------------------------------------------------- the sampler


def buffers(tree) -> list[list[int]]:
    return [
        sorted(shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards)
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("sizes", [None, (1, 2, 1), (2, 2, 1)])
def test_the_sampler_copies_layers_and_what_is_spread_over_replicas_alone(sizes) -> None:
    mesh = None if sizes is None else make_mesh(*sizes)
    specs = {"params": param_specs(TINY)}
    trained = {"params": init_params(TINY, jax.random.key(0))}
    if mesh is not None:
        trained = jax.device_put(trained, tree_shardings(specs, TINY, mesh))
    parts = assemble.Parts(
        chat=None,
        player=None,
        policy=Policy(TINY, mesh=mesh),
        trainable=trained,
        frozen=None,
        specs=specs,
        stop_ids=(1,),
    )
    config = config_of(rollout={"slots": 5, "decode_rows": 3})
    sampler = sampling.make_sampler(parts, trained, config, temperature=1.0)
    assert sampler.slots == (6 if sizes == (2, 2, 1) else 5)  # as many on every replica
    assert sampler.settings.decode_rows == (2 if sizes == (2, 2, 1) else 3)
    weights = trained["params"]
    outside = [name for name in weights if name != "layers"]
    replicas = 1 if mesh is None else mesh.shape["data"]
    for name in outside:
        shared = buffers(sampler.params[name]) == buffers(weights[name])
        spread = replicas > 1 and "data" in weights[name].sharding.spec
        assert shared == (not spread), "what is spread over replicas is put together"
    for name, stack in weights["layers"].items():
        for i, layer in enumerate(sampler.params["layers"]):
            np.testing.assert_array_equal(layer[name], stack[i])
            if mesh is not None:
                assert "data" not in layer[name].sharding.spec


# ---------------------------------------------------------------------- preparation


def test_a_layer_that_does_not_exist_is_refused_before_anything_is_written(tmp_path) -> None:
    config = config_of(tmp_path, policy={"init": INIT, "step_graph_layers": [0, 7]})
    with pytest.raises(UserError, match=r"policy\.step_graph_layers: .*\[0, 7\].*\[0, 2\]"):
        train.prepare(config)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("tarl", "judge: credit method tarl needs judge_score.*add judge"),
        ("flowtracer", "credit: flowtracer needs token_flow, which no run computes"),
    ],
)
def test_a_signal_that_nobody_makes_is_refused_before_anything_is_written(
    tmp_path, method: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train.prepare(config_of(tmp_path, credit=method))
    assert not any(tmp_path.iterdir())


def test_settings_reach_the_parts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(games, "ensure", lambda env: None)
    monkeypatch.setattr(assemble, "tasks_of", lambda env, split: ())
    monkeypatch.setattr(train, "make_estimator", lambda config: method_needing("entropy"))
    rollout = {"end_on_format_error": True, "max_response_tokens": 7}
    setup = train.prepare(config_of(tmp_path, rollout=rollout))
    assert setup.parts.policy.entropy and setup.judge is None
    limits = setup.parts.player.limits
    assert (limits.end_on_format_error, limits.max_response) == (True, 7)


# ---------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(
    ("schedule", "warmup", "total", "rates"),
    [
        ("constant", 0, 4, [2, 2, 2, 2, 2]),
        ("constant", 2, 4, [0, 1, 2, 2, 2]),
        ("linear", 0, 4, [2, 1.5, 1, 0.5, 0]),
        ("linear", 2, 4, [0, 1, 2, 1, 0]),
        ("cosine", 0, 4, [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
        ("cosine", 2, 4, [0, 1, 2, 1, 0]),
        # Warm-up as long as the run, or longer: the last update still reaches the full rate.
        ("cosine", 4, 4, [0, 2 / 3, 4 / 3, 2]),
        ("cosine", 20, 4, [0, 2 / 3, 4 / 3, 2]),
        ("linear", 20, 4, [0, 2 / 3, 4 / 3, 2]),
        ("constant", 20, 4, [0, 2 / 3, 4 / 3, 2]),
        ("cosine", 20, 1, [2]),
    ],
)
def test_learning_rates(schedule: str, warmup: int, total: int, rates: list[float]) -> None:
    rate = learning_rate_schedule(2.0, schedule, warmup, total)
    found = [float(rate(jnp.int32(u))) for u in range(len(rates))]
    np.testing.assert_allclose(found, rates, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------- checkpoints


def test_reading_the_newest_checkpoint_changes_nothing(tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    like = state_of({"w": jnp.zeros(3)})
    assert checkpoint.read_latest(folder, like) is None
    assert not folder.exists()
    with checkpoint.open_checkpoints(folder, keep=2) as checkpoints:
        for iteration in (1, 2):
            checkpoint.save(checkpoints, state_of({"w": jnp.full(3, iteration)}, iteration))
    # What a process that is saving iteration 3 has written so far.
    (folder / "3.orbax-checkpoint-tmp").mkdir()
    (folder / "3.orbax-checkpoint-tmp" / "part").write_text("half")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    found = checkpoint.read_latest(folder, like)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert int(found.iteration) == 2
    np.testing.assert_array_equal(found.trainable["w"], 2.0)
    with pytest.raises(checkpoint.CheckpointError, match=r"trainable/w has shape \(3,\)"):
        checkpoint.read_latest(folder, dataclasses.replace(like, trainable={"w": jnp.zeros(4)}))
    with checkpoint.open_checkpoints(folder, keep=2) as checkpoints:
        checkpoint.save(checkpoints, state_of({"w": jnp.full(3, 3)}, 3))
    assert not (folder / "3.orbax-checkpoint-tmp").exists(), "the trainer itself cleans up"


def test_a_checkpoint_that_is_replaced_while_it_is_read_gives_the_newer_one(
    tmp_path, monkeypatch
) -> None:
    folder = tmp_path / "checkpoints"
    with checkpoint.open_checkpoints(folder, keep=1) as checkpoints:
        checkpoint.save(checkpoints, state_of({"w": jnp.ones(3)}, 1))
    restore = checkpoint.restore

    def late(checkpointer, like):
        if checkpoint.latest(checkpointer) == 1:
            with checkpoint.open_checkpoints(folder, keep=1) as checkpoints:
                checkpoint.save(checkpoints, state_of({"w": 2 * jnp.ones(3)}, 2))
        return restore(checkpointer, like)

    monkeypatch.setattr(checkpoint, "restore", late)
    found = checkpoint.read_latest(folder, state_of({"w": jnp.zeros(3)}))
    assert int(found.iteration) == 2
    np.testing.assert_array_equal(found.trainable["w"], 2.0)
