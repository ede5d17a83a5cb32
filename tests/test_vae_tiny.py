"""The causal tiny autoencoder against golden numbers, and its streams against the one-shot results."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from streamed_vae import FAST_COMPILE, golden_vae, stream

from wp2_jax.checkpoints.names_vae import tiny_rules
from wp2_jax.checkpoints.torch_names import flatten, from_tree, to_tree
from wp2_jax.models.autoencoder import build, init_params
from wp2_jax.models.vae_tiny import TinyVae, TinyVaeConfig
from wp2_jax.verify.autoencoders import check_tiny, tiny_model, tiny_weights_from_recipe


def sidecar(golden, name="i_tae_tiny"):
    return json.loads((golden / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def vae(golden):
    return golden_vae(*tiny_model(sidecar(golden)))


def random_video(frames, batch=1):
    return jax.random.uniform(jax.random.key(frames), (batch, frames, 16, 16, 3), minval=-1.0, maxval=1.0)


@pytest.mark.parametrize(("name", "count"), [("i_tae_tiny", 6), ("i_tae_full", 4)])
def test_golden(golden, name, count):
    results = check_tiny(golden, name)
    assert len(results) == count
    assert [r for r in results if not r.ok] == []


def test_unknown_tensor_is_a_failure(golden, tmp_path):
    (tmp_path / "i.json").write_bytes((golden / "i_tae_tiny.json").read_bytes())
    tensors = load_file(golden / "i_tae_tiny.safetensors")
    save_file(
        {k: tensors[k] for k in ("in.x", "in.z", "in.clip15")} | {"out.new": tensors["in.z"]},
        tmp_path / "i.safetensors",
    )
    assert [(r.item, r.ok, r.note) for r in check_tiny(tmp_path, "i")] == [("i/out.new", False, "unknown tensor")]


def test_recipe_gain_is_read_from_the_sidecar(golden):
    """k_pdd_tae draws the same weights with gain 1 instead of 1.4 (and its own scale of the last convolution)."""
    first, second = sidecar(golden), sidecar(golden, "k_pdd_tae")
    a, b = tiny_weights_from_recipe(first), tiny_weights_from_recipe(second)
    np.testing.assert_allclose(a["enc.encoder.0.weight"], 1.4 * b["enc.encoder.0.weight"], rtol=1e-6)
    np.testing.assert_array_equal(a["enc.encoder.0.bias"], b["enc.encoder.0.bias"])
    ratio = 1.4 * first["dec_last_conv"]["weight_scale"] / second["dec_last_conv"]["weight_scale"]
    np.testing.assert_allclose(a["dec.decoder.22.weight"], ratio * b["dec.decoder.22.weight"], rtol=1e-6)
    np.testing.assert_array_equal(a["dec.decoder.22.bias"], np.full(3, 0.5, np.float32))
    with pytest.raises(ValueError, match="weights_recipe"):
        tiny_weights_from_recipe({**first, "weights_recipe": "zeros"})


@pytest.mark.parametrize("sizes", [(1, 4, 4), (5, 4), (1, 8)])
def test_streaming_encode(vae, sizes):
    video = random_video(9)
    whole = np.asarray(vae[1]("encode", video))
    np.testing.assert_allclose(stream(vae, "encode", video, sizes), whole, atol=3e-5 * np.abs(whole).max())


@pytest.mark.parametrize("step", [1, 4])
def test_streaming_decode(vae, step):
    latents = jax.random.normal(jax.random.key(1), (1, 12, 2, 2, 16))
    whole = vae[1]("decode", latents)
    assert whole.shape == (1, 45, 16, 16, 3)
    np.testing.assert_allclose(stream(vae, "decode", latents, [step] * (12 // step)), whole, atol=3e-5)


@pytest.mark.parametrize(("pictures", "latents"), [(1, 1), (5, 2), (7, 2), (13, 4), (15, 4), (29, 8)])
def test_first_chunk_uses_all_pictures(golden, pictures, latents):
    model, params = tiny_model(sidecar(golden))

    def encode(video):
        state = model.init_encode_state(1, 16, 16)
        return model.apply({"params": params}, state, video, True, method="encode_chunk")[1]

    assert jax.eval_shape(encode, random_video(pictures)).shape == (1, latents, 2, 2, 16)


def test_seventh_picture_of_a_first_chunk_counts(vae):
    video = random_video(7)
    changed = video.at[:, 6].multiply(-1.0)
    a, b = stream(vae, "encode", video, [7]), stream(vae, "encode", changed, [7])
    np.testing.assert_array_equal(a[:, 0], b[:, 0])
    assert np.abs(a[:, 1] - b[:, 1]).max() > 1e-3


def test_decode_clamps_and_decode_raw_does_not(vae):
    latents = 3.0 * jax.random.normal(jax.random.key(2), (1, 2, 2, 2, 16))
    raw, clamped = vae[1]("decode_raw", latents), vae[1]("decode", latents)
    assert np.abs(raw).max() > 1.0
    np.testing.assert_allclose(np.clip(raw, -1.0, 1.0), clamped, atol=1e-6)


def test_published_names_and_shapes(golden):
    manifest = json.loads((golden / "manifests/m5_causal_tae.json").read_text())
    config = TinyVaeConfig()
    tree = jax.eval_shape(lambda: init_params(TinyVae(config), jax.random.key(0)))
    arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    shapes = {name: list(array.shape) for name, array in from_tree(tiny_rules(config), arrays).items()}
    assert shapes == {name: entry["shape"] for name, entry in manifest["tensors"].items()}
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == manifest["parameters"]


def test_loading_is_strict(golden):
    model, params = tiny_model(sidecar(golden))
    weights = tiny_weights_from_recipe(sidecar(golden))
    rules = tiny_rules(model.config)
    shapes = {path: leaf.shape for path, leaf in flatten(params).items()}
    weights["enc.encoder.17.bias"] = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match=r"misshapen enc\.encoder\.17\.bias"):
        to_tree(rules, weights, shapes)
    weights["enc.encoder.99.bias"] = weights.pop("enc.encoder.17.bias")
    with pytest.raises(ValueError, match=r"(?s)missing enc\.encoder\.17\.bias.*extra enc\.encoder\.99\.bias"):
        to_tree(rules, weights, shapes)


def test_stays_float32_when_bfloat16_is_given(golden):
    model, params = tiny_model(sidecar(golden))
    half = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), params)
    widened = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    latents = jax.random.normal(jax.random.key(3), (1, 2, 2, 2, 16), jnp.bfloat16)
    decode = jax.jit(partial(model.apply, method="decode"), compiler_options=FAST_COMPILE)
    got = decode({"params": half}, latents)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, decode({"params": widened}, latents.astype(jnp.float32)), atol=1e-6)


def test_gradient_is_finite_and_reaches_every_parameter():
    model = build("tiny", encoder_width=4, decoder_widths=(8, 4, 4, 4))
    # Blocks start with a zero last convolution, behind which nothing has a gradient: move off that point.
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.2 * random.standard_normal(x.shape).astype("f"), init_params(model, jax.random.key(0))
    )
    video = random_video(9, batch=2)

    def loss(params):
        return jnp.mean(jnp.square(jnp.asarray(model.apply({"params": params}, video)) - video))

    for path, leaf in flatten(jax.jit(jax.grad(loss), compiler_options=FAST_COMPILE)(params)).items():
        assert bool(jnp.isfinite(leaf).all()), path
        assert bool(jnp.any(leaf != 0)), path


@pytest.mark.parametrize(
    ("frames", "first", "message"),
    [
        (0, None, "at least 1"),
        (15, None, "13 or 17"),
        (16, None, "13 or 17"),
        (80, None, "77 or 81"),
        (5, False, "4 or 8"),
        (0, True, "at least 1"),
    ],
)
def test_frame_counts_that_cannot_be_encoded(vae, frames, first, message):
    model, apply = vae
    with pytest.raises(ValueError, match=message):
        if first is None:
            apply("encode", jnp.zeros((1, frames, 16, 16, 3)))
        else:
            state = model.init_encode_state(1, 16, 16)
            apply("encode_chunk", state, jnp.zeros((1, frames, 16, 16, 3)), first=first)


def test_config_errors_name_the_field():
    with pytest.raises(ValueError, match="decoder_widths"):
        TinyVaeConfig(decoder_widths=(8, 8))
    with pytest.raises(TypeError, match="width"):
        build("tiny", width=3)
