"""Mesh, rules, activations and batches on 8 virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wp2_jax import sharding
from wp2_jax.sharding import MeshConfig


@pytest.fixture
def mesh():
    return sharding.make_mesh(MeshConfig(data=1, fsdp=-1, seq=2, tensor=2))


def test_mesh_takes_the_rest_and_refuses_what_does_not_multiply(mesh):
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "seq": 2, "tensor": 2}
    with pytest.raises(sharding.ShardingError, match="does not divide 8 devices"):
        sharding.make_mesh(MeshConfig(data=3))
    with pytest.raises(sharding.ShardingError, match="at most one -1"):
        sharding.make_mesh(MeshConfig(data=-1, fsdp=-1))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("high/blocks/self_attention/q/kernel", (4, 64, 64), P(None, "fsdp", "tensor")),
        ("opt_state/high/mu/blocks/attention/o/kernel", (4, 64, 64), P(None, "tensor", "fsdp")),
        ("blocks/ffn_in/kernel", (4, 63, 64), P(None, None, "tensor")),  # 63 is left whole
        ("blocks/other", (64, 6, 32), P(None, None, "fsdp")),  # the layer axis is the largest, yet never cut
        ("patch/kernel", (1, 2, 2, 36, 48), P(None, None, None, None, "fsdp")),
        ("odd", (33, 33), P()),
        ("small", (16,), P()),
        ("count", (), P()),
    ],
)
def test_rules(mesh, name, shape, expected):
    assert sharding.spec(name, shape, sharding.RULES, mesh) == expected


def test_place_and_abstract(mesh):
    weights = {"blocks": {"q": {"kernel": jnp.arange(4096.0).reshape(1, 64, 64)}}}
    placed = sharding.place(weights, sharding.RULES, mesh)["blocks"]["q"]["kernel"]
    assert placed.addressable_shards[0].data.shape == (1, 32, 32)
    np.testing.assert_array_equal(placed, weights["blocks"]["q"]["kernel"])
    assert sharding.abstract(weights, sharding.RULES, mesh)["blocks"]["q"]["kernel"].sharding == placed.sharding


def test_constrain_moves_from_tokens_to_heads(mesh):
    x = jnp.arange(2 * 8 * 4 * 2, dtype=jnp.float32).reshape(2, 8, 4, 2)

    def layer(x):
        tokens = sharding.constrain(x, "tokens")
        return tokens, sharding.constrain(tokens, "heads")

    with jax.set_mesh(mesh):
        tokens, heads = jax.jit(layer)(x)
    assert tokens.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), "seq")), 4)
    assert heads.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), None, ("seq", "tensor"))), 4)
    np.testing.assert_array_equal(heads, x)
    assert sharding.constrain(x, "heads") is x  # no mesh: nothing to do


def test_put_batch_cuts_rows_and_leaves_names(mesh):
    batch = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2), "key": ["a", "b", "c", "d"]}
    arrays, host = sharding.put_batch(batch, mesh)
    assert host == {"key": ["a", "b", "c", "d"]}
    assert arrays["x"].addressable_shards[0].data.shape == (2, 2)
    np.testing.assert_array_equal(arrays["x"], batch["x"])


@pytest.mark.parametrize(
    "sizes, expected",  # of two processes, the first four devices and the others
    [
        ((2, 4, 1, 1), (range(8), range(8, 16))),
        ((1, 2, 4, 1), (range(8), range(8, 16))),
        ((1, 1, 8, 1), (range(16), range(16))),
        ((1, 4, 1, 2), (range(8), range(8, 16))),
    ],
)
def test_rows_of_a_process(sizes, expected):
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    assert sharding.process_rows(mesh, 16) == list(range(16))
    half = [mesh.devices.reshape(-1)[:4], mesh.devices.reshape(-1)[4:]]
    assert [sharding.process_rows(mesh, 16, devices) for devices in half] == [list(rows) for rows in expected]
    apart = mesh.devices.reshape(-1)[[0, 7]]
    assert sharding.process_rows(sharding.make_mesh(MeshConfig(8, 1, 1, 1)), 16, apart) == [0, 1, 14, 15]


def test_sizes_are_checked_with_the_fix(mesh):
    sharding.check(mesh, batch_size=4, num_heads=8)
    with pytest.raises(sharding.ShardingError, match=r"batch_size: 7 .* = 2; use 6 or 8"):
        sharding.check(mesh, batch_size=7)
    with pytest.raises(sharding.ShardingError, match=r"batch_size: 6 .* = 4; use 4 or 8"):
        sharding.check(mesh, batch_size=6, accumulate=2)
    with pytest.raises(sharding.ShardingError, match=r"num_heads: 6 heads .* = 4; .*\[1, 2, 3, 6\]"):
        sharding.check(mesh, batch_size=4, num_heads=6)
