"""A world model's modules from its config: what training, generation and play share."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp

from wp2_jax.controls.geometry import Grid, check_size
from wp2_jax.controls.images import LOW_RES_SCALE
from wp2_jax.diffusion.experts import Experts
from wp2_jax.inference.spec import CAPACITIES, StreamSpec
from wp2_jax.models import autoencoder, umt5
from wp2_jax.models.dit import DiTConfig


@dataclasses.dataclass(frozen=True)
class WorldConfig:
    """Sizes of the world: pictures `height` x `width`, `chunk`, `sink` and `temporal` in latent frames.

    `boundary`: sigma between the experts, None for a single expert. `guidance`: one scale an expert, high first.
    `text_len`: tokens a caption is padded to; `negative_prompt` is the caption of the null branch.
    """

    height: int = 448
    width: int = 832
    chunk: int = 4
    sink: int = 1
    temporal: int = 1
    boundary: float | None = 0.9
    solver: str = "unipc"
    steps: int = 40
    shift: float = 5.0
    guidance: tuple[float, ...] = (3.5, 3.5)
    intervals: tuple[int, ...] = (56, 72)
    blocks: tuple[int, ...] = (2, 2)
    pdd_shift: float = 7.0
    text_len: int = 512
    negative_prompt: str = "blurred, distorted, flickering"


@dataclasses.dataclass(frozen=True)
class World:
    """The modules of one world model; build it with `from_config`."""

    config: WorldConfig
    dit: DiTConfig
    autoencoder_kind: Literal["wan", "tiny"]
    autoencoder_config: Mapping[str, Any]
    text: umt5.Umt5Config

    @functools.cached_property
    def experts(self) -> Experts:
        return Experts(self.config.boundary)

    @functools.cached_property
    def autoencoder(self) -> nn.Module:
        return autoencoder.build(self.autoencoder_kind, **self.autoencoder_config)

    @functools.cached_property
    def text_encoder(self) -> umt5.Umt5Encoder:
        return umt5.Umt5Encoder(self.text)

    def encode_text(self, params, ids: jnp.ndarray) -> jnp.ndarray:
        """Token ids [..., S] -> contexts [..., S, text_dim], zeros past each caption's length."""
        flat = umt5.encode(self.text_encoder, params, ids.reshape(-1, ids.shape[-1]))
        return flat.reshape(*ids.shape, flat.shape[-1])

    def stream(self, mode: str, capacity: int, **changes) -> StreamSpec:
        """The stream of this world in one mode; `changes` replace sampling settings."""
        config = self.config
        names = (
            "chunk",
            "sink",
            "temporal",
            "solver",
            "steps",
            "shift",
            "guidance",
            "intervals",
            "blocks",
            "pdd_shift",
        )
        settings = {name: getattr(config, name) for name in names} | changes
        return StreamSpec(
            dit=self.dit,
            experts=self.experts,
            autoencoder=self.autoencoder,
            mode=mode,
            height=config.height,
            width=config.width,
            capacity=capacity,
            **settings,
        )

    @property
    def longest(self) -> int:
        """Chunks of the longest world: the model has positions for no more, or the memory no room."""
        return min(self.dit.rope_frames // self.config.chunk, CAPACITIES[-1] + 1)

    @property
    def latent_size(self) -> tuple[int, int]:
        return self.config.height // autoencoder.PIXELS_PER_LATENT, self.config.width // autoencoder.PIXELS_PER_LATENT


def from_config(config: Mapping[str, Any]) -> World:
    """The world of a resolved config (plain dict or ConfigDict) with sections world, model, autoencoder, text.

    Raises ValueError that names the field where sizes do not fit together.
    """
    sections = {name: _plain(config[name]) for name in ("world", "model", "autoencoder", "text")}
    world = _unpack(WorldConfig, sections["world"], "world")
    dit = _unpack(DiTConfig, sections["model"], "model")
    text = _unpack(umt5.Umt5Config, sections["text"], "text")
    if dit.memory.space_factor != LOW_RES_SCALE * dit.patch:
        raise ValueError(
            f"model.memory.spatial_down gives {dit.memory.space_factor} latents a side of a memory token, the "
            f"low-resolution twin has {LOW_RES_SCALE * dit.patch} with model.patch {dit.patch}: the two are added"
        )
    check_size(world.height, world.width, Grid(autoencoder.PIXELS_PER_LATENT, dit.patch, LOW_RES_SCALE))
    if dit.text_dim != text.dim:
        raise ValueError(f"model.text_dim {dit.text_dim} must equal text.dim {text.dim}: one is fed to the other")
    if dit.text_len != world.text_len:
        raise ValueError(f"model.text_len {dit.text_len} must equal world.text_len {world.text_len}")
    kind = sections["autoencoder"].pop("kind")
    built = World(world, dit, kind, _Frozen(sections["autoencoder"]), text)
    built.stream("few_step", 1)
    return built


class _Frozen(dict):
    """A dict that hashes, so that a `World` can be a static argument."""

    def __hash__(self):  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def _unpack(cls: type, values: Mapping[str, Any], name: str):
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{name}: unknown {', '.join(unknown)}; known keys: {', '.join(known)}")
    return cls(**values)


def _plain(value: Any) -> Any:
    """ConfigDicts to dicts, lists to tuples (frozen dataclasses hash their fields)."""
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value
