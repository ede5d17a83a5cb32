"""The output layer in its three forms: velocity, PDD interval bank, fused PDD blocks (spec section 5, PDD)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from wp2_jax.models import layers

FORMS = ("velocity", "bank", "fused")


class Head(nn.Module):
    """LayerNorm with two modulation vectors, then a linear map in float32.

    `form` "velocity": one map to `features`; "bank": one map an interval, `intervals` in all, cut into `blocks` equal
    blocks; "fused": one map a block to [displacement ; endpoint velocity], 2*features.
    """

    features: int
    form: str
    intervals: int
    blocks: int
    eps: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: jnp.ndarray, e: jnp.ndarray, time_index: jnp.ndarray, block: jnp.ndarray | None = None
    ) -> jnp.ndarray:
        """x [B, L, D], e [B, U, D] time embeddings of which token l reads row time_index[l]; block: int32 scalar.

        Returns float32 [B, L, features], [B, L, intervals/blocks, features] or [B, L, 2, features] by form.
        """
        dim = x.shape[-1]
        table = self.param("modulation", nn.initializers.normal(dim**-0.5), (2, dim), self.param_dtype)
        modulation = table.astype(jnp.float32) + e.astype(jnp.float32)[:, :, None]
        modulation = jnp.take(modulation, time_index, axis=1)
        shape = {
            "velocity": (dim, self.features),
            "bank": (self.intervals, dim, self.features),
            "fused": (self.blocks, dim, 2 * self.features),
        }[self.form]
        kernel = self.param("kernel", nn.initializers.zeros, shape, self.param_dtype).astype(jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape[:-2] + shape[-1:], self.param_dtype).astype(jnp.float32)
        x = layers.layer_norm(x, self.eps) * (1 + modulation[:, :, 1]) + modulation[:, :, 0]
        if self.form == "velocity":
            return x @ kernel + bias
        if block is None:
            raise ValueError(f"a {self.form} head needs the PDD block to evaluate: pass block=")
        size = self.intervals // self.blocks
        if self.form == "bank":
            kernel = jax.lax.dynamic_slice_in_dim(kernel, block * size, size)
            bias = jax.lax.dynamic_slice_in_dim(bias, block * size, size)
            return jnp.einsum("bld,ndf->blnf", x, kernel) + bias
        out = x @ jax.lax.dynamic_index_in_dim(kernel, block, keepdims=False)
        out = out + jax.lax.dynamic_index_in_dim(bias, block, keepdims=False)
        return out.reshape(*out.shape[:-1], 2, self.features)


def bank_from_velocity(head: dict, intervals: int) -> dict:
    """The head of a many-step model repeated once an interval: the start of PDD."""
    return {
        **head,
        "kernel": jnp.repeat(head["kernel"][None], intervals, axis=0),
        "bias": jnp.repeat(head["bias"][None], intervals, axis=0),
    }
