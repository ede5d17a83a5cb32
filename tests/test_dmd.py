"""The score distillation gradient on Gaussians, whose scores are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_world import stream_spec

from wp2_jax import rng
from wp2_jax.diffusion import flow
from wp2_jax.objectives import dmd

REAL = (0.7, 0.5)
"""Mean and spread of the teacher's distribution."""


def _velocity(mean, spread):
    """The exact velocity of data N(mean, spread^2): v = (x - E[x0 | x]) / sigma, element by element."""

    def velocity(x, sigma):
        sigma = flow.expand(sigma, x)
        gain = (1 - sigma) * spread**2 / ((1 - sigma) ** 2 * spread**2 + sigma**2)
        return (x - (mean + gain * (x - (1 - sigma) * mean))) / sigma

    return velocity


def _student(theta, z):
    """An affine map of noise: data N(theta[0], theta[1]^2)."""
    return theta[0] + theta[1] * z


def _kl(theta, sigma) -> float:
    """KL(student || teacher) of the noised Gaussians at one level, float64."""
    m, v = ((1 - sigma) * theta[0], (1 - sigma) ** 2 * theta[1] ** 2 + sigma**2)
    m_real, v_real = ((1 - sigma) * REAL[0], (1 - sigma) ** 2 * REAL[1] ** 2 + sigma**2)
    return 0.5 * (np.log(v_real / v) + (v + (m - m_real) ** 2) / v_real - 1)


@functools.cache
def _scored():
    """x0, g and what it is made of, of 3 clips of a student that is off."""
    theta = jnp.asarray([-0.4, 1.1])
    z, eps = jax.random.normal(jax.random.key(0), (2, 3, 4000))
    sigma = jnp.asarray([0.15, 0.5, 0.9])
    x0 = _student(theta, z)
    return theta, z, x0, eps, sigma, dmd.score(x0, eps, sigma, _velocity(*REAL), _velocity(theta[0], theta[1]))


def test_g_is_the_difference_of_clean_predictions_over_its_clip():
    theta, _, x0, eps, sigma, g = _scored()
    x = (1 - sigma[:, None]) * x0 + sigma[:, None] * eps
    v_real, v_fake = _velocity(*REAL)(x, sigma), _velocity(*theta)(x, sigma)
    size = jnp.abs(x0 - (x - sigma[:, None] * v_real)).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(g, -sigma[:, None] * (v_fake - v_real) / size, rtol=1e-4, atol=1e-5)


def test_a_finite_difference_of_the_replay_loss_is_g():
    _, _, x0, _, _, g = _scored()
    target = np.asarray(x0, np.float64) - np.asarray(g, np.float64)

    def loss(x):
        return 0.5 * np.square(x - target).mean()

    step = 1e-4
    for place in ((0, 5), (1, 17), (2, 999)):
        moved = [np.asarray(x0, np.float64).copy() for _ in range(2)]
        moved[0][place] += step
        moved[1][place] -= step
        slope = (loss(moved[0]) - loss(moved[1])) / (2 * step)
        np.testing.assert_allclose(slope, g[place] / g.size, rtol=1e-3, atol=1e-9)
    # And the compiled loss is that function, with that gradient.
    value, grads = jax.value_and_grad(dmd.generator_loss)(x0, g)
    np.testing.assert_allclose(value, loss(np.asarray(x0, np.float64)), rtol=1e-4)
    np.testing.assert_allclose(grads, g / g.size, rtol=1e-3, atol=1e-9)


def test_g_descends_the_divergence_with_the_right_size():
    """Undone the normalisation, (1 - sigma)^2 / sigma^2 g is the gradient of the KL by x0."""
    theta = np.asarray([-0.4, 1.1])
    # Many samples: their mean stands for the expectation.
    z, eps = (jax.random.normal(jax.random.key(seed), (1, 400_000)) for seed in (1, 2))
    for sigma in (0.3, 0.8):
        level = jnp.asarray([sigma])
        x0 = _student(jnp.asarray(theta, jnp.float32), z)
        g = dmd.score(x0, eps, level, _velocity(*REAL), _velocity(*map(float, theta)))
        x = (1 - sigma) * x0 + sigma * eps
        size = np.abs(x0 - (x - sigma * np.asarray(_velocity(*REAL)(x, level)))).mean()
        by_x0 = np.asarray(g, np.float64) * size * (1 - sigma) ** 2 / sigma**2
        found = np.asarray([by_x0.mean(), (by_x0 * z).mean()])
        step = 1e-5
        expected = [
            (_kl(theta + step * axis, sigma) - _kl(theta - step * axis, sigma)) / (2 * step) for axis in np.eye(2)
        ]
        assert np.linalg.norm(found - expected) <= 0.01 * np.linalg.norm(expected)


def test_updates_move_the_student_to_the_teacher():
    optimiser = optax.adam(optax.cosine_decay_schedule(0.03, 400))

    @jax.jit
    def update(carry, number):
        theta, moments = carry
        key = rng.fold(jax.random.key(4), "update", number)
        z, eps = (jax.random.normal(rng.fold(key, name), (16, 128)) for name in ("z", "eps"))
        u = jax.random.uniform(rng.fold(key, "u"), (16,), minval=0.02, maxval=0.98)
        fake = _velocity(theta[0], theta[1])
        g = dmd.score(_student(theta, z), eps, flow.shift(u, 5.0), _velocity(*REAL), fake)
        grads = jax.grad(lambda theta: dmd.generator_loss(_student(theta, z), g))(theta)
        with jax.numpy_dtype_promotion("standard"):
            moves, moments = optimiser.update(grads, moments)
        return (optax.apply_updates(theta, moves), moments), None

    theta = jnp.asarray([-0.4, 1.1])
    (theta, _), _ = jax.lax.scan(update, (theta, optimiser.init(theta)), jnp.arange(400))
    np.testing.assert_allclose(theta, REAL, atol=0.03)


def test_equal_scores_give_no_gradient_and_no_division_by_zero():
    x0 = jnp.full((2, 5), 0.25)
    perfect = lambda x, sigma: (x - x0) / flow.expand(sigma, x)  # noqa: E731
    g = dmd.score(x0, jnp.ones_like(x0), jnp.asarray([0.5, 0.25]), perfect, perfect)
    np.testing.assert_array_equal(g, np.zeros_like(g))
    off = dmd.gradient(x0, x0, x0 + 1e-3)
    np.testing.assert_allclose(off, 1e-3 / dmd.FLOOR, rtol=1e-3)


def test_experts_share_the_clips_by_their_levels():
    spec, config = stream_spec(4), dmd.ScoreConfig(clip=8)
    # shift(u) = 5u / (1 + 4u) reaches 0.9 at u = 9/14.
    share = (0.98 - 9 / 14) / 0.96
    places = (np.arange(1000) + 0.5) / 1000
    high = np.mean([dmd.expert_of(spec, config, place) == "high" for place in places])
    np.testing.assert_allclose(high, share, atol=2e-3)


def test_clips_must_cut_the_rollout():
    spec = stream_spec(4)
    assert dmd.clip_count(spec, dmd.ScoreConfig(clip=8), 4) == 2
    with pytest.raises(ValueError, match=r"score\.clip=8 .* 12 latent frames"):
        dmd.clip_count(spec, dmd.ScoreConfig(clip=8), 3)
    with pytest.raises(ValueError, match=r"score\.clip=6"):
        dmd.clip_count(spec, dmd.ScoreConfig(clip=6), 3)
    with pytest.raises(ValueError, match=r"u_range"):
        dmd.ScoreConfig(u_range=(0.9, 0.1))
