"""Who sees whom, frame by frame (spec section 4).

All tokens of a frame see the same, so a mask is a small bool array [B or 1, query frames, key frames]; `expand` turns
it into tokens for a kernel that wants a dense mask.
"""

import jax.numpy as jnp
import numpy as np

from wp2_jax.models.cache import CacheLayout

# A compressed chunk is two memory frames whatever the generation chunk is (golden README 15).
BLOCK_FRAMES = 2


def expand(mask: jnp.ndarray, query_frames: np.ndarray, key_frames: np.ndarray) -> jnp.ndarray:
    """[B, Fq, Fk] -> [B, Lq, Lk], given each token's frame."""
    return jnp.take(jnp.take(mask, query_frames, axis=1), key_frames, axis=2)


def cache_frames(layout: CacheLayout) -> np.ndarray:
    """The frame of each cache token: sink, tmp, then memory frames."""
    grid = layout.frame_tokens
    memory_grid = layout.memory_rows * layout.memory_cols
    full = layout.sink + layout.temporal
    return np.concatenate(
        [
            np.repeat(np.arange(full), grid),
            full + np.repeat(np.arange(layout.chunks * layout.memory_frames), memory_grid),
        ]
    )


def cache_valid(layout: CacheLayout, chunks: jnp.ndarray) -> jnp.ndarray:
    """[cache frames] bool: what a cache of `chunks` chunks offers."""
    sink = jnp.broadcast_to((chunks > 0) & layout.memory, (layout.sink,))
    temporal = jnp.broadcast_to(chunks > 0, (layout.temporal,))
    there = chunks * layout.memory_frames if layout.memory else 0
    return jnp.concatenate([sink, temporal, jnp.arange(layout.chunks * layout.memory_frames) < there])


def compressed_blocks(query: jnp.ndarray, key: jnp.ndarray) -> jnp.ndarray:
    """Chunk-causal visibility of memory frames, by their indices: [Fq] and [Fk] -> [Fq, Fk]."""
    return key[None, :] // BLOCK_FRAMES <= query[:, None] // BLOCK_FRAMES


def prefill(layout: CacheLayout, chunks: jnp.ndarray, first: bool, new_frames: int) -> jnp.ndarray:
    """[1, query frames, cache frames] for the tokens [sink (first only) | cmp | tmp] of a prefill, already written.

    `chunks` int32: chunks in the cache before it; `new_frames` memory frames are added. Sink sees sink; a memory frame
    sees the sink and memory frames up to its own block; tmp sees all memory; nobody else sees the tmp.
    """
    start = chunks * layout.memory_frames
    new = start + jnp.arange(new_frames)
    memory = jnp.arange(layout.chunks * layout.memory_frames)
    there = memory[None] < start + new_frames

    def rows(count: int, sees_temporal: bool, sees_memory: jnp.ndarray, sees_sink: bool = True) -> jnp.ndarray:
        return jnp.concatenate(
            [
                jnp.full((count, layout.sink), sees_sink),
                jnp.full((count, layout.temporal), sees_temporal),
                jnp.broadcast_to(sees_memory, (count, memory.shape[0])),
            ],
            axis=1,
        )

    parts = [
        rows(new_frames, False, compressed_blocks(new, memory) & there),
        rows(layout.temporal, True, there & layout.memory, layout.memory),
    ]
    if first:
        parts.insert(0, rows(layout.sink, False, jnp.zeros_like(there)))
    return jnp.concatenate(parts)[None]


def denoise(layout: CacheLayout, chunks: jnp.ndarray, frames: int) -> jnp.ndarray:
    """[1, frames, cache frames + frames]: generated frames see all of the memory and their own chunk."""
    row = jnp.concatenate([cache_valid(layout, chunks), jnp.ones((frames,), bool)])
    return jnp.broadcast_to(row, (1, frames, row.shape[0]))


def bidirectional(length: jnp.ndarray, sink: int, memory: int, temporal: int, frames: int, factor: int) -> jnp.ndarray:
    """[B, F, F] over [sink | cmp | tmp | generated]: everyone sees every frame that is there.

    `length` [B] int32 is the history in latent frames; memory frames past it are padding, all of them where it is 0.
    """
    some = length[:, None] > 0
    valid = jnp.concatenate(
        [
            jnp.broadcast_to(some, (length.shape[0], sink)),
            factor * jnp.arange(memory)[None] < length[:, None],
            jnp.broadcast_to(some, (length.shape[0], temporal)),
            jnp.ones((length.shape[0], frames), bool),
        ],
        axis=1,
    )
    count = valid.shape[1]
    # A padded frame as a query sees itself, or its softmax would have no term.
    return valid[:, None, :] | jnp.eye(count, dtype=bool)[None]


def teacher_forcing(
    start: jnp.ndarray, sink: int, memory: int, temporal: int, chunk: int, chunks: int, factor: int
) -> jnp.ndarray:
    """[B, F, F] over [sink | cmp | tmp_0 | noisy_0 | tmp_1 | noisy_1 | ...] for the one-pass training of the student.

    `start` [B] int32: latent frame of the first target. Reproduces prefill and denoise chunk by chunk: noisy_i and
    tmp_i see the sink, the memory frames before start + i*chunk and tmp_i; noisy_i also itself. Where no history
    precedes (start + i*chunk = 0) noisy_i sees itself alone.
    """
    batch = start.shape[0]
    memory_index = jnp.arange(memory)
    first = start[:, None] + chunk * jnp.arange(chunks)[None]  # [B, chunks]
    some = first > 0
    group = temporal + chunk
    total = sink + memory + chunks * group

    def pad(row: jnp.ndarray, left: int) -> jnp.ndarray:
        return jnp.pad(row, ((0, 0), (0, 0), (left, total - left - row.shape[-1])))

    def full(rows: int, cols: int) -> jnp.ndarray:
        return jnp.ones((batch, rows, cols), bool)

    parts = [pad(full(sink, sink), 0)]
    blocks = jnp.broadcast_to(compressed_blocks(memory_index, memory_index), (batch, memory, memory))
    parts.append(pad(jnp.concatenate([full(memory, sink), blocks], axis=2), 0))
    for index in range(chunks):
        left = sink + memory + index * group
        seen = factor * memory_index[None] < first[:, index, None]
        history = jnp.concatenate([jnp.broadcast_to(some[:, index, None], (batch, sink)), seen], axis=1)[:, None]
        own_temporal = jnp.broadcast_to(some[:, index, None, None], (batch, chunk, temporal))
        parts.append(
            pad(jnp.broadcast_to(history, (batch, temporal, sink + memory)), 0) | pad(full(temporal, temporal), left)
        )
        parts.append(
            pad(jnp.broadcast_to(history, (batch, chunk, sink + memory)), 0)
            | pad(jnp.concatenate([own_temporal, full(chunk, chunk)], axis=2), left)
        )
    return jnp.concatenate(parts, axis=1)
