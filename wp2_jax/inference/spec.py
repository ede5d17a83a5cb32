"""What a stream is made of: modules, sizes and sampling settings, all static."""

import dataclasses
import functools
from collections.abc import Mapping

import flax.linen as nn

from wp2_jax.controls.geometry import PICTURES_PER_LATENT
from wp2_jax.diffusion import dpm, pdd, samplers, unipc
from wp2_jax.diffusion.experts import Experts
from wp2_jax.models.autoencoder import PIXELS_PER_LATENT
from wp2_jax.models.cache import CacheLayout
from wp2_jax.models.dit import DiT, DiTConfig
from wp2_jax.models.experts import expert_models

MODES = ("bi", "ar", "few_step")
SOLVERS = {"unipc": unipc.schedule, "dpm++": dpm.schedule}
# A longer history must not recompile, so capacities grow in a few named sizes (chunks).
CAPACITIES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class StreamSpec:
    """One kind of stream. `guidance` and the PDD tuples have one entry an expert, in the order of `experts.names`.

    `capacity` is how many chunks of history the memory can hold; `chunk`, `sink` and `temporal` are latent frames.
    `memory` False hides all history but the temporal part, in ar and few_step mode: to measure what it gives.
    """

    dit: DiTConfig
    experts: Experts
    autoencoder: nn.Module
    mode: str
    height: int
    width: int
    capacity: int
    chunk: int = 4
    sink: int = 1
    temporal: int = 1
    solver: str = "unipc"
    steps: int = 40
    shift: float = 5.0
    guidance: tuple[float, ...] = (3.5, 3.5)
    intervals: tuple[int, ...] = (56, 72)
    blocks: tuple[int, ...] = (2, 2)
    pdd_shift: float = 7.0
    memory: bool = True

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} is not one of {MODES}")
        if self.mode != "few_step" and self.solver not in SOLVERS:
            raise ValueError(f"solver {self.solver!r} is not one of {tuple(SOLVERS)}")
        if self.mode == "bi" and not self.memory:
            raise ValueError("memory=False is for the modes ar and few_step, whose history is a cache")
        if self.capacity < 1:
            raise ValueError(f"capacity {self.capacity} chunks: at least 1 is needed")
        if len(self.guidance) != len(self.experts.names):
            raise ValueError(f"guidance {self.guidance}: give one scale for each expert of {self.experts.names}")

    @functools.cached_property
    def models(self) -> Mapping[str, DiT]:
        """The experts' modules, with fused heads in few-step mode."""
        if self.mode != "few_step":
            return expert_models(self.dit, self.experts.names)
        table = self.pdd_schedule
        names = self.experts.names
        return expert_models(
            self.dit,
            names,
            head="fused",
            intervals={name: table.intervals(name) for name in names},
            blocks={name: len(table.expert_blocks(name)) for name in names},
        )

    @functools.cached_property
    def pdd_schedule(self) -> pdd.PddSchedule:
        return pdd.schedule(self.experts, self.intervals, self.blocks, self.pdd_shift)

    @functools.cached_property
    def schedule(self) -> samplers.Schedule:
        """The many-step sampler's table."""
        return SOLVERS[self.solver](self.steps, self.shift)

    @property
    def guided(self) -> bool:
        """Whether a second pass with the null caption runs at all; few-step mode is unguided."""
        return self.mode != "few_step" and any(scale != 1.0 for scale in self.guidance)

    @property
    def latent_height(self) -> int:
        return self.height // PIXELS_PER_LATENT

    @property
    def latent_width(self) -> int:
        return self.width // PIXELS_PER_LATENT

    @functools.cached_property
    def layout(self) -> CacheLayout:
        """Token layout of the memory."""
        patch, factor = self.dit.patch, self.dit.memory.space_factor
        return CacheLayout(
            sink=self.sink,
            temporal=self.temporal,
            chunk=self.chunk,
            chunks=self.capacity,
            rows=self.latent_height // patch,
            cols=self.latent_width // patch,
            memory_rows=self.latent_height // factor,
            memory_cols=self.latent_width // factor,
            time_factor=self.dit.memory.time_factor,
            memory=self.memory,
        )

    def pictures(self, first: bool) -> int:
        """Pictures of a chunk: 4 a latent frame, but one for the world's first latent frame."""
        return PICTURES_PER_LATENT * self.chunk - (PICTURES_PER_LATENT - 1 if first else 0)


def capacity_for(chunks: int) -> int:
    """The smallest named capacity that holds the history of a world of `chunks` chunks (the last is not absorbed)."""
    for size in CAPACITIES:
        if chunks - 1 <= size:
            return size
    raise ValueError(f"{chunks} chunks: the largest memory holds {CAPACITIES[-1]}; generate a shorter world")
