"""Loading a golden folder's experts, and turning its channels-first arrays into ours."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.checkpoints import names_dit
from wp2_jax.checkpoints.torch_names import flatten, to_tree
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT, DiTConfig
from wp2_jax.models.memory import MemoryConfig
from wp2_jax.verify import golden

# The noisy input of c to f is the latents rolled by one along the channels (golden README).
NOISY_ROLL = 1


def dit_config(sidecar: dict, **changes) -> DiTConfig:
    """Sizes of an expert as a sidecar spells them (`model_config` and `compressor`)."""
    model, compressor = sidecar["model_config"], sidecar["compressor"]
    memory = MemoryConfig(
        widths=tuple(compressor["dims"]),
        spatial_down=tuple(compressor["spatial_down"]),
        temporal_down=tuple(compressor["temporal_down"]),
        attention_blocks=compressor["attn_num"],
        attention_heads=compressor["attn_heads"],
    )
    return DiTConfig(
        dim=model["dim"],
        num_heads=model["num_heads"],
        num_layers=model["num_layers"],
        ffn_dim=model["ffn_dim"],
        freq_dim=model["freq_dim"],
        text_dim=model["text_dim"],
        text_len=model["text_len"],
        latent_channels=model["out_dim"],
        condition_channels=model["in_dim"] - model["out_dim"],
        patch=model["patch_size"][1],
        eps=model["eps"],
        memory=memory,
        **changes,
    )


def shapes(config: DiTConfig) -> dict[str, tuple]:
    """Path -> shape of an expert's parameters, without making them."""
    tree = jax.eval_shape(lambda key: passes.init(config, key), jax.random.key(0))
    return {path: leaf.shape for path, leaf in flatten(tree).items()}


def load_expert(folder: Path, name: str, **changes) -> tuple[DiTConfig, dict]:
    """(config, params) of the many-step expert stored as golden item `name`."""
    sidecar, tensors = golden.load(folder, name)
    config = dit_config(sidecar, **changes)
    return config, to_tree(names_dit.rules(config), golden.below(tensors, "w."), shapes(config))


def with_fused_head(params: dict, heads: dict[str, np.ndarray], expert: str) -> dict:
    """An expert in few-step form: its head replaced by the fused one of weights_pdd_heads."""
    kernel = np.swapaxes(heads[f"w.{expert}.head.block_weight"], 1, 2)
    fused = {**params["head"], "kernel": kernel, "bias": heads[f"w.{expert}.head.block_bias"]}
    return {**params, "head": fused}


def weights_named(sidecar: Mapping) -> list[str]:
    """The weight items that a sidecar's `weights` text names."""
    return re.findall(r"weights_\w+", sidecar.get("weights") or "")


def channels_last(array: np.ndarray) -> jnp.ndarray:
    """[..., C, T, H, W] -> [..., T, H, W, C]."""
    return jnp.asarray(np.moveaxis(array, -4, -1))


def channels_first(array) -> np.ndarray:
    """[..., T, H, W, C] -> [..., C, T, H, W]."""
    return np.moveaxis(np.asarray(array), -1, -4)


def padded_context(raw: np.ndarray, text_len: int, batch: int = 1) -> jnp.ndarray:
    """Raw text features [n, text_dim] -> contexts [batch, 1, text_len, text_dim], zeros past n."""
    context = np.zeros((batch, 1, text_len, raw.shape[1]), np.float32)
    context[:, 0, : len(raw)] = raw
    return jnp.asarray(context)


def expert_of(folder: Path, sidecar: Mapping) -> tuple[DiT, dict]:
    """(model, params) of the expert that a sidecar's `weights` names. Raises ValueError where it names none."""
    names = weights_named(sidecar)
    if not names:
        raise ValueError(f"weights {sidecar.get('weights')!r} names no weights_* item")
    config, params = load_expert(folder, names[0])
    return DiT(config), jax.tree.map(jnp.asarray, params)


def apply(model: DiT, params, *args, method: str) -> Any:
    """One method of the backbone."""
    return model.apply({"params": params}, *args, method=method)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays that items c to f share, channels last."""

    clip: passes.History
    contexts: dict[int, np.ndarray]

    @classmethod
    def load(cls, folder: Path, name: str) -> "Inputs":
        _, tensors = golden.load(folder, name)
        latents, y, lr_latents, lr_y = (
            channels_last(tensors[f"in.{key}"]) for key in ("hr_latents", "hr_y", "lr_latents", "lr_y")
        )
        actions = jnp.asarray(tensors["in.hr_action"])
        clip = passes.History(latents, y, lr_latents, lr_y, actions, jnp.zeros(actions.shape[:2], jnp.int32))
        contexts = {int(key[len("in.context") :]): a for key, a in tensors.items() if key.startswith("in.context")}
        return cls(clip, contexts)

    def history(self, batch: int, start: int, end: int, factor: int) -> passes.History:
        """Latent frames start..end of the first `batch` entries."""
        full, small = slice(start, end), slice(start // factor, end // factor)
        clip = jax.tree.map(lambda a: a[:batch], self.clip)
        return passes.History(
            clip.latents[:, full],
            clip.y[:, full],
            clip.lr_latents[:, small],
            clip.lr_y[:, small],
            clip.actions[:, full],
            clip.captions[:, full],
        )

    def noisy(self, batch: int, start: int, end: int) -> jnp.ndarray:
        return jnp.roll(self.clip.latents[:batch, start:end], NOISY_ROLL, axis=-1)

    def context(self, index: int | list[int], text_len: int, batch: int) -> jnp.ndarray:
        """Contexts [batch, 1, text_len, text_dim]; a list has one index an entry."""
        if isinstance(index, list):
            return jnp.concatenate([padded_context(self.contexts[i], text_len) for i in index])
        return padded_context(self.contexts[index], text_len, batch)


def timesteps(value, tensors: Mapping[str, np.ndarray], batch: int, frames: int) -> tuple[jnp.ndarray, bool]:
    """(t, whether it is one a token) from a number, "833 (int64)", a number an entry, or the name of a tensor."""
    if isinstance(value, str) and value.startswith("in."):
        array = np.asarray(tensors[value.split()[0]], np.float32)
        if array.ndim == 2:
            return jnp.asarray(array), True
        value = array.tolist()
    numbers = [value] * batch if not isinstance(value, list) else value
    column = [float(str(number).split()[0]) for number in numbers]
    return jnp.broadcast_to(jnp.asarray(column, jnp.float32)[:, None], (batch, frames)), False
