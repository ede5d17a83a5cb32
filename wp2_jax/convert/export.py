"""A trained stage as files for PyTorch programs: experts, autoencoder and text encoder, one tensor at a time."""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import tree
from wp2_jax.checkpoints import torch_io, torch_names, trained
from wp2_jax.checkpoints.tensor_file import CheckpointError, Spec
from wp2_jax.convert import configs, layouts
from wp2_jax.diffusion import pdd
from wp2_jax.inference.load import TOKENIZER, text_stage
from wp2_jax.inference.world import World, from_config
from wp2_jax.models.experts import expert_models

PARTS = ("experts", "autoencoder", "text")
DTYPES = ("float32", "bfloat16", "float16")
HEADS = {("pdd", "experts"): "bank", ("stable_forcing", "student"): "fused"}
"""The head form of a stage's role where it is not one velocity."""
FOLDERS = {
    layout: {"high": high, "low": low, "all": one, "autoencoder": "vae", "text": "text_encoder"}
    for layout, (high, low, one) in {
        layouts.PUBLISHED: ("high_noise_model", "low_noise_model", "model"),
        layouts.WAN: ("high_noise_model", "low_noise_model", "model"),
        layouts.DIFFUSERS: ("transformer", "transformer_2", "transformer"),
    }.items()
}
STEMS = {"autoencoder": "diffusion_pytorch_model", "text": "model"}
CARD, WORLD = "README.md", "world.json"


@dataclasses.dataclass(frozen=True)
class Request:
    """What to write. `role` None: the stage's own; `dtype` None: as stored; `max_shard_size` in bytes; `fuse` turns a
    bank of heads into the fused form that few-step mode runs."""

    layout: str = layouts.PUBLISHED
    role: str | None = None
    average: bool = True
    parts: tuple[str, ...] = PARTS
    dtype: str | None = None
    max_shard_size: int = 5 * 10**9
    fuse: bool = False


@dataclasses.dataclass(frozen=True)
class _Part:
    """One model on its way out: its table, its arrays, what its config.json says."""

    name: str
    rules: list[torch_names.Rule]
    specs: Mapping[str, Spec]
    read: Callable[[str, int | None], np.ndarray]
    config: Mapping[str, Any]


def stage_folder(checkpoint: Path, stage: str | None) -> Path:
    """The folder of a stage: `checkpoint` itself, or `stage` in it. CheckpointError, listing the stages there are."""
    if trained.steps(checkpoint):
        if stage is not None:
            raise CheckpointError(f"{checkpoint} is one stage's folder: leave --stage {stage} out")
        return checkpoint.absolute()
    there = sorted(f.name for f in checkpoint.iterdir() if trained.steps(f)) if checkpoint.is_dir() else []
    if stage not in there:
        what = f"no stage {stage}" if stage else "several stages or none: say which by --stage"
        raise CheckpointError(f"{checkpoint} has {what}; trained ones there: {', '.join(there) or 'none'}")
    return (checkpoint / stage).absolute()


