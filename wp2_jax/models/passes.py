"""How the backbone is called: the bidirectional pass, prefill and denoise of the autoregressive path, the one-pass form
of teacher forcing. Pure functions of (model, params, ...); one `DiT` serves all (spec section 4).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from wp2_jax.models import cache as kv
from wp2_jax.models import spans
from wp2_jax.models.dit import CrossAttention, DiT, DiTConfig
from wp2_jax.models.frames import CaptionKeys, Frames, Write, take_frames
from wp2_jax.models.layers import call
from wp2_jax.models.memory import CompressorState, init_state

Past = tuple[Frames | None, Frames, Frames | None]
"""Memory beside generated frames: (sink, cmp, tmp); sink and tmp are None in worlds without them."""

Text = jax.Array | CaptionKeys
"""What frames are told: contexts [B, C, S, text_dim], or what `caption_keys` has made of them."""


class History(flax.struct.PyTreeNode):
    """A clip from the start of its world, left aligned and padded to a static number S of latent frames (S even).

    latents [B, S, h, w, 16]; y [B, S, h, w, 20]; lr_latents [B, S/2, h/4, w/4, 16]; lr_y [B, S/2, h/4, w/4, 20];
    actions [B, S, 6]; captions [B, S] int32 index into the contexts of the call.
    """

    latents: jnp.ndarray
    y: jnp.ndarray
    lr_latents: jnp.ndarray
    lr_y: jnp.ndarray
    actions: jnp.ndarray
    captions: jnp.ndarray


def init(config: DiTConfig, key: jax.Array) -> Any:
    """Fresh parameters of one expert."""
    side = config.memory.space_factor
    latents = jnp.zeros((1, 2, side, side, config.latent_channels))
    y = jnp.zeros((1, 2, side, side, config.condition_channels))
    contexts = jnp.zeros((1, 1, 1, config.text_dim))
    return DiT(config).init(key, latents, y, jnp.zeros((1, 2, 6)), contexts)["params"]


def caption_keys(model: DiT, params, contexts: jnp.ndarray) -> CaptionKeys:
    """Contexts [B, C, S, text_dim] as all layers' cross-attention reads them, for any number of passes."""
    embedded = call(model, params, "encode_text", contexts)
    attention = CrossAttention(model.config)
    return jax.vmap(lambda layer: call(attention, layer, "keys", embedded))(params["blocks"]["cross_attention"])


def _run(
    model: DiT,
    params,
    groups: list[Frames],
    text: Text,
    seen: tuple[spans.Span, ...],
    cache: kv.KVCache | None = None,
    write: Write | None = None,
):
    """All layers over joined groups: (tokens, e, stream, cache contents)."""
    chunks = None if cache is None or write is None else cache.chunks
    x, e, stream = call(model, params, "prepare", groups, text, seen, chunks, write)
    cached = None if cache is None else (cache.k, cache.v)
    keys = text if isinstance(text, CaptionKeys) else None
    x, cached = call(model, params, "run_blocks", x, stream, cached, keys)
    return x, e, stream, cached


def compress(model: DiT, params, history: History) -> jnp.ndarray:
    """x_cmp of a whole clip: tokens [B, S/2 * h/8 * w/8, D] before the transformer."""
    batch, _, h, w, _ = history.latents.shape
    state = init_state(model.config.memory, batch, h, w, jnp.dtype(model.config.dtype))
    return compress_chunk(model, params, state, history.latents, history.y, history.lr_latents, history.lr_y)[0]


def compress_chunk(
    model: DiT, params, state: CompressorState, latents, y, lr_latents, lr_y
) -> tuple[jnp.ndarray, CompressorState]:
    """x_cmp of the frames that follow those the state has seen; one-shot compression is this from a zero state."""
    compressed, state = call(model, params, "compress", latents, y, state)
    coarse = call(model, params, "embed", lr_latents, lr_y)
    return coarse + compressed, state


