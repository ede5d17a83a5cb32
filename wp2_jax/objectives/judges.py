"""Training of the networks that measure: motion of a chunk, and which event begins (models/judges.py).

Pictures are blurred, brightened and made noisy at random, so that a network sees recorded pictures as blurred as a
small world model's. Recorded motion gives three more samples for nothing: its mirror image, its reverse, and both.
"""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from wp2_jax.array_types import Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.models.layers import call
from wp2_jax.rng import fold

MOVEMENTS = 9
# A movement, 3 (forward + 1) + lateral + 1, as the mirror image and the reverse of its pictures show it.
_MIRRORED = np.arange(MOVEMENTS).reshape(3, 3)[:, ::-1].reshape(-1)
_REVERSED = np.arange(MOVEMENTS)[::-1]
_BLUR = (1.0, 4.0, 7.5, 9.0, 7.5, 4.0, 1.0)
"""About a Gaussian of sigma 1.5."""
_GAIN, _OFFSET, _NOISE = 0.2, 0.1, 0.06


def spoil(pictures: jax.Array, key: PRNGKey) -> jax.Array:
    """[B, P, H, W, 3] in [-1, 1] -> as much blurred, brightened and made noisy as each sample's draw says."""
    shape = (pictures.shape[0], 1, 1, 1, 1)
    blur, gain, offset, noise = (
        jax.random.uniform(fold(key, name), shape, minval=low)
        for name, low in (("blur", 0.0), ("gain", -1.0), ("offset", -1.0), ("noise", 0.0))
    )
    pictures = (1 - blur) * pictures + blur * _blurred(pictures)
    pictures = pictures * (1 + _GAIN * gain) + _OFFSET * offset
    return pictures + _NOISE * noise * jax.random.normal(fold(key, "normal"), pictures.shape)


def _blurred(pictures: jax.Array) -> jax.Array:
    reach = len(_BLUR) // 2
    for axis in (2, 3):
        pad = [(reach, reach) if index == axis else (0, 0) for index in range(pictures.ndim)]
        padded = jnp.pad(pictures, pad, mode="edge")
        size = pictures.shape[axis]
        shifted = [jax.lax.slice_in_dim(padded, tap, tap + size, axis=axis) for tap in range(len(_BLUR))]
        pictures = sum((w / sum(_BLUR) * x for w, x in zip(_BLUR, shifted, strict=True)), jnp.zeros_like(pictures))
    return pictures


def motion_loss(
    params: Params,
    batch: Batch,
    frozen: dict,
    key: PRNGKey,
    *,
    model: nn.Module,
    speed: tuple[float, float],
    train: bool,
) -> tuple[Scalar, Metrics]:
    """Rotation by least squares in units of `speed` (pitch, yaw degrees of a chunk at full speed), movement by cross
    entropy where it does not change within the chunk. params {"judge": tree}; batch of data_pipelines.judged.Motion.

    Metrics: movement (share right), turn (share of chunks that turn by more than half of a full turn, seen to turn the
    right way), rotation (mean absolute error in units of `speed`).
    """
    pictures = _flat(batch["pictures"]).astype(jnp.float32) / 127.5 - 1
    rotation = _flat(batch["rotation"]) / jnp.asarray(speed, jnp.float32)
    movement = _flat(batch["movement"])
    known = movement >= 0
    movement = jnp.maximum(movement, 0)
    if train:
        mirrored, reversed_ = (
            jax.random.bernoulli(fold(key, name), shape=movement.shape) for name in ("mirror", "reverse")
        )
        pictures = jnp.where(mirrored[:, None, None, None, None], pictures[:, :, :, ::-1], pictures)
        pictures = jnp.where(reversed_[:, None, None, None, None], pictures[:, ::-1], pictures)
        sign = jnp.where(reversed_, -1.0, 1.0)
        rotation = rotation * jnp.stack([sign, sign * jnp.where(mirrored, -1.0, 1.0)], -1)
        movement = jnp.where(mirrored, jnp.asarray(_MIRRORED)[movement], movement)
        movement = jnp.where(reversed_, jnp.asarray(_REVERSED)[movement], movement)
        pictures = spoil(pictures, key)
        out = call(model, params["judge"], "__call__", pictures)
    else:
        out = motion(model, params["judge"], pictures)
    entropy = optax.softmax_cross_entropy_with_integer_labels(out[:, 2:], movement)
    error = out[:, :2] - rotation
    return jnp.square(error).mean() + _mean(entropy, known), {
        "movement": _mean(out[:, 2:].argmax(-1) == movement, known),
        "turn": _mean(jnp.sign(out[:, :2]) == jnp.sign(rotation), jnp.abs(rotation) > 0.5),
        "rotation": jnp.abs(error).mean(),
    }


def motion(model: nn.Module, params: Params, pictures: jax.Array) -> jax.Array:
    """[B, P, H, W, 3] in [-1, 1] -> [B, 2 + MOVEMENTS]: pitch and yaw in units of the full speed, and a logit a
    movement; the mean over the pictures, their mirror image, their reverse and both."""
    found = []
    for mirrored, reversed_ in itertools.product((False, True), repeat=2):
        viewed = pictures[:, ::-1] if reversed_ else pictures
        out = call(model, params, "__call__", viewed[:, :, :, ::-1] if mirrored else viewed)
        sign = -1.0 if reversed_ else 1.0
        rotation = out[:, :2] * jnp.asarray([sign, -sign if mirrored else sign], out.dtype)
        logits = out[:, 2:]
        logits = logits[:, _MIRRORED] if mirrored else logits
        found.append(jnp.concatenate([rotation, logits[:, _REVERSED] if reversed_ else logits], -1))
    return jnp.stack(found).mean(0)


def change_loss(
    params: Params, batch: Batch, frozen: dict, key: PRNGKey, *, model: nn.Module, train: bool
) -> tuple[Scalar, Metrics]:
    """Cross entropy of the kind of event that begins; batch of data_pipelines.judged.Changes.

    Metrics: right (share), and events (share right of those where something happens).
    """
    pictures = _flat(batch["pictures"]).astype(jnp.float32) / 127.5 - 1
    kind = _flat(batch["kind"])
    if train:
        mirrored = jax.random.bernoulli(fold(key, "mirror"), shape=kind.shape)
        pictures = jnp.where(mirrored[:, None, None, None, None], pictures[:, :, :, ::-1], pictures)
        pictures = spoil(pictures, key)
    out = changes(model, params["judge"], pictures)
    right = out.argmax(-1) == kind
    return optax.softmax_cross_entropy_with_integer_labels(out, kind).mean(), {
        "right": _mean(right, jnp.ones_like(right)),
        "events": _mean(right, kind > 0),
    }


def changes(model: nn.Module, params: Params, pictures: jax.Array) -> jax.Array:
    """[B, P, H, W, 3] in [-1, 1] -> a logit a kind of event."""
    return call(model, params, "__call__", pictures)


def _mean(values: jax.Array, of: jax.Array) -> jax.Array:
    """Mean over the entries that `of` marks; 0 where there are none."""
    return jnp.where(of, values.astype(jnp.float32), 0.0).sum() / jnp.maximum(of.sum(dtype=jnp.float32), 1.0)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])
