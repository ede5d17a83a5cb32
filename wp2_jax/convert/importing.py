"""Files of PyTorch programs into a checkpoint folder of ours: packed stages, written one tensor at a time.

Every file is held against one world's config before anything is written. The config is that of the experiment, of the
`world.json` of an export, of the stage that is added to, or what the files tell; in this order.
"""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from wp2_jax import rng
from wp2_jax.checkpoints import torch_io, torch_names, trained
from wp2_jax.checkpoints.tensor_file import CheckpointError, Spec
from wp2_jax.convert import fresh, inspection, layouts, sources
from wp2_jax.convert.export import DTYPES, HEADS
from wp2_jax.convert.sources import AUTOENCODER, EXPERTS, TEXT, TOKENS
from wp2_jax.diffusion import pdd
from wp2_jax.inference.load import STAGES, TOKENIZER, text_stage
from wp2_jax.inference.world import World, from_config

_WORLD = {"world": "config", "model": "dit", "autoencoder": "autoencoder_config", "text": "text"}
"""The sections of a config that say what the world is, and what a `World` calls them."""
_RUN = ("head", "intervals", "blocks", "dtype", "param_dtype", "remat", "unroll", "attention")
"""Fields of a backbone's config that are no property of its many-step weights."""
NON_COMMERCIAL = "non-commercial"


@dataclasses.dataclass(frozen=True)
class Request:
    """What to read. `files`: a path for each part, of `EXPERTS`, autoencoder, text, tokenizer.

    `config`: a resolved experiment; `average`: which weights of the experts' .pt files that hold both; `dtype` None: as
    stored; `fuse`: a bank of heads as the fused form; `seed`: of the weights that a plain backbone lacks; `licence`: of
    files in the published layout that say nothing themselves.
    """

    files: Mapping[str, Path]
    stage: str | None = None
    config: Mapping[str, Any] | None = None
    average: bool | None = None
    dtype: str | None = None
    fuse: bool = False
    seed: int = 0
    licence: str | None = None


Made = tuple[Spec, Callable[[], Iterable[np.ndarray]]]
"""An array of ours: what it is, and its pieces."""


@dataclasses.dataclass(frozen=True)
class _File:
    """A part's file, recognised: `config` of it holds the world's sizes."""

    part: str
    reader: torch_io.Reader
    found: layouts.Found

    def read(self, name: str, rows: slice | None) -> np.ndarray:
        return self.reader.read(self.found.stored[name], rows)

    def arrays(self) -> dict[str, Made]:
        """Our path -> array, for all that the file holds."""
        own = self.found.own_specs()
        return {
            rule.ours: (
                own[rule.ours],
                functools.partial(torch_names.own_pieces, rule, self.found.specs, self.read),
            )
            for rule in self.found.rules
        }


