"""The text encoder: golden tensors, full-size shapes, padding."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax.checkpoints import names_umt5
from wp2_jax.checkpoints.torch_names import flatten, from_tree, to_tree
from wp2_jax.models import umt5
from wp2_jax.verify.golden import below, load
from wp2_jax.verify.text import check_text, config_of

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def item():
    sidecar, tensors = load(GOLDEN, "j_t5")
    config = config_of(sidecar)
    return config, to_tree(names_umt5.rules(config.num_layers), below(tensors, "w.")), tensors


def test_golden():
    results = check_text(GOLDEN, "j_t5")
    assert [r.item for r in results] == [f"j_t5/{part}" for part in ("hidden", "trimmed0", "trimmed1", "buckets")]
    assert not [r for r in results if not r.ok]
    assert max(r.max_rel for r in results) < 2e-6


def test_names_go_both_ways(item):
    config, params, tensors = item
    back = from_tree(names_umt5.rules(config.num_layers), params)
    theirs = below(tensors, "w.")
    assert back.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(back[name], array)


def test_full_size_shapes_equal_the_published_manifest():
    manifest = json.loads((GOLDEN / "manifests" / "m4_umt5_xxl_encoder.json").read_text())["tensors"]
    config = umt5.Umt5Config(param_dtype="bfloat16")
    shapes = flatten(jax.eval_shape(lambda: umt5.init(config, jax.random.key(0))))
    found = {}
    for rule in names_umt5.rules(config.num_layers):
        leaf = shapes.pop(rule.ours)
        shape = leaf.shape[1:] if rule.layers else leaf.shape
        assert not rule.layers or leaf.shape[0] == config.num_layers
        # A stride-0 view has the shape without the memory.
        theirs = rule.transform.to_theirs(np.broadcast_to(np.float32(0), shape)).shape
        found |= {name: {"shape": list(theirs), "dtype": str(leaf.dtype)} for name in rule.names()}
    assert not shapes
    assert found == manifest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_changes_nothing_and_comes_back_as_zeros(item, dtype):
    config, params, tensors = item
    encoder = umt5.Umt5Encoder(umt5.Umt5Config(**{**vars(config), "dtype": dtype}))
    ids = jnp.asarray(tensors["in.ids"][:1, :13], jnp.int32)
    short = umt5.encode(encoder, params, ids)
    long = umt5.encode(encoder, params, jnp.pad(ids, ((0, 0), (0, 40))))
    assert short.dtype == long.dtype == jnp.dtype(dtype)
    assert not long[:, 13:].any()
    tolerance = 2e-6 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(
        long[:, :13].astype(jnp.float32), short.astype(jnp.float32), atol=tolerance * float(jnp.abs(short).max())
    )


def test_bfloat16_stays_close_to_float32(item):
    config, params, tensors = item
    ids = jnp.asarray(tensors["in.ids"], jnp.int32)
    low = umt5.encode(umt5.Umt5Encoder(umt5.Umt5Config(**{**vars(config), "dtype": "bfloat16"})), params, ids)
    high = umt5.encode(umt5.Umt5Encoder(config), params, ids)
    difference = np.asarray(low.astype(jnp.float32) - high)
    assert 1e-4 < np.sqrt(np.mean(difference**2)) / np.sqrt(np.mean(np.asarray(high) ** 2)) < 2e-2


def test_a_row_of_padding_alone_is_zero(item):
    config, params, _ = item
    out = umt5.encode(umt5.Umt5Encoder(config), params, jnp.zeros((2, 8), jnp.int32))
    assert np.array_equal(out, np.zeros((2, 8, config.dim)))


def test_order_is_seen_through_the_position_tables_alone(item):
    config, params, tensors = item
    encoder = umt5.Umt5Encoder(config)
    ids = jnp.asarray(tensors["in.ids"][:1, :13], jnp.int32)
    forward, backward = umt5.encode(encoder, params, ids), umt5.encode(encoder, params, ids[:, ::-1])
    assert np.abs(forward - backward[:, ::-1]).max() > 1e-2
    # Without position tables the encoder does not see order.
    tables = np.zeros_like(params["blocks"]["attention"]["position_bias"])
    attention = {**params["blocks"]["attention"], "position_bias": tables}
    blind = {**params, "blocks": {**params["blocks"], "attention": attention}}
    forward, backward = umt5.encode(encoder, blind, ids), umt5.encode(encoder, blind, ids[:, ::-1])
    np.testing.assert_allclose(forward, backward[:, ::-1], atol=1e-5)


def test_buckets_by_hand():
    """Distances below 8 have their own bucket; 8 more buckets reach 128 in steps of 2^(1/2); later keys add 16."""
    distances = np.array([0, -1, -7, -8, -11, -12, -15, -16, -23, -64, -127, -128, -9999, 1, 8, 128])
    expected = [0, 1, 7, 8, 8, 9, 9, 10, 11, 14, 15, 15, 15, 17, 24, 31]
    np.testing.assert_array_equal(umt5.relative_buckets(distances), expected)


def test_fresh_parameters_train():
    """Gradients reach every parameter, and hidden states start at unit size."""
    config = umt5.Umt5Config(vocab_size=40, dim=32, attention_dim=32, ffn_dim=64, num_heads=4, num_layers=2)
    encoder, params = umt5.Umt5Encoder(config), umt5.init(config, jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (4, 12), 1, 40)
    hidden = umt5.encode(encoder, params, ids)
    assert 0.9 < float(jnp.sqrt(jnp.square(hidden).mean())) < 1.1
    weight = jax.random.normal(jax.random.key(2), hidden.shape)
    gradients = jax.grad(lambda p: (umt5.encode(encoder, p, ids) * weight).sum())(params)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradients))


def test_bad_sizes():
    with pytest.raises(ValueError, match="attention_dim"):
        umt5.Umt5Config(attention_dim=100, num_heads=3)
    with pytest.raises(ValueError, match="num_buckets"):
        umt5.Umt5Config(num_buckets=30)
    with pytest.raises(ValueError, match="max_distance"):
        umt5.Umt5Config(max_distance=8)
