"""Low-rank updates: nothing at the start, a A B afterwards, gradients where they belong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_objectives import CONFIG, random_weights

from wp2_jax import tree
from wp2_jax.models import low_rank


def _toy():
    random = np.random.default_rng(0)
    return {
        "blocks": {
            "q": {"kernel": jnp.asarray(random.standard_normal((3, 4, 5)), jnp.float32), "bias": jnp.ones((3, 5))},
            "out": {"kernel": jnp.asarray(random.standard_normal((3, 5, 4)), jnp.bfloat16)},
        },
        "head": {"kernel": jnp.asarray(random.standard_normal((4, 2)), jnp.float32)},
    }


def test_targets_are_all_linear_kernels_of_the_blocks():
    adapters = low_rank.init(random_weights(0), 2, jax.random.key(0))
    named = tree.named_leaves(adapters)
    layer = {
        *(
            f"blocks/{part}/{x}/kernel"
            for part in ("self_attention", "cross_attention")
            for x in ("q", "k", "v", "out")
        ),
        *("blocks/action/kernel", "blocks/action/out/kernel", "blocks/ffn/layer_0/kernel", "blocks/ffn/layer_1/kernel"),
    }
    assert set(named) == {f"{name}/{side}" for name in layer for side in "ab"}
    dim, layers = CONFIG.dim, CONFIG.num_layers
    assert named["blocks/action/kernel/a"].shape == (layers, 2 * dim, 2)
    assert named["blocks/ffn/layer_0/kernel/b"].shape == (layers, 2, CONFIG.ffn_dim)


def test_merge_at_the_start_is_the_identity():
    params = random_weights(0)
    merged = jax.jit(low_rank.merge)(params, low_rank.init(params, 2, jax.random.key(0)))
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, merged, params)


def test_merge_adds_the_scaled_product_layer_by_layer():
    params = _toy()
    adapters = low_rank.init(params, 2, jax.random.key(1), (r"kernel$",))
    adapters = jax.tree.map(lambda x: x + 0.5, adapters)
    merged = low_rank.merge(params, adapters, 0.25)
    for layer in range(3):
        update = adapters["blocks"]["q"]["kernel"]["a"][layer] @ adapters["blocks"]["q"]["kernel"]["b"][layer]
        np.testing.assert_allclose(
            merged["blocks"]["q"]["kernel"][layer], params["blocks"]["q"]["kernel"][layer] + 0.25 * update, rtol=1e-5
        )
    update = adapters["head"]["kernel"]["a"] @ adapters["head"]["kernel"]["b"]
    np.testing.assert_allclose(merged["head"]["kernel"], params["head"]["kernel"] + 0.25 * update, rtol=1e-5)
    assert merged["blocks"]["out"]["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(merged["blocks"]["q"]["bias"], params["blocks"]["q"]["bias"])


def test_gradient_is_that_of_the_product():
    # d/dA of sum(W') is scale * 1 B^T, which is zero as long as B is; d/dB is scale * A^T 1.
    params = _toy()
    adapters = low_rank.init(params, 2, jax.random.key(1), (r"^head/kernel$",))
    grads = jax.grad(lambda a: low_rank.merge(params, a, 2.0)["head"]["kernel"].sum())(adapters)
    np.testing.assert_array_equal(grads["head"]["kernel"]["a"], np.zeros((4, 2)))
    expected = 2.0 * np.asarray(adapters["head"]["kernel"]["a"]).T @ np.ones((4, 2))
    np.testing.assert_allclose(grads["head"]["kernel"]["b"], expected, rtol=1e-5)
    spread = np.std(low_rank.init({"kernel": jnp.zeros((400, 3))}, 64, jax.random.key(2), ("kernel",))["kernel"]["a"])
    np.testing.assert_allclose(spread, 400**-0.5, rtol=0.02)


@pytest.mark.parametrize(
    "rank, patterns, message",
    [
        (0, (r"kernel$",), "rank=0: must be at least 1"),
        (2, (r"^nothing$",), "no weight has such a name"),
        (2, (r"vector$",), "is no linear kernel"),
    ],
)
def test_errors_name_field_and_fix(rank, patterns, message):
    params = {**_toy(), "vector": jnp.ones(3)}
    with pytest.raises(ValueError, match=message):
        low_rank.init(params, rank, jax.random.key(0), patterns)


def test_adapters_of_another_model_are_an_error():
    params = _toy()
    adapters = low_rank.init(params, 2, jax.random.key(1), (r"^head/kernel$",))
    with pytest.raises(ValueError, match="head/kernel"):
        low_rank.merge({"blocks": params["blocks"]}, adapters)
