"""What a stage of training has left in its folder: checkpoints of a run, or weights packed into one small file.

A packed stage is a folder with `weights.safetensors`: the averages alone, in bfloat16 (or, by `wp2 quantize`, with
matrices in eight bits), names "ROLE/path", and the metadata of the checkpoint they were taken from. It serves wherever
a trained stage does, for inference and for the stages after it; only its own training cannot go on from it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import tree
from wp2_jax.array_types import ArrayTree
from wp2_jax.checkpoints import orbax_io, tensor_file
from wp2_jax.checkpoints.orbax_io import CheckpointError

FILE = "weights.safetensors"
_CHECKPOINTS = "checkpoints"
_KEPT = ("config", "stage", "provenance", "experiment", "arg", "diff")


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
    """One role's weights of a stage, as `orbax_io.load_params`; packed ones are float32 again, and always averages.

    Matrices in eight bits stay so, in the nodes that `abstract` has for them.
    """
    folder = Path(folder)
    if not is_packed(folder):
        return orbax_io.load_params(folder / _CHECKPOINTS, role, ema=ema, step=step, abstract=abstract)
    path = folder / FILE
    named = tensor_file.read(path)
    chosen = {name.removeprefix(f"{role}/"): value for name, value in named.items() if name.startswith(f"{role}/")}
    if not chosen:
        roles = sorted({name.split("/")[0] for name in named})
        raise CheckpointError(f"{path} has no {role}; it has {', '.join(roles)}")
    shardings: dict[str, Any] = {}
    if abstract is not None:
        wanted = tree.named_leaves(abstract)
        tree.check_fits(wanted, chosen, what=f"the weights {role} of {path}")
        shardings = {name: getattr(like, "sharding", None) for name, like in wanted.items()}
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = {
        name: jax.device_put(value if value.itemsize == 1 else value.astype(np.float32), shardings.get(name) or here)
        for name, value in chosen.items()
    }
    return tree.nested(placed) if abstract is None else tree.map_named(lambda name, _: placed[name], abstract)


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


def is_packed(folder: Path) -> bool:
    """Whether a stage's folder holds packed weights and no run."""
    return not orbax_io.steps(folder / _CHECKPOINTS) and (folder / FILE).is_file()