def export(folder: Path, output: Path, request: Request) -> tuple[list[Path], list[str]]:
    """Write the models of a stage's folder into `output`, which appears when all is whole.

    Parts of the world that were trained in stages beside `folder` come along where they are there. Returns the files of
    weights, and what was left out and why.

    Raises:
      CheckpointError: weights that are not there, are in eight bits, or have no place in the layout.
      ValueError: an output that holds something already, or an unknown dtype.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} holds something already: give a new folder")
    if request.dtype is not None and request.dtype not in DTYPES:
        raise ValueError(f"dtype {request.dtype!r}: give one of {', '.join(DTYPES)}")
    step = trained.steps(folder)[-1]
    about = trained.load_metadata(folder, step)
    config, said = about["config"], []
    parts = list(_parts(folder, step, about, request, said))
    if not parts:
        raise CheckpointError(f"nothing of {', '.join(request.parts)} is in {folder} or beside it: {'; '.join(said)}")
    names = FOLDERS[request.layout]
    marks = {"wp2.stage": config["stage"], "wp2.step": str(step), "wp2.weights": "ema" if request.average else "raw"}
    marks |= {"wp2.licence": about["licence"]} if about.get("licence") else {}
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".part-") as scratch:
        whole = Path(scratch, "whole")
        paths = []
        for part in parts:
            place = whole / names[part.name]
            expert = {} if part.name in STEMS else {"wp2.expert": part.name}
            stem = place / STEMS.get(part.name, "diffusion_pytorch_model")
            paths += _write(part, stem, request, marks | expert)
            (place / "config.json").write_text(json.dumps(part.config, indent=1) + "\n", "utf-8")
        world = {
            "layout": request.layout,
            "parts": {part.name: names[part.name] for part in parts},
            "fused": request.fuse,
            **{name: about[name] for name in ("config", "provenance", "licence") if name in about},
            **{name.removeprefix("wp2."): value for name, value in marks.items()},
        }
        (whole / WORLD).write_text(json.dumps(world, indent=1, sort_keys=True) + "\n", "utf-8")
        (whole / CARD).write_text(configs.card(world, [part.name for part in parts], said), "utf-8")
        if (folder.parent / TOKENIZER).is_file():
            shutil.copy(folder.parent / TOKENIZER, whole / TOKENIZER)
        whole.chmod(0o755)
        os.replace(whole, output)
    return [output / path.relative_to(whole) for path in paths], said


def _write(part: _Part, stem: Path, request: Request, marks: Mapping[str, str]) -> list[Path]:
    theirs = torch_names.published(part.rules, part.specs)
    if request.dtype is not None:
        theirs = {name: spec._replace(dtype=request.dtype) for name, spec in theirs.items()}
    make = torch_names.published_pieces(part.rules, part.read)
    return torch_io.write_weights(stem, theirs, lambda name: [make[name]()], request.max_shard_size, marks)


def _parts(folder: Path, step: int, about: Mapping[str, Any], request: Request, said: list[str]) -> Iterator[_Part]:
    config = about["config"]
    stage, world = config["stage"], from_config(config)
    there = trained.roles(folder, step)
    role = request.role or ("student" if stage == "stable_forcing" else "experts")
    if request.role is not None and role not in there:
        raise CheckpointError(f"{folder} has no {role}; it has {', '.join(there)}")
    if role in ("compressor", "adapters") or "adapters" in there:
        raise CheckpointError(
            f"{folder} holds a compressor and low-rank updates, no whole experts: memory_2 starts from them merged; "
            "export that"
        )
    if "experts" in request.parts and role in there:
        if about.get("precision", "full") != "full":
            raise CheckpointError(f"{folder} is in {about['precision']}: export the checkpoint that it was made from")
        yield from _experts(folder, step, world, (stage, role), request, said)
    elif "experts" in request.parts:
        said.append(f"no experts: {stage} has {', '.join(there)}")
    stages = config.get("stages", (stage,))
    homes = {
        "autoencoder": "autoencoder",
        "text": text_stage(stage, stages) if stage in stages and stage != "autoencoder" else "base",
    }
    for name, home in homes.items():
        place = folder if home == stage else folder.parent / home
        if name not in request.parts:
            continue
        if not trained.steps(place) or name not in trained.roles(place):
            said.append(f"no {name}: {place} has no weights of it")
            continue
        # What was trained with the later stages is the average.
        own = step if place == folder else None
        yield _whole(name, trained.Weights(place, name, ema=True, step=own), world, request.layout, said)


def _experts(
    folder: Path, step: int, world: World, which: tuple[str, str], request: Request, said: list[str]
) -> Iterator[_Part]:
    form = HEADS.get(which, "velocity")
    if request.fuse and form != "bank":
        raise CheckpointError(f"{which[1]} of {which[0]} have no bank of heads to fuse")
    if form != "velocity" and request.layout != layouts.PUBLISHED:
        raise CheckpointError(
            f"the layout {request.layout} has one many-step head, and {which[1]} of {which[0]} are few-step ({form}): "
            f"use --layout {layouts.PUBLISHED}"
        )
    table, names = world.stream("few_step", 1).pdd_schedule, world.experts.names
    counts = {
        "intervals": {name: table.intervals(name) for name in names},
        "blocks": {name: len(table.expert_blocks(name)) for name in names},
    }
    if request.layout != layouts.PUBLISHED:
        said.append(f"the layout {request.layout} has no place for action and memory weights: they are left out")
    stored = expert_models(world.dit, names, head=form, **counts)
    for name in names:
        weights = trained.Weights(folder, f"{which[1]}/{name}", ema=request.average, step=step)
        _check_fits(weights, stored[name].config, f"{which[1]}/{name} of {folder}")
        config, specs, read = stored[name].config, dict(weights.specs), _reading(weights)
        if request.fuse:
            config = expert_models(world.dit, names, head="fused", **counts)[name].config
            kernel, bias = (jnp.asarray(weights.read(f"head/{leaf}")) for leaf in ("kernel", "bias"))
            fused = dict(zip(("head/kernel", "head/bias"), pdd.fuse_heads(kernel, bias, table, name), strict=True))
            specs |= {path: Spec(x.shape, specs[path].dtype) for path, x in fused.items()}
            read = _reading(weights, {path: np.asarray(x) for path, x in fused.items()})
        rules = layouts.expert_rules(request.layout, config)
        yield _Part(name, rules, specs, read, configs.expert(request.layout, config))


def _whole(name: str, weights: trained.Weights, world: World, layout: str, said: list[str]) -> _Part:
    """The autoencoder or the text encoder."""
    if name == "text":
        kind, config = layouts.TEXT, world.text
    else:
        kind = layouts.WAN_VAE if world.autoencoder_kind == "wan" else layouts.TINY_VAE
        config = world.autoencoder.config
        if kind == layouts.TINY_VAE and layout == layouts.DIFFUSERS:
            said.append("diffusers has no causal tiny autoencoder: it is written under its published names")
    _check_fits(weights, config, name)
    rules = layouts.RULES[kind](layout, config)
    return _Part(name, rules, weights.specs, _reading(weights), configs.other(kind, layout, config))


def _check_fits(weights: trained.Weights, config: layouts.Config, what: str) -> None:
    found = {path: jax.ShapeDtypeStruct(spec.shape, np.float32) for path, spec in weights.specs.items()}
    wanted = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in layouts.shapes(config).items()}
    tree.check_fits(wanted, found, what=f"the weights {what}")


def _reading(
    weights: trained.Weights, instead: Mapping[str, np.ndarray] | None = None
) -> Callable[[str, int | None], np.ndarray]:
    def read(path: str, layer: int | None) -> np.ndarray:
        if instead and path in instead:
            return instead[path]
        return weights.read(path) if layer is None else weights.read(path, slice(layer, layer + 1))[0]

    return read
