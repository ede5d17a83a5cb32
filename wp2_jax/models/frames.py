"""Groups of latent frames as tokens, and what every block of the backbone reads besides them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.models.cache import CacheLayout
from wp2_jax.models.spans import Span
from wp2_jax.sharding import constrain


def take_frames(x: jnp.ndarray, index: jnp.ndarray) -> jnp.ndarray:
    """x [B, S, ...] at frames index [B, F] -> [B, F, ...]."""
    return jax.vmap(lambda a, i: jnp.take(a, i, axis=0))(x, index)


class Frames(flax.struct.PyTreeNode):
    """A run of latent (or memory) frames on one token grid, as the transformer sees them.

    tokens [B, F*rows*cols, D]; t [B, F] float32 in 0..1000; actions [B, F, 6] or None; positions [B, F] int32 RoPE
    frame; captions [B, F] int32 index into the contexts. `token_t` says that t is [B, F*rows*cols] instead.
    """

    tokens: jnp.ndarray
    t: jnp.ndarray
    actions: Any  # [B, F, 6] or None
    positions: jnp.ndarray
    captions: jnp.ndarray
    rows: int = flax.struct.field(pytree_node=False)
    cols: int = flax.struct.field(pytree_node=False)
    token_t: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def count(self) -> int:
        return self.positions.shape[1]

    @property
    def grid(self) -> int:
        return self.rows * self.cols


def frame_of_token(groups: Sequence[Frames]) -> np.ndarray:
    """[L] the frame of each token, frames numbered through the groups."""
    counts = [group.grid for group in groups for _ in range(group.count)]
    return np.repeat(np.arange(len(counts)), counts)


def runs_of(groups: Sequence[Frames]) -> tuple[tuple[int, int], ...]:
    """(frames, tokens a frame) of neighbouring groups on one grid."""
    joined = itertools.groupby(groups, key=lambda group: group.grid)
    return tuple((sum(group.count for group in run), grid) for grid, run in joined)


def time_of_token(groups: Sequence[Frames]) -> np.ndarray:
    """[L] the column of the concatenated t that each token reads."""
    index, start = [], 0
    for group in groups:
        tokens = np.arange(group.count * group.grid)
        index.append(start + (tokens if group.token_t else tokens // group.grid))
        start += group.t.shape[1]
    return np.concatenate(index)


@dataclasses.dataclass(frozen=True)
class Write:
    """Where the tokens [sink (first only) | cmp | tmp] of a prefill go in a cache."""

    layout: CacheLayout
    first: bool

    def __call__(self, buffer: jnp.ndarray, new: jnp.ndarray, chunks: jnp.ndarray) -> jnp.ndarray:
        """buffer [B, layout.tokens, N, K], new [B, L, N, K] -> buffer."""
        layout = self.layout
        sink = layout.sink_tokens if self.first else 0
        temporal = new.shape[1] - layout.temporal_tokens
        new = new.astype(buffer.dtype)
        buffer = buffer.at[:, : layout.temporal_tokens].set(new[:, temporal:])
        if self.first:
            buffer = buffer.at[:, layout.temporal_tokens : layout.compressed_start].set(new[:, :sink])
        offset = layout.compressed_start + chunks * layout.chunk_tokens
        buffer = jax.lax.dynamic_update_slice_in_dim(buffer, new[:, sink:temporal], offset, axis=1)
        return constrain(buffer, "heads")


class CaptionKeys(flax.struct.PyTreeNode):
    """What every layer's cross-attention makes of captions: keys after norm, and values.

    k and v [layers, B, C, S, N, K]. A caption's stay the same from pass to pass, so that they are made once
    (`passes.caption_keys`).
    """

    k: jnp.ndarray
    v: jnp.ndarray


class Stream(flax.struct.PyTreeNode):
    """What every block reads besides the hidden tokens, its own cache and its own caption keys.

    On a mesh cut along seq, L is padded (`sharding.even`); `tokens` of them count.
    """

    e0: jnp.ndarray  # [B, U, 6, D] float32
    action: jnp.ndarray | None  # [B, F, D]
    cos: jnp.ndarray  # [B, L, K/2]
    sin: jnp.ndarray
    spans: tuple[Span, ...]  # who attends to what; empty: all to all
    context: jnp.ndarray | None  # [B, C, S, D], without caption keys
    captions: jnp.ndarray | None  # [B, F] int32, which of C > 1 each frame reads
    chunks: Any  # int32 scalar, with a cache
    frame_index: jnp.ndarray  # [L]
    time_index: jnp.ndarray  # [L]
    tokens: int = flax.struct.field(pytree_node=False)
    runs: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False, default=())  # for captions
    write: Write | None = flax.struct.field(pytree_node=False, default=None)