def import_files(request: Request, output: Path) -> tuple[list[Path], list[str]]:
    """Write the files of `request` as packed stages into `output`, beside what is there; returns what was written, and
    what is to be known about it. A stage's file appears when it is whole, that of the experts last.

    Raises:
      CheckpointError: files that cannot be read or do not fit, listing every tensor; stages that have the role already.
      ValueError: an unknown stage or dtype, a config that does not fit together, or too little space.
    """
    if request.dtype not in (None, *DTYPES):
        raise ValueError(f"dtype {request.dtype!r}: give one of {', '.join(DTYPES)}")
    if not request.files:
        raise ValueError("nothing to import: give a folder, or files by their options")
    said: list[str] = []
    readers = {
        part: torch_io.open_weights(path, request.average if part in EXPERTS else None)
        for part, path in request.files.items()
        if part != TOKENS
    }
    told = next((told for x in readers.values() for up in x.path.parents[:2] if (told := sources.told_by(up))), {})
    config = _config(request, told, output, readers, said)
    try:
        world = from_config(config)
    except ValueError as error:
        raise ValueError(f"{error}; a config tells what the files do not: --config FILE.py:STAGE") from error
    files = [_recognised(part, reader, world) for part, reader in readers.items()]
    experts = [file for file in files if file.part in EXPERTS]
    stage, role = _check_experts(request, told, world, experts, said)
    stages = config.get("stages", ())
    homes = {
        AUTOENCODER: (AUTOENCODER, AUTOENCODER),
        TEXT: (text_stage(stage, stages if stage in stages else (stage,)), TEXT),
    }
    targets: dict[str, dict[str, Made]] = {}
    for file in sorted(files, key=lambda file: file.part in EXPERTS):
        home, prefix = homes.get(file.part, (stage, f"{role}/{file.part}"))
        made = _expert_arrays(file, world, request, said) if file in experts else file.arrays()
        for path, (spec, pieces) in made.items():
            spec = spec if request.dtype is None else spec._replace(dtype=request.dtype)
            targets.setdefault(home, {})[f"{prefix}/{path}"] = (spec, pieces)
    tokenizer = sources.tokenizer(request.files.get(TOKENS), world, output)
    abouts = {home: _about(output / home, made, world) for home, made in targets.items()}
    _check_space(output, targets)

    licence = _licence(request, told, files, said)
    provenance = {"imported": {file.part: _origin(file) for file in files}}
    if told.get("provenance"):
        provenance["before"] = told["provenance"]
    written = [] if tokenizer is None else [sources.copied(tokenizer, output / TOKENIZER)]
    for home, made in targets.items():
        about = abouts[home]
        earlier = (about.get("provenance") or {}).get("imported", {})
        metadata = {"step": int(told.get("step", 0)), **({"licence": licence} if licence else {}), **about}
        metadata |= {"stage": home, "config": {**config, "stage": home}}
        metadata["provenance"] = provenance | {"imported": earlier | provenance["imported"]}
        specs = {name: spec for name, (spec, _) in made.items()}
        path = trained.add_roles(output / home, specs, lambda name, made=made: made[name][1](), metadata)
        written.append(path)
    return written, said


def _config(
    request: Request,
    told: Mapping[str, Any],
    output: Path,
    readers: Mapping[str, torch_io.Reader],
    said: list[str],
) -> Mapping[str, Any]:
    if request.config is not None or told:
        return told["config"] if request.config is None else request.config
    for folder in sorted(output.iterdir()) if output.is_dir() else []:
        if trained.steps(folder):
            return trained.load_metadata(folder)["config"]
    sections: dict[str, Any] = {"world": {}, "model": {}, "autoencoder": {"kind": "wan"}, "text": {}}
    heads: dict[str, dict[str, int]] = {"intervals": {}, "blocks": {}}
    for part, reader in readers.items():
        found = layouts.recognise(reader.specs, inspection.given_for(reader))
        fields = dataclasses.asdict(found.config)
        plain = {name: value for name, value in fields.items() if name not in _RUN}
        said += [f"{reader.path}: {name} is assumed to be {value}" for name, value in found.assumed.items()]
        if found.kind == layouts.EXPERT:
            sections["model"] = plain
            sections["world"]["text_len"] = fields["text_len"]
            if fields["head"] == "bank":
                heads["intervals"][part] = fields["intervals"]
            if fields["head"] == "fused":
                heads["blocks"][part] = fields["blocks"]
        elif found.kind == layouts.TEXT:
            sections["text"] = plain
        else:
            sections["autoencoder"] = {"kind": "wan" if found.kind == layouts.WAN_VAE else "tiny", **plain}
    if "all" in readers:
        sections["world"]["boundary"] = None
    for name, counts in heads.items():
        if counts:
            sections["world"][name] = [counts[part] for part in EXPERTS if part in counts]
    return sections


