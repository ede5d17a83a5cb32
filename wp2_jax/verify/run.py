"""Runs every item of a folder of golden tensors: `verify(folder)` (golden/README.md says what each kind is).

An item is a sidecar STEM.json with its STEM.safetensors; the leading letter of the stem is its kind, everything else is
read from the sidecar. Whatever goes wrong becomes a failed result, never an exception.
"""

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax
from safetensors import safe_open

from wp2_jax.verify import golden, manifests
from wp2_jax.verify.autoencoders import check_tiny, check_wan, wan_model
from wp2_jax.verify.controls import check_inputs
from wp2_jax.verify.core import Result, failed
from wp2_jax.verify.dit import check_bidirectional, check_block, check_cache, check_embeddings, check_memory
from wp2_jax.verify.experts import load_expert
from wp2_jax.verify.few_step import check_few_step
from wp2_jax.verify.rollout import check_rollout
from wp2_jax.verify.samplers import check_pdd_heads, check_pdd_schedule, check_samplers
from wp2_jax.verify.text import check_text

INDEX = "INDEX.json"
UNINDEXED = (INDEX, "README.md")

Check = Callable[[Path, str], Iterable[Result]]


def check_weights(folder: Path, name: str) -> Iterator[Result]:
    """Weights fit the model that their sidecar describes; fused heads also follow from their banks."""
    sidecar, tensors = golden.load(folder, name)
    if any(key.startswith("in.bank.") for key in tensors):
        yield from check_pdd_heads(folder, name)
        return
    if "model_config" in sidecar:
        load_expert(folder, name)
    elif "temperal_downsample" in sidecar.get("config", {}):
        wan_model(folder, name)
    else:
        yield failed(f"{name}/config", "neither an expert, nor its heads, nor a Wan autoencoder")
        return
    yield Result(f"{name}/fit", 0.0, 0.0, 0.0, True, f"{len(golden.below(tensors, 'w.'))} tensors")


def _nothing(folder: Path, name: str) -> Iterator[Result]:
    """Inputs are checked by the items that use them."""
    return iter(())


KINDS: dict[str, tuple[Check, ...]] = {
    "weights": (check_weights,),
    "inputs": (_nothing,),
    "a": (check_embeddings,),
    "b": (check_block,),
    "c": (check_bidirectional,),
    "d": (check_memory,),
    "e": (check_cache,),
    "f": (check_pdd_schedule, check_few_step),
    "g": (check_samplers,),
    "h": (check_wan,),
    "i": (check_tiny,),
    "j": (check_text,),
    "k": (check_rollout,),
    "l": (lambda folder, name: check_inputs(folder / f"{name}.json"),),
}
# These hold their answers in the sidecar itself.
WITHOUT_TENSORS = ("l",)
MANIFESTS = "manifests"
# Weights and inputs are needed where another item names them.
REQUIRED = tuple("abcdefghijkl")


@dataclasses.dataclass(frozen=True)
class Group:
    """All results of one file, and how long they took."""

    name: str
    results: list[Result]
    seconds: float

    @property
    def failures(self) -> int:
        return sum(not result.ok for result in self.results)


def kind_of(stem: str) -> str | None:
    """The key of `KINDS` before the first underscore of a stem; None if it is none."""
    kind = stem.split("_", 1)[0]
    return kind if kind in KINDS and "_" in stem else None


def verify(
    folder: str | Path, only: Iterable[str] = (), starting: Callable[[str], None] = lambda name: None
) -> Iterator[Group]:
    """Checks a folder, one group of results a file; `starting` is told each file before its checks run.

    `only` names kinds (letters, "weights", "inputs", "manifests"); the index is always checked, completeness only
    where nothing is left out. Raises ValueError for an unknown kind and NotADirectoryError.
    """
    folder, only = Path(folder), tuple(only)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder of golden tensors")
    unknown = sorted(set(only) - {*KINDS, MANIFESTS})
    if unknown:
        raise ValueError(f"kinds {unknown} are unknown: choose from {', '.join((*KINDS, MANIFESTS))}")

    def wanted(kind: str | None) -> bool:
        return not only or kind in only

    def group(name: str, results: Callable[[], Iterable[Result]]) -> Group:
        starting(name)
        begin = time.perf_counter()
        # Accelerators would multiply in fewer bits than the tolerances allow.
        with jax.default_matmul_precision("highest"):
            return Group(name, _guarded(name, results), time.perf_counter() - begin)

    yield group(INDEX, lambda: check_index(folder))
    stems = sorted({path.stem for path in folder.iterdir() if path.suffix in (".json", ".safetensors")} - {"INDEX"})
    for stem in stems:
        if wanted(kind_of(stem)):
            yield group(stem, lambda stem=stem: check_item(folder, stem))
    models: list[str] = []
    if wanted(MANIFESTS):
        for path in sorted((folder / MANIFESTS).glob("*.json")):

            def check(path: Path = path) -> list[Result]:
                model, results = manifests.check_manifest(path)
                models.extend([model] if model else [])
                return results

            yield group(f"{MANIFESTS}/{path.stem}", check)
    if not only:
        yield group("complete", lambda: check_complete(folder, stems, models))


