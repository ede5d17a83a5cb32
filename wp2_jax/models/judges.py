"""Networks that look at generated pictures and say what happened in them; trained on recorded clips, used to measure.

Both see a few pictures at once, stacked along the channels, through the same trunk.
"""

import flax.linen as nn
import jax.numpy as jnp

from wp2_jax.models.convolution import fold

_WIDTHS = (48, 64, 96, 128)
_GROUPS = 8
_HIDDEN = 256


class Judge(nn.Module):
    """Pictures [B, P, H, W, 3] in [-1, 1] -> [B, outputs]; H and W divide by 16."""

    outputs: int

    @nn.compact
    def __call__(self, pictures: jnp.ndarray) -> jnp.ndarray:
        batch, count, height, width, colours = pictures.shape
        if height % 16 or width % 16:
            raise ValueError(f"pictures of {height}x{width}: height and width must divide by 16")
        stacked = pictures.transpose(0, 2, 3, 1, 4).reshape(batch, 1, height, width, count * colours)
        x = fold(stacked, 2)[:, 0]
        for index, features in enumerate(_WIDTHS):
            x = nn.Conv(features, (3, 3), strides=1 if index == 0 else 2, name=f"down_{index}")(x)
            x = nn.silu(nn.GroupNorm(_GROUPS, name=f"norm_{index}")(x))
            if index:
                y = nn.Conv(features, (3, 3), name=f"conv_{index}")(x)
                x = x + nn.silu(nn.GroupNorm(_GROUPS, name=f"norm_conv_{index}")(y))
        x = nn.silu(nn.Dense(_HIDDEN, name="hidden")(x.reshape(batch, -1)))
        return nn.Dense(self.outputs, name="out")(x)
