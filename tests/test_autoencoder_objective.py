"""The autoencoder's loss: every term against a hand-worked value, and a few steps that lower it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from wp2_jax.models import autoencoder as models
from wp2_jax.objectives import autoencoder


class _Constant(nn.Module):
    """Encodes to latents of mean m and spread s, decodes to the picture plus `error` in picture 0 only."""

    video: np.ndarray
    error: np.ndarray

    @nn.compact
    def encode(self, video):
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * jax.random.normal(jax.random.key(1), (2, 2, 32, 32, 16)) + 0.5

    def decode_raw(self, latents):
        return jnp.asarray(self.video + self.error)


def test_terms_by_hand():
    video = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 5, 8, 8, 3)).astype(np.float32)
    error = np.zeros_like(video)
    # A step of 0.4 at the middle column of one picture of five, whose weight is 1 in 8: half of it is wrong by 0.4.
    error[:, 2, :, 4:] = 0.4
    model = _Constant(video, error)
    params = {"autoencoder": {"scale": jnp.asarray(2.0)}}
    value, metrics = autoencoder.loss(
        params, {"video": video}, {}, jax.random.key(0), model=model, square=2.0, gradient=3.0, regulariser=0.5
    )
    np.testing.assert_allclose(metrics["l1"], 0.4 / 2 / 8, rtol=1e-5)
    # One difference of 0.4 among 7, 3 and 1 across columns; none across rows.
    edges = (0.4 / 7 + 0.4 / 3 + 0.4 / 1) / 8 / 6
    np.testing.assert_allclose(metrics["gradient"], edges, rtol=1e-4)
    # Channels of mean 0.5 and variance 4.
    divergence = (0.25 + 4 - 1 - np.log(4)) / 2
    np.testing.assert_allclose(metrics["regulariser"], divergence, rtol=0.05)
    square = 0.4**2 / 2 / 8
    total = metrics["l1"] + 2 * square + 3 * metrics["gradient"] + 0.5 * metrics["regulariser"]
    np.testing.assert_allclose(value, total, rtol=1e-6)
    np.testing.assert_allclose(metrics["latent_std"], 2.0, rtol=0.05)
    # Four perfect pictures (floored at 100 dB) and one with mean square 0.5 * 0.2^2 in [0, 1].
    np.testing.assert_allclose(metrics["psnr"], (4 * 100 - 10 * np.log10(0.02)) / 5, rtol=1e-4)


def test_every_latent_weighs_the_same():
    video = np.zeros((1, 5, 8, 8, 3), np.float32)
    values = []
    for picture in (None, *range(5)):
        error = np.zeros_like(video)
        if picture is not None:
            error[:, picture] = np.random.default_rng(1).standard_normal((8, 8, 3))
        model = _Constant(video, error)
        params = {"autoencoder": {"scale": jnp.asarray(1.0)}}
        values.append(autoencoder.loss(params, {"video": video}, {}, jax.random.key(0), model=model)[0])
    first, *later = np.subtract(values[1:], values[0])
    np.testing.assert_allclose(later, first / 4, rtol=1e-4)


def test_unit_latents_have_no_divergence():
    latents = jax.random.normal(jax.random.key(0), (4, 4, 16, 16, 16))
    latents = (latents - latents.mean(axis=(0, 1, 2, 3))) / latents.std(axis=(0, 1, 2, 3))
    assert abs(float(autoencoder.unit_divergence(latents))) < 1e-5
    for other in (2.0 * latents, 0.5 * latents, latents + 1.0):
        assert autoencoder.unit_divergence(other) > 0.1


class _Linear(nn.Module):
    """Squares of 8 x 8 pixels to 16 numbers and back, single pictures."""

    def setup(self):
        self.down, self.up = nn.Dense(16), nn.Dense(192)

    def encode(self, video):
        b, _, h, w, _ = video.shape
        squares = video.reshape(b, 1, h // 8, 8, w // 8, 8, 3).transpose(0, 1, 2, 4, 3, 5, 6)
        return self.down(squares.reshape(b, 1, h // 8, w // 8, 192))

    def decode_raw(self, latents):
        b, _, h, w, _ = latents.shape
        squares = self.up(latents).reshape(b, 1, h, w, 8, 8, 3).transpose(0, 1, 2, 4, 3, 5, 6)
        return squares.reshape(b, 1, 8 * h, 8 * w, 3)

    def __call__(self, video):
        return self.decode_raw(self.encode(video))


def test_steps_lower_the_loss_and_bring_latents_to_unit_scale():
    model = _Linear()
    video = np.random.default_rng(0).integers(0, 255, (8, 1, 4, 4, 3)).repeat(8, 2).repeat(8, 3).astype(np.uint8)
    params = {"autoencoder": dict(model.init(jax.random.key(0), jnp.zeros((1, 1, 8, 8, 3)))["params"])}
    # Latents that start far too small.
    params["autoencoder"]["down"] = jax.tree.map(lambda x: 0.05 * x, params["autoencoder"]["down"])
    loss = functools.partial(autoencoder.loss, model=model, regulariser=0.1)

    optimiser = optax.adam(0.01)

    def step(carry, index):
        params, state = carry
        key = jax.random.fold_in(jax.random.key(1), index)
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, {"video": video}, {}, key)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 count with floats
            updates, state = optimiser.update(grads, state)
        return (optax.apply_updates(params, updates), state), metrics

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(300)), donate_argnums=0)
    (params, _), metrics = train((params, optimiser.init(params)))
    history = [jax.tree.map(lambda x, i=i: x[i], metrics) for i in (0, -1)]
    assert history[-1]["l1"] < 0.5 * history[0]["l1"] and history[-1]["psnr"] > history[0]["psnr"]
    assert history[0]["latent_std"] < 0.1 and 0.6 < history[-1]["latent_std"] < 1.4
    # uint8 and float pictures are the same pictures.
    as_float = (video / 127.5 - 1.0).astype(np.float32)
    a, b = (loss(params, {"video": v}, {}, jax.random.key(0))[0] for v in (video, as_float))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_tiny_autoencoder_fits_the_loss():
    model = models.build("tiny", encoder_width=4, decoder_widths=(4, 4, 4, 4))
    weights = jax.eval_shape(functools.partial(models.init_params, model), jax.random.key(0))
    grad = jax.value_and_grad(functools.partial(autoencoder.loss, model=model), has_aux=True)
    batch = {"video": jax.ShapeDtypeStruct((2, 13, 16, 16, 3), jnp.uint8)}
    (value, _), grads = jax.eval_shape(grad, {"autoencoder": weights}, batch, {}, jax.random.key(0))
    assert value.shape == () and value.dtype == jnp.float32
    assert jax.tree.map(jnp.shape, grads) == {"autoencoder": jax.tree.map(jnp.shape, weights)}
