"""The causal tiny autoencoder: 2-D convolutions and blocks that look one frame back (spec section 8, README 31, 43).

The layer order is that of the public TAEHV; the latents have no mean and std. Each picture and latent passes the
network once, so a whole video is one chunk: one-shot and streaming are the same code.

Time runs 4:1. A pool joins two neighbouring frames; where the first chunk has an odd number of frames a zero frame is
put before it. A grow gives two frames for one, except for the first latent of a stream, which stays one frame.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from wp2_jax.models import shortcut
from wp2_jax.models.autoencoder import LATENT_CHANNELS, PIXELS_PER_LATENT, Autoencoder, State, check_chunk
from wp2_jax.models.convolution import Conv2d, fold, unfold, upsample

POOLS = (2, 2, 1)
"""Frames that each pool of the encoder joins."""
GROWS = (1, 2, 2)
"""Frames that each grow of the decoder gives for one."""
# The widths of the last features add up; outputs that start far off kill units before anything is learned.
_SMALL = nn.initializers.variance_scaling(0.02, "fan_in", "truncated_normal")


@dataclasses.dataclass(frozen=True)
class TinyVaeConfig:
    """Widths; the defaults are the published size. The last decoder width is that of the output convolution."""

    encoder_width: int = 64
    decoder_widths: tuple[int, ...] = (256, 128, 64, 64)
    latent_channels: int = LATENT_CHANNELS
    blocks: int = 3  # memory blocks at each of the three levels of both halves
    # Pixels of a side that are folded into channels before the first convolution. The published model has 1; from
    # scratch on a CPU 4 learns several times faster, because nothing runs at full resolution.
    patch: int = 1
    # A linear path beside the layers of both halves (`models/shortcut.py`). The published model has none.
    shortcut: bool = False

    def __post_init__(self):
        # A list (from JSON) becomes a tuple: linen modules hash their fields.
        object.__setattr__(self, "decoder_widths", tuple(self.decoder_widths))
        if len(self.decoder_widths) != 4:
            raise ValueError(f"decoder_widths {self.decoder_widths}: give 4 widths, from the latents to the pictures")
        if self.patch not in (1, 2, 4):
            raise ValueError(
                f"patch {self.patch}: choose 1, 2 or 4, so that {PIXELS_PER_LATENT} pixels remain a latent"
            )

    @property
    def out_init(self) -> nn.initializers.Initializer:
        """Of the last convolutions: beside a shortcut the layers start with nothing to say."""
        return nn.initializers.zeros if self.shortcut else _SMALL

    @property
    def strides(self) -> tuple[int, ...]:
        """Spatial stride of the encoder's levels; the decoder's are these in reverse."""
        halvings = (PIXELS_PER_LATENT // self.patch).bit_length() - 1
        return (1,) * (len(POOLS) - halvings) + (2,) * halvings


class MemoryBlock(nn.Module):
    """relu(conv([x, the frame before x]) + x); keeps its width."""

    @nn.compact
    def __call__(self, x: jax.Array, past: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, F, h, w, C], past [B, h, w, C]: this block's previous input frame -> (y, the next past)."""
        width = x.shape[-1]
        before = jnp.concatenate([past[:, None], x[:, :-1]], axis=1)
        y = nn.relu(Conv2d(width, name="conv_0")(jnp.concatenate([x, before], axis=-1)))
        y = nn.relu(Conv2d(width, name="conv_1")(y))
        # Zero at first: a fresh block passes its input on, and a deep stack of them trains from scratch.
        return nn.relu(Conv2d(width, kernel_init=nn.initializers.zeros, name="conv_2")(y) + x), x[:, -1]


class Pool(nn.Module):
    """`stride` neighbouring frames into one."""

    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, first: bool) -> jax.Array:
        """[B, F, h, w, C] -> [B, ceil(F / stride), h, w, C]; an F that does not divide is allowed only when `first`."""
        b, _, h, w, c = x.shape
        if first:
            x = jnp.pad(x, ((0, 0), (-x.shape[1] % self.stride, 0), (0, 0), (0, 0), (0, 0)))
        x = x.reshape(b, -1, self.stride, h, w, c)
        x = jnp.moveaxis(x, 2, -2).reshape(b, -1, h, w, self.stride * c)
        return Conv2d(c, size=1, use_bias=False, name="conv")(x)


