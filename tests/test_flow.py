"""Flow algebra, guidance and the experts' noise ranges, against hand-worked formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax.diffusion import flow, guidance
from wp2_jax.diffusion.experts import BoundaryError, Experts


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, 3, 4, 4, 5)), jnp.float32) for _ in range(2)]


@pytest.mark.parametrize("sigma", [0.3, np.array([0.2, 0.9]), np.array([[0.1, 0.5, 1.0], [0.0, 0.7, 0.4]])])
def test_interpolation_and_conversions_are_inverse(pair, sigma):
    x0, eps = pair
    level = np.asarray(sigma, np.float32)
    wide = level.reshape(level.shape + (1,) * (x0.ndim - level.ndim)) if level.ndim else level
    x = flow.interpolate(x0, eps, jnp.asarray(level))
    np.testing.assert_allclose(x, (1 - wide) * np.asarray(x0) + wide * np.asarray(eps), atol=1e-6)
    v = flow.velocity(x0, eps)
    np.testing.assert_allclose(flow.x0_from_velocity(x, v, jnp.asarray(level)), x0, atol=2e-6)
    np.testing.assert_allclose(flow.eps_from_velocity(x, v, jnp.asarray(level)), eps, atol=2e-6)


def test_velocity_is_the_derivative_of_the_path(pair):
    x0, eps = pair
    _, slope = jax.jvp(lambda s: flow.interpolate(x0, eps, s), (jnp.float32(0.4),), (jnp.float32(1.0),))
    np.testing.assert_allclose(slope, flow.velocity(x0, eps), atol=1e-6)


def test_velocity_from_x0_inverts_x0_from_velocity(pair):
    x, v = pair
    x0 = flow.x0_from_velocity(x, v, 0.25)
    np.testing.assert_allclose(flow.velocity_from_x0(x, x0, 0.25), v, atol=2e-6)


def test_bfloat16_inputs_give_float32(pair):
    x0, eps = (a.astype(jnp.bfloat16) for a in pair)
    for out in (flow.interpolate(x0, eps, 0.5), flow.velocity(x0, eps), flow.x0_from_velocity(x0, eps, 0.5)):
        assert out.dtype == jnp.float32


def test_shift():
    levels = np.linspace(0.0, 1.0, 101)
    shifted = flow.shift(levels, 5.0)
    assert shifted.dtype == np.float64
    assert shifted[0] == 0.0 and shifted[-1] == 1.0 and np.all(np.diff(shifted) > 0)
    assert flow.shift(0.5, 5.0) == pytest.approx(2.5 / 3.0)
    # The odds of noise are multiplied by s, so shifts compose by multiplication.
    np.testing.assert_allclose(flow.shift(flow.shift(levels, 2.0), 3.0), flow.shift(levels, 6.0), atol=1e-15)
    np.testing.assert_allclose(flow.unshift(shifted, 5.0), levels, atol=1e-14)


def test_guidance():
    text, null = jnp.float32([1.0, 2.0]), jnp.float32([0.5, 4.0])
    np.testing.assert_allclose(guidance.combine(text, null, 3.5), [0.5 + 3.5 * 0.5, 4.0 - 7.0])
    calls = []

    def branch(value, name):
        return lambda x: calls.append(name) or value

    guided = guidance.guided(branch(text, "text"), branch(null, "null"), 2.0)
    np.testing.assert_allclose(guided(None), [1.5, 0.0])
    assert calls == ["text", "null"]
    calls.clear()
    np.testing.assert_allclose(guidance.guided(branch(text, "text"), branch(null, "null"), 1.0)(None), text)
    assert calls == ["text"]


def test_experts_ranges():
    two, one = Experts(0.9), Experts(None)
    assert two.names == ("high", "low") and one.names == ("all",)
    assert two.sigma_range("high") == (0.9, 1.0) and two.sigma_range("low") == (0.0, 0.9)
    assert one.sigma_range("all") == (0.0, 1.0)
    assert [two.at(t) for t in (1000, 900, 899, 0)] == ["high", "high", "low", "low"]
    assert {one.at(t) for t in (1000, 900, 0)} == {"all"}
    assert two.is_high(jnp.float32([0.95, 0.9, 0.89])).tolist() == [True, True, False]
    assert one.is_high(jnp.float32([0.0, 0.5])).all()
    assert two.segments([1000, 950, 900, 899, 10]) == (("high", 0, 3), ("low", 3, 5))
    assert two.segments([800, 10]) == (("low", 0, 2),)
    assert one.segments([1000, 10]) == (("all", 0, 2),)
    with pytest.raises(ValueError, match="'all'"):
        two.sigma_range("all")


@pytest.mark.parametrize("boundary", [0.0, 1.0, 900.0, -0.1, float("nan")])
def test_experts_refuse_a_boundary_that_is_no_noise_level(boundary):
    with pytest.raises(BoundaryError, match="boundary"):
        Experts(boundary)


@pytest.mark.parametrize("boundary", [0.9, None])
def test_sampled_levels_follow_the_restricted_distribution(boundary):
    experts = Experts(boundary)
    for name in experts.names:
        sigma = np.asarray(experts.sample_sigma(jax.random.key(3), name, (20000,), shift=5.0))
        low, high = experts.sigma_range(name)
        assert sigma.dtype == np.float32 and sigma.min() >= np.float32(low) and sigma.max() <= np.float32(high)
        # Undoing the shift must leave a uniform variable on the pre-image: Kolmogorov-Smirnov at about 1e-6.
        u = np.sort(flow.unshift(sigma.astype(np.float64), 5.0))
        ends = flow.unshift(low, 5.0), flow.unshift(high, 5.0)
        expected = (u - ends[0]) / (ends[1] - ends[0])
        assert np.abs(expected - np.arange(1, 20001) / 20000).max() < 2.7 / np.sqrt(20000)


def test_sampled_levels_respect_u_range():
    experts = Experts(None)
    sigma = experts.sample_sigma(jax.random.key(0), "all", (4000,), 5.0, (0.02, 0.98))
    assert flow.shift(0.02, 5.0) - 1e-6 <= sigma.min() < 0.1
    assert 0.99 < sigma.max() <= flow.shift(0.98, 5.0) + 1e-6
    with pytest.raises(ValueError, match="u_range"):
        Experts(0.9).sample_sigma(jax.random.key(0), "high", (1,), 5.0, (0.0, 0.5))
