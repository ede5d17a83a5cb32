"""Checkpoints of a run: sharded, asynchronous, atomic, and restorable on another mesh (Orbax).

A step's folder holds the state as a plain nested dict by path name ("params/high/blocks/...", "ema/...",
"opt_state/..."), so that weights can be read without the optimiser that trained them, and JSON metadata.
"""

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import tree
from wp2_jax.array_types import ArrayTree
from wp2_jax.checkpoints.tensor_file import CheckpointError, Spec


def _orbax() -> Any:
    """Imported when it is needed: packed weights are not read by it, and it takes a good part of their start."""
    import orbax.checkpoint as ocp

    return ocp


class Checkpoints:
    """The checkpoints in one folder, the newest `keep` of them.

    `save` returns once the arrays have left the devices and writes in the background; a checkpoint exists
    when it is whole (it is renamed at the end), so a kill at any time leaves the previous one.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2):
        self.directory = Path(directory).absolute()
        ocp = _orbax()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The newest step, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: ArrayTree, metadata: Mapping[str, Any]) -> None:
        """Save the state (a pytree of arrays and keys) and metadata (JSON; bytes are allowed as values)."""
        ocp = _orbax()
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(tree.nested(tree.named_leaves(_raw_keys(state)))),
                metadata=ocp.args.JsonSave(_encode(dict(metadata))),
            ),
            force=True,
        )

    def restore(self, abstract: ArrayTree, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The state as `abstract` (ShapeDtypeStructs with shardings, any mesh) and the metadata, strictly.

        Raises:
          tree.TreeMismatchError: if a name is missing or extra, or a shape differs; lists them all.
          CheckpointError: if there is no checkpoint or it cannot be read.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.directory}")
        named = _read(self.directory / str(step), tree.named_leaves(_raw_keys(abstract)))
        structure = jax.tree.structure(abstract)
        leaves = [
            jax.random.wrap_key_data(named[name]) if _is_key(like) else named[name]
            for name, like in tree.named_leaves(abstract).items()
        ]
        return jax.tree.unflatten(structure, leaves), load_metadata(self.directory, step)

    def wait(self) -> None:
        """Until what was saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The whole checkpoints in a folder, oldest first."""
    path = Path(directory)
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit()) if path.is_dir() else []


def load_metadata(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The metadata of a checkpoint (the newest if no step is given).

    Raises:
      CheckpointError: if there is none or it cannot be read.
    """
    path = _step_folder(directory, step) / "metadata" / "metadata"
    try:
        return _decode(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: the metadata cannot be read ({error})") from error


def load_params(
    directory: str | os.PathLike[str],
    role: str = "",
    *,
    ema: bool = False,
    step: int | None = None,
    abstract: ArrayTree | None = None,
) -> dict[str, Any]:
    """Weights of a checkpoint without its optimiser: `params` or, with `ema`, their average.

    `directory` is a run's folder of checkpoints. `role` picks one role (or deeper: "student/high"); "" is
    all of them. With `abstract` (ShapeDtypeStructs of what is expected, with shardings if wanted) names and
    shapes are checked and the shardings used; without it every array comes as it was saved, on the first
    device.

    Raises:
      CheckpointError: no checkpoint, an unreadable one, or no such role (lists those there are).
      tree.TreeMismatchError: weights that do not fit `abstract`.
    """
    folder = _step_folder(directory, step)
    saved = _saved_shapes(folder)
    prefix = "/".join(part for part in ("ema" if ema else "params", role) if part) + "/"
    chosen = {name: shape for name, shape in saved.items() if name.startswith(prefix)}
    if not chosen:
        roles = sorted({"/".join(n.split("/")[:2]) for n in saved if n.startswith(("params/", "ema/"))})
        raise CheckpointError(f"{folder} has no {prefix[:-1]}; it has {', '.join(roles)}")
    if abstract is not None:
        wanted = tree.named_leaves(abstract)
        here = {name.removeprefix(prefix): shape for name, shape in chosen.items()}
        tree.check_fits(wanted, here, what=f"the weights {prefix[:-1]} of {folder}")
        chosen = {prefix + name: like for name, like in wanted.items()}
    named = _read(folder, chosen, partial=True)
    return tree.nested({name.removeprefix(prefix): named[name] for name in chosen})


class Arrays:
    """The arrays of a checkpoint by name ("params/ROLE/...", "ema/..."): `specs`, and `read` without a device.

    Raises CheckpointError as `load_params`.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None):
        self._folder = _step_folder(directory, step)
        self.specs = {
            name: Spec(tuple(like.shape), np.dtype(like.dtype).name)
            for name, like in _saved_shapes(self._folder).items()
            if name.startswith(("params/", "ema/"))
        }
        self._held: tuple[str, int, np.ndarray] | None = None

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """An array, or some of its first axis.

        What is stored together is read together and held until other rows are asked for: neighbouring rows are read
        once, and memory is that of the rows of one stored chunk (of an array that one device held: the whole).
        """
        spec = self.specs[name]
        if rows is None:
            return self._load(name, slice(None))[0]
        first, end, _ = rows.indices(spec.shape[0])
        if self._held is not None:
            held, start, array = self._held
            if held == name and start <= first and end <= start + len(array):
                return array[first - start : end - start]
        self._held = None  # before the next one is there
        array, start = self._load(name, slice(first, end))
        self._held = (name, start, array)
        return array[first - start : end - start]

    def _load(self, name: str, rows: slice) -> tuple[np.ndarray, int]:
        """The stored chunks that hold some rows, and the row that they start with."""
        import tensorstore  # as `_orbax`

        place = {"driver": "ocdbt", "base": f"file://{self._folder}/state/", "path": name.replace("/", ".")}
        try:
            store = tensorstore.open({"driver": "zarr", "kvstore": place}, open=True).result()
            if rows == slice(None):
                return store.read().result(), 0
            together = (store.chunk_layout.read_chunk.shape or store.shape)[0]
            start = rows.start // together * together
            return store[start : min(-(-rows.stop // together) * together, store.shape[0])].read().result(), start
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {name} cannot be read ({error})") from error


def _step_folder(directory: str | os.PathLike[str], step: int | None) -> Path:
    found = steps(directory)
    if not found or (step is not None and step not in found):
        raise CheckpointError(f"{directory}: no checkpoint {'' if step is None else step}; there are {found}")
    return Path(directory).absolute() / str(found[-1] if step is None else step)


def _saved_shapes(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    try:
        with _reader() as reader:
            metadata = reader.metadata(folder).item_metadata
        named = tree.named_leaves(metadata["state"].tree)
        return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named.items()}
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged folder
        raise CheckpointError(f"{folder}: the checkpoint cannot be read ({error})") from error


def _read(folder: Path, wanted: Mapping[str, Any], *, partial: bool = False) -> dict[str, jax.Array]:
    """The wanted leaves (ShapeDtypeStructs by name); all that is saved must be wanted unless `partial`."""
    saved = _saved_shapes(folder)
    if not partial:
        tree.check_fits(wanted, saved, what=f"the checkpoint {folder}")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here)
        for name, x in wanted.items()
    }
    nested, ocp = tree.nested(like), _orbax()
    try:
        arguments = ocp.args.PyTreeRestore(
            item=nested,
            restore_args=ocp.checkpoint_utils.construct_restore_args(nested),
            partial_restore=partial,
        )
        with _reader() as reader:
            restored = reader.restore(folder, args=ocp.args.Composite(state=arguments))["state"]
    except Exception as error:
        raise CheckpointError(f"{folder}: the checkpoint cannot be read ({error})") from error
    return tree.named_leaves(restored)


def _reader() -> Any:
    ocp = _orbax()
    items = {"state": ocp.PyTreeCheckpointHandler(), "metadata": ocp.JsonCheckpointHandler()}
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**items))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _raw_keys(state: ArrayTree) -> ArrayTree:
    """Typed keys as their uint32 data, in arrays and in ShapeDtypeStructs."""

    def raw(x: Any) -> Any:
        if not _is_key(x):
            return x
        if not isinstance(x, jax.ShapeDtypeStruct):
            return jax.random.key_data(x)
        data = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)

    return jax.tree.map(raw, state)


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {key: _encode(v) for key, v in value.items()}
    return [_encode(v) for v in value] if isinstance(value, list | tuple) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__bytes__"}:
            return base64.b64decode(value["__bytes__"])
        return {key: _decode(v) for key, v in value.items()}
    return [_decode(v) for v in value] if isinstance(value, list) else value
