"""Gradient replay against the very states of the rollout and one differentiable program over all kept blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_world import (
    chunk_of,
    quick_compilation,
    quick_jit,
    stream_spec,
    streamed,
    student_weights,
    vae_weights,
    world_batch,
    world_conditions,
)

from wp2_jax.diffusion import pdd
from wp2_jax.inference import stream
from wp2_jax.objectives import replay, rollout

# Both experts with a memory, one without; the last block; a second chunk, whose memory's newest part holds the sink.
BLOCKS = (0, 3, 1)
CHUNKS = len(BLOCKS)
KEY = jax.random.key(0)


@functools.cache
def _spec():
    return stream_spec(CHUNKS)


@functools.cache
def _world():
    """(params, conditions, rollout with its compressors, g)."""
    spec = _spec()
    params = {"experts": student_weights(spec), "autoencoder": vae_weights()}
    given = world_conditions(spec, world_batch(0, 2, CHUNKS))
    with quick_compilation():
        functions = rollout.functions(spec, keep_compressors=True)
        rolled = rollout.run(lambda name, *args: functions[name](*args), params, given, KEY, BLOCKS)
    return params, given, rolled, jax.random.normal(jax.random.key(1), rolled.latents.shape)


@functools.cache
def _states():
    params, given, _, _ = _world()
    return streamed(_spec(), params, given, KEY, CHUNKS)


@functools.cache
def _replayed(memory_grad, remat):
    """Gradients {expert: tree}: chunk after chunk, each in a program of its own, averaged."""
    params, given, rolled, g = _world()
    spec = stream_spec(CHUNKS, remat=remat)
    total = jax.tree.map(np.zeros_like, params["experts"])
    for index, block in enumerate(BLOCKS):
        second = index == 1 and memory_grad != "none"
        loss = functools.partial(replay.loss, spec, block=block, memory_grad=memory_grad, second=second)
        name = spec.pdd_schedule.blocks[block].expert
        grads = quick_jit(jax.grad(loss))(params["experts"][name], rolled, given, g, jnp.asarray(index, jnp.int32))
        total[name] = jax.tree.map(lambda a, b: a + np.asarray(b) / CHUNKS, total[name], grads)
    return total


def _one_program(memory_grad, remat):
    """The same of one program over all chunks, from the states that the stream really had."""
    spec = stream_spec(CHUNKS, remat=remat)
    params, given, _, g = _world()
    states, chunks = _states()
    table = spec.pdd_schedule

    def loss(experts, vae, states, chunks, given, g):
        losses = []
        for index, block in enumerate(BLOCKS):
            kept = table.blocks[block]
            own = {"experts": experts, "autoencoder": vae}
            state = states[index]
            if memory_grad == "compressor" and index:
                state, _ = stream.absorb(spec, own, states[index - 1], chunks[index - 1], first=index == 1)
            actions, context = chunk_of(given.actions, index), chunk_of(given.contexts, index, 1)
            y, _ = stream.chunk_y(spec, state)
            x = chunks[index].trace["input"][block]
            moved, velocity = stream.run_block(spec, own, state, kept, x, y, actions, context)
            x0 = pdd.block_x0(x, moved, velocity, float(table.lasts[block]))
            target = jax.lax.stop_gradient(x0 - chunk_of(g, index))
            losses.append(0.5 * jnp.square(x0 - target).mean())
        return sum(losses) / CHUNKS

    # All are arguments: constants would be folded while compiling.
    return quick_jit(jax.grad(loss))(params["experts"], params["autoencoder"], states, chunks, given, g)


def _assert_equal_leaves(found, expected):
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, b), a in zip(leaves, jax.tree.leaves(found), strict=True):
        error, size = np.linalg.norm(a - b), np.linalg.norm(b)
        assert error <= 1e-5 * size, f"{jax.tree_util.keystr(path)}: {error} of {size}"


def _zero(tree) -> bool:
    return not any(np.any(x) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("memory_grad", "remat"),
    [
        ("none", "none"),
        ("none", "full"),
        pytest.param("compressor", "none", marks=pytest.mark.slow),
        pytest.param("compressor", "full", marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_one_differentiable_program(memory_grad, remat):
    found = _replayed(memory_grad, remat)
    _assert_equal_leaves(found, _one_program(memory_grad, remat))
    for name in ("high", "low"):
        assert not _zero(found[name]["blocks"])
        assert _zero(found[name]["compressor"]) == (memory_grad == "none")


@pytest.mark.slow
def test_tokens_reach_the_network_but_not_the_compressor():
    none, tokens, whole = (_replayed(mode, "none") for mode in replay.MEMORY_GRADS)
    for name in ("high", "low"):
        assert _zero(tokens[name]["compressor"])
        # The patch embedding of the block's own tokens is all there is, but they see other keys' gradients alike.
        np.testing.assert_allclose(tokens[name]["patch_kernel"], none[name]["patch_kernel"], rtol=1e-3, atol=1e-6)
        key = {
            mode: grads[name]["blocks"]["self_attention"]["k"]["kernel"]
            for mode, grads in (("none", none), ("tokens", tokens), ("whole", whole))
        }
        assert np.linalg.norm(key["tokens"] - key["none"]) > 1e-3 * np.linalg.norm(key["none"])
        np.testing.assert_allclose(key["tokens"], key["whole"], rtol=1e-3, atol=1e-6)


def test_replaying_the_last_block_gives_the_chunk():
    spec = _spec()
    params, given, rolled, _ = _world()
    last = len(spec.pdd_schedule.blocks) - 1
    index = BLOCKS.index(last)
    x0 = quick_jit(functools.partial(replay.replay_x0, spec, block=last))(
        params["experts"]["low"], rolled, given, jnp.asarray(index, jnp.int32)
    )
    expected = chunk_of(rolled.latents, index)
    assert np.abs(x0 - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_cache_of_every_chunk_comes_back():
    spec = _spec()
    params, given, rolled, _ = _world()
    states, _ = _states()
    for name in ("high", "low"):
        found = quick_jit(functools.partial(replay.cache_at, spec, name, memory_grad="none", second=False))
        for index in range(1, CHUNKS):
            cache = found(params["experts"][name], rolled, given, jnp.asarray(index, jnp.int32))
            expected = states[index].experts[name].cache
            assert int(cache.chunks) == int(expected.chunks) == index
            there = spec.layout.compressed_start + index * spec.layout.chunk_tokens
            for a, b in ((cache.k, expected.k), (cache.v, expected.v)):
                a, b = np.asarray(a)[:, :, :there], np.asarray(b)[:, :, :there]
                assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_what_the_gradient_needs_must_be_in_the_rollout():
    spec = _spec()
    params, given, rolled, g = _world()
    index = jnp.asarray(1, jnp.int32)
    with pytest.raises(ValueError, match="keep_compressors"):
        bare = rolled.replace(compressors=None)
        replay.loss(spec, params["experts"]["low"], bare, given, g, index, block=3, memory_grad="tokens", second=True)
    with pytest.raises(ValueError, match="memory_grad='all'"):
        replay.loss(spec, params["experts"]["low"], rolled, given, g, index, block=3, memory_grad="all")