class Grow(nn.Module):
    """One frame into `stride`."""

    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, first: bool) -> jax.Array:
        """[B, F, h, w, C] -> [B, stride * F, h, w, C], or 1 + stride * (F - 1) frames when `first`."""
        b, f, h, w, c = x.shape
        conv = Conv2d(self.stride * c, size=1, use_bias=False, name="conv")
        y = jnp.moveaxis(conv(x).reshape(b, f, h, w, self.stride, c), -2, 2).reshape(b, -1, h, w, c)
        if not first or self.stride == 1:
            return y
        return jnp.concatenate([x[:, :1], y[:, self.stride :]], axis=1)


class Encoder(nn.Module):
    """Pictures in [0, 1] -> latents."""

    config: TinyVaeConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        width, after = self.config.encoder_width, []
        x = nn.relu(Conv2d(width, name="conv_in")(fold(x, self.config.patch)))
        for level, (stride, space) in enumerate(zip(POOLS, self.config.strides, strict=True)):
            x = Pool(stride, name=f"pool_{level}")(x, first)
            x = Conv2d(width, stride=space, use_bias=False, name=f"down_{level}")(x)
            for block in range(self.config.blocks):
                x, past = MemoryBlock(name=f"block_{level}_{block}")(x, state[len(after)])
                after.append(past)
        return tuple(after), Conv2d(self.config.latent_channels, kernel_init=self.config.out_init, name="conv_out")(x)


class Decoder(nn.Module):
    """Latents -> pictures in [0, 1], not clamped."""

    config: TinyVaeConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        widths, after = self.config.decoder_widths, []
        x = 3.0 * jnp.tanh(x / 3.0)
        x = nn.relu(Conv2d(widths[0], name="conv_in")(x))
        for level, (stride, space) in enumerate(zip(GROWS, reversed(self.config.strides), strict=True)):
            for block in range(self.config.blocks):
                x, past = MemoryBlock(name=f"block_{level}_{block}")(x, state[len(after)])
                after.append(past)
            x = Grow(stride, name=f"grow_{level}")(upsample(x) if space == 2 else x, first)
            x = Conv2d(widths[level + 1], use_bias=False, name=f"up_{level}")(x)
        x = Conv2d(3 * self.config.patch**2, kernel_init=self.config.out_init, name="conv_out")(nn.relu(x))
        return tuple(after), unfold(x, self.config.patch)


class TinyVae(Autoencoder):
    """The interface of `models/autoencoder.py`; inside, pictures are in [0, 1]."""

    config: TinyVaeConfig

    def setup(self):
        self.encoder = Encoder(self.config)
        self.decoder = Decoder(self.config)
        if self.config.shortcut:
            self.linear_encoder = shortcut.LinearEncoder(self.config.latent_channels)
            self.linear_decoder = shortcut.LinearDecoder()

    def encode_chunk(self, state: State, video: jax.Array, first: bool) -> tuple[State, jax.Array]:
        """The next pictures [B, F, H, W, 3]: any F when `first`, later multiples of 4 -> (state, latents)."""
        check_chunk(video, first)
        video = (video.astype(jnp.float32) + 1.0) / 2.0
        state, latents = self.encoder(video, state, first)
        if self.config.shortcut:
            latents += self.linear_encoder(video, first)
        return state, latents

    def decode_chunk_raw(self, state: State, latents: jax.Array, first: bool) -> tuple[State, jax.Array]:
        """The next latents of a stream [B, T, h, w, 16] -> (state, video without the clamp)."""
        latents = latents.astype(jnp.float32)
        state, video = self.decoder(latents, state, first)
        if self.config.shortcut:
            video += self.linear_decoder(latents, first)
        return state, 2.0 * video - 1.0

    @nn.nowrap
    def init_encode_state(self, batch: int, height: int, width: int) -> State:
        """Zeros: the previous input of each memory block. `height`, `width`: pixels of the pictures."""
        sides, scale = [], self.config.patch
        for stride in self.config.strides:
            scale *= stride
            sides += [(height // scale, width // scale)] * self.config.blocks
        return tuple(jnp.zeros((batch, *side, self.config.encoder_width)) for side in sides)

    @nn.nowrap
    def init_decode_state(self, batch: int, height: int, width: int) -> State:
        """Zeros: the previous input of each memory block. `height`, `width`: pixels of the pictures."""
        states, scale = [], PIXELS_PER_LATENT
        for stride, channels in zip(reversed(self.config.strides), self.config.decoder_widths, strict=False):
            states += [jnp.zeros((batch, height // scale, width // scale, channels))] * self.config.blocks
            scale //= stride
        return tuple(states)
