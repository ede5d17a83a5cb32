"""The few-step schedule of parallel decoding distillation (SPEC 5; arXiv 2607.26004; golden/README.md 20).

The path from noise to data is cut into intervals. Grid points are equally spaced in raw time u on either side
of the experts' boundary and then shifted, sigma = shift(u). Each expert's intervals fall into equal blocks;
one forward pass at a block's start predicts the mean velocity of every interval of the block. At inference
the heads of a block are fused into one linear map, which gives the velocity u of the last interval and

    displacement = sum over all intervals but the last of (sigma_{i+1} - sigma_i) u_i
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.diffusion import flow
from wp2_jax.diffusion.experts import Experts


@dataclasses.dataclass(frozen=True)
class Block:
    """Intervals start..end-1 of the grid, run by one forward pass of `expert` at sigma[start].

    `local_index` counts the blocks of that expert, `offset` is the expert's first interval: the block's heads
    are start - offset .. end - 1 - offset of its bank.
    """

    expert: str
    local_index: int
    start: int
    end: int
    offset: int


@dataclasses.dataclass(frozen=True, eq=False)
class PddSchedule:
    """sigmas float64 [n + 1] falling from 1 to 0; timesteps float32 [n + 1] = 1000 sigma,
    the float32 product of float32 numbers that the published model is told (one unit off 1000 sigma at places); blocks
    in order. Build it with `schedule`."""

    sigmas: np.ndarray
    timesteps: np.ndarray
    blocks: tuple[Block, ...]

    @property
    def starts(self) -> np.ndarray:
        """float64 [blocks]: the level at which each block's forward pass runs."""
        return self.sigmas[[block.start for block in self.blocks]]

    @property
    def lasts(self) -> np.ndarray:
        """float64 [blocks]: the level at which each block's last interval starts; its velocity gives x0
        there."""
        return self.sigmas[[block.end - 1 for block in self.blocks]]

    @property
    def ends(self) -> np.ndarray:
        """float64 [blocks]: the level that each block's x0 is noised to; 0 after the last block."""
        return self.sigmas[[block.end for block in self.blocks]]

    def expert_blocks(self, expert: str) -> tuple[Block, ...]:
        """The blocks of one expert, in order. ValueError if it has none."""
        blocks = tuple(block for block in self.blocks if block.expert == expert)
        if not blocks:
            raise ValueError(f"expert {expert!r} has no block in this schedule")
        return blocks

    def intervals(self, expert: str) -> int:
        """How many intervals, that is heads in the bank, one expert has."""
        blocks = self.expert_blocks(expert)
        return blocks[-1].end - blocks[0].start

    def widths(self, block: Block) -> np.ndarray:
        """float64 [end - start]: sigma_{i+1} - sigma_i of the block's intervals, all negative."""
        return np.diff(self.sigmas[block.start : block.end + 1])


def schedule(
    experts: Experts,
    intervals: tuple[int, ...] = (56, 72),
    blocks: tuple[int, ...] = (2, 2),
    shift: float = 7.0,
) -> PddSchedule:
    """The grid with `intervals[e]` intervals in `blocks[e]` equal blocks for every expert e, in sampling
    order.

    The point between the experts is exactly the boundary. Raises ValueError if the tuples do not have one
    entry an expert or an expert's intervals do not divide into its blocks.
    """
    if not len(intervals) == len(blocks) == len(experts.names):
        raise ValueError(
            f"pdd.intervals={intervals}, pdd.blocks={blocks}: need one number for each expert of {experts.names}"
        )
    sigmas, table, offset = [np.ones(1)], [], 0
    for name, count, parts in zip(experts.names, intervals, blocks, strict=True):
        if parts < 1 or count < parts or count % parts:
            raise ValueError(
                f"pdd.intervals={count} of expert {name!r} do not divide into pdd.blocks={parts}: "
                f"use a multiple, such as {max(1, count // max(parts, 1)) * max(parts, 1)}"
            )
        low, high = experts.sigma_range(name)
        raw = np.linspace(flow.unshift(high, shift), flow.unshift(low, shift), count + 1)[1:]
        points = flow.shift(raw, shift)
        points[-1] = low  # not shift(unshift(low)): the boundary is this very number
        sigmas.append(points)
        size = count // parts
        table += [Block(name, b, offset + b * size, offset + (b + 1) * size, offset) for b in range(parts)]
        offset += count
    grid = np.concatenate(sigmas)
    timesteps = np.float32(flow.TIMESTEPS) * grid.astype(np.float32)
    return PddSchedule(grid, timesteps, tuple(table))


def block_x0(x: jax.Array, displacement: jax.Array, velocity: jax.Array, sigma_last) -> jax.Array:
    """x0 after a block: x + displacement is the state at sigma_last, where `velocity` points to x0.
    float32."""
    state = x.astype(jnp.float32) + displacement.astype(jnp.float32)
    return flow.x0_from_velocity(state, velocity, sigma_last)


def renoise(x0: jax.Array, sigma_end, noise: jax.Array) -> jax.Array:
    """x0 with fresh noise at the next block's level, float32."""
    return flow.interpolate(x0, noise, sigma_end)


def step(x: jax.Array, displacement: jax.Array, velocity: jax.Array, sigma_last, sigma_end, noise) -> jax.Array:
    """One block: the input of the next one (with sigma_end = 0, x0 itself). Arrays `[..., 16]` alike,
    float32; sigma_last and sigma_end are scalars or have leading axes of x."""
    return renoise(block_x0(x, displacement, velocity, sigma_last), sigma_end, noise)


def fuse_heads(kernel: jax.Array, bias: jax.Array, schedule: PddSchedule, expert: str) -> tuple[jax.Array, jax.Array]:
    """Fuses an expert's bank of heads into one linear map a block; exact, since the heads are linear.

    kernel [n, D, C], bias [n, C] (n the expert's intervals; C = 64) -> kernel [blocks, D, 2C], bias [blocks,
    2C] float32: outputs [displacement | velocity of the last interval]. Raises ValueError if n is not the
    expert's count.
    """
    if kernel.shape[0] != schedule.intervals(expert) or bias.shape[0] != kernel.shape[0]:
        raise ValueError(
            f"head bank of expert {expert!r}: kernel has {kernel.shape[0]} heads and bias {bias.shape[0]}, "
            f"the schedule {schedule.intervals(expert)} intervals"
        )
    kernel, bias = kernel.astype(jnp.float32), bias.astype(jnp.float32)
    kernels, biases = [], []
    for block in schedule.expert_blocks(expert):
        heads = slice(block.start - block.offset, block.end - 1 - block.offset)
        widths = jnp.asarray(schedule.widths(block)[:-1], jnp.float32)
        moved = [jnp.einsum("i,i...->...", widths, bank[heads], precision="highest") for bank in (kernel, bias)]
        kernels.append(jnp.concatenate([moved[0], kernel[heads.stop]], axis=-1))
        biases.append(jnp.concatenate([moved[1], bias[heads.stop]], axis=-1))
    return jnp.stack(kernels), jnp.stack(biases)
