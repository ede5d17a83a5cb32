"""The UMT5 text encoder (T5 with a table of relative positions in every layer; golden/README.md 32, 42).

Pre-norm blocks without biases, attention without the 1/sqrt(head size), gated tanh-GELU feed-forward, a final norm.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.models.layers import RMSNorm


@dataclasses.dataclass(frozen=True)
class Umt5Config:
    """Sizes of the encoder; the defaults are UMT5-XXL. `attention_dim` is the width of all heads together.

    Raises ValueError for head or bucket counts that do not divide.
    """

    vocab_size: int = 256384
    dim: int = 4096
    attention_dim: int = 4096
    ffn_dim: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self):
        if self.attention_dim % self.num_heads:
            raise ValueError(
                f"text_encoder.attention_dim={self.attention_dim} is not a multiple of num_heads={self.num_heads}"
            )
        if self.num_buckets % 4 or self.num_buckets < 4 or self.max_distance <= self.num_buckets // 4:
            raise ValueError(
                f"text_encoder.num_buckets={self.num_buckets} must be a multiple of 4, and max_distance="
                f"{self.max_distance} above num_buckets / 4: half of a direction's buckets are for exact distances"
            )


def relative_buckets(distance: np.ndarray, num_buckets: int = 32, max_distance: int = 128) -> np.ndarray:
    """Bucket of each signed distance (key position minus query position), int32 of the same shape.

    The first half of the buckets serves keys at or before the query, the second half later keys. In each half the
    first half is one bucket a distance, the rest is logarithmic up to max_distance; everything beyond shares the last.
    """
    distance = np.asarray(distance)
    half = num_buckets // 2
    exact = half // 2
    size = np.abs(distance)
    # float32 as in the published model: a distance at a bucket's edge falls where it falls there.
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        np.log(max_distance / exact)
    )
    coarse = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int32), half - 1)
    return (np.where(distance > 0, half, 0) + np.where(size < exact, size, coarse)).astype(np.int32)


def _linear(config: Umt5Config, features: int, spread: float, name: str) -> nn.Dense:
    """A bias-free linear layer in the config's dtypes, normal initialisation."""
    return nn.Dense(
        features,
        use_bias=False,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=nn.initializers.normal(spread),
        name=name,
    )


class _Attention(nn.Module):
    config: Umt5Config

    @nn.compact
    def __call__(self, x: jnp.ndarray, mask: jnp.ndarray, buckets: jnp.ndarray) -> jnp.ndarray:
        """x [N, S, D], mask [N, S] bool of keys, buckets [S, S] int32 -> [N, S, D]."""
        config = self.config
        head = config.attention_dim // config.num_heads
        heads = (*x.shape[:-1], config.num_heads, head)
        # The missing 1/sqrt(head) is folded into the initialisation of q, as in T5.
        q = _linear(config, config.attention_dim, (config.dim * head) ** -0.5, "q")(x).reshape(heads)
        k = _linear(config, config.attention_dim, config.dim**-0.5, "k")(x).reshape(heads)
        v = _linear(config, config.attention_dim, config.dim**-0.5, "v")(x).reshape(heads)
        table = self.param(
            "position_bias",
            nn.initializers.normal((2 * config.num_buckets * config.num_heads) ** -0.5),
            (config.num_buckets, config.num_heads),
            jnp.dtype(config.param_dtype),
        )
        scores = jnp.einsum("nqhk,nshk->nhqs", q, k, preferred_element_type=jnp.float32)
        scores = scores + table.astype(jnp.float32)[buckets].transpose(2, 0, 1)
        scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        mixed = jnp.einsum("nhqs,nshk->nqhk", weights, v).reshape(*x.shape[:-1], config.attention_dim)
        return _linear(config, config.dim, config.attention_dim**-0.5, "out")(mixed)


class _FeedForward(nn.Module):
    config: Umt5Config

    @nn.compact
    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        config = self.config
        gate = nn.gelu(_linear(config, config.ffn_dim, config.dim**-0.5, "gate")(x), approximate=True)
        up = _linear(config, config.ffn_dim, config.dim**-0.5, "up")(x)
        return _linear(config, config.dim, config.ffn_dim**-0.5, "down")(gate * up)


class _Block(nn.Module):
    config: Umt5Config

    @nn.compact
    def __call__(self, x: jnp.ndarray, mask: jnp.ndarray, buckets: jnp.ndarray) -> tuple[jnp.ndarray, None]:
        param_dtype = jnp.dtype(self.config.param_dtype)
        normed = RMSNorm(self.config.eps, param_dtype, name="attention_norm")(x)
        x = x + _Attention(self.config, name="attention")(normed, mask, buckets)
        normed = RMSNorm(self.config.eps, param_dtype, name="ffn_norm")(x)
        return x + _FeedForward(self.config, name="ffn")(normed), None


class Umt5Encoder(nn.Module):
    """ids [N, S] int32, mask [N, S] bool -> hidden states [N, S, dim] in `config.dtype`.

    The mask says which tokens are the caption's; rows of the others hold numbers without meaning (`encode` zeroes
    them).
    """

    config: Umt5Config

    @nn.compact
    def __call__(self, ids: jnp.ndarray, mask: jnp.ndarray) -> jnp.ndarray:
        config = self.config
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        embed = nn.Embed(
            config.vocab_size,
            config.dim,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=nn.initializers.normal(1.0),
            name="token_embedding",
        )
        position = np.arange(ids.shape[1])
        buckets = relative_buckets(position[None, :] - position[:, None], config.num_buckets, config.max_distance)
        blocks = nn.scan(
            _Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,  # type: ignore[arg-type]  # flax takes it, its annotation does not say so
            length=config.num_layers,
        )
        x, _ = blocks(config, name="blocks")(embed(ids), mask, jnp.asarray(buckets))
        return RMSNorm(config.eps, param_dtype, name="norm")(x)


def init(config: Umt5Config, key: jax.Array) -> dict:
    """Fresh parameters; jit or `jax.eval_shape` it as needed."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return dict(Umt5Encoder(config).init(key, ids, ids == 0)["params"])


def encode(encoder: Umt5Encoder, params, ids: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Captions -> contexts: ids [N, S] int32 -> [N, S, dim] in `config.dtype`, zeros past each true length.

    `mask` [N, S] says which tokens count; None means those that are not the padding id 0.
    """
    mask = ids != 0 if mask is None else mask.astype(bool)
    hidden = encoder.apply({"params": params}, ids, mask)
    assert isinstance(hidden, jax.Array)
    return jnp.where(mask[..., None], hidden, jnp.zeros((), hidden.dtype))
