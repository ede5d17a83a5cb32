"""Readers of PyTorch-side weights against what safetensors and torch wrote; damaged files name themselves."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wp2_jax.checkpoints import torch_io
from wp2_jax.checkpoints.orbax_io import CheckpointError

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.asarray([1.5, -2], ml_dtypes.bfloat16),
}


def check(reader):
    assert reader.specs == {"a.weight": ((2, 3), "float32"), "b.bias": ((2,), "bfloat16")}
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(reader.read(name), value)
        assert reader.read(name).dtype == value.dtype


def test_safetensors_and_shards(tmp_path):
    save_file({f"module.{k}": v for k, v in TENSORS.items()}, tmp_path / "one.safetensors")
    check(torch_io.open_weights(tmp_path / "one.safetensors"))
    files = {"a.weight": "s1.safetensors", "b.bias": "s2.safetensors"}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    check(torch_io.open_weights(index))
    (tmp_path / "s2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"there is no .*s2\.safetensors"):
        torch_io.open_weights(index)
    whole = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors: the weights cannot be read"):
        torch_io.open_weights(tmp_path / "cut.safetensors")


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_pickles(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.tensor([1.5, -2], dtype=torch.bfloat16)}
    torch.save({"generator_ema": {f"model.{k}": v for k, v in state.items()}}, tmp_path / "w.pt")
    check(torch_io.open_weights(tmp_path / "w.pt"))
    (tmp_path / "cut.pth").write_bytes((tmp_path / "w.pt").read_bytes()[:-40])
    torch.save({"a": Code()}, tmp_path / "code.pt")
    for name in ("cut.pth", "code.pt"):
        with pytest.raises(CheckpointError, match=f"{name}: damaged, or not weights alone"):
            torch_io.open_weights(tmp_path / name)


@pytest.mark.parametrize(("limit", "files"), [(10**6, 1), (24, 3)])
def test_what_is_written_is_read_by_safetensors_too(tmp_path, limit, files):
    specs = {"a.weight": torch_io.Spec((2, 3), "float32"), "b.bias": torch_io.Spec((2,), "bfloat16")}
    paths = torch_io.write_weights(tmp_path / "w", specs, TENSORS.__getitem__, limit)
    assert sorted(tmp_path.iterdir()) == sorted(paths) and len(paths) == files
    check(torch_io.open_weights(paths[-1]))
    named = {name: value for path in paths if path.suffix == ".safetensors" for name, value in load_file(path).items()}
    np.testing.assert_array_equal(named["b.bias"], TENSORS["b.bias"])


def test_nothing_is_left_of_a_write_that_fails(tmp_path):
    specs = {"a.weight": torch_io.Spec((2, 3), "float32"), "b.bias": torch_io.Spec((7,), "bfloat16")}
    with pytest.raises(ValueError, match=r"b.bias is \(2,\), and \(7,\) was to be written"):
        torch_io.write_weights(tmp_path / "w", specs, TENSORS.__getitem__, 24)
    assert not list(tmp_path.iterdir())
