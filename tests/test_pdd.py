"""PDD on a linear velocity field with a known answer, and its plumbing on a tiny backbone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_objectives import CHUNK, CONFIG, VELOCITY, encode_text, frozen_trees, random_batch, random_weights, relative

from wp2_jax import rng
from wp2_jax.diffusion import pdd as schedules
from wp2_jax.diffusion.experts import Experts
from wp2_jax.models import passes
from wp2_jax.models.experts import expert_models
from wp2_jax.objectives import batch as batches
from wp2_jax.objectives import pdd

# The field v = A x + b + c sigma over the last block of a grid (sigma 0.5 to 0).
A = np.array([[0.9, -0.4], [0.5, 0.2]])
B = np.array([0.3, -0.2])
C = np.array([-0.5, 0.8])


def _grid(intervals: int) -> tuple[schedules.PddSchedule, np.ndarray]:
    """A schedule of one expert and two blocks of `intervals` each, and the levels of its second block."""
    schedule = schedules.schedule(Experts(None), (2 * intervals,), (2,), shift=2.0)
    return schedule, schedule.sigmas[intervals:]


def _flow(delta: float, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """The exact map x -> M x + m of the field from `sigma` to sigma + delta, by the exponential of [x, 1, sigma]."""
    generator = np.zeros((4, 4))
    generator[:2, :2], generator[:2, 2], generator[:2, 3], generator[3, 2] = A, B, C, 1.0
    power, exponential = np.eye(4), np.eye(4)
    for order in range(1, 30):
        power = power @ generator * delta / order
        exponential = exponential + power
    return exponential[:2, :2], exponential[:2, 2] + exponential[:2, 3] * sigma


def _exact_means(sigmas: np.ndarray) -> np.ndarray:
    """[n, 3, 2]: the interval means of the field's own path, as linear maps of [x, 1] at the block's start."""
    paths = [np.vstack([m.T, k]) for m, k in (_flow(s - sigmas[0], sigmas[0]) for s in sigmas)]
    return np.stack([(after - before) / d for before, after, d in zip(paths, paths[1:], np.diff(sigmas), strict=False)])


def _solver_means(sigmas: np.ndarray, solver: str) -> np.ndarray:
    """[n, 3, 2]: the same of the teacher's solver with one step an interval: what the loss has as its fixed point."""
    path, means = np.vstack([np.eye(2), np.zeros(2)]), []

    def field(path, sigma):
        return path @ A.T + np.vstack([np.zeros((2, 2)), B + C * sigma])

    for sigma, width in zip(sigmas, np.diff(sigmas), strict=False):
        v = field(path, sigma)
        if solver == "midpoint":
            v = field(path + width / 2 * v, sigma + width / 2)
        means.append(v)
        path = path + width * v
    return np.stack(means)


def _train(sigmas: np.ndarray, solver: str, steps: int = 1200) -> dict[str, jax.Array]:
    """A bank of linear heads {"kernel" [n, 2, 2], "bias" [n, 2]} trained by `pdd.regression`.

    It starts as the field at the block's start in every interval."""
    count = len(sigmas) - 1
    at_start = jnp.asarray(np.vstack([A.T, B + C * sigmas[0]]), jnp.float32)
    bank = {
        "kernel": jnp.repeat(at_start[None, :2], count, axis=0),
        "bias": jnp.repeat(at_start[None, 2], count, axis=0),
    }
    a, b, c = (jnp.asarray(x, jnp.float32) for x in (A, B, C))
    optimiser = optax.adam(optax.cosine_decay_schedule(0.02, steps))

    def loss(bank, key):
        x = 1.5 * jax.random.normal(rng.fold(key, "x"), (64, 2))
        interval = jax.random.randint(rng.fold(key, "k"), (64,), 0, count)
        errors = pdd.regression(
            lambda x: jnp.einsum("bd,ndf->nbf", x, bank["kernel"]) + bank["bias"][:, None],
            lambda x, sigma: x @ a.T + b + sigma[:, None] * c,
            x,
            jnp.asarray(sigmas, jnp.float32),
            interval,
            solver=solver,
        )
        return errors.mean()

    def update(carry, step):
        bank, state = carry
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser.update(jax.grad(loss)(bank, rng.fold(jax.random.key(0), "step", step)), state)
        return (optax.apply_updates(bank, updates), state), None

    train = jax.jit(lambda carry: jax.lax.scan(update, carry, jnp.arange(steps))[0])
    return train((bank, optimiser.init(bank)))[0]


