"""``plan`` on simulated devices: what it compiles, what it counts, what it says."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcredit.episodes import Kind
from launch import plan
from launch.__main__ import main
from launch.config import TrainConfig
from launch.errors import UserError
from launch.loading import validate
from launch.plan import hardware, report
from launch.plan.compile import plan_program
from launch.plan.ledger import bytes_per_device, largest
from launch.plan.programs import abstract_setup, abstract_state, architecture, programs
from models.params import init_params, param_count
from models.score import score
from models.sharding import batch_sharding, param_shardings

GOLDEN = "tests/golden/tied"  # a config.json of a tiny policy; no tokenizer is there


def config(**changes):
    data = {
        "run": "unused",
        "policy": {"path": GOLDEN, "lora": {"rank": 2, "alpha": 2.0}},
        "mesh": {"data": 2, "tensor": 2, "context": 2},
        "env": {"max_steps": 3},
        "prompt": {"context": "conversation", "max_context": 128},
        "rollout": {
            "tasks_per_iteration": 2,
            "group_size": 2,
            "slots": 4,
            "max_response_tokens": 16,
            "decode_block": 2,
        },
        "credit": "attnsr",
        "loss": {"kl": 0.02},
        "optimizer": {"microbatch_tokens": 256},
    }
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    return validate(TrainConfig, data, "test")


def setup_for(chosen, name="cpu:8"):
    topology = hardware.parse(name)
    devices = hardware.devices(topology)
    return abstract_setup(chosen, topology, devices), topology, devices


@pytest.fixture(scope="module")
def found():
    return plan.plan(config(), hardware.parse("cpu:8", 1))


def test_every_program_of_the_run_is_there(found):
    assert [p["name"] for p in found["programs"]] == [
        "rollout: prefill",
        "rollout: decode",
        "score: log-probabilities, values, step graph",
        "score: reference",
        "update: accumulate",
        "update: apply",
    ]
    rows = {p["name"]: (p["rows"], p["tokens"]) for p in found["programs"]}
    assert rows["update: accumulate"] == (2, 128)
    calls = {p["name"]: p["calls_per_iteration"] for p in found["programs"]}
    assert calls["score: reference"] == calls["update: accumulate"] == 2
    assert calls["update: apply"] == 1


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"credit": "grpo"}, ["score: log-probabilities", "score: reference"]),
        ({"credit": "grpo", "loss": {"kl": 0.0}}, ["score: log-probabilities"]),
        ({"credit": "grpo", "loss": {"kl": 0.0, "old_logp": "sampler"}}, []),
        (
            {"credit": "relace", "loss": {"kl": 0.0}},
            ["score: log-probabilities", "score: hindsight"],
        ),
    ],
)
def test_scoring_passes_are_those_that_credit_and_loss_need(changes, names):
    setup, _, devices = setup_for(config(**changes))
    scoring = [p.name for p in programs(setup, devices) if p.phase == "score"]
    assert scoring == names


def test_bytes_of_weights_are_those_of_weights_that_are_there():
    setup, _, _ = setup_for(config())
    policy = setup.parts.policy
    params = init_params(policy.config, jax.random.key(0))
    placed = jax.device_put(params, param_shardings(policy.config, policy.mesh))
    first = jax.devices()[0]
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(placed)
        for shard in leaf.addressable_shards
        if shard.device == first
    )
    assert bytes_per_device(setup.parts.frozen) == bytes_per_device(placed) == held


def real(tree):
    """Zeros in the place of shapes, where the shapes say."""
    return jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), tree)


def test_the_programs_are_the_trainers_own(monkeypatch):
    """What scoring and updating run with real arrays is, word for word, what was planned."""
    setup, _, devices = setup_for(config())
    planned = {p.name: p for p in programs(setup, devices)}
    state = real(abstract_state(setup, devices[0]))
    frozen = real(setup.parts.frozen)
    text = {n: p.function.lower(*p.args, **p.static).as_text() for n, p in planned.items()}

    seen = {}

    def spy(policy, layers, n_steps, head):
        function = original(policy, layers, n_steps, head)

        def run(*args):
            seen["score"] = function.lower(*args).as_text()
            return function(*args)

        return run

    import models.score as scoring

    original = scoring.scoring_program
    monkeypatch.setattr(scoring, "scoring_program", spy)
    batch = full_batch(setup)
    score(
        setup.parts.policy,
        state.trainable,
        frozen,
        batch,
        setup.scoring,
        step_graph=True,
    )
    assert seen["score"] == text["score: log-probabilities, values, step graph"]

    grads = setup.update.zeros(state)
    micro = real(planned["update: accumulate"].args[3])
    micro = jax.device_put(micro, batch_sharding(setup.parts.policy.mesh))
    got = setup.update.accumulate.lower(state, frozen, grads, micro).as_text()
    assert got == text["update: accumulate"]
    grads, _ = setup.update.accumulate(state, frozen, grads, micro)
    assert setup.update.apply.lower(state, grads).as_text() == text["update: apply"]


def full_batch(setup):
    """Four conversations of full width in real arrays."""
    from jaxcredit import batching
    from jaxcredit.episodes import Episode, Status, Step

    width = setup.scoring.buckets[-1]
    rng = np.random.default_rng(0)

    def step(n):
        ids = rng.integers(1, 30, n).astype(np.int32)
        return Step(ids[:-4], ids[-4:], np.zeros(4, np.float32), np.ones(4, bool), "stop")

    episodes = [
        Episode("", i, 0, (step(width // 2), step(width // 2)), 0.0, False, Status.FAILURE)
        for i in range(4)
    ]
    batch = batching.batch_episodes(
        episodes, max_steps=setup.config.env.max_steps, length_multiple=64
    )
    assert (np.asarray(batch.kind) != Kind.PAD).all()
    return batch


def test_a_plan_says_what_does_not_fit_and_why(found):
    assert found["fits"] is True
    peak = max(p["peak_bytes"] for p in found["programs"])
    assert found["peak_bytes"] == peak
    for p in found["programs"]:
        assert p["peak_bytes"] == sum(p["bytes"].values())
    tight = {**found, "usable_bytes": peak - 1, "memory_bytes": peak - 1, "fits": False}
    text = report.as_text(tight)
    assert "DOES NOT FIT; largest consumers:" in text
    three = sorted(found["largest"], key=lambda item: -item["bytes"])
    assert len(three) == 3 and three == found["largest"]
    for item in three:
        assert f"{item['consumer']} ({item['what']})" in text and item["fix"] in text


def test_the_largest_consumers_are_the_largest():
    setup, topology, devices = setup_for(config(policy={"lora": None}))
    program = next(p for p in programs(setup, devices) if p.name == "update: apply")
    planned = plan_program(program, topology, setup.parts.policy)
    sizes = [size for _, size, *_ in largest(planned)]
    assert sizes == sorted(planned.live.values(), reverse=True)[:3]
    # Trained whole: float32 weights, a copy of them, two moments, and a gradient.
    weights = bytes_per_device(setup.parts.trainable["params"])
    assert planned.live["optimiser"] == pytest.approx(2 * weights, rel=0.01)
    assert planned.live["initial copy"] == pytest.approx(weights, rel=0.01)


def test_activations_grow_with_layers_kept_and_not_with_remat():
    kept = {}
    for remat in ("none", "full"):
        setup, topology, devices = setup_for(config(policy={"remat": remat}))
        program = next(p for p in programs(setup, devices) if p.name == "update: accumulate")
        kept[remat] = plan_program(program, topology, setup.parts.policy).live["activations"]
    sizes = setup.parts.policy.config
    # One float32 row of states per layer: 2 rows over 2, 128 tokens over 2.
    assert kept["full"] == 4 * sizes.num_hidden_layers * 1 * 64 * sizes.hidden_size
    assert kept["none"] > 3 * kept["full"]


def test_without_a_mesh_one_device_holds_everything():
    setup, topology, devices = setup_for(config(mesh=None))
    program = next(p for p in programs(setup, devices) if p.name == "update: apply")
    planned = plan_program(program, topology, setup.parts.policy)
    assert planned.collectives == ()
    assert planned.live["parameters"] > 4 * param_count(setup.parts.policy.config)


def test_the_command_writes_tables_and_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "_prepare_process", lambda topologies: None)
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps(config().model_dump(mode="json")))
    out = tmp_path / "deep" / "plan.json"
    args = ["plan", str(file), "--topology", "cpu:8", "--phase", "update"]
    assert main([*args, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "this device's memory is not known: state it with --memory GIB" in printed
    (written,) = json.loads(out.read_text())
    assert written["topology"] == "cpu:8" and written["fits"] is None
    assert [p["name"] for p in written["programs"]] == ["update: accumulate", "update: apply"]
    assert written["programs"][0]["flops"] > 0

    assert main([*args, "--memory", "0.00001"]) == 2
    captured = capsys.readouterr()
    assert "DOES NOT FIT" in captured.out
    assert captured.err == "error: plan: does not fit cpu:8; the lines above say what to do\n"

    assert main(["plan", str(file), "--topology", "cpu:8", "--phase", "sampling"]) == 2
    assert "'sampling' is not one of rollout, score, update" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": {"path": "models/Llama-3-8B"}}, "holds no config.json, and 'Llama-3-8B'"),
        ({"mesh": {"data": 4, "tensor": 4, "context": 1}}, "needs 16 devices and 8 are present"),
        ({"prompt": {"context": "window"}}, "needs step graphs"),
    ],
)
def test_what_train_refuses_plan_refuses(changes, words):
    with pytest.raises(UserError, match=words):
        setup_for(config(**changes))


def test_a_known_name_stands_in_for_a_folder_that_is_not_here():
    sizes, source = architecture(config(policy={"path": "models/Qwen2.5-7B-Instruct"}))
    assert sizes.num_hidden_layers == 28
    assert "Qwen2.5-7B-Instruct" in source and "is not here" in source


def test_a_missing_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    for name, extra in (("h200x8", "plan-gpu"), ("v5p:2x2x4", "plan-tpu")):
        with pytest.raises(UserError, match=rf"make {extra}.*pip install -e '\.\[{extra}\]'"):
            hardware.devices(hardware.parse(name))
