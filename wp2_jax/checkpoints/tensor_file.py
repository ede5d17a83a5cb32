"""Arrays by name and metadata in safetensors files: written and read a piece at a time, there when they are whole.

Bytes are read, not mapped: what was read does not stay in the process's resident memory.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (gives NumPy the dtypes that it has no name for itself)
import numpy as np
import safetensors

_KEY = "wp2"
CODES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bool": "BOOL"},
    **{f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)},
    **{f"uint{bits}": f"U{bits}" for bits in (64, 32, 16, 8)},
}
"""The format's word for each dtype."""
_DTYPES = {code: dtype for dtype, code in CODES.items()}


class CheckpointError(ValueError):
    """A checkpoint is absent, damaged, or not of the kind asked for. Nothing was loaded."""


class Spec(NamedTuple):
    """Shape and dtype (NumPy's name, or that of ml_dtypes) of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize


Pieces = Callable[[str], Iterable[np.ndarray]]
"""The contents of an array by name: arrays that follow each other in memory."""


class TensorFile:
    """A file's `specs` and `metadata`, read from its header, and its arrays by `read`.

    Raises CheckpointError for a file that is missing, damaged or cut short.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            # The library holds the header against the file's length.
            with safetensors.safe_open(self.path, framework="numpy") as file:
                self.metadata: Mapping[str, str] = file.metadata() or {}
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.path}: the arrays cannot be read ({error})") from error
        header.pop("__metadata__", None)
        unknown = [f"{name} is {entry['dtype']}" for name, entry in header.items() if entry["dtype"] not in _DTYPES]
        if unknown:
            raise CheckpointError(f"{self.path}: {', '.join(unknown)}; of use are {', '.join(_DTYPES)}")
        self.specs = {
            name: Spec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        }
        self._starts = {name: 8 + length + header[name]["data_offsets"][0] for name in self.specs}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """An array, or some of its first axis: `rows` has no step. Reads no more than that."""
        shape, dtype = self.specs[name]
        offset = self._starts[name]
        if rows is not None:
            first, end, _ = rows.indices(shape[0])
            offset += first * (self.specs[name].nbytes // max(shape[0], 1))
            shape = (max(end - first, 0), *shape[1:])
        array = np.empty(shape, np.dtype(dtype))
        data = array.reshape(-1).view(np.uint8).data
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            while data:  # one call reads at most 2 GB
                count = file.readinto(data)
                if not count:
                    raise CheckpointError(f"{self.path}: the file ended within {name}; it changed while it was read")
                data = data[count:]
        return array


PART = 64 * 2**20
"""Bytes of an array that are held at a time where its rows can be taken one after the other."""


def parts(read: Callable[[str, slice | None], np.ndarray], name: str, spec: Spec) -> Iterator[np.ndarray]:
    """An array by its rows, as many at a time as fit into `PART` (one, where a row is longer)."""
    if spec.nbytes <= PART or not spec.shape:
        yield read(name, None)
        return
    count = max(1, PART * spec.shape[0] // spec.nbytes)
    for first in range(0, spec.shape[0], count):
        yield read(name, slice(first, first + count))


def write_pieces(path: Path, specs: Mapping[str, Spec], pieces: Pieces, metadata: Mapping[str, str]) -> None:
    """Write a file a piece at a time; each piece is cast to its array's dtype.

    Larger elements come first, so that all are aligned. Raises ValueError for pieces that do not make up the shape.
    """
    ordered = sorted(specs.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize)
    header, at = {}, 0
    for name, spec in ordered:
        header[name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at := at + spec.nbytes],
        }
    text = json.dumps({"__metadata__": dict(metadata), **header} if metadata else header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, spec in ordered:
            written = 0
            for piece in pieces(name):
                file.write(np.ascontiguousarray(piece, np.dtype(spec.dtype)).reshape(-1).view(np.uint8).data)
                written += piece.size
            if written != spec.size:
                raise ValueError(f"{name} has {written} elements, and {spec.shape} was to be written")


def write(path: str | os.PathLike[str], named: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> Path:
    """Write arrays that are in memory, and JSON metadata. Returns the path."""
    specs = {name: Spec(np.shape(value), np.dtype(value.dtype).name) for name, value in named.items()}
    return write_streamed(path, specs, lambda name: [named[name]], metadata)


def write_streamed(
    path: str | os.PathLike[str], specs: Mapping[str, Spec], pieces: Pieces, metadata: Mapping[str, Any]
) -> Path:
    """Write by pieces, with JSON metadata; folders on the way are made, and the file appears when it is whole.

    Returns the path. Raises ValueError as `write_pieces`, with nothing left behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        write_pieces(Path(partial), specs, pieces, {_KEY: json.dumps(metadata, sort_keys=True)})
        Path(partial).chmod(0o644)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    return path


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All arrays by name. CheckpointError where the file cannot be read."""
    file = TensorFile(path)
    return {name: file.read(name) for name in file.specs}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata alone. CheckpointError where the file cannot be read or is not one of ours."""
    try:
        return json.loads(TensorFile(path).metadata[_KEY])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: the metadata cannot be read ({error})") from error
