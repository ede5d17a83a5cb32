"""What goes beside exported weights: config.json as each layout's programs read it, and the model card."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from wp2_jax.convert import layouts
from wp2_jax.models.dit import DiTConfig

NON_COMMERCIAL = (
    "These weights derive from the published WorldPlay2 release. They are under that release's non-commercial licence, "
    "not under this software's Apache-2.0: use them for non-commercial purposes only, and pass this notice on."
)


def expert(layout: str, config: DiTConfig) -> dict[str, Any]:
    """config.json of one expert. The published layout adds the compressor's sizes, which no shape shows in full."""
    patch = [1, config.patch, config.patch]
    if layout == layouts.DIFFUSERS:
        return {
            "_class_name": "WanTransformer3DModel",
            "patch_size": patch,
            "num_attention_heads": config.num_heads,
            "attention_head_dim": config.head_dim,
            "in_channels": config.in_channels,
            "out_channels": config.latent_channels,
            "text_dim": config.text_dim,
            "freq_dim": config.freq_dim,
            "ffn_dim": config.ffn_dim,
            "num_layers": config.num_layers,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "eps": config.eps,
            "rope_max_seq_len": config.rope_frames,
        }
    fields = {
        "model_type": "i2v",
        "patch_size": patch,
        "text_len": config.text_len,
        "in_dim": config.in_channels,
        "out_dim": config.latent_channels,
        **{name: getattr(config, name) for name in ("dim", "ffn_dim", "freq_dim", "text_dim", "num_heads")},
        **{name: getattr(config, name) for name in ("num_layers", "eps")},
    }
    return fields | ({"wp2_memory": dataclasses.asdict(config.memory)} if layout == layouts.PUBLISHED else {})


def other(kind: str, layout: str, config: Any) -> dict[str, Any]:
    """config.json of an autoencoder or a text encoder."""
    fields = dataclasses.asdict(config)
    if layout != layouts.DIFFUSERS or kind == layouts.TINY_VAE:
        return fields
    if kind == layouts.WAN_VAE:
        theirs = {"dim": "base_dim", "temporal_downsample": "temperal_downsample"}
        theirs |= {"mean": "latents_mean", "std": "latents_std"}
        return {"_class_name": "AutoencoderKLWan", **{theirs.get(name, name): value for name, value in fields.items()}}
    return {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "d_kv": config.attention_dim // config.num_heads,
        "d_ff": config.ffn_dim,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": config.eps,
    }


def card(world: Mapping[str, Any], parts: Sequence[str], said: Sequence[str]) -> str:
    """The model card: what these files are and where they come from."""
    licence = world.get("licence")
    kept = {"ema": "the average of training", "raw": "the trained weights, not their average"}[world["weights"]]
    lines = [
        "# World model weights",
        "",
        f"Stage `{world['stage']}`, step {world['step']}, {kept}; layout {world['layout']}.",
        "Written by `wp2 convert export`; `world.json` holds the whole configuration.",
        "",
        "| part | folder |",
        "|---|---|",
        *(f"| {part} | `{world['parts'][part]}` |" for part in parts),
        "",
        *(f"- {line}" for line in said),
        "",
        "## Where they come from",
        "",
        f"```json\n{json.dumps(world.get('provenance') or 'not recorded', indent=1)}\n```",
        "",
        "## Licence",
        "",
        NON_COMMERCIAL if licence == "non-commercial" else (licence or "As their owner says; not recorded."),
        "",
    ]
    return "\n".join(lines)
