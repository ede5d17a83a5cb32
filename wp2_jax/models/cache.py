"""The KV cache of the autoregressive path: a typed, immutable buffer of fixed capacity (spec section 4)."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from wp2_jax.sharding import constrain


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Sizes of one cache. `chunks` is the capacity in absorbed chunks.

    `memory` False hides the sink and the compressed history, so that only tmp is seen: to measure what they give.

    Tokens lie as [tmp | sink | cmp of chunk 0 | cmp of chunk 1 | ...]: the growing part comes last and the one that not
    all may see first, so that what is there, or may be seen, is one range.
    """

    sink: int  # latent frames
    temporal: int  # latent frames
    chunk: int  # latent frames
    chunks: int
    rows: int  # token grid of a latent frame
    cols: int
    memory_rows: int  # token grid of a memory frame
    memory_cols: int
    time_factor: int = 2
    memory: bool = True

    @property
    def frame_tokens(self) -> int:
        return self.rows * self.cols

    @property
    def memory_frames(self) -> int:
        """Memory frames a chunk."""
        return self.chunk // self.time_factor

    @property
    def chunk_tokens(self) -> int:
        """Memory tokens a chunk."""
        return self.memory_frames * self.memory_rows * self.memory_cols

    @property
    def temporal_tokens(self) -> int:
        return self.temporal * self.frame_tokens

    @property
    def sink_tokens(self) -> int:
        return self.sink * self.frame_tokens

    @property
    def compressed_start(self) -> int:
        return self.temporal_tokens + self.sink_tokens

    @property
    def tokens(self) -> int:
        return self.compressed_start + self.chunks * self.chunk_tokens


class KVCache(flax.struct.PyTreeNode):
    """Keys after norm and RoPE, and values, of the memory tokens of every layer.

    k and v [layers, B, layout.tokens, N, K]; `chunks` int32 scalar, the chunks absorbed so far (0: empty, nothing is
    attended to).
    """

    k: jnp.ndarray
    v: jnp.ndarray
    chunks: jnp.ndarray
    layout: CacheLayout = flax.struct.field(pytree_node=False)


def empty(layout: CacheLayout, *, layers: int, batch: int, heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """A cache of nothing."""
    k, v = (constrain(jnp.zeros((layers, batch, layout.tokens, heads, head_dim), dtype), "cache") for _ in "kv")
    return KVCache(k, v, jnp.zeros((), jnp.int32), layout)


def truncate(cache: KVCache, chunks: int | jnp.ndarray) -> KVCache:
    """The sink and compressed part as after `chunks` chunks; tmp still holds the newest chunk's.

    Old sink and cmp entries are never recomputed, so they are a prefix of any later cache.
    """
    return cache.replace(chunks=jnp.asarray(chunks, jnp.int32))
