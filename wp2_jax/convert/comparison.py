"""`wp2 convert verify`: files of weights in PyTorch's modules and in ours, on the same random input."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.checkpoints import torch_io, torch_names
from wp2_jax.convert import configs, inspection, layouts, torch_side
from wp2_jax.convert.export import STEMS
from wp2_jax.convert.sources import TOKENS
from wp2_jax.models import passes, umt5
from wp2_jax.models.dit import DiT
from wp2_jax.models.layers import call
from wp2_jax.models.vae_wan import WanVae
from wp2_jax.verify.core import Result, compare

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Of the largest difference over the largest magnitude, by the dtype that is computed in."""
_FRAMES, _ROWS, _COLUMNS, _TOKENS = 3, 8, 12, 24
"""Latents and caption tokens of the input: every axis has its own length."""


def verify(files: Mapping[str, Path], dtype: str = "float32", seed: int = 0) -> Iterator[Result | str]:
    """The differences of each part that PyTorch's modules cover, and a line about each that they do not.

    The autoencoder is float32 in ours, so it is compared in that.

    Raises:
      ValueError: without PyTorch, diffusers and transformers.
      CheckpointError: files that cannot be read, do not fit, or leave a tensor of PyTorch's module without weights.
    """
    torch_side.check()
    for part, path in files.items():
        if part == TOKENS:
            continue
        reader = torch_io.open_weights(path)
        found = layouts.recognise(reader.specs, inspection.given_for(reader))
        found.check()
        if found.kind == layouts.TINY_VAE:
            yield f"{part}: diffusers has no causal tiny autoencoder"
        elif getattr(found.config, "head", "velocity") != "velocity":
            yield f"{part}: diffusers has no few-step heads"
        else:
            tensors = {name: reader.read(stored) for name, stored in found.stored.items()}
            params = torch_names.to_tree(found.rules, tensors)
            with tempfile.TemporaryDirectory() as scratch:
                folder = reader.path.parent
                if found.layout != layouts.DIFFUSERS:
                    folder = Path(scratch)
                    _write(folder, part, found, params)
                yield from _COMPARE[found.kind](part, folder, found.config, params, dtype, seed)


def _write(folder: Path, part: str, found: layouts.Found, params: Any) -> None:
    """The same model as PyTorch's modules read it: without actions and memory."""
    flat = torch_names.flatten(params)
    rules = layouts.RULES[found.kind](layouts.DIFFUSERS, found.config)
    named = torch_names.published_pieces(rules, lambda path, layer: flat[path] if layer is None else flat[path][layer])
    made = {name: make() for name, make in named.items()}
    specs = {name: torch_io.Spec(x.shape, str(x.dtype)) for name, x in made.items()}
    stem = folder / STEMS.get(part, "diffusion_pytorch_model")
    torch_io.write_weights(stem, specs, lambda name: [made[name]])
    if isinstance(found.config, layouts.DiTConfig):
        config = configs.expert(layouts.DIFFUSERS, found.config)
    else:
        config = configs.other(found.kind, layouts.DIFFUSERS, found.config)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def _normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def _backbone(part: str, folder: Path, config: Any, params: Any, dtype: str, seed: int) -> Iterator[Result]:
    random = np.random.default_rng(seed)
    model = DiT(dataclasses.replace(config, dtype=dtype))
    size = (1, _FRAMES, _ROWS * config.patch, _COLUMNS * config.patch)
    noisy, y = _normal(random, *size, config.latent_channels), _normal(random, *size, config.condition_channels)
    contexts = _normal(random, 1, min(_TOKENS, config.text_len), config.text_dim)
    time = 700.0
    places = jnp.arange(_FRAMES, dtype=jnp.int32)[None]

    @jax.jit
    def run(params, noisy, y, contexts):
        t = jnp.full((1, _FRAMES), time)
        return passes.bidirectional(model, params, noisy, y, t, None, contexts, jnp.zeros_like(places), places)

    ours = run(params, noisy, y, contexts[:, None])
    theirs = torch_side.backbone(folder, dtype, np.concatenate([noisy, y], -1), time, contexts)
    yield compare(f"{part}: velocity", ours, theirs, TOLERANCES[dtype])


def _autoencoder(part: str, folder: Path, config: Any, params: Any, dtype: str, seed: int) -> Iterator[Result]:
    random, module = np.random.default_rng(seed), WanVae(config)
    video = np.clip(_normal(random, 1, 4 * (_FRAMES - 1) + 1, 8 * _ROWS, 8 * _COLUMNS, 3), -1, 1)
    latents = _normal(random, 1, _FRAMES, _ROWS, _COLUMNS, config.z_dim)
    encoded, decoded = torch_side.autoencoder(folder, video, latents)
    ours = jax.jit(lambda params, x: call(module, params, "encode", x))(params, video)
    yield compare(f"{part}: latents", ours, encoded, TOLERANCES["float32"])
    ours = jax.jit(lambda params, x: call(module, params, "decode", x))(params, latents)
    yield compare(f"{part}: pictures", ours, decoded, TOLERANCES["float32"])


def _text(part: str, folder: Path, config: Any, params: Any, dtype: str, seed: int) -> Iterator[Result]:
    random = np.random.default_rng(seed)
    encoder = umt5.Umt5Encoder(dataclasses.replace(config, dtype=dtype))
    ids = random.integers(2, config.vocab_size, (2, _TOKENS)).astype(np.int32)
    mask = np.arange(_TOKENS) < np.array([[_TOKENS], [_TOKENS // 2]])
    ids = np.where(mask, ids, 0)
    ours = jax.jit(lambda params, ids: umt5.encode(encoder, params, ids))(params, jnp.asarray(ids))
    theirs = torch_side.text(folder, dtype, ids, mask) * mask[..., None]
    yield compare(f"{part}: contexts", np.asarray(ours, np.float32), theirs, TOLERANCES[dtype])


_COMPARE = {layouts.EXPERT: _backbone, layouts.WAN_VAE: _autoencoder, layouts.TEXT: _text}
