"""A trained world from its checkpoints: which stage serves which mode, and its weights, checked strictly."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from wp2_jax import sharding
from wp2_jax.array_types import Params
from wp2_jax.checkpoints import trained
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.controls.tokenizer import Tokenizer
from wp2_jax.diffusion import pdd
from wp2_jax.inference import precision as precisions
from wp2_jax.inference.precision import Precision
from wp2_jax.inference.spec import MODES
from wp2_jax.inference.world import World, from_config
from wp2_jax.models import autoencoder, passes, umt5
from wp2_jax.models.dit import DiT
from wp2_jax.models.experts import expert_models

STAGES = {
    "few_step": ("stable_forcing", "pdd"),
    "ar": ("teacher_forcing",),
    "bi": ("memory_2", "events", "action", "base"),
}
"""The stages of a curriculum that serve a mode, best first."""
TOKENIZER = "tokenizer.model"


def text_stage(stage: str, stages: Sequence[str]) -> str:
    """Which of a curriculum's `stages` gives a stage its text encoder: "events", from itself on, where there is one."""
    stages = tuple(stages)
    return "events" if "events" in stages[: stages.index(stage) + 1] else "base"


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint that was found but not read: `folder` of the stage, `workdir` of its curriculum, the stage's world.

    `config` is the resolved config that the stage was trained with; `stored` the precision its weights are in, and
    `precision` the one they are to run in.
    """

    workdir: Path
    folder: Path
    stage: str
    step: int
    mode: str
    config: Mapping[str, Any]
    world: World
    stored: str = "full"
    precision: Precision = precisions.PRESETS["full"]

    @property
    def trained_rotation(self) -> tuple[float, float] | None:
        """(yaw, pitch) degrees a latent frame of the data that the world was trained on, None where not recorded."""
        data = self.config.get("data") or {}
        names = ("yaw_degrees", "pitch_degrees")
        return (float(data[names[0]]), float(data[names[1]])) if all(name in data for name in names) else None

    @property
    def role(self) -> str:
        """What the stage's checkpoints call the experts."""
        return "student" if self.stage == "stable_forcing" else "experts"

    @property
    def text_stage(self) -> str:
        """The stage whose text encoder reads this one's captions."""
        return text_stage(self.stage, self.config.get("stages", (self.stage,)))

    @functools.cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of the weights as they are stored: {"experts": by name, "autoencoder": tree, "text": tree}."""
        key = jax.random.key(0)
        return {
            "experts": _expert_shapes(self),
            "autoencoder": jax.eval_shape(lambda: autoencoder.init_params(self.world.autoencoder, key)),
            "text": jax.eval_shape(lambda: umt5.init(self.world.text, key)),
        }

    def as_run(self, experts: dict[str, Params]) -> dict[str, Params]:
        """Stored experts in the form that the mode runs: heads fused, in the precision asked for."""
        if self.stage == "pdd":
            experts = fuse(self.world, experts)
        return {name: precisions.cast(tree, self.precision) for name, tree in experts.items()}

    def tokenizer(self) -> Tokenizer:
        """The curriculum's tokenizer. Raises CheckpointError where it is missing or has more ids than the encoder."""
        path = self.workdir / TOKENIZER
        if not path.is_file():
            raise CheckpointError(
                f"there is no {path}: the first stage of `wp2 curriculum --workdir {self.workdir}` makes it"
            )
        tokenizer = Tokenizer.load(path, self.world.config.text_len)
        if tokenizer.vocab_size > self.world.text.vocab_size:
            raise CheckpointError(
                f"{path} has {tokenizer.vocab_size} ids, the text encoder of {self.folder} has text.vocab_size="
                f"{self.world.text.vocab_size}: the two are not of one curriculum"
            )
        return tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A world ready to run: `params` {"experts": {name: tree}, "autoencoder": tree} as `StreamSpec` of the mode wants
    them, `text_params` of the text encoder. On the devices of `mesh` where there is one: run the stream's functions
    within `on_mesh()`."""

    source: Source
    params: dict[str, Any]
    text_params: Params
    tokenizer: Tokenizer
    mesh: Mesh | None = None

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Where activations are cut over the mesh, if there is one."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @property
    def world(self) -> World:
        return self.source.world

    @property
    def mode(self) -> str:
        return self.source.mode


def shipped() -> Path:
    """The folder of the tiny world's weights that come with the package. CheckpointError where they are missing."""
    folder = Path(__file__).parents[1] / "weights" / "tiny"
    if not folder.is_dir():
        raise CheckpointError(f"this installation has no weights in {folder}: give --checkpoint, or install it again")
    return folder


