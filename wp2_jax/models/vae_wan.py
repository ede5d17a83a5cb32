"""The Wan2.1 VAE as pure functions with explicit state (spec section 1, golden README 26-30, 40).

Everything is built from one step: the first picture of a video, or the next 4 pictures, against one latent. A chunk
or a whole video is the first step and a scan over the others, so that one-shot and streaming results are the same and
memory does not grow with the length of the video.

The first picture skips the temporal convolutions of the down- and upsampling. The temporal downsampling keeps the last
frame it saw; the temporal upsampling starts at the second latent, with a history of zeros.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from wp2_jax.controls.geometry import PICTURES_PER_LATENT
from wp2_jax.models.autoencoder import LATENT_CHANNELS, PIXELS_PER_LATENT, Autoencoder, State, check_chunk
from wp2_jax.models.convolution import CausalConv3d, Conv2d, TimeWeights, causal_conv, last_frames, upsample

# Published constants of Wan2.1: mean and spread of each latent channel over its training data.
LATENT_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
LATENT_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
LATENT_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
LATENT_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)

DOWN_PADDING = ((0, 1), (0, 1))
"""Spatial downsampling pads right and bottom only."""


@dataclasses.dataclass(frozen=True)
class WanVaeConfig:
    """Sizes; the defaults are the published model. The precision is float32 always, also in a bfloat16 run.

    `temporal_downsample` says, for each of the spatial halvings, whether time is halved too. Raises ValueError unless
    a latent stands for 8 x 8 pixels and 4 pictures.
    """

    dim: int = 96
    z_dim: int = LATENT_CHANNELS
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    mean: tuple[float, ...] = LATENT_MEAN
    std: tuple[float, ...] = LATENT_STD

    def __post_init__(self):
        # Lists (from JSON) become tuples: linen modules hash their fields.
        for name in ("dim_mult", "temporal_downsample", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} numbers: give one for each of z_dim {self.z_dim}"
                )
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temporal_downsample {self.temporal_downsample}: give {len(self.dim_mult) - 1} flags, one less than "
                f"dim_mult {self.dim_mult}"
            )
        pixels, pictures = 2 ** len(self.temporal_downsample), 2 ** sum(self.temporal_downsample)
        if (pixels, pictures) != (PIXELS_PER_LATENT, PICTURES_PER_LATENT):
            raise ValueError(
                f"dim_mult {self.dim_mult} and temporal_downsample {self.temporal_downsample}: a latent must stand for "
                f"{PIXELS_PER_LATENT} pixels a side and {PICTURES_PER_LATENT} pictures, not {pixels} and {pictures}"
            )

    @property
    def layers(self) -> dict[str, list["Layer"]]:
        """The entries of both halves, in the order they run."""
        return {"encoder": encoder_layers(self), "decoder": decoder_layers(self)}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One entry of the encoder or decoder, from which modules, states and name tables are made."""

    kind: Literal["input", "residual", "attention", "down", "up", "head"]
    name: str
    published: str
    width_in: int
    width_out: int
    temporal: bool = False


def _middle(width: int) -> list[Layer]:
    kinds: tuple[Literal["residual", "attention"], ...] = ("residual", "attention", "residual")
    return [Layer(kind, f"middle_{i}", f"middle.{i}", width, width) for i, kind in enumerate(kinds)]


def encoder_layers(config: WanVaeConfig) -> list[Layer]:
    """Pictures -> mean and log-variance of the latents."""
    widths = [config.dim * m for m in (1, *config.dim_mult)]
    layers, at = [Layer("input", "conv_in", "conv1", 3, widths[0])], 0
    for level, width in enumerate(widths[1:]):
        for block in range(config.num_res_blocks):
            width_in = width if block else widths[level]
            layers.append(Layer("residual", f"block_{level}_{block}", f"downsamples.{at}", width_in, width))
            at += 1
        if level < len(config.temporal_downsample):
            temporal = config.temporal_downsample[level]
            layers.append(Layer("down", f"down_{level}", f"downsamples.{at}", width, width, temporal))
            at += 1
    return [*layers, *_middle(widths[-1]), Layer("head", "head", "head", widths[-1], 2 * config.z_dim)]


