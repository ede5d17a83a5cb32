"""Loading a golden folder's experts, and turning its channels-first arrays into ours."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.checkpoints import names_dit
from wp2_jax.checkpoints.torch_names import flatten, to_tree
from wp2_jax.models import passes
from wp2_jax.models.dit import DiTConfig
from wp2_jax.models.memory import MemoryConfig
from wp2_jax.verify import golden


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


def weights_named(sidecar: dict) -> list[str]:
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
