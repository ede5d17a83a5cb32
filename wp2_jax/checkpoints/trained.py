"""What a stage of training has left in its folder: checkpoints of a run, or weights packed into one small file.

A packed stage is a folder with `weights.safetensors`: the averages alone, in bfloat16 (or, by `wp2 quantize`, with
matrices in eight bits), names "ROLE/path", and the metadata of the checkpoint they were taken from. It serves wherever
a trained stage does, for inference and for the stages after it; only its own training cannot go on from it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import tree
from wp2_jax.array_types import ArrayTree
from wp2_jax.checkpoints import orbax_io, tensor_file
from wp2_jax.checkpoints.tensor_file import CheckpointError, Pieces, Spec, TensorFile, parts

FILE = "weights.safetensors"
_CHECKPOINTS = "checkpoints"
_KEPT = ("config", "stage", "provenance", "experiment", "arg", "diff", "licence")


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps whose weights are in a stage's folder, oldest first; of a packed stage the one it was packed at."""
    folder = Path(folder)
    found = orbax_io.steps(folder / _CHECKPOINTS)
    return found or ([int(tensor_file.read_metadata(folder / FILE)["step"])] if (folder / FILE).is_file() else [])


def load_metadata(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The metadata of a stage's newest weights, or of those of `step`. Errors: CheckpointError."""
    folder = Path(folder)
    if is_packed(folder):
        return tensor_file.read_metadata(folder / FILE)
    return orbax_io.load_metadata(folder / _CHECKPOINTS, step)


def load_params(
    folder: str | os.PathLike[str],
    role: str,
    *,
    ema: bool = False,
    step: int | None = None,
    abstract: ArrayTree | None = None,
) -> dict[str, Any]:
    """One role's weights of a stage, as `orbax_io.load_params`; packed ones always are averages.

    Those come in the dtypes of `abstract`, without it in float32; matrices in eight bits stay so, in the nodes that
    `abstract` has for them.
    """
    folder = Path(folder)
    if not is_packed(folder):
        return orbax_io.load_params(folder / _CHECKPOINTS, role, ema=ema, step=step, abstract=abstract)
    weights = Weights(folder, role)
    like = {name: jax.ShapeDtypeStruct(spec.shape, _as_run(spec.dtype)) for name, spec in weights.specs.items()}
    if abstract is not None:
        wanted = tree.named_leaves(abstract)
        tree.check_fits(wanted, like, what=f"the weights {role} of {folder / FILE}")
        like = wanted
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = {name: _placed(weights, name, x, getattr(x, "sharding", None) or here) for name, x in like.items()}
    return tree.nested(placed) if abstract is None else tree.map_named(lambda name, _: placed[name], abstract)


def _as_run(dtype: str) -> np.dtype:
    """Matrices in eight bits stay so, everything else is float32."""
    return np.dtype(dtype if np.dtype(dtype).itemsize == 1 else np.float32)


def _placed(weights: "Weights", name: str, like: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """One array on its devices: of one that is cut along its first axis each gets its own rows from the file."""

    def part(index: Any) -> np.ndarray:
        array = weights.read(name, index[0])[:, *index[1:]] if index else weights.read(name)
        return np.asarray(array, like.dtype)

    return jax.make_array_from_callback(like.shape, sharding, part)


class Weights:
    """One role's weights of a stage: `specs` by path, and `read(path, rows)` for an array or some of its first axis.

    `role` may go deeper ("student/high"). Packed weights are averages, whatever `ema` says.

    Raises:
      CheckpointError: no weights of this role, listing the roles there are, or unreadable ones.
    """

    def __init__(self, folder: str | os.PathLike[str], role: str, *, ema: bool = True, step: int | None = None):
        folder = Path(folder)
        packed = is_packed(folder)
        file = TensorFile(folder / FILE) if packed else orbax_io.Arrays(folder / _CHECKPOINTS, step)
        self._prefix = f"{role}/" if packed else f"{'ema' if ema else 'params'}/{role}/"
        self.specs = {
            name.removeprefix(self._prefix): spec for name, spec in file.specs.items() if name.startswith(self._prefix)
        }
        self._file = file
        if not self.specs:
            depth = 1 if packed else 2
            roles = sorted({"/".join(name.split("/")[:depth]) for name in file.specs})
            where = folder / FILE if packed else folder
            raise CheckpointError(f"{where} has no {self._prefix[:-1]}; it has {', '.join(roles)}")

    def read(self, path: str, rows: slice | None = None) -> np.ndarray:
        return self._file.read(self._prefix + path, rows)


def roles(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, bool]:
    """The roles whose weights a stage's folder holds, and whether their average is there."""
    folder = Path(folder)
    if is_packed(folder):
        return dict.fromkeys(_packed_roles(folder), True)
    names = {tuple(name.split("/")[:2]) for name in orbax_io.Arrays(folder / _CHECKPOINTS, step).specs}
    return {role: ("ema", role) in names for role in sorted({role for _, role in names})}


def _packed_roles(folder: Path) -> list[str]:
    return sorted({name.split("/")[0] for name in TensorFile(folder / FILE).specs}) if is_packed(folder) else []


def pack(folder: str | os.PathLike[str], output: str | os.PathLike[str], roles: Sequence[str]) -> Path:
    """Pack the averages of `roles` of a stage's newest checkpoint into output/weights.safetensors; returns its path.

    Raises:
      CheckpointError: no checkpoint, or no average of a role.
    """
    folder = Path(folder)
    step = steps(folder)[-1:] or [None]
    weights = {role: load_params(folder, role, ema=True, step=step[0]) for role in roles}
    weights = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), weights)
    return write_packed(output, weights, load_metadata(folder, step[0]) | {"step": step[0]})


