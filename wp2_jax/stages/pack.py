"""The weights of a curriculum as a small folder: one file a stage, and the tokenizer."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from wp2_jax.checkpoints import trained
from wp2_jax.inference.load import TOKENIZER
from wp2_jax.stages.context import StageError
from wp2_jax.stages.run import STAGES

ROLES = {"autoencoder": ("autoencoder",), "base": ("text",), "events": ("text",), "stable_forcing": ("student",)}
"""What is kept of a stage where that is not the experts. Of those that train the text encoder, later ones need that."""


def default(workdir: Path) -> tuple[str, ...]:
    """The stages that generate in every mode: of those that train the text encoder, the last that is there."""
    text = "events" if trained.steps(workdir / "events") else "base"
    return ("autoencoder", text, "memory_2", "teacher_forcing", "stable_forcing")


def pack(workdir: Path, output: Path, stages: Sequence[str] | None = None) -> list[Path]:
    """Pack `stages` (by default those of `default`) of a curriculum's workdir into `output`; returns the files.

    Raises:
      StageError: a stage that does not exist or has not been trained. Nothing is written then.
    """
    stages = tuple(stages or default(workdir))
    unknown = [stage for stage in stages if stage not in STAGES or stage == "memory_1"]
    untrained = [stage for stage in stages if stage not in unknown and not trained.steps(workdir / stage)]
    if unknown:
        choices = ", ".join(stage for stage in STAGES if stage != "memory_1")
        raise StageError(f"stages {', '.join(unknown)} cannot be packed; choose from {choices}")
    if untrained or not (workdir / TOKENIZER).is_file():
        raise StageError(
            f"{workdir} has no trained {', '.join(untrained) or TOKENIZER}: run wp2 curriculum there first"
        )
    paths = [trained.pack(workdir / stage, output / stage, ROLES.get(stage, ("experts",))) for stage in stages]
    return [*paths, Path(shutil.copy(workdir / TOKENIZER, output / TOKENIZER))]
