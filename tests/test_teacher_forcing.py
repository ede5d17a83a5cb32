"""One masked pass is what prefill and denoise see chunk by chunk; its loss and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_objectives import (
    CHUNK,
    CONFIG,
    TEXT_DIM,
    VELOCITY,
    counted,
    encode_text,
    frozen_trees,
    random_batch,
    random_weights,
    relative,
)

from wp2_jax.diffusion.experts import Experts
from wp2_jax.models import passes
from wp2_jax.models.cache import CacheLayout
from wp2_jax.models.dit import DiT
from wp2_jax.models.memory import init_state
from wp2_jax.objectives import batch as batches
from wp2_jax.objectives import teacher_forcing

HISTORIES = (0, 4, 12)
CHUNKS = 4
FRAMES = CHUNKS * CHUNK
CLIP = max(HISTORIES) + FRAMES
HEIGHT, WIDTH = 8, 16
# A token a latent; a memory token is as wide as one of the low-resolution twin.
ONE_LATENT = dataclasses.replace(CONFIG, patch=1, memory=dataclasses.replace(CONFIG.memory, spatial_down=(1, 1, 0)))


def _clip_and_contexts():
    rows = random_batch(0, len(HISTORIES), CLIP, HEIGHT, WIDTH)
    for row, history in enumerate(HISTORIES):
        # What lies past the targets is padding: make it loud, so that a leak is seen.
        end = history + FRAMES
        for name in ("latents", "y", "actions"):
            rows[name][row, end:] *= 50
        for name in ("lr_latents", "lr_y"):
            rows[name][row, end // 2 :] *= 50
    clip = batches.clip_from_batch(jax.tree.map(jnp.asarray, rows), CHUNK)
    contexts = jax.random.normal(jax.random.key(3), (len(HISTORIES), CLIP // CHUNK, 3, TEXT_DIM))
    return clip, contexts.at[:, :, 2].set(0.0)


def _part(x, first, count):
    return jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)


def _still(model, params, clip, frame: jax.Array, caption):
    latents, y, actions = (passes.take_frames(a, frame) for a in (clip.latents, clip.y, clip.actions))
    return passes.full_frames(model, params, latents, y, jnp.zeros((1, 1)), actions, frame, caption)


@functools.partial(jax.jit, static_argnums=0, static_argnames="sink")
def _absorb(model, params, clip, contexts, cache, state, chunk, sink: bool):
    """One chunk of a world of batch 1 into the cache, under its caption alone; `sink`: it is the first and has one."""
    at = CHUNK * chunk
    latents, y = _part(clip.latents, at, CHUNK), _part(clip.y, at, CHUNK)
    lr_latents, lr_y = _part(clip.lr_latents, at // 2, CHUNK // 2), _part(clip.lr_y, at // 2, CHUNK // 2)
    tokens, state = passes.compress_chunk(model, params, state, latents, y, lr_latents, lr_y)
    caption, grid = jnp.zeros((1, CHUNK), jnp.int32), passes.memory_grid(model, HEIGHT, WIDTH)
    compressed = passes.memory_frames(tokens, _part(clip.actions, at, CHUNK), caption, at // 2, grid)
    anchor = _still(model, params, clip, jnp.full((1, 1), CHUNK - 1, jnp.int32) + at, caption[:, :1])
    begin = _still(model, params, clip, jnp.zeros((1, 1), jnp.int32), caption[:, :1]) if sink else None
    return passes.prefill(model, params, cache, begin, compressed, anchor, _part(contexts, chunk, 1)), state


@functools.partial(jax.jit, static_argnums=0)
def _predict(model, params, clip, contexts, cache, x, t, chunk):
    at = CHUNK * chunk
    positions = at + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    y, actions = _part(clip.y, at, CHUNK), _part(clip.actions, at, CHUNK)
    caption = jnp.zeros((1, CHUNK), jnp.int32)
    frames = passes.full_frames(model, params, x, y, t, actions, positions, caption)
    return passes.denoise(model, params, cache, frames, _part(contexts, chunk, 1))


def _incremental(model, params, clip, contexts, noisy, t, history: int, sink: int):
    """Prefill and denoise of one world chunk by chunk, as generation runs it."""
    patch, memory = model.config.patch, model.config.memory.space_factor
    layout = CacheLayout(
        sink=sink,
        temporal=1,
        chunk=CHUNK,
        chunks=CLIP // CHUNK,
        rows=HEIGHT // patch,
        cols=WIDTH // patch,
        memory_rows=HEIGHT // memory,
        memory_cols=WIDTH // memory,
    )
    cache, state = passes.empty_cache(model, layout, 1), init_state(model.config.memory, 1, HEIGHT, WIDTH)
    velocities = []
    for chunk in range(history // CHUNK + CHUNKS):
        index, first = jnp.asarray(chunk), CHUNK * chunk - history
        if first >= 0:
            piece = slice(first, first + CHUNK)
            velocities.append(_predict(model, params, clip, contexts, cache, noisy[:, piece], t[:, piece], index))
        cache, state = _absorb(model, params, clip, contexts, cache, state, index, sink=chunk == 0 and sink > 0)
    return jnp.concatenate(velocities, axis=1)


@pytest.mark.parametrize(
    "sink, config", [(0, CONFIG), (1, CONFIG), (1, ONE_LATENT)], ids=["no sink", "sink", "patch 1"]
)
def test_one_masked_pass_equals_prefill_and_denoise(sink, config):
    model, params = DiT(config), random_weights(0, config)
    clip, contexts = _clip_and_contexts()
    noisy = jax.random.normal(jax.random.key(1), (len(HISTORIES), FRAMES, HEIGHT, WIDTH, 16))
    t = jnp.repeat(1000 * jax.random.uniform(jax.random.key(2), (len(HISTORIES), CHUNKS)), CHUNK, axis=1)
    start = jnp.asarray(HISTORIES, jnp.int32)
    one_pass = jax.jit(functools.partial(passes.teacher_forcing, model, chunk=CHUNK, sink=sink))
    masked = one_pass(params, noisy, t, clip, start, contexts)
    for row, history in enumerate(HISTORIES):
        own_clip, *own = jax.tree.map(lambda x, row=row: x[row : row + 1], (clip, contexts, noisy, t))
        incremental = _incremental(model, params, own_clip, own[0], own[1], own[2], history, sink)
        for chunk in range(CHUNKS):
            piece = slice(CHUNK * chunk, CHUNK * (chunk + 1))
            assert relative(masked[row, piece], incremental[0, piece]) < 1e-5, (history, chunk)

    # The agreement is worth something only if the captions, the sink and the past matter to it.
    moved = jnp.roll(contexts, 1, axis=1)
    assert relative(one_pass(params, noisy, t, clip, start, moved), masked) > 1e-3
    louder = clip.replace(latents=clip.latents.at[:, 0].multiply(2.0))
    changed = one_pass(params, noisy, t, louder, start, contexts)
    np.testing.assert_array_equal(changed[0, :CHUNK], masked[0, :CHUNK])
    assert relative(changed[0, CHUNK:], masked[0, CHUNK:]) > 1e-3 and relative(changed[1], masked[1]) > 1e-3


def _loss(model: DiT, params, batch, frozen, key, boundary=None):
    experts = Experts(boundary)
    return teacher_forcing.loss(
        params,
        batch,
        frozen,
        key,
        models=dict.fromkeys(experts.names, model),
        experts=experts,
        encode_text=encode_text,
        frames=8,
        chunk=CHUNK,
    )


def _trees():
    return {"experts": {"all": random_weights(0)}}


def test_gradients_do_not_depend_on_rematerialisation():
    batch, frozen = random_batch(4, 1, 12), frozen_trees(4)
    found = {}
    for remat in ("none", "full", "dots"):
        model = DiT(dataclasses.replace(CONFIG, remat=remat))
        grad = jax.jit(jax.value_and_grad(functools.partial(_loss, model), has_aux=True))
        found[remat] = grad(_trees(), batch, frozen, jax.random.key(0))
    (value, metrics), grads = found["none"]
    assert value == metrics["loss/all"] > 0
    for remat in ("full", "dots"):
        (other, _), other_grads = found[remat]
        np.testing.assert_allclose(other, value, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(other_grads), jax.tree.leaves(grads), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-12


def test_frames_past_the_target_do_not_count_and_history_does():
    batch, frozen = random_batch(5, 2, 16), frozen_trees(0)
    value, compilations = counted(functools.partial(_loss, VELOCITY))
    at_start = value(_trees(), batch, frozen, jax.random.key(0))[0]
    late = dict(batch, latents=batch["latents"].copy())
    late["latents"][:, 8:] = 9.0
    assert value(_trees(), late, frozen, jax.random.key(0))[0] == at_start
    # The same compiled function with a longer history: the curriculum grows without a compilation.
    grown = dict(frozen, max_history=jnp.asarray(8, jnp.int32))
    assert value(_trees(), batch, grown, jax.random.key(0))[0] != at_start
    assert len(compilations) == 1


def test_a_target_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="frames 8 as target in clips of 4"):
        _loss(VELOCITY, _trees(), random_batch(5, 2, 4), frozen_trees(0), jax.random.key(0), 0.9)