def write_packed(output: str | os.PathLike[str], weights: ArrayTree, metadata: Mapping[str, Any], **more: Any) -> Path:
    """Write {role: tree} as output/weights.safetensors, each array in its dtype, with what inference needs of a
    checkpoint's metadata and with `more`; returns the path."""
    kept = {name: metadata[name] for name in ("step", *_KEPT) if name in metadata}
    named = {name: np.asarray(x) for name, x in tree.named_leaves(weights).items()}
    return tensor_file.write(Path(output) / FILE, named, kept | more)


def check_room(folder: str | os.PathLike[str], roles: Iterable[str]) -> None:
    """Raises CheckpointError where roles cannot be added to a stage's folder: a run's, or one that has them."""
    folder = Path(folder)
    if orbax_io.steps(folder / _CHECKPOINTS):
        raise CheckpointError(f"{folder} holds a run's checkpoints: weights go into a new folder")
    if there := sorted(set(roles) & set(_packed_roles(folder))):
        raise CheckpointError(f"{folder / FILE} has {', '.join(there)} already: give a new folder, or delete that file")


def add_roles(
    folder: str | os.PathLike[str], specs: Mapping[str, Spec], pieces: Pieces, metadata: Mapping[str, Any]
) -> Path:
    """Write arrays "ROLE/path" a piece at a time into a packed stage, beside the roles that it has; returns its file.

    The file that was there stays as it is until the new one is whole. Raises CheckpointError as `check_room`.
    """
    folder = Path(folder)
    check_room(folder, {name.split("/")[0] for name in specs})
    kept = TensorFile(folder / FILE) if is_packed(folder) else None
    before = {} if kept is None else kept.specs

    def both(name: str) -> Iterable[np.ndarray]:
        return pieces(name) if kept is None or name in specs else parts(kept.read, name, before[name])

    return tensor_file.write_streamed(folder / FILE, {**before, **specs}, both, metadata)


def licence(workdir: str | os.PathLike[str], stages: Iterable[str]) -> dict[str, str]:
    """{"licence": ...} where one of the stages in a workdir has one: what is trained from them is under it too."""
    folders = [Path(workdir) / stage for stage in stages]
    found = [load_metadata(folder).get("licence") for folder in folders if steps(folder)]
    return next(({"licence": one} for one in found if one), {})


def is_packed(folder: Path) -> bool:
    """Whether a stage's folder holds packed weights and no run."""
    return not orbax_io.steps(folder / _CHECKPOINTS) and (folder / FILE).is_file()
