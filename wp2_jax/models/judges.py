"""Networks that look at generated pictures and say what happened in them; trained on recorded clips, used to measure.

Both see a few pictures at once. `ChangeJudge` sees them stacked along the channels; `MotionJudge` is told which parts
of one picture match which of another, because from stacked pictures alone it learned no motion in 3000 steps: how
likely each displacement is, their mean, and how much still differs.
"""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp

from wp2_jax.models.convolution import fold, pooled

_MOTION_WIDTHS = (96, 128, 128)
_GROUPS = 8
_HIDDEN = 256
# Of matching: pictures are halved, those two apart are compared, displacements reach so far down and across.
_APART, _REACH = 2, (2, 4)
# Added to squared distances before their logarithm: what two pictures of one place differ by.
_LEAST = 1e-4
DISPLACEMENTS = tuple(itertools.product(*(range(-reach, reach + 1) for reach in _REACH)))
"""(down, across) in pixels of the halved picture."""


class Trunk(nn.Module):
    """[B, H, W, C] -> [B, outputs]; H and W halve with every one of `widths` but the first."""

    outputs: int
    widths: tuple[int, ...] = (48, 64, 96, 128)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index, features in enumerate(self.widths):
            x = nn.Conv(features, (3, 3), strides=1 if index == 0 else 2, name=f"down_{index}")(x)
            x = nn.silu(nn.GroupNorm(_GROUPS, name=f"norm_{index}")(x))
            if index:
                y = nn.Conv(features, (3, 3), name=f"conv_{index}")(x)
                x = x + nn.silu(nn.GroupNorm(_GROUPS, name=f"norm_conv_{index}")(y))
        x = nn.silu(nn.Dense(_HIDDEN, name="hidden")(x.reshape(len(x), -1)))
        return nn.Dense(self.outputs, name="out")(x)


class ChangeJudge(Trunk):
    """Pictures [B, P, H, W, 3] in [-1, 1] -> [B, outputs]; H and W divide by 16."""

    def __call__(self, pictures: jax.Array) -> jax.Array:
        _check(pictures)
        return super().__call__(fold(_beside(pictures)[:, None], 2)[:, 0])


class MotionJudge(nn.Module):
    """Pictures [B, P, H, W, 3] in [-1, 1], P of 4 or more -> [B, outputs]; H and W divide by 16.

    One small network sums up the matches of each two pictures; the one behind it sees all the sums, where each is, and
    some of the pictures.
    """

    outputs: int

    @nn.compact
    def __call__(self, pictures: jax.Array) -> jax.Array:
        _check(pictures)
        x = pooled(pictures, 2)
        sharpness = jnp.exp(self.param("log_sharpness", nn.initializers.constant(3.4), ()))
        apart = distances(x[:, :-_APART], x[:, _APART:])
        found = nn.softmax(-sharpness * apart)
        moved = found @ jnp.asarray(DISPLACEMENTS, jnp.float32)
        unlike = jnp.log(_LEAST + apart.min(-1, keepdims=True)) / 4
        seen = jnp.concatenate([4 * found, moved, unlike], -1)
        batch, pairs = seen.shape[:2]
        y = nn.silu(nn.Dense(32, name="pair_in")(seen.reshape(-1, *seen.shape[2:])))
        y = nn.silu(nn.GroupNorm(_GROUPS, name="pair_norm")(nn.Conv(48, (3, 3), strides=2, name="pair_conv")(y)))
        height, width = y.shape[1:3]
        shown = pooled(x[:, :: 2 * _APART], 2)
        place = jnp.stack(jnp.meshgrid(jnp.linspace(-1, 1, height), jnp.linspace(-1, 1, width), indexing="ij"), -1)
        parts = [_beside(y.reshape(batch, pairs, *y.shape[1:])), _beside(shown)]
        stacked = jnp.concatenate([*parts, jnp.broadcast_to(place, (batch, *place.shape))], -1)
        return Trunk(self.outputs, _MOTION_WIDTHS, name="trunk")(stacked)


def _beside(x: jax.Array) -> jax.Array:
    """[B, N, H, W, C] -> [B, H, W, N C]."""
    return x.transpose(0, 2, 3, 1, 4).reshape(len(x), *x.shape[2:4], -1)


def distances(before: jax.Array, after: jax.Array) -> jax.Array:
    """[B, N, H, W, C] twice -> [B, N, H, W, D]: mean squared distance of each place, with its neighbours, to the place
    of `after` that lies one of `DISPLACEMENTS` away; beyond the border its edge is repeated."""
    down, across = _REACH
    height, width = before.shape[2:4]
    padded = jnp.pad(after, ((0, 0), (0, 0), (down, down), (across, across), (0, 0)), mode="edge")
    found = [
        jnp.square(before - padded[:, :, down + dy : down + dy + height, across + dx : across + dx + width]).mean(-1)
        for dy, dx in DISPLACEMENTS
    ]
    stacked = jnp.stack(found, -1)
    window = (1, 1, 3, 3, 1)
    return jax.lax.reduce_window(stacked, 0.0, jax.lax.add, window, (1,) * 5, "SAME") / 9


def _check(pictures: jax.Array) -> None:
    height, width = pictures.shape[2:4]
    if height % 16 or width % 16:
        raise ValueError(f"pictures of {height}x{width}: height and width must divide by 16")