def _maps(bank) -> np.ndarray:
    return np.concatenate([bank["kernel"], bank["bias"][:, None]], axis=1)


@functools.cache
def _errors(solver: str, intervals: int) -> tuple[float, float]:
    """Largest distance of the trained bank from the solver's means and from the exact means."""
    _, sigmas = _grid(intervals)
    trained = _maps(_train(sigmas, solver))
    return tuple(
        np.abs(trained - means(sigmas)).max()
        for means in (functools.partial(_solver_means, solver=solver), _exact_means)
    )


def test_exact_means_by_quadrature():
    # An independent check of the analytic answer: the field integrated with tiny steps.
    _, sigmas = _grid(4)
    fine = np.concatenate([np.linspace(a, b, 400, endpoint=False) for a, b in itertools.pairwise(sigmas)])
    means = _solver_means(np.append(fine, sigmas[-1]), "midpoint").reshape(4, 400, 3, 2).mean(axis=1)
    np.testing.assert_allclose(means, _exact_means(sigmas), atol=1e-6)


@pytest.mark.parametrize("solver", pdd.SOLVERS)
@pytest.mark.parametrize("intervals", [4, 8])
def test_trained_bank_is_the_solvers_path(solver, intervals):
    from_solver, _ = _errors(solver, intervals)
    assert from_solver < 3e-4


def test_orders_of_the_distance_to_the_analytic_means():
    # Halving the intervals halves Euler's error and quarters the midpoint's.
    euler = _errors("euler", 4)[1] / _errors("euler", 8)[1]
    midpoint = _errors("midpoint", 4)[1] / _errors("midpoint", 8)[1]
    assert 1.6 < euler < 2.5 and 3.0 < midpoint < 5.5
    assert _errors("midpoint", 8)[1] < 2e-3


def test_fused_heads_of_the_trained_bank_reach_the_analytic_end():
    schedule, sigmas = _grid(8)
    trained = _train(sigmas, "midpoint")
    # The block under test is the second: give the first any heads.
    bank = {name: jnp.concatenate([jnp.ones_like(x), x]) for name, x in trained.items()}
    kernel, bias = schedules.fuse_heads(bank["kernel"], bank["bias"], schedule, "all")
    x = jax.random.normal(jax.random.key(1), (5, 2))
    out = x @ kernel[1] + bias[1]
    u = jnp.einsum("bd,ndf->nbf", x, trained["kernel"]) + trained["bias"][:, None]
    summed = sum(float(width) * u[i] for i, width in enumerate(np.diff(sigmas)[:-1]))
    np.testing.assert_allclose(out[:, :2], summed, atol=1e-6)
    np.testing.assert_allclose(out[:, 2:], u[-1], atol=1e-6)
    x0 = schedules.block_x0(x, out[:, :2], out[:, 2:], schedule.lasts[1])
    m, k = _flow(sigmas[-1] - sigmas[0], sigmas[0])
    np.testing.assert_allclose(x0, np.asarray(x) @ m.T + k, atol=2e-3)


def test_unknown_solver_is_an_error():
    with pytest.raises(ValueError, match="choose one of euler, midpoint"):
        pdd.regression(
            lambda x: x[None], lambda x, s: x, jnp.ones((1, 2)), jnp.ones(2), jnp.zeros(1, jnp.int32), solver="x"
        )


# The backbone. One interval a block: k is 0, so Euler's target is the teacher at the block's start.
EXPERTS = Experts(0.9)


def _setup(per_block: int):
    intervals = (2 * per_block, 2 * per_block)
    schedule = schedules.schedule(EXPERTS, intervals, (2, 2))
    models = expert_models(
        CONFIG,
        EXPERTS.names,
        head="bank",
        intervals=dict(zip(EXPERTS.names, intervals, strict=True)),
        blocks={"high": 2, "low": 2},
    )
    teacher = {"high": random_weights(0), "low": random_weights(1)}
    params = {"experts": {name: pdd.bank_params(tree, 2 * per_block) for name, tree in teacher.items()}}
    return schedule, models, params, {**frozen_trees(4), "teacher": teacher}


