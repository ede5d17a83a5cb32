"""The student's rollout is generation itself, and keeps what a replay needs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiny_world import (
    CHUNK,
    chunk_of,
    quick_compilation,
    stream_spec,
    streamed,
    student_weights,
    vae_weights,
    world_batch,
    world_conditions,
)

from wp2_jax.models import memory
from wp2_jax.objectives import rollout

BLOCKS = (2, 0, 3)
CHUNKS = len(BLOCKS)
KEY = jax.random.key(0)


@functools.cache
def _world():
    spec = stream_spec(CHUNKS)
    params = {"experts": student_weights(spec), "autoencoder": vae_weights()}
    with quick_compilation():
        functions = rollout.functions(spec, keep_compressors=True)
    return spec, params, functions


def _roll(batch, blocks):
    spec, params, functions = _world()
    given = world_conditions(spec, batch)
    with quick_compilation():
        return given, rollout.run(lambda name, *args: functions[name](*args), params, given, KEY, blocks)


def _close(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-6)


def test_a_rollout_is_what_the_stream_generates():
    spec, params, _ = _world()
    given, rolled = _roll(world_batch(0, 2, CHUNKS), BLOCKS)
    states, made = streamed(spec, params, given, KEY, CHUNKS)
    assert int(rolled.state.index) == CHUNKS
    np.testing.assert_array_equal(rolled.record.block, BLOCKS)
    assert rolled.compressors is not None
    for index, (state, chunk) in enumerate(zip(states, made, strict=True)):
        _close(chunk_of(rolled.latents, index), chunk.latents)
        _close(rolled.record.x[index], chunk.trace["input"][BLOCKS[index]])
        for name, expert in state.experts.items():
            kept = jax.tree.map(lambda x, index=index: x[index], rolled.compressors[name])
            jax.tree.map(_close, kept, expert.compressor)
    # The low-resolution twin of all chunks, the last one's included, is one encoding of every second picture.
    assert all(np.any(chunk_of(rolled.lr_latents, index, 2)) for index in range(CHUNKS))
    found, last = (state.experts["low"].cache for state in (rolled.state, states[-1]))
    assert found is not None and last is not None
    end = spec.layout.compressed_start + (CHUNKS - 1) * spec.layout.chunk_tokens
    start = spec.layout.compressed_start
    _close(found.k[:, :, start:end], last.k[:, :, start:end])


def test_a_shorter_rollout_is_its_beginning_and_compiles_nothing():
    _, _, functions = _world()
    batch = world_batch(0, 2, CHUNKS)
    _, whole = _roll(batch, BLOCKS)
    sizes = {name: function._cache_size() for name, function in functions.items()}
    short = {
        "image": batch["image"],
        "actions": batch["actions"][:, : 2 * CHUNK],
        "contexts": batch["contexts"][:, :2],
    }
    _, rolled = _roll(short, BLOCKS[:2])
    assert sizes == {name: function._cache_size() for name, function in functions.items()}
    np.testing.assert_array_equal(rolled.latents[:, : 2 * CHUNK], whole.latents[:, : 2 * CHUNK])
    np.testing.assert_array_equal(rolled.lr_latents[:, :CHUNK], whole.lr_latents[:, :CHUNK])
    for buffer in (rolled.latents[:, 2 * CHUNK :], rolled.lr_latents[:, CHUNK:], rolled.record.x[2:]):
        assert buffer.size and not np.any(buffer)


def test_a_rollout_that_cannot_be_is_an_error():
    spec, _, _ = _world()
    with pytest.raises(ValueError, match="rollout of 4 chunks: set capacity, now 3"):
        world_conditions(spec, world_batch(0, 1, 4))
    odd = world_batch(0, 1, 2)
    odd["actions"] = odd["actions"][:, :-1]
    with pytest.raises(ValueError, match="7 latent frames for 2 captions"):
        world_conditions(spec, odd)
    with pytest.raises(ValueError, match="mode 'ar'"):
        rollout.functions(dataclasses.replace(spec, mode="ar"))


def test_the_compressor_before_the_first_chunk_is_empty():
    spec, _, _ = _world()
    _, rolled = _roll(world_batch(0, 2, CHUNKS), BLOCKS)
    empty = memory.init_state(spec.dit.memory, 2, spec.latent_height, spec.latent_width)
    assert rolled.compressors is not None
    for kept in rolled.compressors.values():
        jax.tree.map(lambda x, zero: np.testing.assert_array_equal(x[0], zero), kept, empty)
        assert all(np.any(x[1]) for x in kept)
