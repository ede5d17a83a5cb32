"""The two denoising experts and the noise range of each (SPEC sections 1 and 5).

The high-noise expert serves timesteps t >= 1000 boundary, the low-noise one those below. Without a boundary
there is a single expert, "all", that serves every level.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.diffusion import flow


class BoundaryError(ValueError):
    """The boundary between the experts is not a noise level strictly between 0 and 1."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """`boundary` is the sigma at which the experts change (0.9 in the published models), None for one
    expert."""

    boundary: float | None = 0.9

    def __post_init__(self):
        if self.boundary is not None and not 0.0 < self.boundary < 1.0:
            raise BoundaryError(
                f"experts.boundary={self.boundary}: must lie between 0 and 1, or be None for a single expert"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which sampling uses them."""
        return ("all",) if self.boundary is None else ("high", "low")

    def sigma_range(self, name: str) -> tuple[float, float]:
        """(lowest, highest) sigma of one expert. The boundary itself belongs to the high expert."""
        if name not in self.names:
            raise ValueError(f"expert {name!r}: this model has {self.names}")
        if self.boundary is None:
            return 0.0, 1.0
        return (self.boundary, 1.0) if name == "high" else (0.0, self.boundary)

    def at(self, timestep: float) -> str:
        """The expert of one timestep (host-side number): t >= 1000 boundary is high."""
        if self.boundary is None:
            return "all"
        return "high" if timestep >= flow.TIMESTEPS * self.boundary else "low"

    def is_high(self, sigma: jax.Array) -> jax.Array:
        """Boolean of sigma's shape: sigma >= boundary (all true with a single expert). For traced levels."""
        return sigma >= (0.0 if self.boundary is None else self.boundary)

    def segments(self, timesteps: Sequence[int] | np.ndarray) -> tuple[tuple[str, int, int], ...]:
        """Splits falling timesteps into runs of one expert: (name, first step, one past the last step)."""
        segments: list[tuple[str, int, int]] = []
        for index, t in enumerate(timesteps):
            name = self.at(float(t))
            first = segments.pop()[1] if segments and segments[-1][0] == name else index
            segments.append((name, first, index + 1))
        return tuple(segments)

    def sample_sigma(
        self,
        key: jax.Array,
        name: str,
        shape: tuple[int, ...],
        shift: float = 5.0,
        u_range: tuple[float, float] = (0.0, 1.0),
    ) -> jax.Array:
        """Training noise levels of one expert, float32 `shape`.

        They are distributed as shift(u), u uniform in `u_range`, given that the level lies in the expert's
        range: shift is increasing, so u is drawn uniformly from the pre-image of the range and nothing is
        rejected. Raises ValueError if the expert's range and `u_range` do not meet.
        """
        own = [flow.unshift(sigma, shift) for sigma in self.sigma_range(name)]
        low, high = max(own[0], u_range[0]), min(own[1], u_range[1])
        if low >= high:
            raise ValueError(
                f"u_range={u_range} leaves no noise level to expert {name!r} at shift {shift}: "
                f"it must overlap {tuple(own)}"
            )
        u = jax.random.uniform(key, shape, jnp.float32, low, high)
        # float32 rounding of u and of the shift may cross an edge of the range by one unit in the last place.
        edges = [np.float32(flow.shift(u_edge, shift)) for u_edge in (low, high)]
        return jnp.clip(flow.shift(u, shift), *edges)
