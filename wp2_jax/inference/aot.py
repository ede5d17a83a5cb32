"""Compiled programs kept on disk, so that a second start neither traces nor compiles.

jax's own compilation cache keeps what XLA made, but a program has to be traced and lowered before it can be looked up;
here it is found by the shapes of its arguments, the settings, the source of this package and the versions of jax.

A file holds pickles, as jax writes them: the folder must be one that nobody else can write to.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

Programs = TypeVar("Programs", bound=tuple)
"""A NamedTuple of jitted functions."""


def default_folder() -> Path:
    """The user's own, `XDG_CACHE_HOME`/wp2_jax or ~/.cache/wp2_jax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wp2_jax"


def kept(programs: Programs, folder: str | os.PathLike[str]) -> Programs:
    """The same functions, each of them jitted, with their programs kept in `folder` (made where it is missing).

    Within a mesh they run as they are: nothing is kept.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = type(programs)._fields  # pyright: ignore[reportAttributeAccessIssue]  (NamedTuple is no bound of types)
    return type(programs)._make(  # pyright: ignore[reportAttributeAccessIssue]
        _Kept(name, function, folder) for name, function in zip(names, programs, strict=True)
    )


class _Kept:
    """One jitted function. Arguments with a leaf that is no array are its static ones."""

    def __init__(self, name: str, function: Callable[..., Any], folder: Path):
        self._name, self._function, self._folder = name, function, folder
        self._loaded: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        if not jax.sharding.get_abstract_mesh().empty:
            return self._function(*arguments, **static)
        fixed = [argument for argument in arguments if not _is_arrays(argument)]
        given = [argument for argument in arguments if _is_arrays(argument)]
        leaves, structure = jax.tree.flatten(given)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        key = (tuple(fixed), tuple(static.items()), structure, shapes)
        if key not in self._loaded:
            words = (self._name, fixed, static, structure, shapes)
            path = self._folder / f"{self._name}-{hashlib.sha256(repr((words, _here())).encode()).hexdigest()[:32]}"
            self._loaded[key] = _load(path) or _keep(path, self._function.lower(*arguments, **static))
        return self._loaded[key](*given)


def _is_arrays(argument: Any) -> bool:
    return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(argument))


def _load(path: Path) -> Callable[..., Any] | None:
    """The program of a file; None where there is none that this machine can run."""
    try:
        parts = pickle.loads(path.read_bytes())
        return serialize_executable.deserialize_and_load(*parts, execution_devices=jax.devices()[:1])
    except FileNotFoundError:
        return None
    except Exception:  # whatever a damaged file, or one of another machine, makes of it: it is compiled anew
        path.unlink(missing_ok=True)
        return None


def _keep(path: Path, lowered: Any) -> Callable[..., Any]:
    with _fresh():
        program = lowered.compile()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        pickle.dump(serialize_executable.serialize(program), file)
    os.replace(file.name, path)
    return program


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    """Without jax's own cache: what was loaded from there cannot be written again (on CPU, jaxlib 0.10.2, its functions
    are then "not found" where it is run)."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@functools.cache
def _here() -> tuple[str, ...]:
    """What a program depends on besides its arguments."""
    device, source = jax.devices()[0], hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(path.read_bytes())
    versions = (jax.__version__, importlib.metadata.version("jaxlib"), device.client.platform_version)
    return (*versions, device.device_kind, os.environ.get("XLA_FLAGS", ""), source.hexdigest())
