"""What is known before generation starts: y at full and at low resolution, and the low-resolution pictures of a chunk.

Training caches its data through these same functions (spec sections 3 and 4).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from wp2_jax.controls.geometry import PICTURES_PER_LATENT
from wp2_jax.controls.images import low_resolution
from wp2_jax.models.layers import call


def chunk_low_res(video: jnp.ndarray) -> jnp.ndarray:
    """Every second picture of one chunk [B, F, H, W, 3], scaled: what the low-resolution twin is encoded from."""
    return low_resolution(video[:, ::2])


def image_latents(autoencoder: nn.Module, params, image: jnp.ndarray, frames: int, chunk: int = 4) -> jnp.ndarray:
    """Latents [B, frames, h, w, 16] of the clip [image, zeros, zeros, ...], where zero is mid-grey; image [B, H, W, 3].

    Encoded chunk by chunk with the streaming encoder, which equals one pass and needs the memory of one chunk. `frames`
    is any number of latent frames.
    """
    batch, height, width, _ = image.shape
    state = call(autoencoder, params, "init_encode_state", batch, height, width)
    first_frames = min(chunk, frames)
    grey = jnp.zeros((batch, PICTURES_PER_LATENT * chunk, height, width, 3), image.dtype)
    first = jnp.concatenate([image[:, None], grey[:, : PICTURES_PER_LATENT * (first_frames - 1)]], axis=1)
    state, head = call(autoencoder, params, "encode_chunk", state, first, True)
    rest = frames - first_frames
    if not rest:
        return head

    def body(state, _):
        return call(autoencoder, params, "encode_chunk", state, grey, False)

    _, later = jax.lax.scan(body, state, None, length=-(-rest // chunk))
    later = jnp.moveaxis(later, 0, 1).reshape(batch, -1, *head.shape[2:])
    return jnp.concatenate([head, later[:, :rest]], axis=1)


def with_mask(image_latents: jnp.ndarray) -> jnp.ndarray:
    """y [B, T, h, w, 20]: four mask channels (1 at latent frame 0) before the image latents [B, T, h, w, 16]."""
    shape = (*image_latents.shape[:-1], 4)
    mask = jnp.zeros(shape, image_latents.dtype).at[:, 0].set(1)
    return jnp.concatenate([mask, image_latents], axis=-1)


def conditioning(autoencoder: nn.Module, params, image: jnp.ndarray, frames: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    """y [B, frames, h, w, 20] of an image [B, H, W, 3] in about [-1, 1], and its low-resolution y over frames/2."""
    full = image_latents(autoencoder, params, image, frames)
    half = image_latents(autoencoder, params, low_resolution(image), frames // 2)
    return with_mask(full), with_mask(half)
