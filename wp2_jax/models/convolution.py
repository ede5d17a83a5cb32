"""Convolutions over video that the autoencoders share: channels last, float32, explicit history.

A causal convolution in time is a sum of 2-D convolutions, one a time tap. Measured on two CPU cores, forward and
backward, that runs 2 to 4 times as fast as XLA's 3-D convolution; the 2-D convolution itself is left to XLA, which
was up to twice as fast as im2col and a matrix product.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from wp2_jax.sharding import bands

SAME = ((1, 1), (1, 1))
"""Padding of a 3x3 convolution that keeps the size."""

# Most convolutions are followed by an activation that halves the variance.
_KERNEL_INIT = nn.initializers.he_normal()


def conv2d(x: jax.Array, kernel: jax.Array, stride: int = 1, padding=SAME) -> jax.Array:
    """x [..., H, W, C] with any number of leading axes, kernel [kh, kw, C, out] -> [..., H/stride, W/stride, out]."""
    *lead, h, w, c = x.shape
    y = lax.conv_general_dilated(
        x.reshape(-1, h, w, c), kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y.reshape(*lead, *y.shape[1:])


def causal_conv(x: jax.Array, kernel: jax.Array, history: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution that sees no later frame; rows and columns are zero-padded to keep their size.

    x [B, F, H, W, C]; history [B, P, H, W, C], the frames before x; kernel [kt, kh, kw, C, out]; `stride` is in time.
    Output frame i covers frames i * stride ... i * stride + kt - 1 of [history, x].
    -> [B, (P + F - kt) // stride + 1, H, W, out]
    """
    frames = jnp.concatenate([history, x], axis=1)
    taps, kh, kw = kernel.shape[:3]
    count = (frames.shape[1] - taps) // stride + 1
    padding = ((kh // 2, kh // 2), (kw // 2, kw // 2))
    out = conv2d(frames[:, : (count - 1) * stride + 1 : stride], kernel[0], padding=padding)
    for tap in range(1, taps):
        out += conv2d(frames[:, tap : tap + (count - 1) * stride + 1 : stride], kernel[tap], padding=padding)
    return out


def last_frames(history: jax.Array, x: jax.Array) -> jax.Array:
    """The last frames of [history, x], as many as the history has: the history of the next call."""
    return jnp.concatenate([history, x], axis=1)[:, -history.shape[1] :]


def upsample(x: jax.Array) -> jax.Array:
    """Nearest neighbour: [..., H, W, C] -> [..., 2H, 2W, C]."""
    *lead, h, w, c = x.shape
    x = jnp.broadcast_to(x[..., :, None, :, None, :], (*lead, h, 2, w, 2, c))
    return x.reshape(*lead, 2 * h, 2 * w, c)


def pooled(x: jax.Array, factor: int) -> jax.Array:
    """Means over factor x factor squares of [B, F, H, W, C]; H and W multiples of the factor."""
    b, f, h, w, c = x.shape
    return x.reshape(b, f, h // factor, factor, w // factor, factor, c).mean(axis=(3, 5))


def fold(x: jax.Array, patch: int) -> jax.Array:
    """[B, F, H, W, C] -> [B, F, H/patch, W/patch, patch * patch * C]."""
    b, f, h, w, c = x.shape
    x = x.reshape(b, f, h // patch, patch, w // patch, patch, c)
    return jnp.moveaxis(x, 4, 3).reshape(b, f, h // patch, w // patch, patch * patch * c)


def unfold(x: jax.Array, patch: int) -> jax.Array:
    """The inverse of `fold`."""
    b, f, h, w, c = x.shape
    x = x.reshape(b, f, h, w, patch, patch, c // patch**2)
    return jnp.moveaxis(x, 3, 4).reshape(b, f, h * patch, w * patch, c // patch**2)


def _kernel(module: nn.Module, *shape: int) -> jax.Array:
    """Declares `kernel`; float32 to compute with, whatever dtype it is kept in."""
    init = getattr(module, "kernel_init", None) or _KERNEL_INIT
    return module.param("kernel", init, shape, jnp.float32).astype(jnp.float32)


def _bias(module: nn.Module, features: int) -> jax.Array:
    return module.param("bias", nn.initializers.zeros, (features,), jnp.float32).astype(jnp.float32)


class TimeWeights(nn.Module):
    """The parameters of a convolution over time alone, apart from its use: a first chunk skips the convolution, but
    its parameters must exist all the same."""

    features: int

    @nn.compact
    def __call__(self, width: int) -> tuple[jax.Array, jax.Array]:
        """-> kernel [3, 1, 1, width, features], bias [features]."""
        return _kernel(self, 3, 1, 1, width, self.features), _bias(self, self.features)


class Conv2d(nn.Module):
    """A convolution of every frame: [..., H, W, C] -> [..., H/stride, W/stride, features]."""

    features: int
    size: int = 3
    stride: int = 1
    padding: tuple[tuple[int, int], tuple[int, int]] | None = None  # None: keep the size
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = bands(x) if x.ndim == 5 else x
        kernel = _kernel(self, self.size, self.size, x.shape[-1], self.features)
        half = self.size // 2
        y = conv2d(x, kernel, self.stride, self.padding or ((half, half), (half, half)))
        return y + _bias(self, self.features) if self.use_bias else y


class CausalConv3d(nn.Module):
    """A causal convolution [B, F, H, W, C] -> [B, F, H, W, features] that takes and returns its history."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
        """history [B, 2, H, W, C]: the last two frames before x, zeros at the start -> (y, the next history)."""
        x = bands(x)
        kernel = _kernel(self, 3, 3, 3, x.shape[-1], self.features)
        return causal_conv(x, kernel, history) + _bias(self, self.features), last_frames(history, x)
