"""Who attends to what (spec section 4), as dense calls: no mask over tokens is ever made.

Queries that see the same keys form a `Span`. Its keys are laid one after the other in such an order that what is there
is a prefix of them, however long the history is: kernels then need a length and nothing else.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp

from wp2_jax.models.cache import CacheLayout

# A compressed chunk is two memory frames whatever the generation chunk is (golden README 15).
BLOCK_FRAMES = 2

Range = tuple[int, int]
"""Begin and end of neighbouring tokens."""


class Span(flax.struct.PyTreeNode):
    """`queries` see the first `length` tokens of their `keys`, ranges that lie one after the other.

    `length` int32 [B or 1], None: all of them; at least one. `blocks` (lead, size): query i sees those before
    lead + (i // size + 1) * size only.
    """

    length: Any  # array or None
    queries: Range = flax.struct.field(pytree_node=False)
    keys: tuple[Range, ...] = flax.struct.field(pytree_node=False)
    blocks: tuple[int, int] | None = flax.struct.field(pytree_node=False, default=None)


def held(layout: CacheLayout, chunks: jnp.ndarray) -> jnp.ndarray:
    """Tokens that a cache of `chunks` chunks offers, counted from its beginning."""
    memory = layout.sink_tokens + chunks * layout.chunk_tokens if layout.memory else 0
    return jnp.where(chunks > 0, layout.temporal_tokens + memory, 0)


def denoise(layout: CacheLayout, chunks: jnp.ndarray, tokens: int) -> tuple[Span, ...]:
    """Generated tokens over [themselves | cache]: all of the memory and their own chunk."""
    return (Span(tokens + held(layout, chunks)[None], (0, tokens), ((0, tokens + layout.tokens),)),)


def prefill(layout: CacheLayout, chunks: jnp.ndarray, first: bool, new_frames: int) -> tuple[Span, ...]:
    """Tokens [sink (first only) | cmp | tmp] of a prefill over the cache that they are already written to.

    `chunks` int32: chunks in the cache before it; `new_frames` memory frames are added. Sink sees sink; a memory frame
    sees the sink and memory frames up to its own block; tmp sees all memory; nobody else sees the tmp.
    """
    sink, temporal, grid = layout.sink_tokens, layout.temporal_tokens, layout.memory_rows * layout.memory_cols
    old = chunks * layout.memory_frames
    memory = ((temporal, layout.tokens),)
    found, at = [], 0
    if first:
        found.append(Span(None, (0, sink), ((temporal, temporal + sink),)))
        at = sink
    # Where chunks are whole blocks, blocks begin with chunks.
    step = 1 if layout.memory_frames % BLOCK_FRAMES else BLOCK_FRAMES
    for frame in range(0, new_frames, step):
        block = ((old + frame) // BLOCK_FRAMES + 1) * BLOCK_FRAMES
        length = sink + jnp.minimum(block, old + new_frames) * grid
        found.append(Span(length[None], (at, at + step * grid), memory))
        at += step * grid
    if temporal:
        seen = sink + (old + new_frames) * grid if layout.memory else jnp.zeros((), jnp.int32)
        found.append(Span(temporal + seen[None], (at, at + temporal), ((0, layout.tokens),)))
    return tuple(found)


def bidirectional(
    length: jnp.ndarray, sink: int, memory: int, memory_grid: int, temporal: int, tokens: int, factor: int
) -> tuple[Span, ...]:
    """[sink | cmp | tmp | generated], all of which see every token that is there.

    `length` [B] int32 is the history in latent frames; memory frames past it are padding, all of them where it is 0.
    sink, temporal and `tokens` (generated) are token counts; `memory` frames of `memory_grid` tokens, one for `factor`
    latent frames.
    """
    rest = sink + memory * memory_grid + temporal
    there = sink + temporal + -(-length // factor) * memory_grid
    keys = ((rest, rest + tokens), (rest - temporal, rest), (0, rest - temporal))
    return (Span(tokens + jnp.where(length > 0, there, 0), (0, rest + tokens), keys),)


def teacher_forcing(
    start: jnp.ndarray,
    sink: int,
    memory: int,
    memory_grid: int,
    temporal: int,
    chunk: int,
    chunks: int,
    grid: int,
    factor: int,
) -> tuple[Span, ...]:
    """[sink | cmp | tmp_0 | noisy_0 | tmp_1 | noisy_1 | ...] for the one-pass training of the student.

    `start` [B] int32: latent frame of the first target; sink, memory, temporal and chunk are frames, of `grid` tokens
    (memory: `memory_grid`). Reproduces prefill and denoise chunk by chunk: noisy_i and tmp_i see the sink, the memory
    frames before start + i*chunk and tmp_i; noisy_i also itself. Where no history precedes (start + i*chunk = 0)
    noisy_i sees itself alone.
    """
    lead = sink * grid
    past = lead + memory * memory_grid
    found = [Span(None, (0, lead), ((0, lead),))] if sink else []
    found.append(Span(None, (lead, past), ((0, past),), (lead, BLOCK_FRAMES * memory_grid)))
    anchor, width = temporal * grid, chunk * grid
    for index in range(chunks):
        first = start + index * chunk
        history = jnp.where(first > 0, lead + -(-first // factor) * memory_grid, 0)
        tmp = past + index * (anchor + width)
        noisy, end = tmp + anchor, tmp + anchor + width
        if temporal:
            found.append(Span(anchor + history, (tmp, noisy), ((tmp, noisy), (0, past))))
        length = width + jnp.where(first > 0, anchor + history, 0)
        found.append(Span(length, (noisy, end), ((noisy, end), (tmp, noisy), (0, past))))
    return tuple(found)
