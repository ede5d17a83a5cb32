"""Reading one golden item: NAME.json (the sidecar) and NAME.safetensors (golden/README.md)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def load(folder: str | Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(sidecar, tensors by name). float16 tensors are widened to float32: they were rounded before anything
    was computed (golden/README.md). Raises FileNotFoundError if either file is missing."""
    folder = Path(folder)
    sidecar = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / f"{name}.safetensors")
    widen = {key: a.astype(np.float32) if a.dtype == np.float16 else a for key, a in tensors.items()}
    return sidecar, widen


def below(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The tensors whose names start with `prefix`, under the rest of their names."""
    return {key[len(prefix) :]: a for key, a in tensors.items() if key.startswith(prefix)}
