"""Flow-matching algebra (SPEC section 1).

    x_sigma = (1 - sigma) x0 + sigma eps        sigma 1 is noise, 0 is clean
    v       = eps - x0                          the velocity d x_sigma / d sigma
    t       = 1000 sigma                        what the model is told
    shift s:  sigma' = s sigma / (1 + (s - 1) sigma)

Arrays may have any shape. `sigma` is a scalar or has the leading axes of the data (`[B]`, or `[B, T]` for one
level a latent frame); the remaining axes are broadcast. Everything is computed and returned in float32,
whatever dtype the model runs in.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TIMESTEPS = 1000.0


def _float32(x) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def expand(sigma: Float[Array, "..."] | float, like: Float[Array, "..."]) -> Float[Array, "..."]:
    """sigma `[B]`, `[B, T]` or a scalar, with trailing axes of size 1 so that it broadcasts against
    `like`."""
    sigma = _float32(sigma)
    return sigma.reshape(sigma.shape + (1,) * (jnp.ndim(like) - sigma.ndim)) if sigma.ndim else sigma


def interpolate(x0, eps, sigma) -> jax.Array:
    """x_sigma = (1 - sigma) x0 + sigma eps, float32, shape of x0."""
    sigma = expand(sigma, x0)
    return (1.0 - sigma) * _float32(x0) + sigma * _float32(eps)


def velocity(x0, eps) -> jax.Array:
    """v = eps - x0, float32: the regression target of flow matching."""
    return _float32(eps) - _float32(x0)


def x0_from_velocity(x, v, sigma) -> jax.Array:
    """The clean data that (x_sigma, v) implies: x0 = x - sigma v, float32."""
    return _float32(x) - expand(sigma, x) * _float32(v)


def eps_from_velocity(x, v, sigma) -> jax.Array:
    """The noise that (x_sigma, v) implies: eps = x + (1 - sigma) v, float32."""
    return _float32(x) + (1.0 - expand(sigma, x)) * _float32(v)


def velocity_from_x0(x, x0, sigma) -> jax.Array:
    """v = (x - x0) / sigma, float32. sigma must be above 0: clean data say nothing about the velocity."""
    return (_float32(x) - _float32(x0)) / expand(sigma, x)


def timestep(sigma) -> jax.Array:
    """t = 1000 sigma, float32."""
    return TIMESTEPS * _float32(sigma)


def shift(sigma, s: float):
    """sigma' = s sigma / (1 + (s - 1) sigma). Fixes 0 and 1; s > 1 moves levels towards noise.

    Works on numpy (keeping float64) and on jax arrays; so do all expressions below.
    """
    return s * sigma / (1.0 + (s - 1.0) * sigma)


def unshift(sigma, s: float):
    """The inverse of `shift`: sigma = sigma' / (s - (s - 1) sigma')."""
    return sigma / (s - (s - 1.0) * sigma)
