"""Where the parts of a world are that others have written: an export of ours, or a release."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from wp2_jax.checkpoints.tensor_file import CheckpointError
from wp2_jax.controls.tokenizer import Tokenizer
from wp2_jax.convert.export import WORLD
from wp2_jax.inference.load import TOKENIZER
from wp2_jax.inference.world import World

EXPERTS = ("high", "low", "all")
AUTOENCODER, TEXT, TOKENS = "autoencoder", "text", "tokenizer"
PLACES = {
    "high": ("high_noise_model", "transformer"),
    "low": ("low_noise_model", "transformer_2"),
    "all": ("model",),
    AUTOENCODER: ("vae", "Wan2.1_VAE.pth"),
    TEXT: ("text_encoder", "models_t5_umt5-xxl-enc-bf16.pth"),
    TOKENS: (TOKENIZER, "tokenizer", "google/umt5-xxl"),
}
"""Where a release keeps a part: the WorldPlay2 and Wan folders and diffusers' ones."""
_PIECES = ("spiece.model", TOKENIZER)


def find(folder: Path) -> dict[str, Path]:
    """The parts in a folder: an export of ours, or a release in the WorldPlay2, Wan or diffusers arrangement.

    Raises CheckpointError where there is none.
    """
    told = told_by(folder)
    places = PLACES
    if told:
        places = {part: (name,) for part, name in told["parts"].items()} | {TOKENS: (TOKENIZER,)}
    there = {part: [folder / name for name in places.get(part, ()) if (folder / name).exists()] for part in PLACES}
    parts = {part: paths[0] for part, paths in there.items() if paths}
    if "low" not in parts and parts.get("high", folder).name == "transformer":
        parts["all"] = parts.pop("high")
    if not parts:
        expected = ", ".join(name for names in PLACES.values() for name in names)
        raise CheckpointError(f"{folder} holds neither {WORLD} nor any of {expected}: name the files by their options")
    return parts


def told_by(folder: Path) -> dict[str, Any]:
    """What an export of ours says in its folder, {} where that is none."""
    try:
        told = json.loads((folder / WORLD).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(told, dict) and all(isinstance(told.get(name), dict) for name in ("config", "parts"))
    return told if whole else {}


def tokenizer(path: Path | None, world: World, output: Path) -> Path | None:
    """The sentencepiece model of a file or folder. Raises where it is not one for this world's text encoder."""
    if path is None:
        return None
    if path.is_dir():
        there = [path / name for name in _PIECES if (path / name).is_file()]
        if not there:
            raise CheckpointError(
                f"{path} holds no {' or '.join(_PIECES)}: give the sentencepiece model of the encoder"
            )
        path = there[0]
    model = Tokenizer.load(path, world.config.text_len)
    if model.vocab_size > world.text.vocab_size:
        raise CheckpointError(
            f"{path} has {model.vocab_size} ids, the text encoder has text.vocab_size={world.text.vocab_size}: the "
            "two do not belong together"
        )
    kept = output / TOKENIZER
    if kept.is_file() and kept.read_bytes() != path.read_bytes():
        raise CheckpointError(f"{kept} is another tokenizer than {path}: give a new folder, or delete that file")
    return path


def copied(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(source, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target
