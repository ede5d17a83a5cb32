"""What the two autoencoders have in common: the interface, the frame counts they take, and the choice between them.

Both are linen modules whose methods take and return float32 pictures [B, F, H, W, 3] in [-1, 1] and latents
[B, T, H/8, W/8, 16]. Call them as `model.apply({"params": params}, ..., method="encode")`:

    encode(video) -> latents                                 F = 4n + 1 pictures give T = n + 1 latents
    decode(latents) -> video                                 clamped to [-1, 1]; `decode_raw` is without the clamp
    encode_chunk(state, video, first) -> (state, latents)    `first` is static: the first chunk of a stream
    decode_chunk(state, latents, first) -> (state, video)    clamped
    init_encode_state(batch, height, width), init_decode_state(batch, height, width) -> state, zeros

A state is an immutable pytree of arrays whose shapes stay the same over the stream. `height` and `width` are always
those of the pictures. A first chunk may hold any number of pictures (golden README 27, 31): the Wan autoencoder uses
the first 4n + 1 of them, the tiny one pads on the left; either way 7, 13, 15 and 29 pictures give 2, 4, 4 and 8
latents. Later chunks hold whole latents, 4 pictures each.
"""

import abc
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from wp2_jax.controls.errors import GeometryError
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, Grid, check_size, fit_pictures, nearest_multiples

PIXELS_PER_LATENT = 8
LATENT_CHANNELS = 16

State = tuple[Any, ...]


class Autoencoder(nn.Module, abc.ABC):
    """The interface above, from what a kind defines: `encode_chunk`, `decode_chunk_raw` and the two states."""

    def __call__(self, video: jax.Array) -> jax.Array:
        """Encodes and decodes without the clamp: the reconstruction a training loss compares."""
        return self.decode_raw(self.encode(video))

    def encode(self, video: jax.Array) -> jax.Array:
        """[B, 4n + 1, H, W, 3] in [-1, 1] -> latents [B, n + 1, H/8, W/8, 16]. Raises GeometryError (4n + 1, 8)."""
        check_video(video)
        batch, _, height, width, _ = video.shape
        return self.encode_chunk(self.init_encode_state(batch, height, width), video, True)[1]

    def decode(self, latents: jax.Array) -> jax.Array:
        """[B, T, h, w, 16] -> video [B, 4 (T - 1) + 1, 8 h, 8 w, 3] clamped to [-1, 1]."""
        return jnp.clip(self.decode_raw(latents), -1.0, 1.0)

    def decode_raw(self, latents: jax.Array) -> jax.Array:
        """`decode` without the clamp, which has no gradient outside of [-1, 1]."""
        batch, _, h, w, _ = latents.shape
        state = self.init_decode_state(batch, h * PIXELS_PER_LATENT, w * PIXELS_PER_LATENT)
        return self.decode_chunk_raw(state, latents, True)[1]

    def decode_chunk(self, state: State, latents: jax.Array, first: bool) -> tuple[State, jax.Array]:
        """The next latents of a stream [B, T, h, w, 16] -> (state, video clamped to [-1, 1])."""
        state, video = self.decode_chunk_raw(state, latents, first)
        return state, jnp.clip(video, -1.0, 1.0)

    @abc.abstractmethod
    def encode_chunk(self, state: State, video: jax.Array, first: bool) -> tuple[State, jax.Array]:
        """The next pictures of a stream [B, F, H, W, 3] -> (state, latents)."""

    @abc.abstractmethod
    def decode_chunk_raw(self, state: State, latents: jax.Array, first: bool) -> tuple[State, jax.Array]:
        """`decode_chunk` without the clamp."""

    @abc.abstractmethod
    def init_encode_state(self, batch: int, height: int, width: int) -> State:
        """What stands before the first picture."""

    @abc.abstractmethod
    def init_decode_state(self, batch: int, height: int, width: int) -> State:
        """What stands before the first latent."""


def check_video(video: jax.Array) -> None:
    """Raises GeometryError unless [B, F, H, W, 3] holds a whole video: F = 4n + 1, H and W multiples of 8."""
    _check_pixels(video)
    fit = fit_pictures(video.shape[1])
    if fit.trimmed:
        nearest = f"{fit.pictures} or {fit.pictures + PICTURES_PER_LATENT}"
        raise GeometryError(
            "length_not_4n_plus_1",
            f"a video of {video.shape[1]} pictures: a whole video has 4n + 1 pictures, the nearest are {nearest}.",
        )


def check_chunk(video: jax.Array, first: bool) -> None:
    """Raises GeometryError unless [B, F, H, W, 3] is a chunk: F >= 1 for the first one, a multiple of 4 later."""
    _check_pixels(video)
    count = video.shape[1]
    fit_pictures(count)
    if not first and count % PICTURES_PER_LATENT:
        nearest = " or ".join(map(str, nearest_multiples(count, PICTURES_PER_LATENT)))
        raise GeometryError(
            "length_not_multiple_of_latent",
            f"a later chunk of {count} pictures does not fill whole latents of 4: use {nearest}.",
        )


def _check_pixels(video: jax.Array) -> None:
    if video.ndim != 5 or video.shape[-1] != 3:
        raise GeometryError("video_shape", f"a video of shape {video.shape}: it must be [B, F, H, W, 3].")
    check_size(video.shape[2], video.shape[3], Grid(PIXELS_PER_LATENT, patch=1, memory_scale=1))


def build(kind: Literal["wan", "tiny"], **config) -> nn.Module:
    """The autoencoder `kind` with the fields of `WanVaeConfig` or `TinyVaeConfig`; an unknown field is a TypeError."""
    # Imported here because both modules use the checks above.
    from wp2_jax.models import vae_tiny, vae_wan

    if kind == "wan":
        return vae_wan.WanVae(vae_wan.WanVaeConfig(**config))
    if kind == "tiny":
        return vae_tiny.TinyVae(vae_tiny.TinyVaeConfig(**config))
    raise ValueError(f"autoencoder kind {kind!r}: choose 'wan' or 'tiny'")


def init_params(model: nn.Module, key: jax.Array) -> dict:
    """Freshly drawn float32 weights of either autoencoder."""
    return dict(model.init(key, jnp.zeros((1, 1, PIXELS_PER_LATENT, PIXELS_PER_LATENT, 3)))["params"])
