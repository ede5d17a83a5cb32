"""Trees by path name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax import tree


@pytest.fixture
def weights():
    return {"blocks": {"q": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}, "head": [jnp.ones(4)]}


def test_names_and_nested(weights):
    named = tree.named_leaves(weights)
    assert list(named) == ["blocks/q/bias", "blocks/q/kernel", "head/0"]
    assert tree.nested({"a/b": 1, "a/c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
    shapes = tree.map_named(lambda name, x, y: (name, x.shape == y.shape), weights, weights)
    assert shapes["blocks"]["q"]["bias"] == ("blocks/q/bias", True)


def test_mask(weights):
    assert tree.mask(weights, [r"bias$", r"^head"]) == {
        "blocks": {"q": {"kernel": False, "bias": True}},
        "head": [True],
    }


def test_merge_replaces_and_casts(weights):
    values = jax.tree.map(lambda x: np.full(x.shape, 7, np.float16), weights)
    merged = tree.merge(weights, values)
    assert all(x.dtype == jnp.float32 and (x == 7).all() for x in jax.tree.leaves(merged))
    part = tree.merge(
        weights, {"blocks": values["blocks"], "old": np.ones(1)}, allow_missing=["head"], allow_extra=["old"]
    )
    np.testing.assert_array_equal(part["head"][0], np.ones(4))
    np.testing.assert_array_equal(part["blocks"]["q"]["bias"], np.full(3, 7))


def test_merge_lists_all_that_is_wrong(weights):
    values = {"blocks": {"q": {"kernel": np.ones((3, 2))}}, "tail": np.ones(5), "head": [np.ones(4)]}
    with pytest.raises(tree.TreeMismatchError) as error:
        tree.merge(weights, values, what="expert high")
    text = str(error.value)
    assert "expert high do not fit: 1 missing, 1 extra, 1 misshapen" in text
    assert "missing    blocks/q/bias (3,)" in text
    assert "extra      tail (5,)" in text
    assert "misshapen  blocks/q/kernel (3, 2), expected (2, 3)" in text


def test_count_and_overview(weights):
    shapes = jax.eval_shape(lambda: weights)
    assert tree.count(weights) == tree.count(shapes) == 2 * 3 + 3 + 4
    assert "blocks/q/kernel" in tree.overview(shapes)
    assert "13" in tree.overview(weights)
