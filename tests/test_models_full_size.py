"""The full-size models against the published lists of parameters; shapes only, nothing is made."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from wp2_jax.checkpoints.torch_names import published
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT, DiTConfig
from wp2_jax.verify import manifests

COUNTS = {
    "many-step expert": (1305, 17_460_184_640),
    "few-step expert": (1305, 17_461_167_872),
    "Wan2.1 VAE": (194, 126_892_531),
    "UMT5-XXL": (242, 5_680_910_336),
    "causal tiny autoencoder": (128, 11_315_539),
}


@pytest.mark.parametrize("model", COUNTS)
def test_counts(model):
    rules, ours = manifests.full_size(model)
    total = sum(math.prod(spec.shape) for spec in ours.values())
    assert (len(published(rules, ours)), total) == COUNTS[model]


def test_every_manifest_is_met(golden):
    met = []
    for path in sorted((golden / "manifests").glob("*.json")):
        model, results = manifests.check_manifest(path)
        met.append(model)
        assert not [r for r in results if not r.ok]
    assert sorted(met) == sorted(COUNTS)


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype", "count"])
def test_a_changed_manifest_is_noticed(golden, tmp_path, change):
    manifest = json.loads((golden / "manifests/m3_wan21_vae.json").read_text())
    tensors = manifest["tensors"]
    name = "encoder.conv1.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["encoder.conv9.weight"] = tensors[name]
    elif change == "shape":
        tensors[name]["shape"][2] = 5
    elif change == "dtype":
        tensors[name]["dtype"] = "bfloat16"
    else:
        manifest["parameters"] += 1
    path = tmp_path / "renamed.json"
    path.write_text(json.dumps(manifest))
    model, results = manifests.check_manifest(path)
    assert model == "Wan2.1 VAE"
    assert [r.item for r in results if not r.ok]


def test_a_manifest_of_something_else_is_unknown(tmp_path):
    path = tmp_path / "m6.json"
    path.write_text(json.dumps({"tensors": {"conv.weight": {"shape": [1], "dtype": "float32"}}}))
    model, results = manifests.check_manifest(path)
    assert model is None and not results[0].ok


def test_a_full_size_pass_has_the_right_shape():
    """832 x 480 pictures, a chunk of 4 latent frames with its memory, in bfloat16."""
    config = DiTConfig(dtype="bfloat16", param_dtype="bfloat16", remat="full")
    model = DiT(config)
    params = jax.eval_shape(lambda key: passes.init(config, key), jax.random.key(0))
    h, w, length = 56, 104, 8

    def zeros(*shape, dtype=jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    history = passes.History(
        zeros(1, length, h, w, 16),
        zeros(1, length, h, w, 20),
        zeros(1, length // 2, h // 4, w // 4, 16),
        zeros(1, length // 2, h // 4, w // 4, 20),
        zeros(1, length, 6),
        zeros(1, length, dtype=jnp.int32),
    )
    velocity = jax.eval_shape(
        lambda params, *arrays, history, length: passes.bidirectional(
            model, params, *arrays, history=history, length=length
        ),
        params,
        zeros(1, 4, h, w, 16),
        zeros(1, 4, h, w, 20),
        zeros(1, 4),
        zeros(1, 4, 6),
        zeros(1, 1, 512, 4096),
        zeros(1, 4, dtype=jnp.int32),
        zeros(1, 4, dtype=jnp.int32),
        history=history,
        length=zeros(1, dtype=jnp.int32),
    )
    assert velocity.shape == (1, 4, h, w, 16) and velocity.dtype == jnp.float32