def decoder_layers(config: WanVaeConfig) -> list[Layer]:
    """Latents -> pictures. An upsampling halves the width, and each level has one block more than in the encoder."""
    widths = [config.dim * m for m in (config.dim_mult[-1], *reversed(config.dim_mult))]
    temporal = config.temporal_downsample[::-1]
    layers, at = [Layer("input", "conv_in", "conv1", config.z_dim, widths[0]), *_middle(widths[0])], 0
    for level, width in enumerate(widths[1:]):
        for block in range(config.num_res_blocks + 1):
            width_in = width if block else widths[level] // (2 if level else 1)
            layers.append(Layer("residual", f"block_{level}_{block}", f"upsamples.{at}", width_in, width))
            at += 1
        if level < len(temporal):
            layers.append(Layer("up", f"up_{level}", f"upsamples.{at}", width, width // 2, temporal[level]))
            at += 1
    return [*layers, Layer("head", "head", "head", widths[-1], 3)]


def _zeros(layers: list[Layer], batch: int, height: int, width: int) -> State:
    """The state before the first step of a stream whose input of the first layer has this height and width."""
    state = []
    for layer in layers:
        frames: list[tuple[int, int]] = []  # (how many, channels)
        if layer.kind in ("input", "head"):
            frames = [(2, layer.width_in)]
        elif layer.kind == "residual":
            frames = [(2, layer.width_in), (2, layer.width_out)]
        elif layer.kind == "up" and layer.temporal:
            frames = [(2, layer.width_in)]
        if layer.kind == "down":
            height, width = height // 2, width // 2
            frames = [(1, layer.width_in)] if layer.temporal else []
        state.append(tuple(jnp.zeros((batch, count, height, width, channels)) for count, channels in frames))
        if layer.kind == "up":
            height, width = height * 2, width * 2
    return tuple(state)


def _normalise(module: nn.Module, name: str, x: jax.Array) -> jax.Array:
    """x / |x| over the channels, times sqrt(C) and a gain."""
    gain = module.param(name, nn.initializers.ones, x.shape[-1:], jnp.float32).astype(jnp.float32)
    # The floor is that of |x| at 1e-12; under the root it keeps the gradient of a zero vector finite.
    square = jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-24)
    return x * jax.lax.rsqrt(square) * (x.shape[-1] ** 0.5 * gain)


class _Input(nn.Module):
    layer: Layer

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        y, history = CausalConv3d(self.layer.width_out, name="conv")(x, state[0])
        return (history,), y


class _Residual(nn.Module):
    layer: Layer

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        width, y, after = self.layer.width_out, x, []
        for index in range(2):
            y = nn.silu(_normalise(self, f"gain_{index}", y))
            y, history = CausalConv3d(width, name=f"conv_{index}")(y, state[index])
            after.append(history)
        if self.layer.width_in != width:
            x = Conv2d(width, size=1, name="shortcut")(x)
        return tuple(after), x + y


class _Attention(nn.Module):
    """Self-attention of each frame, one head."""

    layer: Layer

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        b, f, h, w, c = x.shape
        qkv = Conv2d(3 * c, size=1, name="qkv")(_normalise(self, "gain", x))
        q, k, v = jnp.split(qkv.reshape(b * f, h * w, 1, 3 * c), 3, axis=-1)
        y = jax.nn.dot_product_attention(q, k, v).reshape(b, f, h, w, c)
        return (), x + Conv2d(c, size=1, name="out")(y)


class _Down(nn.Module):
    layer: Layer

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        y = Conv2d(self.layer.width_out, stride=2, padding=DOWN_PADDING, name="space")(x)
        if not self.layer.temporal:
            return (), y
        kernel, bias = TimeWeights(self.layer.width_out, name="time")(y.shape[-1])
        after = (y[:, -1:],)
        return after, y if first else causal_conv(y, kernel, state[0], stride=2) + bias


class _Up(nn.Module):
    layer: Layer

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        b, f, h, w, c = x.shape
        if self.layer.temporal:
            kernel, bias = TimeWeights(2 * c, name="time")(c)
            if not first:
                y = causal_conv(x, kernel, state[0]) + bias
                state = (last_frames(state[0], x),)
                # The first half of the channels is the earlier of the two frames.
                x = jnp.moveaxis(y.reshape(b, f, h, w, 2, c), -2, 2).reshape(b, 2 * f, h, w, c)
        return state, Conv2d(self.layer.width_out, name="space")(upsample(x))


class _Head(nn.Module):
    layer: Layer

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        y = nn.silu(_normalise(self, "gain", x))
        y, history = CausalConv3d(self.layer.width_out, name="conv")(y, state[0])
        return (history,), y


_MODULES = {
    "input": _Input,
    "residual": _Residual,
    "attention": _Attention,
    "down": _Down,
    "up": _Up,
    "head": _Head,
}


class _Half(nn.Module):
    """The encoder or the decoder: its layers one after the other."""

    layers: tuple[Layer, ...]

    @nn.compact
    def __call__(self, x: jax.Array, state: State, first: bool) -> tuple[State, jax.Array]:
        after = []
        for layer, before in zip(self.layers, state, strict=True):
            new, x = _MODULES[layer.kind](layer, name=layer.name)(x, before, first)
            after.append(new)
        return tuple(after), x


class WanVae(Autoencoder):
    """The interface of `models/autoencoder.py`; latents are normalised by the config's mean and std."""

    config: WanVaeConfig

    def setup(self):
        self.encoder = _Half(tuple(encoder_layers(self.config)))
        self.decoder = _Half(tuple(decoder_layers(self.config)))
        self.quantise = Conv2d(2 * self.config.z_dim, size=1)
        self.dequantise = Conv2d(self.config.z_dim, size=1)

    def encode_chunk(self, state: State, video: jax.Array, first: bool) -> tuple[State, jax.Array]:
        """The next pictures of a stream [B, F, H, W, 3] -> (state, latents).

        When `first`, any F: the first 4n + 1 pictures are used (5 of 7, 13 of 15) and the others dropped; then F must
        be a multiple of 4 (GeometryError).
        """
        check_chunk(video, first)
        state, moments = self._run(_encode_step, state, video.astype(jnp.float32), PICTURES_PER_LATENT, first)
        mean, std = (jnp.asarray(values, jnp.float32) for values in (self.config.mean, self.config.std))
        return state, (moments[..., : self.config.z_dim] - mean) / std

    def decode_chunk_raw(self, state: State, latents: jax.Array, first: bool) -> tuple[State, jax.Array]:
        """The next latents of a stream [B, T, h, w, 16] -> (state, video without the clamp)."""
        mean, std = (jnp.asarray(values, jnp.float32) for values in (self.config.mean, self.config.std))
        return self._run(_decode_step, state, latents.astype(jnp.float32) * std + mean, 1, first)

    def _run(self, step, state: State, x: jax.Array, size: int, first: bool) -> tuple[State, jax.Array]:
        """`step` on the first frame (when `first`), then over groups of `size`; an incomplete last group is dropped."""
        parts = []
        if first:
            state, y = step(self, state, x[:, :1], True)
            parts, x = [y], x[:, 1:]
        b, f, *rest = x.shape
        groups = f // size
        if groups:
            x = jnp.moveaxis(x[:, : groups * size].reshape(b, groups, size, *rest), 1, 0)
            scan = nn.scan(
                lambda vae, carry, group: step(vae, carry, group, False),
                variable_broadcast="params",
                split_rngs={"params": False},
            )
            state, y = scan(self, state, x)
            parts.append(jnp.moveaxis(y, 0, 1).reshape(b, -1, *y.shape[3:]))
        return state, jnp.concatenate(parts, axis=1)

    @nn.nowrap
    def init_encode_state(self, batch: int, height: int, width: int) -> State:
        """Zeros before the first picture: the last frames each convolution saw. `height`, `width` of the pictures."""
        return _zeros(encoder_layers(self.config), batch, height, width)

    @nn.nowrap
    def init_decode_state(self, batch: int, height: int, width: int) -> State:
        """Zeros before the first latent: the last frames each convolution saw. `height`, `width` of the pictures."""
        layers = decoder_layers(self.config)
        return _zeros(layers, batch, height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT)


def _encode_step(vae: WanVae, state: State, video: jax.Array, first: bool) -> tuple[State, jax.Array]:
    state, x = vae.encoder(video, state, first)
    return state, vae.quantise(x)


def _decode_step(vae: WanVae, state: State, latent: jax.Array, first: bool) -> tuple[State, jax.Array]:
    return vae.decoder(vae.dequantise(latent), state, first)
