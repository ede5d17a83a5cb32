"""Eight bits: matrices and products against NumPy's integers, presets, and folders that `wp2 quantize` writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_workdir
from random_workdir import write_inputs

from wp2_jax import cli, tree
from wp2_jax.controls.inputs import load_inputs
from wp2_jax.inference import generate, load, precision
from wp2_jax.inference.quantize import quantize
from wp2_jax.models import passes, quantized


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return random_workdir.write(tmp_path_factory.mktemp("curriculum"), ("base", "pdd", "stable_forcing"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_errs_by_half_a_step(dtype):
    """Steps of 1/127.5 of the largest in a column (of matrices) or of a token (of what they are multiplied with)."""
    random = np.random.default_rng(0)
    kernel = random.normal(size=(3, 48, 20)).astype(np.float32)
    kernel[:, :, 3] *= 1000  # a loud column costs the others nothing
    x = np.asarray(random.normal(size=(2, 5, 48)), dtype)
    x[0, 0] *= 1000  # nor a loud token
    matrix = quantized.quantize(jnp.asarray(kernel), "int8", activations=True)
    scale = np.abs(kernel).max(1, keepdims=True) / 127.5
    assert matrix.values.dtype == jnp.int8
    np.testing.assert_allclose(matrix.scale, scale, rtol=1e-6)
    assert np.abs(kernel / scale - np.asarray(matrix.values)).max() < 0.501

    layer = jax.tree.map(lambda a: a[1], matrix)
    wide, whole = np.asarray(x, np.float64), np.asarray(layer.values, np.float64) * scale[1]
    exact, size = wide @ whole, np.abs(wide) @ np.abs(whole)
    rounding = 2**-7 if dtype == jnp.bfloat16 else 1e-6
    alone = jax.jit(quantized.matmul)(x, layer.replace(activations=False))
    assert alone.dtype == dtype
    assert (np.abs(np.asarray(alone, np.float64) - exact) < rounding * size).all()

    both = np.asarray(jax.jit(quantized.matmul)(x, layer), np.float64)
    step = np.abs(wide).max(-1, keepdims=True) / 127.5
    error = np.abs(both - exact)
    assert (error < 0.501 * step * np.abs(whole).sum(0) + rounding * size).all()
    assert error.mean() > 0.01 * (step * np.abs(whole).sum(0)).mean()
    np.testing.assert_array_equal(quantized.rows(layer, 8, 12).values, layer.values[8:12])


def test_fp8_keeps_three_bits_of_mantissa():
    kernel = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    matrix = quantized.quantize(jnp.asarray(kernel), "fp8")
    assert matrix.values.dtype == jnp.float8_e4m3fn
    large = np.abs(kernel) > 0.05
    error = np.abs(quantized.dequantize(matrix) - kernel)[large] / np.abs(kernel)[large]
    assert 2**-6 < error.max() <= 2**-4 + 1e-3


@pytest.mark.parametrize(
    "name", ["int8", "fp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "bf16", "int8-w8a8"))]
)
def test_presets_change_the_blocks_matrices_alone(workdir, name):
    full = load.load(workdir, "few_step").params["experts"]["high"]
    source = load.locate(workdir, "few_step", name)
    made = load.load(source).params["experts"]["high"]
    whole, ours = tree.named_leaves(full), tree.named_leaves(made)
    kept = {leaf: value for leaf, value in whole.items() if not tree.matches(leaf, precision.MATRICES)}
    assert all(ours[leaf].dtype == jnp.float32 and np.array_equal(ours[leaf], value) for leaf, value in kept.items())
    assert len(whole) - len(kept) == 12
    form = precision.PRESETS[name].form
    dtypes = {"int8", "float32"} if form == "int8" else {"float8_e4m3fn", "float32"}
    wanted = dtypes if form else {precision.PRESETS[name].dtype or "float32"}
    assert {value.dtype.name for leaf, value in ours.items() if leaf not in kept} == wanted

    # A pass in the preset's dtype comes near the one in full precision, as near as its bits allow.
    def displacement(params, model) -> np.ndarray:
        spec = source.world.stream("few_step", 1)
        cache = passes.empty_cache(model, spec.layout, 1)
        key = jax.random.key(0)
        h, w = spec.latent_height, spec.latent_width
        latents, y = jax.random.normal(key, (1, 4, h, w, 16)), jnp.zeros((1, 4, h, w, 20))
        places = jnp.arange(4, dtype=jnp.int32)[None]
        t, actions = jnp.full((1, 4), 900.0), jnp.zeros((1, 4, 6))
        frames = passes.full_frames(model, params, latents, y, t, actions, places, jnp.zeros_like(places))
        contexts = jnp.ones((1, 1, 4, model.config.text_dim))
        return np.asarray(passes.denoise(model, params, cache, frames, contexts, jnp.asarray(0))[1])

    exact = displacement(full, load.locate(workdir, "few_step").world.stream("few_step", 1).models["high"])
    near = displacement(made, source.world.stream("few_step", 1).models["high"])
    assert near.dtype == np.float32
    error = np.sqrt(np.square(near - exact).mean() / np.square(exact).mean())
    assert error == 0 if name == "full" else 1e-4 < error < (0.1 if form == "fp8" else 0.03), error


def test_a_quantized_folder_plays_like_quantizing_at_the_start(workdir, tmp_path, capsys):
    out = tmp_path / "int8"
    assert cli.main(["quantize", "--checkpoint", str(workdir), "--output", str(out), "--precision", "int8"]) == 0
    said = capsys.readouterr().out
    assert "high/blocks/self_attention/q" in said and "low/blocks/action/out" in said and "stable_forcing" in said
    ours, theirs = load.load(out, "few_step"), load.load(load.locate(workdir, "few_step", "int8"))
    assert ours.source.stored == "int8" and ours.world == theirs.world
    for leaf, value in tree.named_leaves(theirs.params["experts"]).items():
        found = tree.named_leaves(ours.params["experts"])[leaf]
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value, err_msg=leaf)
    items = load_inputs(write_inputs(tmp_path, 4), generate.input_options(ours.source))
    (request,) = generate.prepare(ours.source, ours.tokenizer, items)
    (pictures,) = generate.generate(ours, request, 0)
    assert pictures.shape == (13, 64, 64, 3) and np.isfinite(pictures).all()

    with pytest.raises(ValueError, match="weights are int8, which gives int8 or int8-w8a8"):
        load.locate(out, "few_step", "full")
    with pytest.raises(ValueError, match="is in int8 already"):
        quantize(load.locate(out, "few_step"), tmp_path / "again", "fp8")
    with pytest.raises(ValueError, match="can be written in int8 or fp8"):
        quantize(load.locate(workdir, "few_step"), tmp_path / "again", "bf16")
    with pytest.raises(ValueError, match="give one of full, bf16"):
        load.locate(workdir, "few_step", "int4")
    assert not (tmp_path / "again").exists()


def test_a_device_without_the_product_says_what_to_use(workdir):
    with pytest.raises(ValueError, match=r"does not multiply fp8 by fp8; use fp8 .* bf16 or full"):
        load.locate(workdir, "few_step", "fp8-w8a8")


def test_quality_table(workdir):
    """int8 errs by a step of scale / 12 ** 0.5, whatever the layer: for normal numbers some 0.7%."""
    weights = load.load(workdir, "few_step").params["experts"]["high"]
    rows = precision.losses("high", weights, precision.cast(weights, precision.PRESETS["int8"]))
    assert len(rows) == 12
    for row in rows:
        assert 0.003 < row.error < 0.02 and 0 < row.scales[0] <= row.scales[1]
        assert row.after < 0.35 * row.before