def full_frames(model: DiT, params, latents, y, t, actions, positions, captions, token_t: bool = False) -> Frames:
    """Frames at full resolution: generated ones, or sink and tmp (with t = 0)."""
    h, w = latents.shape[2:4]
    patch = model.config.patch
    tokens = call(model, params, "embed", latents, y)
    return Frames(tokens, t, actions, positions, captions, h // patch, w // patch, token_t)


def memory_frames(tokens: jnp.ndarray, actions, captions, first: jnp.ndarray | int, grid: tuple[int, int]) -> Frames:
    """x_cmp tokens as frames: memory frame j stands at latent frame 2j with that frame's action and caption.

    tokens [B, M*rows*cols, D]; actions [B, 2M, 6] or None and captions [B, 2M] of the latent frames; `first` memory
    frame.
    """
    rows, cols = grid
    batch, count = tokens.shape[0], tokens.shape[1] // (rows * cols)
    stride = captions.shape[1] // count
    positions = stride * (first + jnp.arange(count, dtype=jnp.int32))
    return Frames(
        tokens,
        jnp.zeros((batch, count), jnp.float32),
        None if actions is None else actions[:, ::stride],
        jnp.broadcast_to(positions, (batch, count)),
        captions[:, ::stride],
        rows,
        cols,
    )


def memory_grid(model: DiT, h: int, w: int) -> tuple[int, int]:
    """Token grid of a memory frame for latents of h x w."""
    factor = model.config.memory.space_factor
    return h // factor, w // factor


def still_frames(model: DiT, params, history: History, index: jnp.ndarray) -> Frames:
    """Clean frames of a history as memory at full resolution (sink, tmp); index [B, F] int32."""
    latents, y, actions, captions = (
        take_frames(a, index) for a in (history.latents, history.y, history.actions, history.captions)
    )
    t = jnp.zeros(index.shape, jnp.float32)
    return full_frames(model, params, latents, y, t, actions, index, captions)


def memory(model: DiT, params, history: History, length: jnp.ndarray, sink: int, temporal: int) -> Past:
    """The memory of histories of `length` [B] latent frames."""
    batch, _, h, w, _ = history.latents.shape
    compressed = memory_frames(
        compress(model, params, history), history.actions, history.captions, 0, memory_grid(model, h, w)
    )
    anchor = latest = None
    if sink:
        index = jnp.broadcast_to(jnp.arange(sink, dtype=jnp.int32), (batch, sink))
        anchor = still_frames(model, params, history, index)
    if temporal:
        index = jnp.maximum(length[:, None] - temporal + jnp.arange(temporal, dtype=jnp.int32), 0)
        latest = still_frames(model, params, history, index)
    return anchor, compressed, latest


def bidirectional(
    model: DiT,
    params,
    noisy: jnp.ndarray,
    y: jnp.ndarray,
    t: jnp.ndarray,
    actions: jnp.ndarray | None,
    contexts: jnp.ndarray,
    captions: jnp.ndarray,
    positions: jnp.ndarray,
    *,
    history: History | None = None,
    length: jnp.ndarray | None = None,
    sink: int = 1,
    temporal: int = 1,
    token_t: bool = False,
) -> jnp.ndarray:
    """Velocity [B, L, h, w, 16] of noisy frames, memory and generated tokens attending to each other.

    noisy [B, L, h, w, 16]; y [B, L, h, w, 20]; t [B, L] float32 (or a token each with `token_t`); actions [B, L, 6] or
    None; contexts [B, C, S, text_dim]; captions and positions [B, L] int32. `history` with `length` [B] int32 latent
    frames of it (multiple of the chunk; 0: none) gives the memory.
    """
    generated = full_frames(model, params, noisy, y, t, actions, positions, captions, token_t)
    past = None
    if history is not None:
        assert length is not None
        past = memory(model, params, history, length, sink, temporal)
        if actions is None:
            anchor, compressed, latest = past
            past = (
                anchor and anchor.replace(actions=None),
                compressed.replace(actions=None),
                latest and latest.replace(actions=None),
            )
    return bidirectional_frames(model, params, past, generated, contexts, length)


def bidirectional_frames(
    model: DiT, params, past: Past | None, generated: Frames, text: Text, length: jnp.ndarray | None, block=None
) -> jnp.ndarray:
    """One pass over generated frames, alone or with a memory of `length` [B] latent frames."""
    groups, seen, tail = [generated], (), generated.count * generated.grid
    if past is not None:
        assert length is not None
        groups = [group for group in past if group is not None] + groups
        sink, compressed, temporal = past
        anchor, latest = (0 if group is None else group.count * group.grid for group in (sink, temporal))
        factor = model.config.memory.time_factor
        seen = spans.bidirectional(length, anchor, compressed.count, compressed.grid, latest, tail, factor)
    x, e, stream, _ = _run(model, params, groups, text, seen)
    return call(model, params, "output", x, e, stream, tail, generated.rows, generated.cols, block)


def empty_cache(model: DiT, layout: kv.CacheLayout, batch: int) -> kv.KVCache:
    """A cache of this model's sizes that holds nothing."""
    config = model.config
    return kv.empty(
        layout,
        layers=config.num_layers,
        batch=batch,
        heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype(config.dtype),
    )


def prefill(
    model: DiT,
    params,
    cache: kv.KVCache,
    sink: Frames | None,
    compressed: Frames,
    temporal: Frames | None,
    text: Text,
) -> kv.KVCache:
    """Takes new memory into a cache: the sink the first time only (else None), new cmp frames, the new tmp.

    Only these run through the network; the old tmp is overwritten, sink and old cmp stay as they were computed.
    """
    layout = cache.layout
    groups = [group for group in (sink, compressed, temporal) if group is not None]
    first = cache.layout.sink > 0 and sink is not None
    seen = spans.prefill(layout, cache.chunks, first, compressed.count)
    *_, (k, v) = _run(model, params, groups, text, seen, cache, Write(layout, first))
    return cache.replace(k=k, v=v, chunks=cache.chunks + compressed.count // layout.memory_frames)


def denoise(
    model: DiT,
    params,
    cache: kv.KVCache,
    generated: Frames,
    text: Text,
    block: jnp.ndarray | None = None,
) -> jnp.ndarray:
    """Head outputs for one chunk that sees the cache and itself: velocity, bank or fused outputs by the head's form."""
    tail = generated.count * generated.grid
    seen = spans.denoise(cache.layout, cache.chunks, tail)
    x, e, stream, _ = _run(model, params, [generated], text, seen, cache)
    return call(model, params, "output", x, e, stream, tail, generated.rows, generated.cols, block)


def teacher_forcing(
    model: DiT,
    params,
    noisy: jnp.ndarray,
    t: jnp.ndarray,
    clip: History,
    start: jnp.ndarray,
    contexts: jnp.ndarray,
    *,
    chunk: int,
    sink: int = 1,
    temporal: int = 1,
    block: jnp.ndarray | None = None,
) -> jnp.ndarray:
    """All target chunks in one masked pass, each as prefill + denoise would see it.

    noisy [B, L, h, w, 16], L a multiple of `chunk`; t [B, L]; `clip` holds the history and the L clean targets; start
    [B] int32 first target frame (multiple of `chunk`). Returns head outputs for the L frames.
    """
    frames = noisy.shape[1]
    if frames % chunk:
        raise ValueError(f"{frames} target frames do not fill chunks of {chunk}: use a multiple")
    h, w = noisy.shape[2:4]
    batch = noisy.shape[0]
    target = start[:, None] + jnp.arange(frames, dtype=jnp.int32)
    y, actions, captions = (take_frames(a, target) for a in (clip.y, clip.actions, clip.captions))
    compressed = memory_frames(compress(model, params, clip), clip.actions, clip.captions, 0, memory_grid(model, h, w))
    groups = [compressed]
    if sink:
        index = jnp.broadcast_to(jnp.arange(sink, dtype=jnp.int32), (batch, sink))
        groups.insert(0, still_frames(model, params, clip, index))
    for first in range(0, frames, chunk):
        if temporal:
            index = start[:, None] + first - temporal + jnp.arange(temporal, dtype=jnp.int32)
            groups.append(still_frames(model, params, clip, jnp.maximum(index, 0)))
        part = slice(first, first + chunk)
        groups.append(
            full_frames(
                model,
                params,
                noisy[:, part],
                y[:, part],
                t[:, part],
                actions[:, part],
                target[:, part],
                captions[:, part],
            )
        )
    factor, grid = model.config.memory.time_factor, groups[-1].grid
    seen = spans.teacher_forcing(
        start, sink, compressed.count, compressed.grid, temporal, chunk, frames // chunk, grid, factor
    )
    x, e, stream, _ = _run(model, params, groups, contexts, seen)
    lead = sink * grid + compressed.count * compressed.grid
    group = (temporal + chunk) * grid
    outputs = []
    for index in range(frames // chunk):
        # `output` reads the last tokens: count them up to the end of this noisy chunk.
        part = stream.replace(tokens=lead + (index + 1) * group)
        outputs.append(call(model, params, "output", x, e, part, chunk * grid, groups[-1].rows, groups[-1].cols, block))
    return jnp.concatenate(outputs, axis=-4)
