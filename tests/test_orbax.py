"""Checkpoints: another mesh, weights alone, and every way in which one can be wrong."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax import rng, sharding, tree
from wp2_jax.checkpoints import orbax_io
from wp2_jax.checkpoints.orbax_io import CheckpointError, Checkpoints
from wp2_jax.sharding import MeshConfig
from wp2_jax.train import optim, state, step
from wp2_jax.train.optim import OptimConfig

# TensorStore drops the other reads of a damaged checkpoint without asking for their results.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

OPTIMISERS = {
    "high": optim.make(OptimConfig(frozen=("old",))),
    "low": optim.make(OptimConfig(b1=0.0, schedule="cosine", steps=9)),
}


def init(key, given, width=48):
    def weights(name):
        return {
            "blocks": {"q": {"kernel": jax.random.normal(rng.fold(key, name), (3, 64, width))}},
            "old": jnp.ones((5,), jnp.bfloat16),
        }

    return state.create(key, {"high": weights("high"), "low": weights("low")}, OPTIMISERS, ema=("high",))


def abstract(mesh, width=48):
    shapes = jax.eval_shape(lambda key: init(key, {}, width), rng.base_key(0))
    return sharding.abstract(shapes, sharding.RULES, mesh)


def numbers(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (name, x), y in zip(tree.named_leaves(a).items(), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(numbers(x), numbers(y), err_msg=name)
        assert x.dtype == y.dtype, name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state on 8 devices, saved at step 7."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    mesh = sharding.make_mesh(MeshConfig(data=2))
    full = step.jit_init(init, rng.base_key(5), {}, mesh, sharding.RULES)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(7, full, {"loader": b"\x00position", "stage": "base", "nested": {"a": [1, 2]}})
    return folder, full


@pytest.mark.parametrize(
    ("devices", "config"),
    [(8, MeshConfig(data=2)), (8, MeshConfig(fsdp=2, seq=2, tensor=2)), (4, MeshConfig()), (1, MeshConfig())],
)
def test_restores_bit_equal_on_any_mesh(saved, devices, config):
    folder, full = saved
    mesh = sharding.make_mesh(config, jax.devices()[:devices])
    with Checkpoints(folder) as checkpoints:
        restored, metadata = checkpoints.restore(abstract(mesh))
    assert_equal(restored, full)
    kernel = restored.params["low"]["blocks"]["q"]["kernel"]
    assert kernel.sharding.mesh == mesh
    assert metadata == {"loader": b"\x00position", "stage": "base", "nested": {"a": [1, 2]}}


def test_weights_alone(saved):
    folder, full = saved
    assert_equal(orbax_io.load_params(folder), full.params)
    assert_equal(orbax_io.load_params(folder, "low"), full.params["low"])
    assert_equal(orbax_io.load_params(folder, "high", ema=True), full.ema["high"])
    mesh = sharding.make_mesh(MeshConfig())
    like = sharding.abstract(full.params["low"], sharding.RULES, mesh)
    on_mesh = orbax_io.load_params(folder, "low", abstract=like)
    assert_equal(on_mesh, full.params["low"])
    assert on_mesh["blocks"]["q"]["kernel"].sharding == like["blocks"]["q"]["kernel"].sharding
    with pytest.raises(CheckpointError, match="no ema/low; it has ema/high, params/high, params/low"):
        orbax_io.load_params(folder, "low", ema=True)
    with pytest.raises(tree.TreeMismatchError, match=r"blocks/q/kernel \(3, 64, 48\), expected \(3, 64, 32\)"):
        orbax_io.load_params(folder, "low", abstract=abstract(mesh, width=32).params["low"])


def test_missing_extra_and_misshapen_are_listed_together(saved):
    folder, _ = saved
    want = abstract(sharding.make_mesh(MeshConfig()), width=32)
    want.params["low"]["new"] = want.params["low"].pop("old")
    with Checkpoints(folder) as checkpoints, pytest.raises(tree.TreeMismatchError) as error:
        checkpoints.restore(want)
    text = str(error.value)
    assert "missing    params/low/new (5,)" in text
    assert "extra      params/low/old (5,)" in text
    assert "misshapen  params/high/blocks/q/kernel (3, 64, 48), expected (3, 64, 32)" in text


def data_files(folder):
    return sorted((p for p in (folder / "7" / "state").rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)


@pytest.mark.parametrize("how", ["truncated", "emptied", "removed", "no index", "no metadata"])
def test_damaged_files_are_errors(saved, tmp_path, how):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved[0], folder)
    largest = data_files(folder)[0]
    if how == "truncated":
        os.truncate(largest, largest.stat().st_size // 2)
    elif how == "emptied":
        os.truncate(largest, 0)
    elif how == "removed":
        largest.unlink()
    elif how == "no index":
        (folder / "7" / "state" / "_METADATA").unlink()
    else:
        os.truncate(folder / "7" / "metadata" / "metadata", 5)
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.restore(abstract(sharding.make_mesh(MeshConfig())))


def test_no_checkpoint_names_the_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"none: no checkpoint .*there are \[\]"):
        orbax_io.load_params(tmp_path / "none")
    with Checkpoints(tmp_path / "new") as checkpoints, pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoints.restore({})


def test_a_save_cut_short_leaves_the_one_before(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved[0], folder)
    half = folder / "9.orbax-checkpoint-tmp"
    shutil.copytree(folder / "7", half)
    (half / "commit_success.txt").unlink(missing_ok=True)
    assert orbax_io.steps(folder) == [7]
    assert_equal(orbax_io.load_params(folder), saved[1].params)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest() == 7


def test_keeps_the_newest_and_saves_what_was_there_when_called(tmp_path):
    """Saving goes on in the background while the state that was saved is donated away."""
    grow = jax.jit(lambda x: jax.tree.map(lambda v: v + 1, x), donate_argnums=0)
    x = {"params": {"all": {"w": jnp.zeros((256, 1024))}}}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for now in range(1, 5):
            x = grow(x)
            checkpoints.save(now, x, {})
    assert orbax_io.steps(tmp_path) == [3, 4]
    for now in (3, 4):
        np.testing.assert_array_equal(orbax_io.load_params(tmp_path, step=now)["all"]["w"], np.full((256, 1024), now))
