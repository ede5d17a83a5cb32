"""Rotary positions of video tokens and the sinusoid of the timestep (spec section 3).

Tables are made in float64 on the host and kept as float32, so that a bfloat16 run reads the same numbers.
"""

import functools

import jax.numpy as jnp
import numpy as np


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """Complex pairs of a head that turn with time, height and width."""
    pairs = head_dim // 2
    return pairs - 2 * (pairs // 3), pairs // 3, pairs // 3


@functools.cache
def _angles(head_dim: int, axis: int, positions: int, theta: float) -> np.ndarray:
    """[positions, pairs of the axis] float64; each axis has a frequency ladder of its own."""
    pairs = axis_pairs(head_dim)[axis]
    frequencies = theta ** (-np.arange(pairs, dtype=np.float64) / pairs)
    return np.outer(np.arange(positions, dtype=np.float64), frequencies)


def rope_tables(
    positions: jnp.ndarray, rows: int, cols: int, *, head_dim: int, table_frames: int, theta: float = 10000.0
) -> tuple[jnp.ndarray, jnp.ndarray]:
    """cos and sin for the tokens of frames on one grid.

    `positions` [B, F] int32, each in 0..table_frames-1 (checked where the length of a world is chosen: a traced index
    cannot raise). Returns two float32 arrays [B, F*rows*cols, head_dim/2], tokens ordered frame, row, column.
    """
    time = _angles(head_dim, 0, table_frames, theta)
    row = _angles(head_dim, 1, rows, theta)
    col = _angles(head_dim, 2, cols, theta)
    batch, frames = positions.shape

    def table(function) -> jnp.ndarray:
        in_time = jnp.take(jnp.asarray(function(time), jnp.float32), positions, axis=0)
        in_time = jnp.broadcast_to(in_time[:, :, None, None], (batch, frames, rows, cols, time.shape[1]))
        space = np.concatenate(
            [
                np.broadcast_to(function(row)[:, None], (rows, cols, row.shape[1])),
                np.broadcast_to(function(col)[None, :], (rows, cols, col.shape[1])),
            ],
            axis=-1,
        )
        in_space = jnp.broadcast_to(jnp.asarray(space, jnp.float32), (batch, frames, rows, cols, space.shape[-1]))
        full = jnp.concatenate([in_time, in_space], axis=-1)
        return full.reshape(batch, frames * rows * cols, head_dim // 2)

    return table(np.cos), table(np.sin)


def apply_rope(x: jnp.ndarray, cos: jnp.ndarray, sin: jnp.ndarray) -> jnp.ndarray:
    """Rotates adjacent channel pairs of x [B, L, N, K] by the angles [B, L, K/2], in float32; keeps x's dtype."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    cos, sin = cos[:, :, None], sin[:, :, None]
    real, imaginary = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


@functools.cache
def _sinusoid_table(dim: int, steps: int) -> np.ndarray:
    """[2, steps, dim/2] float64: cos and sin of whole timesteps."""
    half = dim // 2
    angles = np.outer(np.arange(steps, dtype=np.float64), 10000.0 ** (-np.arange(half) / half))
    return np.stack([np.cos(angles), np.sin(angles)])


def timestep_sinusoid(t: jnp.ndarray, dim: int) -> jnp.ndarray:
    """[..., dim] float32, cosine half first, for timesteps t [...] in 0..1000.

    A float32 product t * frequency is wrong by up to 6e-5 at t = 1000. The whole part of t reads a float64-made table
    and the fraction, where float32 is exact enough, is added by the angle sum.
    """
    half = dim // 2
    t = t.astype(jnp.float32)
    whole = jnp.clip(jnp.floor(t), 0, 1000)
    fraction = (t - whole)[..., None] * jnp.asarray(10000.0 ** (-np.arange(half) / half), jnp.float32)
    table = jnp.asarray(_sinusoid_table(dim, 1001), jnp.float32)
    cos, sin = jnp.take(table, whole.astype(jnp.int32), axis=1)
    cos_f, sin_f = jnp.cos(fraction), jnp.sin(fraction)
    return jnp.concatenate([cos * cos_f - sin * sin_f, sin * cos_f + cos * sin_f], axis=-1)
