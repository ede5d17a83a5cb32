"""Frame-aligned actions: their encoding and their injection into a block (spec section 2)."""

import math

import flax.linen as nn
import jax.numpy as jnp

from wp2_jax.models import layers, quantized

ACTION_WIDTH = 6
TABLE_ROWS = (3, 3, 2, 2)  # forward, lateral, perspective, jump
_HIDDEN = (256, 1024)


class ActionEncoder(nn.Module):
    """Action rows [..., 6] -> embeddings [..., dim] in `dtype`.

    (pitch, yaw) in degrees go through an MLP, the four discrete entries through tables. Discrete entries are truncated
    towards zero; forward and lateral are shifted by one; values outside are clamped (golden README 6).
    """

    dim: int
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, rows: jnp.ndarray) -> jnp.ndarray:
        continuous = layers.Mlp((*_HIDDEN, self.dim), "silu", self.dtype, self.param_dtype, name="continuous")
        embedding = continuous(rows[..., :2])
        # The spread that makes the six inputs equally strong next to the Xavier MLP.
        spread = math.sqrt(2 / (_HIDDEN[-1] + self.dim)) / math.sqrt(2)
        for index, count in enumerate(TABLE_ROWS):
            table = self.param(f"table_{index}", nn.initializers.normal(spread), (count, self.dim), self.param_dtype)
            entry = jnp.trunc(rows[..., 2 + index]).astype(jnp.int32) + (1 if count == 3 else 0)
            embedding = embedding + jnp.take(table.astype(self.dtype), jnp.clip(entry, 0, count - 1), axis=0)
        return embedding


class ActionInjection(nn.Module):
    """F([h ; e]) = Linear(SiLU(Linear([h ; e]))), the last layer zero at initialisation.

    h [B, L, D] and the frames' e [B, F, D], each token with its frame's (`frame_index` [L]). The first layer is linear
    in its two halves, so e's half is computed once a frame.
    """

    dim: int
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, h: jnp.ndarray, e: jnp.ndarray, frame_index: jnp.ndarray) -> jnp.ndarray:
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), (2 * self.dim, self.dim), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.dim,), self.param_dtype)
        ours, theirs = quantized.rows(kernel, 0, self.dim), quantized.rows(kernel, self.dim, 2 * self.dim)
        from_action = quantized.matmul(e.astype(self.dtype), theirs) + bias.astype(self.dtype)
        hidden = quantized.matmul(h.astype(self.dtype), ours) + jnp.take(from_action, frame_index, axis=1)
        out = layers.dense(self.dim, self, "out", kernel_init=nn.initializers.zeros)
        return out(nn.silu(hidden))
