"""Sample sheets: what the weights of a stage make, beside what was recorded. uint8 pictures by name."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import xla_flags
from wp2_jax.array_types import Params
from wp2_jax.controls.geometry import picture_count
from wp2_jax.inference import generate
from wp2_jax.inference.spec import StreamSpec, capacity_for
from wp2_jax.inference.world import World
from wp2_jax.models.layers import call

COLUMNS = 8
# Enough for a look while training; generation takes the config's steps.
SAMPLING_STEPS = 12


def rows_of(videos: list[np.ndarray]) -> np.ndarray:
    """Videos [F, H, W, 3] in [-1, 1] as rows of one sheet, each shown at `COLUMNS` equally spaced pictures."""
    rows = []
    for video in videos:
        index = np.linspace(0, len(video) - 1, COLUMNS).round().astype(int)
        rows.append(np.concatenate(list(video[index]), axis=1))
    sheet = np.concatenate(rows, axis=0)
    return np.round(np.clip(sheet * 0.5 + 0.5, 0, 1) * 255).astype(np.uint8)


@functools.partial(jax.jit, static_argnums=0)
def reconstruct(world: World, params: Params, video: jax.Array) -> jax.Array:
    """Video [B, F, H, W, 3] in [-1, 1] through the autoencoder and back."""
    return call(world.autoencoder, params, "decode", call(world.autoencoder, params, "encode", video))


def reconstruction(world: World, params: Params, video: np.ndarray, count: int = 4) -> dict[str, np.ndarray]:
    """Held-out windows above their reconstructions."""
    decoded = np.asarray(reconstruct(world, params, jnp.asarray(video[:count])))
    pairs = [picture for row in range(len(decoded)) for picture in (video[row], decoded[row])]
    return {"reconstruction": rows_of(pairs)}


def rollout(context, mode: str, experts: Params, text: Params, *, chunks: int, count: int = 2) -> dict[str, np.ndarray]:
    """Held-out recordings above what the model makes of their first picture, captions and commands."""
    world, records = context.world, context.records("test")
    config = world.config
    spec = world.stream(mode, capacity_for(chunks), steps=SAMPLING_STEPS)
    # Everything comes from the host, so that the stages of a curriculum share the compiled programs.
    params = jax.device_get({"experts": experts, "autoencoder": context.encoder.params})
    frames = chunks * config.chunk
    clips = [records[(index * len(records)) // count] for index in range(count)]
    pictures = [clip["pictures"][: picture_count(frames)].astype(np.float32) / 127.5 - 1 for clip in clips]
    captions = [context.captions(clip, frames) for clip in clips]
    ids = np.stack([context.tokenizer.encode(texts) for texts in captions])
    text = jax.device_get(text)
    contexts, null = (jax.device_get(generate.encode_text(world, text, tokens)) for tokens in (ids, context.null_ids))
    null = np.broadcast_to(null[None], (count, 1, *null.shape[1:]))
    actions = np.stack([clip["actions"][:frames] for clip in clips])
    made = worlds(spec, params, np.stack([p[0] for p in pictures]), actions, contexts, null)
    made = np.concatenate(list(made), axis=1)
    return {mode: rows_of([row for pair in zip(pictures, made, strict=True) for row in pair])}


@functools.cache
def _programs():
    return generate.programs(xla_flags.quick_compile(jax.default_backend()))


def worlds(
    spec: StreamSpec, params: Params, image, actions, contexts, null_context, *, seed: int = 0, programs=None
) -> Iterator[np.ndarray]:
    """Several worlds at once: image [B, H, W, 3], actions [B, T, 6], contexts [B, chunks, S, D]. Yields the pictures
    of each chunk, float32 [B, F, H, W, 3] in [-1, 1].

    `programs` of `generate.programs`; those that compile quickly and run slowly where none are given.
    """
    start, emit, absorb = programs or _programs()
    state = start(spec, params, image, generate.condition_frames(spec), null_context, jax.random.key(seed))
    chunks = contexts.shape[1]
    for index in range(chunks):
        rows = actions[:, index * spec.chunk : (index + 1) * spec.chunk]
        state, chunk = emit(spec, params, state, rows, contexts[:, index : index + 1], first=index == 0)
        yield np.asarray(chunk.video)
        if index < chunks - 1:
            state, _ = absorb(spec, params, state, chunk, first=index == 0)
