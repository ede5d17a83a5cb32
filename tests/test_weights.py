"""A stage's weights one array or some rows at a time, from a run's checkpoint and packed, cut over devices too."""

import jax
import numpy as np
import pytest
import random_workdir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wp2_jax import tree
from wp2_jax.checkpoints import trained
from wp2_jax.checkpoints.tensor_file import CheckpointError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    workdir = random_workdir.write(tmp_path_factory.mktemp("run"), ("stable_forcing",))
    packed = tmp_path_factory.mktemp("packed")
    trained.pack(workdir / "stable_forcing", packed, ("student",))
    return workdir / "stable_forcing", packed


def test_rows_are_those_of_the_whole(folders):
    for folder in folders:
        whole = tree.named_leaves(trained.load_params(folder, "student/high", ema=True))
        weights = trained.Weights(folder, "student/high")
        assert weights.specs.keys() == whole.keys()
        for name, value in whole.items():
            assert weights.specs[name].shape == value.shape
            np.testing.assert_array_equal(np.asarray(weights.read(name), np.float32), value)
            for row in range(value.shape[0]):
                rows = weights.read(name, slice(row, row + 1))
                np.testing.assert_array_equal(np.asarray(rows, np.float32), value[row : row + 1])
    raw, average = (trained.Weights(folders[0], "student/high", ema=ema).read("patch_bias") for ema in (False, True))
    np.testing.assert_array_equal(average, np.float32(1.25) * raw)


def test_roles_are_listed(folders):
    assert trained.roles(folders[0]) == {"fake": False, "student": True}
    assert trained.roles(folders[1]) == {"student": True}
    with pytest.raises(CheckpointError, match="has no ema/fake; it has ema/student, params/fake, params/student"):
        trained.Weights(folders[0], "fake")


def test_packed_weights_are_cut_over_devices_and_cast_as_asked(folders):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))

    def like(leaf):
        fits = leaf.ndim > 1 and leaf.shape[1] % 2 == 0
        spec = PartitionSpec(None, "x") if fits else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, np.dtype("bfloat16"), sharding=NamedSharding(mesh, spec))

    whole = trained.load_params(folders[1], "student")
    cut = trained.load_params(folders[1], "student", abstract=jax.tree.map(like, whole))
    for name, value in tree.named_leaves(cut).items():
        assert value.dtype == "bfloat16" and value.sharding.mesh == mesh
        np.testing.assert_array_equal(np.asarray(value, np.float32), tree.named_leaves(whole)[name])
