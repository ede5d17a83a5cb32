"""The memory compressor: latents at full resolution -> a few tokens, causally (spec section 4).

32 times fewer tokens: 2 in time and 4 x 4 in space beyond the patch grid, so that its grid is that of the
low-resolution twin. One-shot and streaming are the same code: a stream carries the last frames before each causal
convolution, a one-shot pass starts from zeros.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from wp2_jax.models import layers
from wp2_jax.models.attention import attend
from wp2_jax.models.convolution import causal_conv, last_frames
from wp2_jax.sharding import constrain

CompressorState = tuple[jnp.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """Sizes of the compressor; the defaults are the full size.

    `widths` has one entry more than there are stages; `spatial_down` and `temporal_down` mark the stages that halve.
    """

    widths: tuple[int, ...] = (64, 64, 128, 256, 256, 512, 512)
    spatial_down: tuple[int, ...] = (1, 1, 1, 0, 0, 0)
    temporal_down: tuple[int, ...] = (1, 0, 0, 0, 0, 0)
    attention_blocks: int = 2
    attention_heads: int = 8

    def __post_init__(self):
        stages = len(self.widths) - 1
        if not stages == len(self.spatial_down) == len(self.temporal_down):
            raise ValueError(
                f"memory.widths names {stages} stages, spatial_down {len(self.spatial_down)} and temporal_down "
                f"{len(self.temporal_down)}: give one entry a stage"
            )
        if self.widths[-1] % self.attention_heads:
            raise ValueError(
                f"memory.widths ends in {self.widths[-1]}, which {self.attention_heads} attention_heads do not divide"
            )

    @property
    def time_factor(self) -> int:
        """Latent frames in a memory frame (l in the spec)."""
        return 2 ** sum(self.temporal_down)

    @property
    def space_factor(self) -> int:
        """Latent rows in a memory row: s = 4 times the patch, 8 at full size."""
        return 2 ** sum(self.spatial_down)


def init_state(
    config: MemoryConfig, batch: int, height: int, width: int, dtype: jnp.dtype = jnp.float32
) -> CompressorState:
    """Zeros: what stands before the first frame of a world. `height` and `width` in latents."""
    tails = []
    for stage, channels in enumerate(config.widths[:-1]):
        tails.append(jnp.zeros((batch, 2, height, width, channels), dtype))
        if config.spatial_down[stage]:
            height, width = height // 2, width // 2
        if config.temporal_down[stage]:
            tails.append(jnp.zeros((batch, 2, height, width, config.widths[stage + 1]), dtype))
    return tuple(tails)


def average_down(x: jnp.ndarray, channels: int, time: int, space: int) -> jnp.ndarray:
    """The shortcut of a halving stage: a mean over consecutive groups of (channel, time, row, column) offsets.

    x [B, T, H, W, C] -> [B, T/time, H/space, W/space, channels].
    """
    b, t, h, w, c = x.shape
    x = x.reshape(b, t // time, time, h // space, space, w // space, space, c)
    x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(b, t // time, h // space, w // space, channels, -1).mean(axis=-1)


class _CausalConv(nn.Module):
    """A convolution over time and space that sees no later frame; `stride` is in time."""

    width: int
    taps: tuple[int, int, int]
    stride: int
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jnp.ndarray, history: jnp.ndarray) -> jnp.ndarray:
        shape = (*self.taps, x.shape[-1], self.width)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.width,), self.param_dtype)
        return causal_conv(x, kernel.astype(self.dtype), history, self.stride) + bias.astype(self.dtype)


class _Stage(nn.Module):
    width: int
    spatial: bool
    temporal: bool
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    def _causal(self, name: str, taps: tuple[int, int, int], stride: int = 1) -> "_CausalConv":
        return _CausalConv(self.width, taps, stride, self.dtype, self.param_dtype, name=name)

    @nn.compact
    def __call__(self, x: jnp.ndarray, tails: list[jnp.ndarray]) -> tuple[jnp.ndarray, list[jnp.ndarray]]:
        tail = tails.pop(0).astype(x.dtype)
        kept = [last_frames(tail, x)]
        out = nn.silu(self._causal("conv", (3, 3, 3))(x, tail))
        if self.spatial:
            padding = ((0, 1), (0, 1))
            down = nn.Conv(
                self.width, (3, 3), 2, padding, dtype=self.dtype, param_dtype=self.param_dtype, name="spatial"
            )
            b, t = out.shape[:2]
            out = down(out.reshape(b * t, *out.shape[2:]))
            out = out.reshape(b, t, *out.shape[1:])
        if self.temporal:
            tail = tails.pop(0).astype(x.dtype)
            kept.append(last_frames(tail, out))
            out = self._causal("temporal", (3, 1, 1), stride=2)(out, tail)
        if self.spatial or self.temporal:
            shortcut = average_down(x, self.width, 2 if self.temporal else 1, 2 if self.spatial else 1)
        else:
            shortcut = layers.dense(self.width, self, "shortcut")(x)
        return out + shortcut, kept


class _FrameAttention(nn.Module):
    """Self-attention within each memory frame on an L2-normalised input, residual added."""

    heads: int
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        b, t, h, w, c = x.shape
        gain = self.param("gain", nn.initializers.ones, (c,), self.param_dtype)
        wide = x.astype(jnp.float32)
        # max(norm, 1e-12), written so that a zero vector (padded history) has a finite gradient.
        square = jnp.maximum(jnp.square(wide).sum(axis=-1, keepdims=True), 1e-24)
        wide = wide * jax.lax.rsqrt(square) * c**0.5
        normed = (wide * gain.astype(jnp.float32)).astype(self.dtype)
        qkv = layers.dense(3 * c, self, "qkv")(normed).reshape(b * t, h * w, 3, self.heads, c // self.heads)
        out = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(b, t, h, w, c)
        return x + layers.dense(c, self, "out")(out)


class Compressor(nn.Module):
    """[latent, y] frames -> memory tokens, zero at initialisation."""

    config: MemoryConfig
    dim: int
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, frames: jnp.ndarray, state: CompressorState) -> tuple[jnp.ndarray, CompressorState]:
        """frames [B, T, h, w, 36], T even, h and w multiples of 8 -> tokens [B, T/2 * h/8 * w/8, dim], new state."""
        config = self.config
        batch, count = frames.shape[:2]
        if count % config.time_factor:
            raise ValueError(f"{count} latent frames cannot be compressed: use a multiple of {config.time_factor}")
        # Small, and whole on every device: see `sharding.bands`.
        x = layers.dense(config.widths[0], self, "in")(constrain(frames, "batch").astype(self.dtype))
        tails, kept = list(state), []
        for index, width in enumerate(config.widths[1:]):
            stage = _Stage(
                width,
                bool(config.spatial_down[index]),
                bool(config.temporal_down[index]),
                self.dtype,
                self.param_dtype,
                name=f"stage_{index}",
            )
            x, tail = stage(constrain(x, "batch"), tails)
            kept += tail
        for index in range(config.attention_blocks):
            block = _FrameAttention(config.attention_heads, self.dtype, self.param_dtype, name=f"attention_{index}")
            x = block(x)
        tokens = layers.dense(self.dim, self, "out", kernel_init=nn.initializers.zeros)(constrain(x, "batch"))
        return tokens.reshape(batch, -1, self.dim), tuple(kept)
