"""One world over eight devices: tokens cut along seq, pictures in bands. Equal to one device, and really cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_objectives import CONFIG, TEXT_DIM, random_batch, random_weights

from wp2_jax import sharding
from wp2_jax.models import autoencoder, layers, passes
from wp2_jax.models.cache import CacheLayout
from wp2_jax.models.dit import DiT
from wp2_jax.objectives import batch as batches

EIGHT_HEADS = dataclasses.replace(CONFIG, dim=48, num_heads=8)
SEQ = sharding.MeshConfig(seq=8, fsdp=1)


def compiled(function, mesh, *arguments):
    """A function compiled for a mesh, or for none, and its text."""
    if mesh is None:
        made = jax.jit(function).lower(*arguments).compile()
        return made(*arguments), made.as_text() or ""
    with jax.set_mesh(mesh):
        arguments = jax.device_put(arguments, jax.NamedSharding(mesh, jax.P()))
        made = jax.jit(function).lower(*arguments).compile()
        return made(*arguments), made.as_text() or ""


@pytest.mark.parametrize("heads", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_that_do_not_divide(heads):
    """Teacher forcing of 2 chunks, 182 tokens, values and gradients; 2 heads are whole on every device."""
    config = dataclasses.replace(EIGHT_HEADS, num_heads=heads)
    model, params = DiT(config), random_weights(0, config)
    rows = random_batch(1, 1, 12)
    clip = batches.clip_from_batch(jax.tree.map(jnp.asarray, rows), 4)
    noisy = jax.random.normal(jax.random.key(0), (1, 8, 8, 8, 16))
    contexts = jax.random.normal(jax.random.key(1), (1, 3, 3, TEXT_DIM))
    start, t = jnp.asarray([4]), jnp.linspace(1000, 300, 8)[None]

    def loss(params, noisy):
        out = passes.teacher_forcing(model, params, noisy, t, clip, start, contexts, chunk=4)
        return jnp.square(out).mean(), out

    function = jax.value_and_grad(loss, has_aux=True)
    ((_, one), gradient), _ = compiled(function, None, params, noisy)
    ((_, many), cut), text = compiled(function, sharding.make_mesh(SEQ), params, noisy)
    np.testing.assert_allclose(many, one, atol=1e-5 * np.abs(one).max())
    for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(b).max(), 1e-2))
    assert heads == 2 or "all-to-all" in text


@pytest.mark.parametrize("kind", ["tiny", pytest.param("wan", marks=pytest.mark.slow)])
def test_bands_equal_the_whole_frame(kind):
    """Decoding and encoding of three chunks, 16 rows of latents on 8 devices."""
    sizes = {
        "tiny": dict(encoder_width=8, decoder_widths=(8, 8, 8, 8)),
        "wan": dict(dim=4, dim_mult=(1, 2, 2, 2), num_res_blocks=1),
    }
    vae = autoencoder.build(kind, **sizes[kind])  # pyright: ignore[reportArgumentType]
    params = autoencoder.init_params(vae, jax.random.key(0))
    latents = jax.random.normal(jax.random.key(1), (1, 6, 16, 4, 16))
    video = jax.random.uniform(jax.random.key(2), (1, 5 + 8, 128, 32, 3), minval=-1)

    def run(params, latents, video):
        decoder = layers.call(vae, params, "init_decode_state", 1, 128, 32)
        encoder = layers.call(vae, params, "init_encode_state", 1, 128, 32)
        pictures, codes = [], []
        for index in range(3):
            part = latents[:, 2 * index : 2 * index + 2]
            decoder, made = layers.call(vae, params, "decode_chunk_raw", decoder, part, index == 0)
            shown = video[:, :5] if index == 0 else video[:, 1 + 4 * index : 5 + 4 * index]
            encoder, code = layers.call(vae, params, "encode_chunk", encoder, shown, index == 0)
            pictures.append(made)
            codes.append(code)
        return jnp.concatenate(pictures, 1), jnp.concatenate(codes, 1), decoder, encoder

    one, _ = compiled(run, None, params, latents, video)
    many, text = compiled(run, sharding.make_mesh(SEQ), params, latents, video)
    assert "collective-permute" in text
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()))
    assert many[0].shape == (1, 5 + 8 + 8, 128, 32, 3)


def test_the_cache_is_cut_by_heads():
    """From the start, and after a prefill: eight devices hold an eighth each, of the same keys and values."""
    model, params = DiT(EIGHT_HEADS), random_weights(0, EIGHT_HEADS)
    layout = CacheLayout(sink=1, temporal=1, chunk=4, chunks=2, rows=4, cols=4, memory_rows=1, memory_cols=1)
    latents = jax.random.normal(jax.random.key(0), (1, 2, 8, 8, 16))
    tokens = jax.random.normal(jax.random.key(1), (1, 2, EIGHT_HEADS.dim))
    contexts = jax.random.normal(jax.random.key(2), (1, 1, 3, TEXT_DIM))

    def fill(params, latents, tokens, contexts):
        empty = passes.empty_cache(model, layout, 1)
        at = jnp.zeros((1, 1), jnp.int32)
        y, actions = jnp.zeros((1, 1, 8, 8, 20)), jnp.zeros((1, 1, 6))
        sink, temporal = (
            passes.full_frames(model, params, latents[:, i : i + 1], y, jnp.zeros((1, 1)), actions, at + 3 * i, at)
            for i in range(2)
        )
        memory = passes.memory_frames(tokens, jnp.zeros((1, 4, 6)), jnp.zeros((1, 4), jnp.int32), 0, (1, 1))
        full = passes.prefill(model, params, empty, sink, memory, temporal, contexts)
        return empty.k, empty.v, full.k, full.v

    arguments = (params, latents, tokens, contexts)
    one, _ = compiled(fill, None, *arguments)
    many, _ = compiled(fill, sharding.make_mesh(SEQ), *arguments)
    for a, b in zip(many, one, strict=True):
        assert a.sharding.shard_shape(a.shape) == (*a.shape[:3], 1, a.shape[4])
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()))
    assert np.abs(one[2]).max() > 0
