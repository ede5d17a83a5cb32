"""Multistep samplers as one scan over a static table of coefficients.

UniPC and DPM++ (and any linear multistep method on predictions of x0) update the sample by a linear
combination of the present sample, the last corrected one and the newest predictions of x0. The coefficients
depend on the schedule alone, so each solver computes them on the host in float64 (`unipc.schedule`,
`dpm.schedule`) and the device runs, for step i,

    m0 = x - sigma_i v(x)                                    prediction of x0
    c  = C[i] . (x, previous c, m0, m1, m2)                  corrector
    x' = P[i] . (c, m0, m1)                                  predictor

with m1, m2 the earlier predictions. The state is float32 whatever the model's dtype. A sampler sees only a
function `predict(x, t, sigma, index) -> velocity`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.diffusion import flow
from wp2_jax.diffusion.experts import Experts

# (x [...] float32, t () float32, sigma () float32, index () int32) -> velocity, shape of x, any float dtype
Predict = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A solver's static table for n steps, on the host.

    timesteps int64 [n]: what the model is told, truncated (golden/README.md 22).
    sigmas float64 [n + 1], ending at 0.
    corrector float64 [n, 5], weights of (x, previous c, m0, m1, m2).
    predictor float64 [n, 3], weights of (c, m0, m1).
    """

    timesteps: np.ndarray
    sigmas: np.ndarray
    corrector: np.ndarray
    predictor: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.timesteps)


class SamplerState(NamedTuple):
    """What one step hands to the next, all float32 in the shape of the sample."""

    x: jax.Array
    corrected: jax.Array
    m1: jax.Array
    m2: jax.Array


def begin(x: jax.Array) -> SamplerState:
    """The state before the first step, from noise `x` of any shape."""
    x = x.astype(jnp.float32)
    return SamplerState(x, x, jnp.zeros_like(x), jnp.zeros_like(x))


def advance(
    schedule: Schedule, predict: Predict, state: SamplerState, first: int = 0, last: int | None = None
) -> SamplerState:
    """Runs steps first..last-1 (static) as one scan; all remaining steps when `last` is None.

    Running the steps in several calls gives the same as in one: that is how the two experts take their parts
    of a schedule.
    """
    return _scan(schedule, predict, state, slice(first, last), lambda x: None)[0]


def sample(schedule: Schedule, predict: Predict, x: jax.Array) -> jax.Array:
    """Runs the whole schedule from noise `x`: the clean sample, float32, in the shape of x."""
    return advance(schedule, predict, begin(x)).x


def trajectory(schedule: Schedule, predict: Predict, x: jax.Array) -> jax.Array:
    """Like `sample`, but returns the sample after every step, `[n, *x.shape]` float32."""
    return _scan(schedule, predict, begin(x), slice(None), lambda x: x)[1]


def _scan(schedule: Schedule, predict: Predict, state: SamplerState, part: slice, emit: Callable):
    rows = (
        jnp.asarray(schedule.timesteps[part], jnp.float32),
        jnp.asarray(schedule.sigmas[:-1][part], jnp.float32),
        jnp.arange(schedule.steps, dtype=jnp.int32)[part],
        jnp.asarray(schedule.corrector[part], jnp.float32),
        jnp.asarray(schedule.predictor[part], jnp.float32),
    )

    def step(state: SamplerState, row):
        t, sigma, index, c, p = row
        m0 = flow.x0_from_velocity(state.x, predict(state.x, t, sigma, index), sigma)
        corrected = c[0] * state.x + c[1] * state.corrected + c[2] * m0 + c[3] * state.m1 + c[4] * state.m2
        x = p[0] * corrected + p[1] * m0 + p[2] * state.m1
        return SamplerState(x, corrected, m0, state.m1), emit(x)

    return jax.lax.scan(step, state, rows)


def sample_experts(schedule: Schedule, experts: Experts, predict: Mapping[str, Predict], x: jax.Array) -> jax.Array:
    """Like `sample` with one predict function an expert; each runs its own steps in its own scan."""
    state = begin(x)
    for name, first, last in experts.segments(schedule.timesteps):
        state = advance(schedule, predict[name], state, first, last)
    return state.x


def check(steps: int, shift: float) -> None:
    """Raises ValueError for a step count or shift that no solver can use."""
    if steps < 1:
        raise ValueError(f"sampler.steps={steps}: must be at least 1")
    if not shift > 0:
        raise ValueError(f"sampler.shift={shift}: must be above 0 (1 leaves the levels as they are)")
