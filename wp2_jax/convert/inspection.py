"""What a path holds, as rows of a table, from headers alone: a file of a PyTorch program or a checkpoint of ours."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wp2_jax.checkpoints import torch_io, trained
from wp2_jax.checkpoints.tensor_file import CheckpointError, Spec
from wp2_jax.convert import layouts
from wp2_jax.models.dit import DiTConfig

Row = tuple[str, str]
INTERVALS = {56: "high", 72: "low"}
"""Intervals of the published banks, by which their expert is known."""
PREFIX = "wp2."
"""Of what our own exports say of themselves in a file's metadata."""
_HEADS = {
    "velocity": "many-step: one velocity",
    "fused": "fused few-step: {blocks} blocks",
    "bank": "few-step bank: {intervals} intervals",
}
_STAGES = {
    "velocity": "cannot be told from the file: the bidirectional teacher and the autoregressive model look alike",
    "fused": "few-step student (stable_forcing)",
    "bank": "few-step initialisation (pdd)",
}


def describe(path: Path, average: bool | None = None) -> list[Row]:
    """(label, text) of a weights file, an index, a folder of either, a stage's folder or a workdir.

    Raises CheckpointError where it is none of these or cannot be read.
    """
    if path.is_dir():
        if trained.steps(path):
            return _stage(path)
        if stages := [folder for folder in sorted(path.iterdir()) if folder.is_dir() and trained.steps(folder)]:
            return [row for folder in stages for row in _stage(folder)]
    return _file(torch_io.open_weights(path, average))


def _stage(folder: Path) -> list[Row]:
    """A stage of ours: what trained it, and each role."""
    step = trained.steps(folder)[-1]
    about = trained.load_metadata(folder, step)
    config = about.get("config") or {}
    form = "packed" if trained.is_packed(folder) else "checkpoint"
    rows = [("stage", f"{config.get('stage', '?')}, step {step}, {form} of {folder}")]
    if "precision" in about:
        rows.append(("precision", about["precision"]))
    for role, averaged in trained.roles(folder, step).items():
        weights = trained.Weights(folder, role, ema=averaged, step=step)
        kept = "averages" if form == "packed" else "trained and averaged" if averaged else "trained"
        rows.append((f"  {role}", f"{kept}; {_amount(weights.specs.values())}"))
    return rows


def _file(reader: torch_io.Reader) -> list[Row]:
    specs = reader.specs
    rows = [("file", str(reader.path))]
    if reader.wrappers:
        rows.append(("weights", f"of {' / '.join(reader.wrappers)}"))
    try:
        found = layouts.recognise(specs, given_for(reader))
    except CheckpointError as error:
        return [*rows, ("kind", f"unknown: {error}"), ("tensors", _amount(specs.values()))]
    except ValueError as error:
        return [*rows, ("tensors", _amount(specs.values())), ("fits", f"no: {error}")]
    rows += [("kind", found.kind), ("layout", found.layout)]
    if isinstance(found.config, DiTConfig):
        form = found.config.head
        rows.append(("head", _HEADS[form].format(blocks=found.config.blocks, intervals=found.config.intervals)))
        rows.append(("expert", expert_of(reader, found) or f"cannot be told from the file{hint(reader.path)}"))
        rows.append(("stage", reader.metadata.get(f"{PREFIX}stage") or _STAGES[form]))
    rows.append(("sizes", _sizes(found)))
    if found.assumed:
        assumed = ", ".join(f"{name} {value}" for name, value in found.assumed.items())
        rows.append(("assumed", f"{assumed}: neither the file nor a config.json beside it tells"))
    rows.append(("tensors", _amount(specs.values())))
    parts: dict[str, list[Spec]] = {}
    for name, spec in found.specs.items():
        parts.setdefault(name.split(".")[0], []).append(spec)
    rows += [(f"  {part}", _amount(held)) for part, held in parts.items()]
    try:
        found.check()
        rows.append(("fits", "yes: every name and shape is as the model wants it"))
    except ValueError as error:
        rows.append(("fits", f"no: {error}"))
    return rows


def expert_of(reader: torch_io.Reader, found: layouts.Found) -> str | None:
    """Which expert a file is: what one of ours says, or what the length of a published bank tells; None otherwise."""
    if told := reader.metadata.get(f"{PREFIX}expert"):
        return told
    config = found.config
    return INTERVALS.get(config.intervals) if isinstance(config, DiTConfig) and config.head == "bank" else None


def hint(path: Path) -> str:
    """What a path's words say of the expert: no proof."""
    words = re.split(r"[^a-z]+", f"{path.parent.name}/{path.name}".lower())
    named = [expert for expert in ("high", "low") if expert in words]
    return f" (its path says {named[0]}, which nothing in it confirms)" if len(named) == 1 else ""


_TOLD: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    layouts.EXPERT: (
        "ffn_dim",
        {
            "num_heads": ("num_heads", "num_attention_heads"),
            "eps": ("eps",),
            "text_len": ("text_len",),
            "rope_frames": ("rope_max_seq_len",),
            "memory": ("wp2_memory",),
        },
    ),
    layouts.WAN_VAE: ("z_dim", {"mean": ("mean", "latents_mean"), "std": ("std", "latents_std")}),
    layouts.TEXT: (
        "vocab_size",
        {
            "max_distance": ("max_distance", "relative_attention_max_distance"),
            "eps": ("eps", "layer_norm_epsilon"),
        },
    ),
}
"""Of a kind: what its config.json holds at any rate (a folder may have files of several kinds), and the names there of
our fields that no shape shows."""


def given_for(reader: torch_io.Reader) -> dict[str, Any]:
    """Fields of a model's config that a config.json beside its file tells and no shape shows."""
    path = reader.path.parent / "config.json"
    kind, _ = layouts.kind_of(reader.specs)
    if not path.is_file() or kind not in _TOLD:
        return {}
    try:
        told = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error})") from error
    mark, fields = _TOLD[kind]
    if not isinstance(told, Mapping) or mark not in told:
        return {}
    given = {ours: told[name] for ours, names in fields.items() for name in names if told.get(name) is not None}
    if "memory" in given:
        memory: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given["memory"].items()}
        given["memory"] = layouts.MemoryConfig(**memory)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _sizes(found: layouts.Found) -> str:
    hidden = ("dtype", "param_dtype", "remat", "unroll", "mean", "std", "head", "intervals", "blocks", "memory")
    fields = {field.name: getattr(found.config, field.name) for field in dataclasses.fields(found.config)}
    if found.kind == layouts.TINY_VAE:
        hidden = ()
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name not in hidden)


def _amount(specs: Iterable[Spec]) -> str:
    specs = list(specs)
    dtypes = Counter(spec.dtype for spec in specs)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    size = sum(spec.nbytes for spec in specs)
    return f"{len(specs)} tensors ({kinds}), {sum(spec.size for spec in specs):,} numbers, {size / 1e6:,.2f} MB"