def _recognised(part: str, reader: torch_io.Reader, world: World) -> _File:
    """A part's file, held against the world. CheckpointError that lists all that does not fit."""
    autoencoder = layouts.WAN_VAE if world.autoencoder_kind == "wan" else layouts.TINY_VAE
    wanted, config = {AUTOENCODER: (autoencoder, world.autoencoder.config), TEXT: (layouts.TEXT, world.text)}.get(
        part, (layouts.EXPERT, world.dit)
    )
    try:
        kind, _ = layouts.kind_of(reader.specs)
        if kind != wanted:
            raise CheckpointError(f"it is of kind {kind}, and this world's {part} is of kind {wanted}")
        given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        if kind == layouts.EXPERT:
            given = {name: value for name, value in given.items() if name not in ("head", "intervals", "blocks")}
        found = layouts.recognise(reader.specs, given)
        found.check()
    except ValueError as error:
        raise CheckpointError(f"{reader.path}: {error}") from error
    return _File(part, reader, found)


def _check_experts(
    request: Request, told: Mapping[str, Any], world: World, files: list[_File], said: list[str]
) -> tuple[str, str]:
    """(stage, role) of the experts. Raises CheckpointError for files that are not those of this world or stage."""
    if not files:
        return request.stage or told.get("stage") or "base", "experts"
    parts = [file.part for file in files]
    if set(parts) != set(world.experts.names):
        raise CheckpointError(
            f"with world.boundary {world.config.boundary} the experts are {', '.join(world.experts.names)}, and there "
            f"are files for {', '.join(parts)}: give one for each"
        )
    if len({file.reader.path.resolve() for file in files}) < len(files):
        raise CheckpointError(f"{files[0].reader.path} is given for {' and '.join(parts)}: each has its own")
    forms = {_form(file) for file in files}
    if len(forms) > 1:
        raise CheckpointError(
            f"the experts have different heads, {' and '.join(sorted(forms))}: they are of two stages"
        )
    for file in files:
        _check_expert(file, world, said)
    (form,) = forms
    if request.fuse and form != "bank":
        raise CheckpointError(f"{files[0].reader.path} has no bank of heads to fuse: its form is {form}")
    form = "fused" if request.fuse else form
    plain = files[0].found.layout != layouts.PUBLISHED
    known = {"fused": "stable_forcing", "bank": "pdd"}.get(form) or ("base" if plain else None)
    stage = request.stage or ("stable_forcing" if request.fuse else told.get("stage")) or known
    stages = sorted({stage for names in STAGES.values() for stage in names})
    if stage is None:
        raise ValueError(
            "the files do not tell the bidirectional model from the autoregressive one: say --stage memory_2 or "
            "--stage teacher_forcing"
        )
    if stage not in stages:
        raise ValueError(f"stage {stage!r} has no experts of its own; choose from {', '.join(stages)}")
    role = next((role for name, role in HEADS if name == stage), "experts")
    if (wanted := HEADS.get((stage, role), "velocity")) != form:
        more = ", or --fuse" if (wanted, form) == ("fused", "bank") else ""
        raise CheckpointError(
            f"stage {stage} keeps heads of the form {wanted}, these files are {form}: give another --stage{more}"
        )
    return stage, role


def _form(file: _File) -> str:
    return file.found.config.head  # pyright: ignore[reportAttributeAccessIssue]


def _check_expert(file: _File, world: World, said: list[str]) -> None:
    """Whether a file can be the expert that it was given as; what it leaves open is said."""
    path, part, config = file.reader.path, file.part, file.found.config
    assert isinstance(config, layouts.DiTConfig)
    marked = file.reader.metadata.get(f"{inspection.PREFIX}expert")
    if marked is not None and marked != part:
        raise CheckpointError(f"{path} says that it is the expert {marked}, and it was given as {part}")
    table = world.stream("few_step", 1).pdd_schedule
    names = world.experts.names
    if config.head == "bank":
        counts = {name: table.intervals(name) for name in names}
        what, count = "intervals", config.intervals
    else:
        counts = {name: len(table.expert_blocks(name)) for name in names}
        what, count = "blocks", config.blocks
    if config.head != "velocity" and count != counts[part]:
        others = [name for name in names if counts[name] == count]
        swapped = f"; {others[0]} has that many: are the two swapped?" if others else ""
        raise CheckpointError(f"{path} has {count} {what}, the expert {part} of this world {counts[part]}{swapped}")
    told = config.head == "bank" and len(set(counts.values())) == len(counts)
    if marked is None and not told and part != "all":
        said.append(f"{path} is taken for the expert {part}: nothing in it tells{inspection.hint(path)}")


