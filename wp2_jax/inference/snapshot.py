"""A world between two chunks, on disk and back: pictures go on as if it had never stopped.

In memory a snapshot is the `StreamState` itself (copy it before a program that overwrites it, see
`generate.programs`); a fork is the same state gone on with twice.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import tree
from wp2_jax.checkpoints import tensor_file
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.inference.stream import StreamState

# The order of the cache's tokens: that of a state is in no shape.
_ORDER = {"cache": "tmp, sink, cmp"}


def save(path: str | os.PathLike[str], state: StreamState, about: Mapping[str, Any]) -> Path:
    """Write a state and what it belongs to (`about`, JSON: weights, mode, capacity) to one file."""
    named = {name: np.asarray(_raw(x)) for name, x in tree.named_leaves(state).items()}
    return tensor_file.write(path, named, {**about, **_ORDER})


def load(path: str | os.PathLike[str], like: StreamState, about: Mapping[str, Any]) -> StreamState:
    """The state of a file, placed as `like` is: a state of the same stream, or its shapes (`jax.eval_shape`).

    Raises:
      CheckpointError: the file cannot be read, or belongs to something else than `about`.
      TreeMismatchError: arrays are missing, left over or of another shape.
    """
    found = tensor_file.read_metadata(path)
    wanted = {**about, **_ORDER}
    other = [f"{name} {found.get(name)!r}, not {value!r}" for name, value in wanted.items() if found.get(name) != value]
    if other:
        raise CheckpointError(f"{path} is a world of another kind: {'; '.join(other)}")
    named = tensor_file.read(path)
    expected = tree.named_leaves(like)
    tree.check_fits({name: jax.eval_shape(_raw, x) for name, x in expected.items()}, named, what=f"the world {path}")

    def placed(name: str, x: Any) -> jax.Array:
        value = jax.device_put(named[name].astype(jax.eval_shape(_raw, x).dtype), getattr(x, "sharding", None))
        return jax.random.wrap_key_data(value) if _is_key(x) else value

    return tree.map_named(placed, like)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _raw(x: Any) -> Any:
    """Random keys as the numbers they are made of."""
    return jax.random.key_data(x) if _is_key(x) else x
