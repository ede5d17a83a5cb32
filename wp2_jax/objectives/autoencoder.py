"""Reconstruction of video windows: how an autoencoder is trained from scratch (our choice; the published one is given).

    loss = L1 + square * L2 + gradient * G + regulariser * R

L2, the mean square, is for colour: a saturated wall is a large error, and under L1 alone a fresh model long stays grey.

G is the L1 distance of horizontal and vertical differences between neighbours, on the pictures and on their 2x and 4x
means: plain L1 settles for blur and leaves a regular grid, both of which are large in the differences, and the means
hold colours and shapes in place.

R keeps latents near unit scale, because diffusion mixes them with unit noise and no mean and std are stored. With mean
m and variance s of a channel over the batch, R is the mean over channels of (m^2 + s - 1 - log s) / 2, the divergence
of N(m, s) from N(0, 1). Unlike a penalty on z^2 it does not pull single latents to zero.

The decoder sees latents with a little noise: a sampler's latents are never exact, and near latents shall decode alike.
"""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.array_types import Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.controls.geometry import PICTURES_PER_LATENT
from wp2_jax.models.convolution import pooled

_SCALES = (1, 2, 4)


def gradient_distance(video: jax.Array, target: jax.Array) -> Scalar:
    """G: mean absolute difference of neighbour differences, averaged over both directions and the scales 1, 2, 4."""
    error, terms = video - target, []
    for factor in _SCALES:
        level = pooled(error, factor)
        terms += [jnp.abs(jnp.diff(level, axis=axis)).mean() for axis in (2, 3)]
    return jnp.mean(jnp.stack(terms))


def unit_divergence(latents: jax.Array) -> Scalar:
    """R of latents [B, T, h, w, C]: 0 where every channel has mean 0 and variance 1, else positive."""
    axes = (0, 1, 2, 3)
    mean, variance = latents.mean(axis=axes), latents.var(axis=axes)
    # A channel that is constant at the start (variance 0) gets a large finite gradient.
    return 0.5 * jnp.mean(jnp.square(mean) + variance - 1.0 - jnp.log(variance + 1e-6))


def loss(
    params: Params,
    batch: Batch,
    frozen: dict[str, Any],
    key: PRNGKey,
    *,
    model: nn.Module,
    square: float = 10.0,
    gradient: float = 0.5,
    regulariser: float = 0.3,
    latent_noise: float = 0.05,
) -> tuple[Scalar, Metrics]:
    """Reconstruction loss of batch["video"] [B, 4n + 1, H, W, 3], float32 in [-1, 1] or uint8.

    params["autoencoder"] are the weights of `model` (`models/autoencoder.py`). Every latent counts the same, so the
    first picture, which has one of its own and which generation starts from, counts as much as four later ones.
    `latent_noise` is the spread of what is added to the latents. H and W are multiples of 8. Metrics: l1, gradient,
    regulariser (before their factors), psnr (dB, of the clamped pictures), latent_mean (largest |mean| of a channel),
    latent_std (mean over channels).
    """
    del frozen
    video = batch["video"]
    if video.dtype == jnp.uint8:
        video = video.astype(jnp.float32) / 127.5 - 1.0

    def run(x: jax.Array, method: str) -> jax.Array:
        return cast(jax.Array, model.apply({"params": params["autoencoder"]}, x, method=method))

    latents = run(video, "encode")
    noise = latent_noise * jax.random.normal(key, latents.shape, jnp.float32)
    decoded = run(latents + noise, "decode_raw")

    weight = np.ones((video.shape[1], 1, 1, 1), np.float32)
    weight[0] = PICTURES_PER_LATENT
    weight /= weight.mean()
    l1 = (weight * jnp.abs(decoded - video)).mean()
    edges = gradient_distance(weight * decoded, weight * video)
    spread = unit_divergence(latents)
    error = jnp.square((jnp.clip(decoded, -1.0, 1.0) - video) / 2.0).mean(axis=(2, 3, 4))
    metrics = {
        "l1": l1,
        "gradient": edges,
        "regulariser": spread,
        "psnr": jnp.mean(-10.0 * jnp.log10(jnp.maximum(error, 1e-10))),
        "latent_mean": jnp.abs(latents.mean(axis=(0, 1, 2, 3))).max(),
        "latent_std": latents.std(axis=(0, 1, 2, 3)).mean(),
    }
    squares = (weight * jnp.square(decoded - video)).mean()
    return l1 + square * squares + gradient * edges + regulariser * spread, metrics
