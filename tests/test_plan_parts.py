"""The parts of a plan against numbers worked by hand: exchanges, operations, topologies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from launch.errors import UserError
from launch.plan import flops, hlo
from launch.plan.hardware import GIB, parse, table, target_text
from models.attention import splash
from models.attention.case import Case

MESH = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def compiled(f, *shapes, specs, out):
    """Text of f on the mesh, every device seeing its own part."""
    mapped = jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=out, check_vma=False)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(MESH, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(mapped).lower(*args).compile().as_text()


def found(text, per_node=8, **options):
    return {
        (c.kind, c.crosses): (c.count, c.sent)
        for c in hlo.collectives(text, per_node=per_node, **options)
    }


@pytest.mark.parametrize(
    ("name", "f", "out", "sent"),
    [
        # A device holds [8, 16] float32: 512 bytes; groups of 4 along "tensor".
        ("all-reduce", lambda x: jax.lax.psum(x, "tensor"), P("data"), 2 * 512 * 3 / 4),
        (
            "all-gather",
            lambda x: jax.lax.all_gather(x, "tensor", tiled=True),
            P("data"),
            4 * 512 * 3 / 4,
        ),
        (
            "reduce-scatter",
            lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True),
            P("data"),
            512 * 3 / 4,
        ),
        (
            "all-to-all",
            lambda x: jax.lax.all_to_all(x, "tensor", 0, 1, tiled=True),
            P("data"),
            512 * 3 / 4,
        ),
        (
            "collective-permute",
            lambda x: jax.lax.ppermute(x, "tensor", [(0, 1), (1, 2), (2, 3), (3, 0)]),
            P("data"),
            512,
        ),
    ],
)
def test_bytes_of_an_exchange(name, f, out, sent):
    text = compiled(f, (16, 64), specs=(P("data", "tensor"),), out=out)
    (key, (count, bytes_sent)), *rest = found(text).items()
    assert (key, count, rest) == ((name, False), 1, [])
    assert bytes_sent == pytest.approx(sent)


def test_an_exchange_in_a_loop_counts_every_round():
    def f(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(jax.lax.psum(x, "data")), x)

    text = compiled(f, (16, 64), specs=(P("data", "tensor"),), out=P("data", "tensor"))
    assert found(text)["all-reduce", False] == (5, 5 * 2 * 512 / 2)


def test_an_unknown_number_of_rounds_is_the_callers():
    def f(x):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) < 100, lambda x: jnp.exp(jax.lax.psum(x, "data")), x
        )

    text = compiled(f, (16, 64), specs=(P("data", "tensor"),), out=P("data", "tensor"))
    once, thrice = found(text), found(text, loop_trips=3)
    assert thrice["all-reduce", False][1] == 3 * once["all-reduce", False][1] > 0


def test_rounds_are_read_from_the_condition_where_they_are_not_stated():
    text = """
