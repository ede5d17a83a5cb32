"""Exported models in diffusers' and transformers' modules, from a folder, run on arrays. Needs the extra `bench`."""

# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

import numpy as np

from wp2_jax.checkpoints.tensor_file import CheckpointError


def check() -> None:
    """Raises ValueError that says what to install."""
    try:
        import diffusers  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"the comparison needs PyTorch's modules ({error}): pip install 'wp2_jax[bench]'") from error


def _diffusers(kind: Any, folder: Path, dtype: str) -> Any:
    """A module of diffusers with the weights of a folder, by its own config.json; it keeps some of them in float32.

    Not by `from_pretrained`, which wants one more package for this, and only warns of tensors that it makes up.
    """
    import torch
    from safetensors.torch import load_file

    module = kind.from_config(kind.load_config(str(folder)))
    state = {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    exact = module._keep_in_fp32_modules or ()
    for name, value in module.named_parameters():
        kept = any(word in name.split(".") for word in exact)
        value.data = value.data.to(torch.float32 if kept else getattr(torch, dtype))
    return module.eval()


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


def _first(array: np.ndarray) -> Any:
    """[B, T, H, W, C] -> tensor [B, C, T, H, W]."""
    return _tensor(np.moveaxis(array, -1, 1))


def _last(tensor: Any) -> np.ndarray:
    return np.moveaxis(tensor.float().numpy(), 1, -1)


def backbone(folder: Path, dtype: str, latents: np.ndarray, t: float, contexts: np.ndarray) -> np.ndarray:
    """Velocity [B, T, h, w, 16] of WanTransformer3DModel for latents [B, T, h, w, 36] and contexts [B, S, D]."""
    import torch
    from diffusers import WanTransformer3DModel

    module = _diffusers(WanTransformer3DModel, folder, dtype)
    given = (_first(latents).to(module.dtype), torch.full((len(latents),), t), _tensor(contexts).to(module.dtype))
    with torch.no_grad():
        return _last(module(*given, return_dict=False)[0])


def autoencoder(folder: Path, video: np.ndarray, latents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(normalised latents of a video, pictures of normalised latents) of AutoencoderKLWan, channels last, float32."""
    import torch
    from diffusers import AutoencoderKLWan

    module = _diffusers(AutoencoderKLWan, folder, "float32")
    mean, std = (np.asarray(getattr(module.config, name), np.float32) for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        encoded = _last(module.encode(_first(video)).latent_dist.mode())
        decoded = _last(module.decode(_first(latents * std + mean)).sample)
    return (encoded - mean) / std, decoded


def text(folder: Path, dtype: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Hidden states [N, S, D] of UMT5EncoderModel for ids and mask [N, S]."""
    import torch
    from transformers import UMT5EncoderModel

    module, told = UMT5EncoderModel.from_pretrained(str(folder), output_loading_info=True, dtype=getattr(torch, dtype))
    lists = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if wrong := {name: sorted(map(str, told[name])) for name in lists if told[name]}:
        raise CheckpointError(f"{folder}: UMT5EncoderModel has {wrong}")
    module.eval()
    with torch.no_grad():
        given = {"input_ids": _tensor(ids.astype(np.int64)), "attention_mask": _tensor(mask.astype(np.int64))}
        return module(**given).last_hidden_state.float().numpy()
