"""Optimisers against AdamW worked by hand in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from wp2_jax import tree
from wp2_jax.train import optim
from wp2_jax.train.optim import OptimConfig


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax itself mixes integers and floats
        yield


def adamw_by_hand(config, grads, params, rate, decay):
    """Two or more updates in float64; grads are a list of dicts by name."""
    mu = {n: 0.0 for n in params}
    nu = {n: 0.0 for n in params}
    for t, grad in enumerate(grads, start=1):
        norm = np.sqrt(sum(np.sum(g**2) for g in grad.values()))
        for n in params:
            g = grad[n] * min(1.0, config.clip / norm)
            mu[n] = config.b1 * mu[n] + (1 - config.b1) * g
            nu[n] = config.b2 * nu[n] + (1 - config.b2) * g**2
            step = (mu[n] / (1 - config.b1**t)) / (np.sqrt(nu[n] / (1 - config.b2**t)) + config.eps)
            params[n] = params[n] - rate[n] * (step + config.weight_decay * decay[n] * params[n])
    return params


def test_adamw_by_hand_with_clip_decay_and_rates():
    config = OptimConfig(learning_rate=0.1, b1=0.8, b2=0.9, weight_decay=0.3, rates=(("slow", 0.25), ("w", 2.0)))
    names = ["net/w", "net/bias", "slow/w", "norm/w", "action_table/w"]
    draw = np.random.default_rng(0)
    params = {n: draw.normal(size=3) for n in names}
    grads = [{n: draw.normal(size=3) * 4 for n in names} for _ in range(3)]
    rate = {"net/w": 0.2, "net/bias": 0.1, "slow/w": 0.025, "norm/w": 0.2, "action_table/w": 0.2}
    decay = {"net/w": 1, "net/bias": 0, "slow/w": 1, "norm/w": 0, "action_table/w": 0}

    transform = optim.make(config)
    ours = tree.nested({n: jnp.asarray(p, jnp.float32) for n, p in params.items()})
    state = transform.init(ours)
    for grad in grads:
        updates, state = transform.update(
            tree.nested({n: jnp.asarray(g, jnp.float32) for n, g in grad.items()}), state, ours
        )
        ours = jax.tree.map(jnp.add, ours, updates)
    expected = adamw_by_hand(config, grads, params, rate, decay)
    for name, value in tree.named_leaves(ours).items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_frozen_paths_stay_hold_no_state_and_do_not_count_in_the_clip():
    config = OptimConfig(learning_rate=1.0, b1=0.0, b2=0.0, eps=1.0, weight_decay=0.0, clip=1.0, frozen=("^old",))
    params = {"new": jnp.zeros(2), "old": jnp.ones(5)}
    transform = optim.make(config)
    state = transform.init(params)
    assert sorted(n.split("/")[-2] for n in tree.named_leaves(state) if n.endswith("/new")) == ["mu", "nu"]
    assert not [n for n in tree.named_leaves(state) if n.endswith("old")]
    grads = {"new": jnp.asarray([0.6, 0.0]), "old": jnp.full(5, 100.0)}
    updates: Any = transform.update(grads, state, params)[0]
    np.testing.assert_array_equal(updates["old"], np.zeros(5))
    np.testing.assert_allclose(updates["new"], [-0.6 / 1.6, 0.0], rtol=1e-6)  # g / (|g| + eps), g not clipped


def test_muon_moves_matrices_along_their_polar_factor_and_the_rest_as_adam():
    config = OptimConfig(method="muon", learning_rate=0.5, weight_decay=0.0, clip=1e9)
    draw = np.random.default_rng(0)
    grads = {"blocks/q/kernel": draw.normal(size=(2, 24, 16)), "blocks/q/bias": draw.normal(size=(2, 16))}
    grads |= {"head/kernel": draw.normal(size=(24, 16)), "blocks/one/kernel": draw.normal(size=(16, 24))}
    given = tree.nested({name: jnp.asarray(g, jnp.float32) for name, g in grads.items()})
    transform = optim.make(config)
    updates, _ = transform.update(given, transform.init(given), given)
    updates = tree.named_leaves(updates)
    matrices = [("blocks/q/kernel", 0), ("blocks/q/kernel", 1), ("blocks/one/kernel", slice(None))]
    for name, index in matrices:
        rotation, _ = linalg.polar(grads[name][index])
        moved = np.asarray(updates[name][index]) / (-0.5 * 0.2 * np.sqrt(24))
        # Five Newton-Schulz steps bring the singular values near one, not to it.
        values = np.asarray(linalg.svdvals(moved))
        assert values.min() > 0.6 and values.max() < 1.3, values
        assert np.sum(moved * rotation) / np.linalg.norm(moved) / np.linalg.norm(rotation) > 0.97
    for name in ("head/kernel", "blocks/q/bias"):
        # Adam's first update with Nesterov momentum has one size everywhere, against the gradient's sign.
        moved = np.asarray(updates[name])
        np.testing.assert_allclose(moved, -np.abs(moved).max() * np.sign(grads[name]), rtol=1e-4)
    with pytest.raises(ValueError, match="'sgd' is unknown; use adamw or muon"):
        optim.make(OptimConfig(method="sgd"))
    with pytest.raises(ValueError, match="stack/kernel has shape"):
        optim.make(OptimConfig(method="muon", matrices=("kernel",))).init(
            {"stack": {"kernel": jnp.zeros((1, 2, 3, 4))}}
        )


def test_schedules():
    rate = optim.learning_rate(OptimConfig(learning_rate=2.0, warmup=4))
    np.testing.assert_allclose([np.asarray(rate(i)).item() for i in range(6)], [0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    rate = optim.learning_rate(OptimConfig(learning_rate=2.0, schedule="cosine", warmup=2, steps=10, final_scale=0.1))
    by_hand = [2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * i / 8))) for i in range(9)]
    np.testing.assert_allclose([np.asarray(rate(i)).item() for i in range(11)], [1.0, 2.0, *by_hand], rtol=1e-5)
    with pytest.raises(ValueError, match=r"optim.steps: 0 .* optim.warmup 0"):
        optim.make(OptimConfig(schedule="cosine"))
    with pytest.raises(ValueError, match="'linear' is unknown"):
        optim.make(OptimConfig(schedule="linear"))


def test_ema_is_float32():
    params = {"w": jnp.full(3, 2.0, jnp.bfloat16)}
    ema = optim.ema_update({"w": jnp.ones(3)}, params, 0.9)
    assert ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(ema["w"], np.full(3, 1.1), rtol=1e-6)
