"""Arrays by name and JSON metadata in one safetensors file, which appears when it is whole."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from wp2_jax.checkpoints.orbax_io import CheckpointError

_KEY = "wp2"


def write(path: str | os.PathLike[str], named: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> Path:
    """Write the arrays, of any dtype that NumPy or ml_dtypes has; folders on the way are made. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.asarray(value, order="C") for name, value in named.items()}
    data = safetensors_numpy.save(contiguous, metadata={_KEY: json.dumps(metadata, sort_keys=True)})
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        file.write(data)
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)
    return path


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All arrays by name. CheckpointError where the file cannot be read."""
    try:
        return safetensors_numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: the arrays cannot be read ({error})") from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata alone. CheckpointError where the file cannot be read or is not one of ours."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            found: Mapping[str, str] = file.metadata() or {}
        return json.loads(found[_KEY])
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: the metadata cannot be read ({error})") from error
