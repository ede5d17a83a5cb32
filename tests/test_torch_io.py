"""Readers of PyTorch-side weights against what safetensors and torch wrote; damaged files name themselves."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from wp2_jax.checkpoints import tensor_file, torch_io
from wp2_jax.checkpoints.orbax_io import CheckpointError

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.asarray([1.5, -2], ml_dtypes.bfloat16),
}


SPECS = {"a.weight": torch_io.Spec((2, 3), "float32"), "b.bias": torch_io.Spec((2,), "bfloat16")}


def pieces(name):
    """By rows."""
    return iter(TENSORS[name])


def check(reader):
    assert reader.specs == SPECS
    np.testing.assert_array_equal(reader.read("a.weight", slice(1, 2)), TENSORS["a.weight"][1:])
    np.testing.assert_array_equal(reader.read("b.bias", slice(0, 1)), TENSORS["b.bias"][:1])
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
    for wrong in ({"weight_map": {"a.weight": 3}}, {"weight_map": ["a"]}, {"weight_map": {}}, [], {"maps": {}}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=r"m\.safetensors\.index\.json: no index with a weight_map"):
            torch_io.open_weights(index)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"one\.safetensors, s1\.safetensors: name one of them"):
        torch_io.open_weights(tmp_path)
    (tmp_path / "s1.safetensors").unlink()
    check(torch_io.open_weights(tmp_path))
    with pytest.raises(CheckpointError, match="leave the choice out"):
        torch_io.open_weights(tmp_path, average=True)
    whole = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors: the arrays cannot be read"):
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


def test_the_average_is_taken_when_asked_for(tmp_path):
    torch = pytest.importorskip("torch")
    raw, average = ({"a": torch.full((2,), value)} for value in (1.0, 2.0))
    torch.save({"generator": raw, "generator_ema": average, "step": 3}, tmp_path / "both.pt")
    torch.save({"state_dict": {"generator": raw}}, tmp_path / "raw.pt")
    torch.save(raw, tmp_path / "bare.pt", _use_new_zipfile_serialization=False)
    for choice, value in ((True, 2.0), (False, 1.0)):
        reader = torch_io.open_weights(tmp_path / "both.pt", choice)
        np.testing.assert_array_equal(reader.read("a"), np.full(2, value, np.float32))
    with pytest.raises(CheckpointError, match="choose raw or ema"):
        torch_io.open_weights(tmp_path / "both.pt")
    assert torch_io.open_weights(tmp_path / "raw.pt").wrappers == ("state_dict", "generator")
    for name in ("raw.pt", "bare.pt"):
        np.testing.assert_array_equal(torch_io.open_weights(tmp_path / name).read("a"), np.ones(2, np.float32))
        with pytest.raises(CheckpointError, match=f"{name} has no generator_ema to take"):
            torch_io.open_weights(tmp_path / name, True)


@pytest.mark.parametrize(("limit", "files"), [(10**6, 1), (24, 3)])
def test_what_is_written_is_read_by_safetensors_too(tmp_path, limit, files):
    (tmp_path / "w2.safetensors").touch()
    for older in (10, 10**6):  # what they leave goes away
        torch_io.write_weights(tmp_path / "w", {"x": torch_io.Spec((4, 4), "float32")} | SPECS, more, older)
    paths = torch_io.write_weights(tmp_path / "w", SPECS, pieces, limit)
    (tmp_path / "w2.safetensors").unlink()
    assert sorted(tmp_path.iterdir()) == sorted(paths) and len(paths) == files
    check(torch_io.open_weights(paths[-1]))
    named = {name: value for path in paths if path.suffix == ".safetensors" for name, value in load_file(path).items()}
    np.testing.assert_array_equal(named["b.bias"], TENSORS["b.bias"])


def more(name):
    return [np.zeros((4, 4))] if name == "x" else pieces(name)


def test_nothing_is_left_of_a_write_that_fails(tmp_path):
    with pytest.raises(ValueError, match=r"b.bias has 2 elements, and \(7,\) was to be written"):
        torch_io.write_weights(tmp_path / "w", SPECS | {"b.bias": torch_io.Spec((7,), "bfloat16")}, pieces, 24)
    assert not list(tmp_path.iterdir())


def test_arrays_of_every_kind_are_aligned_and_read_back(tmp_path):
    """Also those that are less aligned than what follows them, empty ones and single numbers."""
    named = {
        "odd": np.asarray([1, 2, 3], np.int8),
        "key": np.asarray([7, 8], np.uint32),
        "eight": np.asarray([0.5, -2], ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 3), np.float16),
        "one": np.asarray(2.5),
        "on": np.asarray([True, False]),
    }
    path = tensor_file.write(tmp_path / "new" / "x.safetensors", named, {"step": 3})
    assert tensor_file.read_metadata(path) == {"step": 3}
    found = tensor_file.read(path)
    assert found.keys() == named.keys()
    with safe_open(path, "np") as library:
        for name, value in named.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            np.testing.assert_array_equal(found[name], value)
            if name != "eight":  # the library has no NumPy dtype for it
                np.testing.assert_array_equal(library.get_tensor(name), value)
    assert tensor_file.TensorFile(path).read("odd", slice(1, 3)).tolist() == [2, 3]
