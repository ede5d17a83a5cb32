"""Packed weights: small files that serve wherever a trained stage does."""

import jax.numpy as jnp
import numpy as np
import pytest
import random_workdir

from wp2_jax import tree
from wp2_jax.checkpoints import trained
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.inference import load
from wp2_jax.inference.quantize import quantize
from wp2_jax.stages import pack, run
from wp2_jax.stages.context import StageError


def test_packed_weights_serve_as_a_checkpoint_and_as_finished_stages(tmp_path):
    """Averages to bfloat16's precision, the same config, and errors where something is missing."""
    stages = ("base", "teacher_forcing", "pdd", "stable_forcing")
    workdir = random_workdir.write(tmp_path / "run", stages)
    files = pack.pack(workdir, tmp_path / "packed", ("autoencoder", *stages))
    assert sum(path.stat().st_size for path in files) < 0.3 * sum(
        path.stat().st_size for path in workdir.rglob("*") if path.is_file()
    )
    for mode in ("few_step", "ar"):
        before, after = load.load(workdir, mode), load.load(tmp_path / "packed", mode)
        assert (after.source.stage, after.source.step) == (before.source.stage, before.source.step)
        assert after.world == before.world and after.source.trained_rotation == before.source.trained_rotation
        for name in ("params", "text_params"):
            ours, theirs = (tree.named_leaves(getattr(loaded, name)) for loaded in (after, before))
            assert ours.keys() == theirs.keys()
            for leaf, value in theirs.items():
                assert ours[leaf].dtype == jnp.float32
                np.testing.assert_allclose(ours[leaf], value, rtol=2**-8, err_msg=leaf)
    assert run._finished(tmp_path / "packed" / "teacher_forcing", 10**9)
    with pytest.raises(CheckpointError, match=r"weights.safetensors has no fake; it has student"):
        trained.load_params(tmp_path / "packed" / "stable_forcing", "fake")
    damaged = tmp_path / "packed" / "pdd" / trained.FILE
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.load(tmp_path / "packed" / "pdd", "few_step")
    with pytest.raises(StageError, match="has no trained memory_2"):
        pack.pack(workdir, tmp_path / "again")
    with pytest.raises(StageError, match="stages memory_1 cannot be packed; choose from autoencoder, base"):
        pack.pack(workdir, tmp_path / "again", ("memory_1",))
    assert not (tmp_path / "again").exists()


def test_the_text_encoder_is_that_of_the_last_stage_before_that_trained_it(tmp_path):
    """`events` doubles the weights of the encoder: for itself and what follows, not for what comes before."""
    stages = ("base", "events", "teacher_forcing")
    workdir = random_workdir.write(tmp_path / "run", stages)
    first, own, later = (
        load.load(workdir / name, mode).text_params for name, mode in zip(stages, ("bi", "bi", "ar"), strict=True)
    )
    for name, value in tree.named_leaves(first).items():
        np.testing.assert_array_equal(2 * value, tree.named_leaves(own)[name])
        np.testing.assert_array_equal(2 * value, tree.named_leaves(later)[name])

    assert pack.default(workdir)[1] == "events"
    pack.pack(workdir, tmp_path / "packed", ("autoencoder", "events", "teacher_forcing"))
    packed = tree.named_leaves(load.load(tmp_path / "packed", "ar").text_params)
    np.testing.assert_allclose(packed["norm/scale"], tree.named_leaves(later)["norm/scale"], rtol=2**-8)

    for mode, stage in (("bi", "events"), ("ar", "teacher_forcing")):
        quantize(load.locate(workdir, mode), tmp_path / mode, "int8")
        made = load.load(tmp_path / mode, mode)
        assert made.source.stage == stage
        np.testing.assert_allclose(tree.named_leaves(made.text_params)["norm/scale"], packed["norm/scale"], rtol=2**-8)