def _expert_arrays(file: _File, world: World, request: Request, said: list[str]) -> dict[str, Made]:
    """An expert's arrays: its file's, with heads fused where asked, and fresh ones for what the layout lacks."""
    made, config = file.arrays(), file.found.config
    assert isinstance(config, layouts.DiTConfig)
    if request.fuse:
        paths = ("head/kernel", "head/bias")
        kernel, bias = (jnp.asarray(np.concatenate(list(made[path][1]()))) for path in paths)
        table = world.stream("few_step", 1).pdd_schedule
        for path, fused in zip(paths, pdd.fuse_heads(kernel, bias, table, file.part), strict=True):
            made[path] = Spec(fused.shape, made[path][0].dtype), functools.partial(_one, np.asarray(fused))
    missing = {path: shape for path, shape in layouts.shapes(config).items() if path not in made}
    if missing:
        key = rng.fold(rng.base_key(request.seed), file.part)
        draw = fresh.extensions(config, key)
        dtype = made["patch_kernel"][0].dtype
        for path, shape in missing.items():
            made[path] = Spec(shape, dtype), functools.partial(draw, path)
        said.append(
            f"{file.reader.path} has no action and memory weights: those of {file.part} are initialised (seed "
            f"{request.seed}), and add nothing to the backbone until they are trained"
        )
    return made


def _one(array: np.ndarray) -> Iterator[np.ndarray]:
    yield array


def _about(folder: Path, made: Mapping[str, Made], world: World) -> dict[str, Any]:
    """The metadata of a stage that is added to, {} of a new one. CheckpointError where the two do not go together."""
    trained.check_room(folder, {name.split("/")[0] for name in made})
    if not trained.steps(folder):
        return {}
    about = trained.load_metadata(folder)
    if about.get("precision", "full") != "full":
        raise CheckpointError(f"{folder} is in {about['precision']}: give a new folder")
    there = from_config(about["config"])
    wrong = [section for section, name in _WORLD.items() if getattr(there, name) != getattr(world, name)]
    if wrong:
        raise CheckpointError(f"{folder} is of another world, by {', '.join(wrong)} of its config: give a new folder")
    return about


def _check_space(output: Path, targets: Mapping[str, Mapping[str, Made]]) -> None:
    needed = sum(spec.nbytes for made in targets.values() for spec, _ in made.values())
    needed += sum((output / home / trained.FILE).stat().st_size for home in targets if trained.steps(output / home))
    place = next(up for up in (output.absolute(), *output.absolute().parents) if up.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(f"{output} takes {needed / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB free")


def _licence(request: Request, told: Mapping[str, Any], files: list[_File], said: list[str]) -> str | None:
    """What the files say, or, of files in the published layout that are not ours, that of the release."""
    marks = [told.get("licence"), *(file.reader.metadata.get(f"{inspection.PREFIX}licence") for file in files)]
    if marked := [mark for mark in marks if mark]:
        return NON_COMMERCIAL if NON_COMMERCIAL in marked else marked[0]
    theirs = [
        file
        for file in files
        if (file.found.kind, file.found.layout) == (layouts.EXPERT, layouts.PUBLISHED)
        and f"{inspection.PREFIX}stage" not in file.reader.metadata
    ]
    if theirs and request.licence is None:
        said.append(
            f"{theirs[0].reader.path} is in the layout of the published release: recorded as under its non-commercial "
            "licence, and so is what is trained from it; --licence says otherwise"
        )
        return NON_COMMERCIAL
    return request.licence


def _origin(file: _File) -> dict[str, str]:
    path = file.reader.path
    origin = {"file": f"{path.parent.name}/{path.name}", "layout": file.found.layout}
    return origin | ({"weights": "/".join(file.reader.wrappers)} if file.reader.wrappers else {})
