"""Weights as PyTorch programs keep them: names, shapes and dtypes without the data, then one tensor at a time.

A file is `.safetensors`, a set of those with its `*.index.json`, or `.pt` / `.pth`. Only the last kind needs torch.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from wp2_jax.checkpoints.orbax_io import CheckpointError

WRAPPERS = ("generator_ema", "generator", "state_dict", "model")
PREFIXES = ("module.", "model.")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


class Spec(NamedTuple):
    """Shape and dtype (NumPy's name, or "bfloat16") of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class Reader:
    """`specs` by name, and `read(name)`: one tensor, copied from the mapped file."""

    def __init__(self, specs: Mapping[str, Spec], sources: Mapping[str, Any]):
        self.specs = _bare(specs)
        self._sources = _bare(sources)

    def read(self, name: str) -> np.ndarray:
        return self._sources[name]()


def open_weights(path: str | os.PathLike[str]) -> Reader:
    """A reader of a weights file or of the index of a sharded set. CheckpointError, naming the file, otherwise."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    if path.name.endswith(".index.json"):
        return _sharded(path)
    if path.suffix == ".safetensors":
        return Reader(*_safetensors(path))
    if path.suffix in (".pt", ".pth"):
        return _pickled(path)
    raise CheckpointError(f"{path}: give a .safetensors, .safetensors.index.json, .pt or .pth file")


def _bare(named: Mapping[str, Any]) -> dict[str, Any]:
    """The names without what wrappers of modules put before all of them."""
    named = dict(named)
    while prefix := next((p for p in PREFIXES if named and all(name.startswith(p) for name in named)), None):
        named = {name.removeprefix(prefix): value for name, value in named.items()}
    return named


def _safetensors(path: Path) -> tuple[dict[str, Spec], dict[str, Any]]:
    specs = {}
    try:
        file = safetensors.safe_open(path, framework="numpy")
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            part = file.get_slice(name)
            dtype = part.get_dtype()
            if dtype not in _DTYPES:
                raise CheckpointError(f"{path}: {name} is {dtype}; of use are {', '.join(_DTYPES)}")
            specs[name] = Spec(tuple(part.get_shape()), _DTYPES[dtype])
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: the weights cannot be read ({error})") from error
    return specs, {name: lambda name=name: file.get_tensor(name) for name in specs}


def _sharded(path: Path) -> Reader:
    try:
        shards = dict(json.loads(path.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no index with a weight_map ({error})") from error
    specs, sources = {}, {}
    for shard in sorted(set(shards.values())):
        file = path.parent / shard
        if not file.is_file():
            raise CheckpointError(f"{path} names {shard}, and there is no {file}")
        held, readers = _safetensors(file)
        listed = {name for name, where in shards.items() if where == shard}
        if listed != set(held):
            wrong = sorted(listed ^ set(held))
            raise CheckpointError(f"{file} does not hold what {path.name} says: {', '.join(wrong)}")
        specs |= held
        sources |= readers
    return Reader(specs, sources)


def _pickled(path: Path) -> Reader:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CheckpointError(f"{path}: PyTorch reads such files; pip install 'wp2_jax[torch]'") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for damaged files and for pickles with code
        first = str(error).split("\n")[0]
        raise CheckpointError(f"{path}: damaged, or not weights alone (code is refused): {first}") from error
    while isinstance(state, dict) and (key := next((w for w in WRAPPERS if isinstance(state.get(w), dict)), None)):
        state = state[key]
    wrong = [] if isinstance(state, dict) else [type(state).__name__]
    wrong = wrong or [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise CheckpointError(f"{path}: not a dict of tensors: {', '.join(wrong)}")

    def read(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    specs = {name: Spec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in state.items()}
    return Reader(specs, {name: lambda x=x: read(x).copy() for name, x in state.items()})


def write_weights(
    stem: str | os.PathLike[str],
    specs: Mapping[str, Spec],
    read: Callable[[str], np.ndarray],
    max_shard_size: int = 5 * 10**9,
) -> list[Path]:
    """Write tensors, one at a time, as stem.safetensors or as numbered shards with stem.safetensors.index.json.

    `read(name)` gives a tensor of the shape in `specs`; it is cast to the dtype there. A shard holds at most
    `max_shard_size` bytes, or one larger tensor. Files get their names when all are whole, the index last; returns
    their paths. Raises ValueError for a tensor of another shape, with nothing left behind.
    """
    stem = Path(stem)
    shards: list[dict[str, int]] = []
    for name, spec in specs.items():
        size = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
        if not shards or sum(shards[-1].values()) + size > max_shard_size:
            shards.append({})
        shards[-1][name] = size
    count = len(shards)
    ends = [".safetensors"] if count == 1 else [f"-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    texts = {}
    if count > 1:
        where = {name: stem.name + end for shard, end in zip(shards, ends, strict=True) for name in shard}
        total = sum(sum(shard.values()) for shard in shards)
        texts[".safetensors.index.json"] = json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + end) for end in (*ends, *texts)]
    with tempfile.TemporaryDirectory(dir=stem.parent, prefix=".part-") as folder:
        for shard, end in zip(shards, ends, strict=True):
            _write_shard(Path(folder, stem.name + end), shard, specs, read)
        for end, text in texts.items():
            Path(folder, stem.name + end).write_text(text, "utf-8")
        for path in paths:
            os.replace(Path(folder, path.name), path)
    return paths


def _write_shard(
    path: Path, sizes: Mapping[str, int], specs: Mapping[str, Spec], read: Callable[[str], np.ndarray]
) -> None:
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    header, at = {}, 0
    for name, size in sizes.items():
        shape, dtype = specs[name]
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sizes:
            array = read(name)
            if array.shape != tuple(specs[name].shape):
                raise ValueError(f"{name} is {array.shape}, and {tuple(specs[name].shape)} was to be written")
            file.write(np.ascontiguousarray(array, np.dtype(specs[name].dtype)).tobytes())
