"""The linear path of the tiny autoencoder against principal components worked out by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from streamed_vae import FAST_COMPILE, golden_vae, stream

from wp2_jax.models import shortcut
from wp2_jax.models.autoencoder import build, init_params


@pytest.fixture(scope="module")
def model():
    return build("tiny", encoder_width=8, decoder_widths=(8, 8, 8, 8), blocks=1, patch=4, shortcut=True)


@pytest.fixture(scope="module")
def params(model):
    return init_params(model, jax.random.key(0))


def smooth_video(frames, batch, seed=0):
    """Pictures whose neighbours agree, as those of a world do: sums of a few waves that drift."""
    random = np.random.default_rng(seed)
    t, y, x = np.meshgrid(np.arange(frames), np.arange(32), np.arange(32), indexing="ij")
    video = np.zeros((batch, frames, 32, 32, 3))
    for row in range(batch):
        for channel in range(3):
            for _ in range(4):
                a, b, c, phase = random.normal(size=4) * (0.1, 0.3, 0.3, 3.0)
                video[row, ..., channel] += 0.25 * np.sin(a * t + b * y + c * x + phase)
    return video.astype(np.float32)


def squares(video):
    """The pixels of every latent [count, 4 * 8 * 8 * 3], a pixel at a time: a formula of its own."""
    batch, frames, height, width, _ = video.shape
    groups = [[0, 0, 0, 0]] + [list(range(start, start + 4)) for start in range(1, frames, 4)]
    return np.stack(
        [
            np.concatenate([video[row, f, y : y + 8, x : x + 8].reshape(-1) for f in group])
            for row in range(batch)
            for group in groups
            for y in range(0, height, 8)
            for x in range(0, width, 8)
        ]
    ).astype(np.float64)


def test_starts_as_the_principal_components(model, params):
    video = smooth_video(9, 20)
    assert squares(video).shape == (20 * 3 * 16, shortcut.BLOCK)
    fitted = shortcut.from_pictures(params, jnp.asarray(video))
    apply = jax.jit(model.apply, static_argnames="method", compiler_options=FAST_COMPILE)
    latents = np.asarray(apply({"params": fitted}, video, method="encode"))
    flat = latents.reshape(-1, 16)
    np.testing.assert_allclose(flat.mean(axis=0), 0.0, atol=2e-3)
    np.testing.assert_allclose(flat.var(axis=0).mean(), 1.0, rtol=2e-3)

    decoded = np.asarray(apply({"params": fitted}, latents, method="decode_raw"))
    pixels = squares(video)
    deviation = pixels - pixels.mean(axis=0)
    # NumPy's own projection. Later latents only: of the first, which stands for four equal pictures, one is decoded.
    basis = np.linalg.svd(deviation, full_matrices=False)[2][:16]
    left = (deviation - deviation @ basis.T @ basis).reshape(20, 3, 16, -1)
    got = np.square(decoded[:, 1:].astype(np.float64) - video[:, 1:]).sum()
    np.testing.assert_allclose(got, np.square(left[:, 1:]).sum(), rtol=2e-3)
    assert got < 0.2 * np.square(deviation.reshape(20, 3, 16, -1)[:, 1:]).sum()


def test_channels_share_the_variance(params):
    """A Hadamard matrix spreads each component evenly: every channel has the same variance."""
    video = smooth_video(9, 20, seed=1)
    kernel = np.asarray(shortcut.from_pictures(params, jnp.asarray(video))["linear_encoder"]["conv"]["kernel"])
    pixels = squares((video + 1) / 2)
    np.testing.assert_allclose(np.cov(pixels @ kernel[1, 1], rowvar=False).diagonal(), np.ones(16), rtol=1e-2)
    assert not kernel[[0, 2]].any() and not kernel[:, [0, 2]].any()


def test_blocks_and_back():
    video = jax.random.uniform(jax.random.key(0), (2, 9, 16, 24, 3))
    first = shortcut.blocks(video, True)
    assert first.shape == (2, 3, 2, 3, shortcut.BLOCK)
    np.testing.assert_array_equal(first.reshape(-1, shortcut.BLOCK), squares(np.asarray(video)).astype(np.float32))
    np.testing.assert_array_equal(shortcut.unblocks(first, True), video)
    np.testing.assert_array_equal(shortcut.unblocks(shortcut.blocks(video[:, 1:], False), False), video[:, 1:])


def test_streams_equal_one_shot(model, params):
    random = np.random.default_rng(2)
    loud = jax.tree.map(lambda x: x + 0.05 * random.standard_normal(x.shape).astype("f"), params)
    vae = golden_vae(model, loud)
    video = smooth_video(9, 1)[:, :, :16, :16]
    latents = vae[1]("encode", video)
    np.testing.assert_allclose(
        stream(vae, "encode", video, (1, 4, 4)), latents, atol=3e-5 * float(np.abs(latents).max())
    )
    whole = vae[1]("decode", latents)
    np.testing.assert_allclose(stream(vae, "decode", latents, (1, 1, 1)), whole, atol=3e-5)


def test_without_a_shortcut_nothing_is_added(params):
    plain = build("tiny", encoder_width=8, decoder_widths=(8, 8, 8, 8), blocks=1, patch=4)
    tree = init_params(plain, jax.random.key(0))
    assert set(params) - set(tree) == {"linear_encoder", "linear_decoder"}