def check_index(folder: Path) -> list[Result]:
    """Every file is listed in INDEX.json with its size and SHA-256, and every listed file is there."""
    path = folder / INDEX
    if not path.is_file():
        return [failed(INDEX, "missing: nothing says what the files should be")]
    listed = json.loads(path.read_text("utf-8"))["files"]
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} - set(UNINDEXED)
    results = [failed(f"{INDEX}/{name}", "unlisted file") for name in sorted(there - set(listed))]
    for name, entry in listed.items():
        file = folder / name
        if not file.is_file():
            results.append(failed(f"{INDEX}/{name}", "missing file"))
            continue
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if len(content) != entry["bytes"]:
            results.append(failed(f"{INDEX}/{name}", f"{len(content)} bytes, listed {entry['bytes']}"))
        elif digest != entry["sha256"]:
            results.append(failed(f"{INDEX}/{name}", f"altered: sha256 {digest}, listed {entry['sha256']}"))
    return results or [Result(f"{INDEX}/files", 0.0, 0.0, 0.0, True, f"{len(listed)} files as listed")]


def check_item(folder: Path, stem: str) -> Iterator[Result]:
    """One item: its file is as the sidecar lists it, every check of its kind, and no output left uncompared."""
    kind = kind_of(stem)
    if kind is None:
        yield failed(stem, f"unknown kind: a stem begins with one of {', '.join(KINDS)} and an underscore")
        return
    if not (folder / f"{stem}.json").is_file():
        yield failed(stem, f"{stem}.json is missing")
        return
    if kind in WITHOUT_TENSORS:
        yield from _checked(folder, stem, kind)
        return
    try:
        stored = _stored(folder / f"{stem}.safetensors")
        listed = json.loads((folder / f"{stem}.json").read_text("utf-8"))["tensors"]
    # A file that is missing or cut short, a sidecar without its list.
    except Exception as error:
        yield failed(f"{stem}/tensors", f"{type(error).__name__}: {error}")
        return
    yield _structure(f"{stem}/tensors", listed, stored)
    covered, stopped = set(), False
    for result in _checked(folder, stem, kind):
        covered.add(result.item.split("/", 1)[-1])
        stopped = stopped or result.item == stem
        yield result
    for key in stored:
        if key.startswith("out.") and key.removeprefix("out.") not in covered:
            note = "not reached: the check stopped before" if stopped else "unknown tensor: nothing compares it"
            yield failed(f"{stem}/{key.removeprefix('out.')}", note)


def _checked(folder: Path, stem: str, kind: str) -> Iterator[Result]:
    """Results of all checks of a kind, named STEM/TENSOR."""
    for check in KINDS[kind]:
        for result in _guarded(stem, lambda check=check: check(folder, stem)):
            part = result.item.split("/", 1)[1].removeprefix("out.") if "/" in result.item else ""
            yield dataclasses.replace(result, item=f"{stem}/{part}" if part else stem)


def _guarded(name: str, results: Callable[[], Iterable[Result]]) -> list[Result]:
    """The results; an exception ends them with a failed one that gives the reason."""
    collected: list[Result] = []
    try:
        for result in results():
            collected.append(result)
    # Anything that broken weights or tensors can cause must be one failed line.
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        collected.append(failed(name, text if len(text) <= 300 else f"{text[:300]}..."))
    return collected


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def _stored(path: Path) -> dict[str, list]:
    """Tensor name -> [shape, dtype] of a file, as sidecars spell it."""
    with safe_open(path, "np") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (the file is no mapping)
        return {key: [list(s.get_shape()), _DTYPES.get(s.get_dtype(), s.get_dtype())] for key, s in slices.items()}


def _structure(item: str, listed: Mapping[str, list], there: Mapping[str, list]) -> Result:
    """Every tensor that the sidecar lists exists with its shape and dtype, and no other."""
    problems = [f"missing {key}" for key in listed if key not in there]
    problems += [f"unlisted {key}" for key in there if key not in listed]
    problems += [
        f"{key} is {there[key]}, listed {listed[key]}" for key in listed if there.get(key, listed[key]) != listed[key]
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        return failed(item, "; ".join(problems[:5]) + more)
    return Result(item, 0.0, 0.0, 0.0, True, f"{len(listed)} tensors as listed")


def check_complete(folder: Path, stems: list[str], models: list[str]) -> list[Result]:
    """Every kind and every manifest is there, and the weights and inputs that items name."""
    kinds = {kind_of(stem) for stem in stems}
    results = [failed(f"complete/{kind}", "no item of this kind") for kind in REQUIRED if kind not in kinds]
    results += [failed(f"complete/{model}", "no manifest of it") for model in manifests.MODELS if model not in models]
    for stem in stems:
        try:
            sidecar = json.loads((folder / f"{stem}.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue  # the item itself has failed already
        named = re.findall(r"(?:weights|inputs)_\w+", f"{sidecar.get('weights')} {sidecar.get('inputs')}")
        results += [
            failed(f"complete/{name}", f"{stem} names it, it is missing") for name in named if name not in stems
        ]
    note = f"kinds {REQUIRED[0]} to {REQUIRED[-1]}, {len(models)} manifests"
    return results or [Result("complete/kinds", 0.0, 0.0, 0.0, True, note)]