def _loss(schedule, models, params, batch, frozen, key, **options):
    return pdd.loss(
        params,
        batch,
        frozen,
        key,
        models=models,
        teachers=dict.fromkeys(EXPERTS.names, VELOCITY),
        experts=EXPERTS,
        schedule=schedule,
        encode_text=encode_text,
        frames=CHUNK,
        chunk=CHUNK,
        **options,
    )


def test_a_fresh_bank_is_its_teacher_at_the_block_start():
    schedule, models, params, frozen = _setup(1)
    value = jax.jit(functools.partial(_loss, schedule, models, guide_scale=1.0))
    batch = random_batch(0, 4, 8)
    for seed in range(4):
        _, metrics = value(params, batch, frozen, jax.random.key(seed))
        assert metrics["loss/high"] < 1e-9 and metrics["loss/low"] < 1e-9
    # Another teacher is another target, for its own expert only.
    other = {**frozen, "teacher": {**frozen["teacher"], "low": random_weights(2)}}
    _, metrics = value(params, batch, other, jax.random.key(0))
    assert metrics["loss/high"] < 1e-9 and metrics["loss/low"] > 1e-3


def test_gradients_reach_the_student_and_not_through_its_own_run():
    schedule, models, params, frozen = _setup(3)
    grad = jax.jit(jax.value_and_grad(functools.partial(_loss, schedule, models, solver="midpoint"), has_aux=True))
    (value, metrics), grads = grad(params, random_batch(0, 4, 8), frozen, jax.random.key(0))
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    for name in EXPERTS.names:
        np.testing.assert_allclose(
            metrics[f"loss/{name}"], (metrics[f"loss/{name}/data"] + metrics[f"loss/{name}/own"]) / 2, rtol=1e-5
        )
        # Two samples an expert: at most two of the six heads are trained in an update, in one block.
        moved = np.abs(grads["experts"][name]["head"]["kernel"]).max(axis=(1, 2)) > 0
        assert 1 <= moved.sum() <= 2 and (not moved[:3].any() or not moved[3:].any())
        assert np.abs(grads["experts"][name]["compressor"]["out"]["kernel"]).max() > 0


def test_the_students_own_run_is_inference():
    schedule, models, params, _ = _setup(2)
    rows = random_batch(3, 2, 8)
    clip = batches.clip_from_batch(jax.tree.map(jnp.asarray, rows), CHUNK)
    start, contexts = jnp.asarray([0, 4], jnp.int32), jax.random.normal(jax.random.key(5), (2, 2, 3, 12))
    noise, key = jax.random.normal(jax.random.key(6), (2, CHUNK, 8, 8, 16)), jax.random.key(8)

    def forward(form, name, weights, x, sigma, local):
        t = jnp.broadcast_to(1000.0 * sigma, x.shape[:2])
        model = form[name]
        return passes.teacher_forcing(model, weights, x, t, clip, start, contexts, chunk=CHUNK, block=local)

    fused = expert_models(
        CONFIG, EXPERTS.names, head="fused", intervals={"high": 4, "low": 4}, blocks={"high": 2, "low": 2}
    )
    run = jax.jit(
        lambda weights, block: pdd.own_run(
            weights,
            functools.partial(forward, fused),
            noise,
            key,
            schedule=schedule,
            names=EXPERTS.names,
            block=block,
        )
    )
    bank = {name: jax.jit(functools.partial(forward, models, name)) for name in EXPERTS.names}
    x, states = noise, []
    for index, block in enumerate(schedule.blocks[:3]):
        # By hand, with the bank instead of the fused heads.
        level = jnp.asarray(schedule.sigmas[block.start], jnp.float32)
        u = bank[block.expert](params["experts"][block.expert], x, level, jnp.asarray(block.local_index))
        moved = jnp.einsum("i,i...->...", jnp.asarray(schedule.widths(block)[:-1], jnp.float32), u[:-1])
        fresh = jax.random.normal(rng.fold(key, "step", index), x.shape)
        x = schedules.step(x, moved, u[-1], schedule.lasts[index], schedule.ends[index], fresh)
        states.append(x)
    assert relative(run(params["experts"], jnp.asarray(0)), states[1]) < 1e-5
    assert relative(run(params["experts"], jnp.asarray(1)), states[2]) < 1e-5


def test_an_odd_share_is_an_error():
    schedule, models, params, frozen = _setup(1)
    with pytest.raises(ValueError, match="does not divide by 2"):
        _loss(schedule, models, params, random_batch(0, 2, 8), frozen, jax.random.key(0))