def locate(directory: str | os.PathLike[str], mode: str, precision: str | None = None) -> Source:
    """Find the checkpoint for a mode ("bi", "ar" or "few_step") without reading weights, to run in a precision.

    `directory` is a curriculum's workdir, where the mode picks the stage (`STAGES`), or one stage's folder in it.
    `precision` is one of `precision.PRESETS`, by default the one the weights are in.

    Raises:
      ValueError: an unknown mode, or a precision that these weights or this device do not have.
      CheckpointError: nothing trained there, a stage that does not serve the mode, or unreadable metadata.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: give one of {', '.join(MODES)}")
    directory = Path(directory).absolute()
    if not directory.is_dir():
        raise CheckpointError(f"there is no folder {directory}: give the workdir of `wp2 curriculum` or a stage in it")
    if (directory / "checkpoints").is_dir() or trained.steps(directory):
        folder = directory
    else:
        there = _stages_in(directory)
        fitting = [name for name in STAGES[mode] if name in there]
        if not fitting:
            raise CheckpointError(
                f"mode {mode} needs one of the stages {', '.join(STAGES[mode])}, and {directory} has "
                f"{', '.join(there) or 'no trained stage'}; train it with `wp2 curriculum --workdir {directory}`"
                f"{_modes_of(there)}"
            )
        folder = directory / fitting[0]
    return _source(folder, mode, precision)


def _stages_in(directory: Path) -> list[str]:
    return sorted(folder.name for folder in directory.iterdir() if trained.steps(folder))


def _modes_of(stages: list[str]) -> str:
    modes = [mode for mode, names in STAGES.items() if set(names) & set(stages)]
    return f", or use --mode {' or '.join(modes)}" if modes else ""


def _source(folder: Path, mode: str, precision: str | None) -> Source:
    steps = trained.steps(folder)
    if not steps:
        raise CheckpointError(f"{folder}/checkpoints holds no whole checkpoint: the stage has not been trained yet")
    metadata = trained.load_metadata(folder, steps[-1])
    config = metadata.get("config")
    if not isinstance(config, Mapping) or "stage" not in config:
        raise CheckpointError(f"{folder}, step {steps[-1]}: its metadata hold no config with a stage")
    stage = config["stage"]
    if stage not in STAGES[mode]:
        raise CheckpointError(
            f"{folder} is of stage {stage}, which does not serve mode {mode} (that needs "
            f"{' or '.join(STAGES[mode])}){_modes_of([stage])}"
        )
    stored = metadata.get("precision", "full")
    chosen = precisions.preset(precision or stored, stored)
    world = precisions.world_in(from_config(config), chosen)
    return Source(folder.parent, folder, stage, steps[-1], mode, config, world, stored, chosen)


def load(
    source: Source | str | os.PathLike[str],
    mode: str | None = None,
    *,
    ema: bool = True,
    mesh: Mesh | None = None,
    rules: sharding.Rules = sharding.RULES,
) -> Loaded:
    """Read the weights of a `Source`, or of a directory and a mode as for `locate`.

    The experts' average is read unless `ema` is False; autoencoder and text encoder always are the averages, for that
    is what the later stages were trained with. With `mesh` the weights are cut over it by `rules`.

    Raises:
      CheckpointError: a stage or file that is missing, naming it and the command that makes it.
      tree.TreeMismatchError: weights that do not fit the world, listing names and shapes; nothing is loaded.
    """
    if not isinstance(source, Source):
        source = locate(source, mode or "few_step")
    elif mode is not None and mode != source.mode:
        raise ValueError(f"mode {mode!r}: the checkpoint was located for mode {source.mode}")
    tokenizer = source.tokenizer()

    def read(stage: str, role: str, shapes: Any, average: bool = True) -> Any:
        folder = source.folder if stage == source.stage else source.workdir / stage
        if not trained.steps(folder):
            raise CheckpointError(
                f"{stage} gives the weights of the {role}, and {folder} holds no checkpoint; train it with "
                f"`wp2 curriculum --workdir {source.workdir}`, or copy that folder beside {source.folder}"
            )
        step = source.step if stage == source.stage else None
        abstract = shapes if mesh is None else sharding.abstract(shapes, rules, mesh)
        return trained.load_params(folder, role, ema=average, step=step, abstract=abstract)

    shapes = source.shapes
    experts = source.as_run(read(source.stage, source.role, shapes["experts"], ema))
    vae, text = (
        read("autoencoder", "autoencoder", shapes["autoencoder"]),
        read(source.text_stage, "text", shapes["text"]),
    )
    return Loaded(source, {"experts": experts, "autoencoder": vae}, text, tokenizer, mesh)


def _expert_shapes(source: Source) -> dict[str, Any]:
    """Shapes of the experts as the stage saved them: velocity, bank or fused heads, matrices perhaps in eight bits."""
    world = source.world
    if source.stage == "pdd":
        table = world.stream("few_step", 1).pdd_schedule
        names = world.experts.names
        intervals = {name: table.intervals(name) for name in names}
        blocks = {name: len(table.expert_blocks(name)) for name in names}
        models = expert_models(world.dit, names, head="bank", intervals=intervals, blocks=blocks)
    else:
        models = world.stream(source.mode, 1).models
    stored = precisions.PRESETS[source.stored]

    def shapes(model: DiT) -> Any:
        return jax.eval_shape(lambda: precisions.cast(passes.init(model.config, jax.random.key(0)), stored))

    return {name: shapes(model) for name, model in models.items()}


def fuse(world: World, experts: Mapping[str, Params]) -> dict[str, Params]:
    """Experts in bank form (stage pdd) -> in the fused form that few-step mode runs; exact."""
    table = world.stream("few_step", 1).pdd_schedule
    fused = {}
    for name, tree in experts.items():
        head = tree["head"]
        kernel, bias = pdd.fuse_heads(head["kernel"], head["bias"], table, name)
        dtype = head["kernel"].dtype
        fused[name] = {**tree, "head": {**head, "kernel": kernel.astype(dtype), "bias": bias.astype(dtype)}}
    return fused
