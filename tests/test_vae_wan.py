"""The Wan2.1 VAE against golden numbers, and its streams against the one-shot results."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from safetensors.numpy import load_file, save_file
from streamed_vae import FAST_COMPILE, golden_vae, stream

from wp2_jax.checkpoints.names_vae import wan_rules
from wp2_jax.checkpoints.torch_names import flatten, from_tree, to_tree
from wp2_jax.models.autoencoder import build, init_params
from wp2_jax.models.convolution import causal_conv, last_frames, upsample
from wp2_jax.models.vae_wan import WanVae, WanVaeConfig
from wp2_jax.verify.autoencoders import check_wan, wan_model


@pytest.fixture(scope="module")
def vae(golden):
    return golden_vae(*wan_model(golden))


def random_video(frames, size=16, batch=1):
    return jax.random.uniform(jax.random.key(frames), (batch, frames, size, size, 3), minval=-1.0, maxval=1.0)


def test_golden(golden):
    results = check_wan(golden)
    assert len(results) == 9
    assert [r for r in results if not r.ok] == []


def test_unknown_tensor_and_impossible_split_are_failures(golden, tmp_path):
    for name in ("weights_vae.json", "weights_vae.safetensors", "h_vae.json"):
        (tmp_path / name).write_bytes((golden / name).read_bytes())
    tensors = load_file(golden / "h_vae.safetensors")
    kept = {k: tensors[k] for k in ("in.video", "in.z", "out.mean")}
    extra = {"out.histogram": tensors["out.mean"], "out.stream_encode_9_6": tensors["out.encode9"]}
    save_file({**kept, **extra}, tmp_path / "h_vae.safetensors")
    verdicts = {r.item: (r.ok, r.note) for r in check_wan(tmp_path)}
    assert verdicts["h_vae/out.mean"][0]
    assert verdicts["h_vae/out.histogram"] == (False, "unknown tensor")
    assert not verdicts["h_vae/out.stream_encode_9_6"][0] and "4 or 8" in verdicts["h_vae/out.stream_encode_9_6"][1]


@pytest.mark.parametrize("sizes", [(1, 4, 4), (5, 4)])
def test_streaming_encode(vae, sizes):
    video = random_video(9)
    np.testing.assert_allclose(stream(vae, "encode", video, sizes), vae[1]("encode", video), atol=1e-5)


@pytest.mark.parametrize("step", [1, 4, 12])
def test_streaming_decode(vae, step):
    latents = jax.random.normal(jax.random.key(1), (1, 12, 1, 2, 16))
    whole = vae[1]("decode", latents)
    assert whole.shape == (1, 45, 8, 16, 3)
    np.testing.assert_allclose(stream(vae, "decode", latents, [step] * (12 // step)), whole, atol=1e-5)


@pytest.mark.parametrize(("given", "used"), [(7, 5), (15, 13)])
def test_first_chunk_drops_pictures_that_fill_no_latent(vae, given, used):
    video = random_video(15)
    np.testing.assert_allclose(stream(vae, "encode", video, [given]), vae[1]("encode", video[:, :used]), atol=1e-5)


def test_batch_entries_are_independent(vae):
    video = random_video(5, batch=2)
    both = vae[1]("encode", video)
    np.testing.assert_allclose(both[1:], vae[1]("encode", video[1:]), atol=1e-5)


def test_published_names_and_shapes(golden):
    manifest = json.loads((golden / "manifests/m3_wan21_vae.json").read_text())
    config = WanVaeConfig()
    tree = jax.eval_shape(lambda: init_params(WanVae(config), jax.random.key(0)))
    arrays = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), tree)
    rules = wan_rules(config)
    assert {rule.ours for rule in rules} == set(flatten(tree))
    # Only the shapes of the transforms' results are needed, so no rule is made to copy half a gigabyte.
    ours = {rule.theirs: list(rule.transform.to_theirs(flatten(arrays)[rule.ours]).shape) for rule in rules}
    assert ours == {name: entry["shape"] for name, entry in manifest["tensors"].items()}
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == manifest["parameters"]


def test_names_round_trip_and_strict_loading(golden):
    weights = {k.removeprefix("w."): v for k, v in load_file(golden / "weights_vae.safetensors").items()}
    model, _ = wan_model(golden)
    rules = wan_rules(model.config)
    back = from_tree(rules, to_tree(rules, weights))
    assert set(back) == set(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(back[name], array)
    del weights["conv2.bias"]
    with pytest.raises(ValueError, match=r"missing conv2\.bias"):
        to_tree(rules, weights)


def test_stays_float32_when_bfloat16_is_given(vae, golden):
    model, params = wan_model(golden)
    half = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), params)
    video = random_video(5).astype(jnp.bfloat16)
    widened = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    encode = jax.jit(partial(model.apply, method="encode"), compiler_options=FAST_COMPILE)
    got = encode({"params": half}, video)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, encode({"params": widened}, video.astype(jnp.float32)), atol=1e-5)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.init_decode_state(1, 16, 16))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("method", "shape"),
    [("decode_raw", (1, 2, 1, 1, 16)), pytest.param("__call__", (1, 5, 8, 8, 3), marks=pytest.mark.slow)],
)
def test_gradient_is_finite(golden, method, shape):
    model, _ = wan_model(golden)
    params = init_params(model, jax.random.key(0))
    x = jax.random.normal(jax.random.key(4), shape)

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.asarray(model.apply({"params": params}, x, method=method))))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=FAST_COMPILE)(params, x)
    for leaf in jax.tree.leaves(gradients):
        assert bool(jnp.isfinite(leaf).all())
    assert bool(jnp.any(gradients[1] != 0))


@pytest.mark.parametrize(
    ("shape", "first", "message"),
    [
        ((1, 0, 16, 16, 3), None, "at least 1"),
        ((1, 15, 16, 16, 3), None, "13 or 17"),
        ((1, 16, 16, 16, 3), None, "13 or 17"),
        ((1, 80, 16, 16, 3), None, "77 or 81"),
        ((1, 5, 30, 16, 3), None, "24x16 or 32x16"),
        ((1, 6, 16, 16, 3), False, "4 or 8"),
        ((1, 0, 16, 16, 3), True, "at least 1"),
        ((5, 16, 16, 3), None, "B, F, H, W, 3"),
    ],
)
def test_shapes_that_cannot_be_encoded(vae, shape, first, message):
    model, apply = vae
    with pytest.raises(ValueError, match=message):
        if first is None:
            apply("encode", jnp.zeros(shape))
        else:
            apply("encode_chunk", model.init_encode_state(1, 16, 16), jnp.zeros(shape), first=first)


def test_config_errors_name_the_field():
    with pytest.raises(ValueError, match="mean has 2"):
        WanVaeConfig(mean=(0.0, 1.0))
    with pytest.raises(ValueError, match="temporal_downsample"):
        WanVaeConfig(temporal_downsample=(True,))
    with pytest.raises(ValueError, match="4 pictures, not 8 and 2"):
        WanVaeConfig(temporal_downsample=(False, False, True))
    with pytest.raises(TypeError, match="widht"):
        build("wan", widht=3)
    with pytest.raises(ValueError, match="'wan' or 'tiny'"):
        build("huge")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("stride", [1, 2])
def test_causal_conv_is_a_3d_convolution(stride):
    x = jax.random.normal(jax.random.key(0), (2, 4, 5, 6, 3))
    history = jax.random.normal(jax.random.key(1), (2, 2, 5, 6, 3))
    kernel = jax.random.normal(jax.random.key(2), (3, 3, 3, 3, 7))
    expected = lax.conv_general_dilated(
        jnp.concatenate([history, x], axis=1),
        kernel,
        (stride, 1, 1),
        ((0, 0), (1, 1), (1, 1)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )
    np.testing.assert_allclose(causal_conv(x, kernel, history, stride), expected, rtol=1e-5, atol=1e-4)


def test_history_and_upsampling_by_hand():
    frames = jnp.arange(3.0).reshape(1, 3, 1, 1, 1)
    assert last_frames(frames[:, :2], frames[:, 2:]).ravel().tolist() == [1.0, 2.0]
    picture = jnp.array([[1.0, 2.0]]).reshape(1, 1, 2, 1)
    assert upsample(picture)[0, ..., 0].tolist() == [[1.0, 1.0, 2.0, 2.0]] * 2
