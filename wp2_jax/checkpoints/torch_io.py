"""Weights as PyTorch programs keep them: names, shapes and dtypes without the data, then one tensor at a time.

A file is `.safetensors`, a set of those with its `*.index.json`, or `.pt` / `.pth`. Only the last kind needs torch.
"""

import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.checkpoints.tensor_file import CODES, Pieces, Spec, TensorFile, write_pieces

AVERAGED, RAW = "generator_ema", "generator"
WRAPPERS = (AVERAGED, RAW, "state_dict", "model")
PREFIXES = ("module.", "model.")
INDEX = ".safetensors.index.json"


class Reader:
    """`specs` by name, and `read(name, rows)`: one tensor or some of its first axis, copied from the file.

    `metadata` is what a safetensors file says of itself; `wrappers` what a pickle kept the tensors in, outermost first.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, Spec],
        sources: Mapping[str, Callable[[slice | None], np.ndarray]],
        metadata: Mapping[str, str] | None = None,
        wrappers: tuple[str, ...] = (),
    ):
        self.path, self.metadata, self.wrappers = path, dict(metadata or {}), wrappers
        self.specs = _bare(specs)
        self._sources = _bare(sources)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._sources[name](rows)


def open_weights(path: str | os.PathLike[str], average: bool | None = None) -> Reader:
    """A reader of a weights file, of the index of a sharded set, or of a folder that holds one of either.

    `average` chooses between the average and the trained weights in a pickle that names them (`AVERAGED`, `RAW`);
    without it a pickle with both is an error.

    Raises:
      CheckpointError: no such file, a damaged one, one with code in it, or not the weights asked for; names the file.
    """
    path = Path(path)
    if path.is_dir():
        path = _only_weights(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    if path.suffix in (".pt", ".pth"):
        return _pickled(path, average)
    if average is not None:
        raise CheckpointError(
            f"{path}: only .pt and .pth files hold averaged and trained weights side by side; leave the choice out"
        )
    if path.name.endswith(".index.json"):
        return _sharded(path)
    if path.suffix == ".safetensors":
        file = TensorFile(path)
        return Reader(path, file.specs, _sources(file), file.metadata)
    raise CheckpointError(f"{path}: give a .safetensors, .safetensors.index.json, .pt or .pth file")


def _only_weights(folder: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.pt", "*.pth"):
        if found := sorted(folder.glob(pattern)):
            break
    else:
        raise CheckpointError(f"{folder} holds no .safetensors, .safetensors.index.json, .pt or .pth file")
    if len(found) > 1:
        raise CheckpointError(f"{folder} holds {', '.join(path.name for path in found)}: name one of them")
    return found[0]


def _bare(named: Mapping[str, Any]) -> dict[str, Any]:
    """The names without what wrappers of modules put before all of them."""
    named = dict(named)
    while prefix := next((p for p in PREFIXES if named and all(name.startswith(p) for name in named)), None):
        named = {name.removeprefix(prefix): value for name, value in named.items()}
    return named


def _sources(file: TensorFile) -> dict[str, Callable[[slice | None], np.ndarray]]:
    return {name: lambda rows, name=name: file.read(name, rows) for name in file.specs}


def _sharded(path: Path) -> Reader:
    try:
        shards = json.loads(path.read_text("utf-8"))["weight_map"]
        if not shards or not all(isinstance(x, str) for pair in shards.items() for x in pair):
            raise ValueError("its weight_map must give a file name for each tensor")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no index with a weight_map ({error})") from error
    specs, sources, metadata = {}, {}, {}
    for shard in sorted(set(shards.values())):
        file = path.parent / shard
        if not file.is_file():
            raise CheckpointError(f"{path} names {shard}, and there is no {file}")
        held = TensorFile(file)
        listed = {name for name, where in shards.items() if where == shard}
        if listed != set(held.specs):
            wrong = sorted(listed ^ set(held.specs))
            raise CheckpointError(f"{file} does not hold what {path.name} says: {', '.join(wrong)}")
        specs |= held.specs
        sources |= _sources(held)
        metadata |= held.metadata
    return Reader(path, specs, sources, metadata)


def _pickled(path: Path, average: bool | None) -> Reader:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CheckpointError(f"{path}: PyTorch reads such files; pip install 'wp2_jax[torch]'") from error
    try:
        # Files of the old kind cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds for damaged files and for pickles with code
        first = str(error).split("\n")[0]
        raise CheckpointError(f"{path}: damaged, or not weights alone (code is refused): {first}") from error
    state, wrappers = _unwrapped(path, state, average)
    wrong = [] if isinstance(state, dict) else [type(state).__name__]
    wrong = wrong or [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise CheckpointError(f"{path}: not a dict of tensors: {', '.join(wrong)}")

    def read(tensor: Any, rows: slice | None) -> np.ndarray:
        tensor = tensor if rows is None else tensor[rows]
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return tensor.numpy().copy()

    specs = {name: Spec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in state.items()}
    unknown = [f"{name} is {spec.dtype}" for name, spec in specs.items() if spec.dtype not in CODES]
    if unknown:
        raise CheckpointError(f"{path}: {', '.join(unknown)}; of use are {', '.join(CODES)}")
    return Reader(path, specs, {name: lambda rows, x=x: read(x, rows) for name, x in state.items()}, None, wrappers)


def _unwrapped(path: Path, state: Any, average: bool | None) -> tuple[Any, tuple[str, ...]]:
    """The dict of tensors within wrappers, and those it was in."""
    taken: tuple[str, ...] = ()
    while isinstance(state, dict):
        there = [name for name in WRAPPERS if isinstance(state.get(name), dict)]
        if not there:
            break
        if average is None and {AVERAGED, RAW} <= set(there):
            raise CheckpointError(
                f"{path} holds trained weights ({RAW}) and their average ({AVERAGED}): choose raw or ema"
            )
        asked = {True: AVERAGED, False: RAW}.get(average)  # pyright: ignore[reportArgumentType]
        taken += (asked if asked in there else there[0],)
        state = state[taken[-1]]
    if average is not None and (AVERAGED if average else RAW) not in taken:
        raise CheckpointError(
            f"{path} has no {AVERAGED if average else RAW} to take (it has {', '.join(taken) or 'bare tensors'}): "
            "leave the choice out"
        )
    return state, taken


def write_weights(
    stem: str | os.PathLike[str],
    specs: Mapping[str, Spec],
    pieces: Pieces,
    max_shard_size: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write tensors, a piece at a time, as stem.safetensors or as numbered shards with stem.safetensors.index.json.

    Pieces are as in `tensor_file.write_pieces`. A shard holds at most `max_shard_size` bytes, or one larger tensor.
    Files get their names when all are whole, the index last; those of an older set under the same stem go away.
    Returns their paths. Raises ValueError for a tensor of another size, with nothing left behind.
    """
    stem = Path(stem)
    shards: list[dict[str, Spec]] = []
    for name, spec in specs.items():
        if not shards or sum(x.nbytes for x in shards[-1].values()) + spec.nbytes > max_shard_size:
            shards.append({})
        shards[-1][name] = spec
    count = len(shards)
    ends = [".safetensors"] if count == 1 else [f"-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    texts = {}
    if count > 1:
        where = {name: stem.name + end for shard, end in zip(shards, ends, strict=True) for name in shard}
        total = sum(spec.nbytes for spec in specs.values())
        texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + end) for end in (*ends, *texts)]
    with tempfile.TemporaryDirectory(dir=stem.parent, prefix=".part-") as folder:
        for shard, end in zip(shards, ends, strict=True):
            write_pieces(Path(folder, stem.name + end), shard, pieces, {"format": "pt", **(metadata or {})})
        for end, text in texts.items():
            Path(folder, stem.name + end).write_text(text, "utf-8")
        # Without its index the older set is no set any more, whatever happens before the new one is whole.
        stem.with_name(stem.name + INDEX).unlink(missing_ok=True)
        for path in paths:
            os.replace(Path(folder, path.name), path)
    older = re.compile(re.escape(stem.name) + r"(-\d{5}-of-\d{5})?\.safetensors")
    for path in set(stem.parent.iterdir()) - set(paths):
        if older.fullmatch(path.name):
            path.unlink()
    return paths
