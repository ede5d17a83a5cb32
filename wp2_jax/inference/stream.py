"""The streaming step: `emit` generates and decodes one chunk, `absorb` takes it into the memory.

Everything a world knows is one immutable `StreamState`; `step` is emit and absorb together. Modes (spec sections 4, 5):

- "few_step": the PDD student, one pass a block, KV cache;
- "ar": the many-step autoregressive model, guided, with a second cache under the null caption;
- "bi": the bidirectional teacher, memory tokens beside the generated ones in every pass.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from wp2_jax.controls.images import LOW_RES_SCALE
from wp2_jax.diffusion import guidance, pdd, samplers
from wp2_jax.inference import condition
from wp2_jax.inference.spec import StreamSpec
from wp2_jax.models import passes
from wp2_jax.models.frames import CaptionKeys, Frames
from wp2_jax.models.layers import call
from wp2_jax.models.memory import CompressorState, init_state
from wp2_jax.rng import fold

Caption = jax.Array | Mapping[str, CaptionKeys]
"""What a chunk is told: its context [B, 1, S, text_dim], or that of `caption`, by expert."""


class ExpertState(flax.struct.PyTreeNode):
    """One expert's memory. `cache` and `null_cache` in ar and few_step mode, `tokens` in bi mode.

    `tokens` is (sink, cmp, tmp) as `Frames`, before the transformer; cmp is a buffer of the stream's capacity.
    """

    compressor: CompressorState
    cache: Any  # KVCache | None
    null_cache: Any  # KVCache | None
    tokens: Any  # tuple[Frames | None, Frames, Frames] | None


class StreamState(flax.struct.PyTreeNode):
    """A world between two chunks.

    `index` int32: the chunk to generate next. `y`, `lr_y` of the whole length; past their end the last chunk's serve.
    """

    index: jnp.ndarray
    key: jax.Array
    y: jnp.ndarray
    lr_y: jnp.ndarray
    null_caption: Any  # Caption
    decoder: Any
    encoder: Any
    experts: dict[str, ExpertState]


class Chunk(flax.struct.PyTreeNode):
    """What one step made: latents [B, C, h, w, 16], video [B, F, H, W, 3] in [-1, 1], its controls.

    `trace` holds the sampler's inner states where asked for, else it is empty.
    """

    latents: jnp.ndarray
    video: jnp.ndarray
    actions: jnp.ndarray
    caption: Any  # Caption
    trace: dict[str, jnp.ndarray]


class Noise(flax.struct.PyTreeNode):
    """Noise of one chunk: initial [B, C, h, w, 16]; renoise [blocks - 1, ...] in few_step mode, else None."""

    initial: jnp.ndarray
    renoise: Any  # array or None


def caption(spec: StreamSpec, params, context: jnp.ndarray) -> dict[str, CaptionKeys]:
    """A context [B, 1, S, text_dim] as every pass reads it: made once, it serves as long as the caption stays."""
    return {name: passes.caption_keys(spec.models[name], params["experts"][name], context) for name in spec.models}


def _text(caption: Caption, name: str) -> passes.Text:
    """One expert's side of a caption."""
    return caption[name] if isinstance(caption, Mapping) else caption


