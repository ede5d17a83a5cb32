"""One update: accumulation, guard, counters, shards and donation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wp2_jax import rng, sharding, tree
from wp2_jax.sharding import MeshConfig
from wp2_jax.train import optim, state, step
from wp2_jax.train.optim import OptimConfig

OPTIMISERS = {
    "high": optim.make(OptimConfig(learning_rate=1e-2)),
    "low": optim.make(OptimConfig(learning_rate=1e-3, b1=0.0)),
}


def loss_fn(params, batch, frozen, key):
    hidden = batch["x"] @ params["high"]["w"] + params["high"]["bias"]
    error = jnp.tanh(hidden) @ params["low"]["w"] - batch["x"] @ frozen["teacher"]
    return jnp.mean(error**2), {"bias": jnp.mean(params["high"]["bias"])}


def init(key, given):
    params = {
        "high": {"w": jax.random.normal(rng.fold(key, "high"), (32, 64)) * 0.1, "bias": jnp.zeros(64)},
        "low": {"w": jax.random.normal(rng.fold(key, "low"), (64, 8)) * 0.1},
    }
    return state.create(key, params, OPTIMISERS, ema=("high",))


@pytest.fixture
def batch():
    return {"x": np.random.default_rng(1).normal(size=(8, 32)).astype(np.float32)}


@pytest.fixture
def frozen():
    return {"teacher": np.random.default_rng(2).normal(size=(32, 8)).astype(np.float32)}


def test_gradients_averages_and_metrics(batch, frozen):
    old = init(rng.base_key(0), {})
    new, metrics = step.make_update(loss_fn, OPTIMISERS, ema_decay=0.75)(old, batch, frozen)
    loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch, frozen, old.key)[0])(old.params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    for role in ("high", "low"):
        norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(grads[role])))
        np.testing.assert_allclose(metrics[f"grad_norm/{role}"], norm, rtol=1e-5)
    # Adam's first update is -rate * sign(g) where |g| is well above eps.
    moved = np.asarray(new.params["low"]["w"] - old.params["low"]["w"] * (1 - 1e-3 * 0.01))
    np.testing.assert_allclose(moved, -1e-3 * np.sign(grads["low"]["w"]), atol=1e-5)
    expected = 0.75 * old.params["high"]["w"] + 0.25 * new.params["high"]["w"]
    np.testing.assert_allclose(new.ema["high"]["w"], expected, rtol=1e-6, atol=1e-7)
    assert (int(new.step), int(new.skipped), int(metrics["skipped"])) == (1, 0, 0)


def test_accumulation_equals_one_batch(batch, frozen):
    old = init(rng.base_key(0), {})
    whole, metrics_whole = step.make_update(loss_fn, OPTIMISERS, ema_decay=0.9)(old, batch, frozen)
    parts, metrics_parts = step.make_update(loss_fn, OPTIMISERS, ema_decay=0.9, accumulate=4)(old, batch, frozen)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for name in ("loss", "grad_norm/high", "grad_norm/low"):
        np.testing.assert_allclose(metrics_whole[name], metrics_parts[name], rtol=1e-5)
    with pytest.raises(ValueError, match="accumulate: 3 does not divide the batch of 8"):
        step.make_update(loss_fn, OPTIMISERS, accumulate=3)(old, batch, frozen)


def test_a_step_that_is_not_finite_changes_nothing_and_counts(batch, frozen):
    update = jax.jit(step.make_update(loss_fn, OPTIMISERS, ema_decay=0.9))
    good, _ = update(init(rng.base_key(0), {}), batch, frozen)
    bad = {"x": batch["x"].copy()}
    bad["x"][3, 5] = np.nan
    once, metrics = update(good, bad, frozen)
    twice, metrics2 = update(once, bad, frozen)
    for field in ("params", "opt_state", "ema"):
        same = jax.tree.map(np.array_equal, getattr(good, field), getattr(twice, field))
        assert all(jax.tree.leaves(same)), field
    assert (int(metrics["skipped"]), int(metrics["skipped_in_row"])) == (1, 1)
    assert (int(twice.step), int(twice.skipped), int(metrics2["skipped_in_row"])) == (3, 2, 2)
    after, metrics3 = update(twice, batch, frozen)
    assert (int(after.skipped), int(metrics3["skipped"]), int(after.skipped_in_row)) == (2, 0, 0)
    assert not np.array_equal(after.params["low"]["w"], good.params["low"]["w"])


def test_a_gradient_that_is_not_finite_is_caught_though_the_loss_is():
    def root(params, batch, frozen, key):
        return jnp.sum(jnp.sqrt(params["all"]["w"])), {}  # at 0 the value is 0 and the slope infinite

    optimisers = {"all": optim.make(OptimConfig())}
    old = state.create(rng.base_key(0), {"all": {"w": jnp.zeros(2)}}, optimisers)
    new, metrics = step.make_update(root, optimisers)(old, {}, {})
    assert np.isfinite(metrics["loss"]) and int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(new.params["all"]["w"], np.zeros(2))


@pytest.mark.parametrize("config", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)])
def test_sharded_equals_unsharded_and_stays_in_its_shards(batch, frozen, config):
    mesh = sharding.make_mesh(config)
    rules = dataclasses.replace(sharding.RULES, min_size=1)
    sharded = step.jit_init(init, rng.base_key(0), {}, mesh, rules)
    wanted = sharding.shardings(jax.eval_shape(init, rng.base_key(0), {}), rules, mesh)
    update = step.JitUpdate(step.make_update(loss_fn, OPTIMISERS, ema_decay=0.9), mesh, rules)
    plain, plain_update = init(rng.base_key(0), {}), step.make_update(loss_fn, OPTIMISERS, ema_decay=0.9)
    rows, _ = sharding.put_batch(batch, mesh)
    weights = sharding.place(frozen, rules, mesh)
    given_up = sharded.params["high"]["w"]
    for _ in range(3):
        sharded, metrics = update(sharded, rows, weights)
        plain, plain_metrics = plain_update(plain, batch, frozen)
        np.testing.assert_allclose(metrics["loss"], plain_metrics["loss"], rtol=1e-5)
    assert given_up.is_deleted()
    for (name, x), target in zip(tree.named_leaves(sharded).items(), jax.tree.leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(target, x.ndim), name
    assert sharded.params["high"]["w"].addressable_shards[0].data.size < 32 * 64
    # Adam's early updates have the sign of the gradient: where it is 1e-8 a rounding error shows.
    np.testing.assert_allclose(sharded.params["high"]["w"], plain.params["high"]["w"], atol=1e-4)


def test_one_role_at_a_time(batch, frozen):
    """What a stage with several losses does: each role moves by its own gradient, the step counts once."""
    old = init(rng.base_key(0), {})
    grads = {"low": jax.tree.map(jnp.ones_like, old.params["low"])}
    new, metrics = step.apply_gradients(old, grads, OPTIMISERS, ok=jnp.asarray(True))
    assert int(new.step) == 0 and list(metrics) == ["grad_norm/low"]
    assert new.params["high"] is old.params["high"] and new.opt_state["high"] is old.opt_state["high"]
    np.testing.assert_allclose(metrics["grad_norm/low"], np.sqrt(64 * 8), rtol=1e-6)
    new, metrics = step.finish(new, step.all_finite(grads, jnp.asarray(jnp.inf)))
    assert int(new.step) == 1 and int(metrics["skipped"]) == 1


def test_roles_must_agree():
    with pytest.raises(ValueError, match=r"roles differ: params \['high'\], optimisers \['high', 'low'\]"):
        state.create(rng.base_key(0), {"high": {"w": jnp.zeros(1)}}, OPTIMISERS)


def test_the_compiled_update_grows_with_its_leaves_and_no_faster():
    """A scalar that all leaves share, such as whether the update counts, must not be computed once more in each."""

    def instructions(leaves: int) -> int:
        params = {"all": {f"w{index}": jnp.ones(4) for index in range(leaves)}}
        optimisers = {"all": OPTIMISERS["high"]}
        update = step.make_update(
            lambda params, *_: (optax.tree.norm(params, squared=True), {}), optimisers, ema_decay=0.9
        )
        start = state.create(rng.base_key(0), params, optimisers, ema=("all",))
        return (jax.jit(update).lower(start, {}, {}).compile().as_text() or "").count("\n")

    few, many = instructions(10), instructions(40)
    assert many < 5 * few