%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}
%condition (x: f32[8]) -> pred[] {
  %i = s32[]{:T(128)} get-tuple-element(%x), index=0
  %end = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT, metadata={op_name="lt"}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %w = f32[8]{0} while(%x), condition=%condition, body=%body
}
"""
    assert found(text)["all-reduce", False] == (28, 28 * 2 * 32 / 2)


@pytest.mark.parametrize(("axis", "crosses"), [("data", True), ("tensor", False)])
def test_a_group_crosses_nodes_only_if_its_devices_are_on_several(axis, crosses):
    # Eight devices as two nodes of four: rows of the mesh are nodes.
    text = compiled(
        lambda x: jax.lax.psum(x, axis), (16, 64), specs=(P("data", "tensor"),), out=P()
    )
    assert list(found(text, per_node=4)) == [("all-reduce", crosses)]


@pytest.mark.parametrize(
    ("attribute", "groups"),
    [
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'c'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0},{2,2}}", [[0, 1], [1, 0]]),
    ],
)
def test_every_way_to_write_groups(attribute, groups):
    line = f"  %x = f32[4]{{0}} all-reduce(%y), channel_id=1, {attribute}, to_apply=%add"
    assert hlo._groups(line).tolist() == groups


def test_what_a_scan_keeps_for_its_backward_pass():
    L, B, T, D = 3, 2, 32, 16

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def f(x, w):
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    args = (jnp.zeros((B, T, D)), jnp.zeros((L, D, D)))
    text = jax.jit(jax.grad(f, argnums=1)).lower(*args).compile().as_text()
    assert hlo.stacked_bytes(text, L, (B, T)) == 4 * L * B * T * D


def scanned(a, b):
    return jax.lax.scan(lambda c, _: (c, a @ b), None, None, length=7)[1]


def branched(a, b):
    return jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: 2 * (a @ b) @ b.T @ b)


def looped(a, b):
    return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ b @ b.T, a)


def sharded(a, b):
    specs = (P("data"), P(None, "tensor"))
    return jax.shard_map(jnp.matmul, mesh=MESH, in_specs=specs, out_specs=P("data", "tensor"))(a, b)


def gradient(a, b):
    return jax.grad(lambda a, b: jnp.sum(jnp.sin(a @ b)), argnums=(0, 1))(a, b)


@pytest.mark.parametrize(
    ("f", "products"),
    [
        (jnp.matmul, 1),
        (jnp.sinh, 0),
        (scanned, 7),
        (branched, 3),  # the larger branch
        (looped, 4 * 2),
        (sharded, 1),  # over all devices together
        (gradient, 3),
    ],
)
def test_operations(f, products):
    a, b = jnp.zeros((8, 16)), jnp.zeros((16, 32))
    args = (a,) if f is jnp.sinh else (a, b)
    assert flops.count(jax.jit(f).trace(*args).jaxpr, loop_trips=4) == products * 2 * 8 * 16 * 32


def test_operations_of_the_splash_kernels():
    B, T, H, G, h = 2, 256, 4, 2, 128
    case = Case((B, T, H, h), G, jnp.bfloat16, "tpu")
    q, k = jnp.zeros((B, T, H, h), jnp.bfloat16), jnp.zeros((B, T, G, h), jnp.bfloat16)
    segments = jnp.ones((B, T), jnp.int32)

    def f(q, k, v):
        return jnp.sum(splash.attend(case, q, k, v, segments)[0].astype(jnp.float32))

    traced = jax.jit(jax.grad(f, argnums=(0, 1, 2))).trace(q, k, k)
    product = 2 * B * H * h * T * T / 2
    inner = 2 * B * T * H * h  # sum of out * d_out, of which the backward pass starts
    assert flops.count(traced.jaxpr) == (2 + 3 + 4) * product + inner


def test_operations_agree_with_the_compiler_where_there_is_no_loop():
    def f(a, b, c):
        return jnp.einsum("bij,bjk,kl->bil", a, b, c)

    args = (jnp.zeros((3, 64, 32)), jnp.zeros((3, 32, 48)), jnp.zeros((48, 80)))
    traced = jax.jit(f).trace(*args)
    said = traced.lower().compile().cost_analysis()
    assert flops.count(traced.jaxpr) == pytest.approx(said["flops"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "platform", "shape", "per_node"),
    [
        ("h200x8", "gpu", (1, 8), 8),
        ("b200x32", "gpu", (4, 8), 8),
        ("v5p:2x2x4", "tpu", (2, 2, 4), 16),
        ("v5e:4x4", "tpu", (4, 4), 16),
        ("cpu:8", "cpu", (8,), 8),
    ],
)
def test_a_topology(name, platform, shape, per_node):
    topology = parse(name)
    assert (topology.platform, topology.shape, topology.per_node) == (platform, shape, per_node)
    assert topology.size == per_node * (shape[0] if platform == "gpu" else 1)


@pytest.mark.parametrize("name", ["h200x4", "h300x8", "v5p:2x4", "v5e:2", "cpu", "cpu:0", ""])
def test_an_unknown_topology_is_told_what_is_known(name):
    with pytest.raises(UserError, match=r"--topology: .*h200x8, h200x16.*cpu:N"):
        parse(name)


def test_memory_can_be_stated():
    assert parse("cpu:8").memory is None
    assert parse("cpu:8", 2).memory == 2 * GIB
    assert parse("a100x8", 36).memory == 36 * GIB
    assert f"device_memory_size: {36 * GIB}" in target_text(parse("a100x8", 36))


def test_every_device_has_every_fact_and_a_source():
    text = (table.__wrapped__.__globals__["_FILE"]).read_text()
    for platform in ("gpu", "tpu"):
        for facts in table()[platform].values():
            rates = {"bfloat16", "float32", "memory_rate", "link_rate"}
            assert all(facts[rate] > 1e9 for rate in rates)
            assert 0.5 < facts["usable"] <= 1 and facts["memory_bytes"] > 2**33
            for source in facts["source"].split("; "):
                assert f"#   {source.split()[0]}" in text or f", {source.split()[0]}" in text
