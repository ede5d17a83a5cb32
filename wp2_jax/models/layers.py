"""Layers shared by the backbone and the compressor."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from wp2_jax.models import quantized


def call(module: nn.Module, params: Any, method: str, *args: Any) -> Any:
    """One method of a module on its parameter tree."""
    return module.apply({"params": params}, *args, method=method)


def layer_norm(x: jnp.ndarray, eps: float) -> jnp.ndarray:
    """LayerNorm over the last axis without gain and bias, in float32 (returns float32)."""
    x = x.astype(jnp.float32)
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)


class LayerNorm(nn.Module):
    """Affine LayerNorm, computed in float32; returns float32."""

    eps: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), self.param_dtype)
        return layer_norm(x, self.eps) * scale.astype(jnp.float32) + bias.astype(jnp.float32)


class RMSNorm(nn.Module):
    """RMSNorm over the last axis: normalised in float32, rounded to x's dtype, then scaled (golden README 3)."""

    eps: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * scale.astype(x.dtype)


class Mlp(nn.Module):
    """Linear, activation, Linear, ... with one width an entry; the last layer has no activation.

    Input is cast to `dtype`; the output has `dtype`.
    """

    widths: tuple[int, ...]
    activation: str  # "silu" or "gelu" (tanh form)
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    last_init: nn.initializers.Initializer | None = None

    @nn.compact
    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        activate = {"silu": nn.silu, "gelu": lambda a: nn.gelu(a, approximate=True)}[self.activation]
        for index, width in enumerate(self.widths):
            last = index == len(self.widths) - 1
            init = self.last_init if last and self.last_init is not None else self.kernel_init
            x = dense(width, self, f"layer_{index}", kernel_init=init)(x)
            x = x if last else activate(x)
        return x


class Dense(nn.Module):
    """x [..., in] -> [..., features] in `dtype`: nn.Dense whose kernel may be in eight bits (`quantized.Matrix`)."""

    features: int
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)
        return quantized.matmul(x.astype(self.dtype), kernel) + bias.astype(self.dtype)


def dense(features: int, owner, name: str, kernel_init: nn.initializers.Initializer | None = None) -> Dense:
    """A linear layer with the dtypes of the module that owns it."""
    init = nn.initializers.xavier_uniform() if kernel_init is None else kernel_init
    return Dense(features, owner.dtype, owner.param_dtype, init, name=name)