def start(
    spec: StreamSpec, params, image: jnp.ndarray, frames: int, null_caption: Caption | None, key: jax.Array
) -> StreamState:
    """The state of a new world of `frames` latent frames.

    params {"experts": {name: tree}, "autoencoder": tree}; image [B, H, W, 3] about [-1, 1]; null_caption, that of the
    guidance, None where the stream has none. `frames` may be smaller than the world: past the encoder's reach y no
    longer changes.
    """
    batch = image.shape[0]
    autoencoder = spec.autoencoder
    y, lr_y = condition.conditioning(autoencoder, params["autoencoder"], image, frames)
    weights = params["autoencoder"]
    size = (batch, spec.height, spec.width)
    small = (batch, spec.height // LOW_RES_SCALE, spec.width // LOW_RES_SCALE)
    return StreamState(
        index=jnp.zeros((), jnp.int32),
        key=key,
        y=y,
        lr_y=lr_y,
        null_caption=null_caption,
        decoder=call(autoencoder, weights, "init_decode_state", *size),
        encoder=call(autoencoder, weights, "init_encode_state", *small),
        experts={name: _empty_expert(spec, name, batch) for name in spec.experts.names},
    )


def _empty_expert(spec: StreamSpec, name: str, batch: int) -> ExpertState:
    model, layout = spec.models[name], spec.layout
    dtype = jnp.dtype(spec.dit.dtype)
    compressor = init_state(spec.dit.memory, batch, spec.latent_height, spec.latent_width, dtype)
    if spec.mode == "bi":

        def frames(count: int, rows: int, cols: int) -> Frames:
            return Frames(
                jnp.zeros((batch, count * rows * cols, spec.dit.dim), dtype),
                jnp.zeros((batch, count), jnp.float32),
                jnp.zeros((batch, count, 6), jnp.float32),
                jnp.zeros((batch, count), jnp.int32),
                jnp.zeros((batch, count), jnp.int32),
                rows,
                cols,
            )

        sink = frames(spec.sink, layout.rows, layout.cols) if spec.sink else None
        count = layout.chunks * layout.memory_frames
        compressed = frames(count, layout.memory_rows, layout.memory_cols)
        positions = layout.time_factor * jnp.arange(count, dtype=jnp.int32)
        compressed = compressed.replace(positions=jnp.broadcast_to(positions, (batch, count)))
        return ExpertState(compressor, None, None, (sink, compressed, frames(spec.temporal, layout.rows, layout.cols)))
    cache = passes.empty_cache(model, layout, batch)
    return ExpertState(compressor, cache, cache if spec.guided else None, None)


def draw_noise(spec: StreamSpec, state: StreamState) -> Noise:
    """The noise of the next chunk, from the world's key and the chunk's index."""
    shape = (state.y.shape[0], spec.chunk, spec.latent_height, spec.latent_width, spec.dit.latent_channels)
    initial = jax.random.normal(fold(state.key, "noise", state.index), shape)
    if spec.mode != "few_step":
        return Noise(initial, None)
    again = len(spec.pdd_schedule.blocks) - 1
    return Noise(initial, jax.random.normal(fold(state.key, "renoise", state.index), (again, *shape)))


def chunk_y(spec: StreamSpec, state: StreamState) -> tuple[jnp.ndarray, jnp.ndarray]:
    """y and low-resolution y of the next chunk."""
    half = spec.chunk // spec.dit.memory.time_factor
    y = jax.lax.dynamic_slice_in_dim(state.y, state.index * spec.chunk, spec.chunk, axis=1)
    return y, jax.lax.dynamic_slice_in_dim(state.lr_y, state.index * half, half, axis=1)


def chunk_frames(spec: StreamSpec, model, params, x, y, t, actions, index) -> Frames:
    """The generated frames of chunk `index` at timestep t (scalar)."""
    batch = x.shape[0]
    positions = index * spec.chunk + jnp.arange(spec.chunk, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, (batch, spec.chunk))
    t = jnp.full((batch, spec.chunk), t, jnp.float32)
    return passes.full_frames(model, params, x, y, t, actions, positions, jnp.zeros_like(positions))


def run_block(spec: StreamSpec, params, state: StreamState, block: pdd.Block, x, y, actions, caption: Caption):
    """One few-step pass: (displacement, endpoint velocity), each [B, C, h, w, 16]. Used by emit and by replay."""
    model, tree = spec.models[block.expert], params["experts"][block.expert]
    t = float(spec.pdd_schedule.timesteps[block.start])
    frames = chunk_frames(spec, model, tree, x, y, t, actions, state.index)
    cache, text = state.experts[block.expert].cache, _text(caption, block.expert)
    return passes.denoise(model, tree, cache, frames, text, jnp.asarray(block.local_index, jnp.int32))


def _emit_few_step(spec: StreamSpec, params, state, y, actions, caption: Caption, noise: Noise, trace: bool):
    table = spec.pdd_schedule
    x = noise.initial
    inputs, cleans = [], []
    for index, block in enumerate(table.blocks):
        displacement, velocity = run_block(spec, params, state, block, x, y, actions, caption)
        clean = pdd.block_x0(x, displacement, velocity, float(table.lasts[index]))
        inputs.append(x)
        cleans.append(clean)
        if index < len(table.blocks) - 1:
            x = pdd.renoise(clean, float(table.ends[index]), noise.renoise[index])
    return clean, {"input": jnp.stack(inputs), "x0": jnp.stack(cleans)} if trace else {}


def _predict(spec: StreamSpec, params, state, y, actions, caption: Caption, name: str, scale: float, first: bool):
    """velocity(x, t, sigma, index) of one expert, guided."""
    model, tree, memory = spec.models[name], params["experts"][name], state.experts[name]

    def branch(caption: Caption, cache: Any):
        text = _text(caption, name)

        def velocity(x, t, sigma, index):
            generated = chunk_frames(spec, model, tree, x, y, t, actions, state.index)
            if spec.mode == "ar":
                return passes.denoise(model, tree, cache, generated, text)
            if first:
                return passes.bidirectional_frames(model, tree, None, generated, text, None)
            length = jnp.broadcast_to(state.index * spec.chunk, (x.shape[0],))
            return passes.bidirectional_frames(model, tree, memory.tokens, generated, text, length)

        return velocity

    if scale == 1.0:
        return branch(caption, memory.cache)
    return guidance.guided(branch(caption, memory.cache), branch(state.null_caption, memory.null_cache), scale)


def _emit_many_step(
    spec: StreamSpec, params, state, y, actions, caption: Caption, noise: Noise, first: bool, trace: bool
):
    predict = {
        name: _predict(spec, params, state, y, actions, caption, name, scale, first)
        for name, scale in zip(spec.experts.names, spec.guidance, strict=True)
    }
    if not trace:
        return samplers.sample_experts(spec.schedule, spec.experts, predict, noise.initial), {}
    sampler, states = samplers.begin(noise.initial), []
    segments = spec.experts.segments(spec.schedule.timesteps)
    for name, begin, end in segments:
        for index in range(begin, end):
            sampler = samplers.advance(spec.schedule, predict[name], sampler, index, index + 1)
            states.append(sampler.x)
    t, sigma = float(spec.schedule.timesteps[0]), float(spec.schedule.sigmas[0])
    velocity = predict[segments[0][0]](noise.initial, t, sigma, 0)
    return sampler.x, {"state": jnp.stack(states), "velocity_step0": velocity}


def emit(
    spec: StreamSpec,
    params,
    state: StreamState,
    actions: jnp.ndarray,
    caption: Caption,
    *,
    first: bool,
    noise: Noise | None = None,
    trace: bool = False,
) -> tuple[StreamState, Chunk]:
    """Generates and decodes the next chunk; the memory is not touched.

    actions [B, C, 6]; `first` static: the world's first chunk. `noise` is drawn from the
    state unless given. The state that comes back only has its decoder advanced.
    """
    noise = draw_noise(spec, state) if noise is None else noise
    y, _ = chunk_y(spec, state)
    if spec.mode == "few_step":
        latents, inner = _emit_few_step(spec, params, state, y, actions, caption, noise, trace)
    else:
        latents, inner = _emit_many_step(spec, params, state, y, actions, caption, noise, first, trace)
    weights = params["autoencoder"]
    decoder, video = call(spec.autoencoder, weights, "decode_chunk", state.decoder, latents, first)
    return state.replace(decoder=decoder), Chunk(latents, video, actions, caption, inner)


def absorb(spec: StreamSpec, params, state: StreamState, chunk: Chunk, *, first: bool) -> tuple[StreamState, Any]:
    """Takes a chunk into the memory under its own caption: low-resolution twin, compression, prefill.

    Returns the state of the next chunk and the chunk's low-resolution latents [B, C/2, h/4, w/4, 16].
    """
    pictures = condition.chunk_low_res(chunk.video)
    weights = params["autoencoder"]
    encoder, lr_latents = call(spec.autoencoder, weights, "encode_chunk", state.encoder, pictures, first)
    experts = {
        name: _absorb_expert(spec, params["experts"][name], name, state, chunk, lr_latents, first)
        for name in spec.experts.names
    }
    return state.replace(index=state.index + 1, encoder=encoder, experts=experts), lr_latents


def memory_frames(
    spec: StreamSpec, model, params, state: StreamState, chunk: Chunk, lr_latents, compressor, first: bool
):
    """The new (sink or None, cmp, tmp) frames of one chunk for one expert, and the compressor's new state."""
    y, lr_y = chunk_y(spec, state)
    layout = spec.layout
    compressed, compressor = passes.compress_chunk(
        model, params, compressor, chunk.latents.astype(jnp.float32), y, lr_latents, lr_y
    )
    captions = jnp.zeros(chunk.actions.shape[:2], jnp.int32)
    memory = passes.memory_frames(
        compressed,
        chunk.actions,
        captions,
        state.index * layout.memory_frames,
        (layout.memory_rows, layout.memory_cols),
    )

    def still(part: slice, offset: int, count: int) -> Frames:
        positions = state.index * spec.chunk + offset + jnp.arange(count, dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, captions[:, part].shape)
        t = jnp.zeros(positions.shape, jnp.float32)
        return passes.full_frames(
            model, params, chunk.latents[:, part], y[:, part], t, chunk.actions[:, part], positions, captions[:, part]
        )

    temporal = still(slice(spec.chunk - spec.temporal, None), spec.chunk - spec.temporal, spec.temporal)
    sink = still(slice(0, spec.sink), 0, spec.sink) if first and spec.sink else None
    return (sink, memory, temporal), compressor


def _absorb_expert(spec: StreamSpec, params, name: str, state, chunk: Chunk, lr_latents, first: bool) -> ExpertState:
    model, expert = spec.models[name], state.experts[name]
    (sink, memory, temporal), compressor = memory_frames(
        spec, model, params, state, chunk, lr_latents, expert.compressor, first
    )
    if spec.mode == "bi":
        old_sink, buffer, _ = expert.tokens
        offset = state.index * memory.count
        buffer = buffer.replace(
            tokens=jax.lax.dynamic_update_slice_in_dim(
                buffer.tokens, memory.tokens.astype(buffer.tokens.dtype), offset * memory.grid, axis=1
            ),
            actions=jax.lax.dynamic_update_slice_in_dim(buffer.actions, jnp.asarray(memory.actions), offset, axis=1),
        )
        return expert.replace(compressor=compressor, tokens=(sink if first else old_sink, buffer, temporal))
    fill = functools.partial(passes.prefill, model, params)
    cache = fill(expert.cache, sink, memory, temporal, _text(chunk.caption, name))
    null_cache = expert.null_cache
    if null_cache is not None:
        null_cache = fill(null_cache, sink, memory, temporal, _text(state.null_caption, name))
    return expert.replace(compressor=compressor, cache=cache, null_cache=null_cache)


def step(
    spec: StreamSpec, params, state: StreamState, actions: jnp.ndarray, caption: Caption, *, first: bool
) -> tuple[StreamState, jnp.ndarray]:
    """One chunk: (state, actions [B, C, 6], caption) -> (state, pictures [B, F, H, W, 3])."""
    state, chunk = emit(spec, params, state, actions, caption, first=first)
    state, _ = absorb(spec, params, state, chunk, first=first)
    return state, chunk.video
