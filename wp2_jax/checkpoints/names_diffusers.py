"""Names of the same weights in diffusers (WanTransformer3DModel, AutoencoderKLWan) and transformers (UMT5EncoderModel).

These modules know neither actions nor memory: of the backbone they take what `without_extensions` leaves.
"""

import dataclasses
from typing import Any

from wp2_jax.checkpoints import names_dit, names_umt5, names_vae
from wp2_jax.checkpoints.torch_names import Rule

_BACKBONE = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_BLOCK = {
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    "self_attn.norm_": "attn1.norm_",
    "cross_attn.norm_": "attn2.norm_",
    "self_attn.": "attn1.to_",
    "cross_attn.": "attn2.to_",
    "norm3.": "norm2.",
    "ffn.0.": "ffn.net.0.proj.",
    "ffn.2.": "ffn.net.2.",
    "modulation": "scale_shift_table",
}
_RESIDUAL = {
    "residual.0.gamma": "norm1.gamma",
    "residual.2.": "conv1.",
    "residual.3.gamma": "norm2.gamma",
    "residual.6.": "conv2.",
    "shortcut.": "conv_shortcut.",
}
_UMT5 = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
    "attn.": "layer.0.SelfAttention.",
    "norm1.": "layer.0.layer_norm.",
    "norm2.": "layer.1.layer_norm.",
    "pos_embedding.embedding.": "layer.0.SelfAttention.relative_attention_bias.",
    "ffn.gate.0.": "layer.1.DenseReluDense.wi_0.",
    "ffn.fc1.": "layer.1.DenseReluDense.wi_1.",
    "ffn.fc2.": "layer.1.DenseReluDense.wo.",
}
_EXTENSIONS = ("compressor/", "action_encoder/", "blocks/action/")


def _renamed(name: str, table: dict[str, str]) -> str:
    """The name with the first beginning that the table knows replaced."""
    for theirs, diffusers in table.items():
        if name.startswith(theirs):
            return diffusers + name[len(theirs) :]
    return name


def _in_blocks(rule: Rule, table: dict[str, str], blocks: str) -> Rule:
    inner = rule.theirs.removeprefix("blocks.{i}.")
    return dataclasses.replace(rule, theirs=f"{blocks}.{{i}}.{_renamed(inner, table)}")


def dit_rules(config: Any) -> list[Rule]:
    """The table of a `DiTConfig` with a velocity head, as WanTransformer3DModel names it."""
    return [
        _in_blocks(rule, _BLOCK, "blocks")
        if rule.layers
        else dataclasses.replace(rule, theirs=_renamed(rule.theirs, _BACKBONE))
        for rule in backbone(names_dit.rules(config))
    ]


def backbone(rules: list[Rule]) -> list[Rule]:
    """Of an expert's table what Wan2.2 has: neither actions nor memory."""
    return [rule for rule in rules if not rule.ours.startswith(_EXTENSIONS)]


def without_extensions(expert: dict[str, Any]) -> dict[str, Any]:
    """One expert's tree without action and memory modules."""
    blocks = {name: value for name, value in expert["blocks"].items() if name != "action"}
    return {name: value for name, value in expert.items() if name not in ("compressor", "action_encoder")} | {
        "blocks": blocks
    }


def umt5_rules(num_layers: int) -> list[Rule]:
    """The table of the text encoder, as UMT5EncoderModel names it."""
    return [
        _in_blocks(rule, _UMT5, "encoder.block")
        if rule.layers
        else dataclasses.replace(rule, theirs=_renamed(rule.theirs, _UMT5))
        for rule in names_umt5.rules(num_layers)
    ]


def wan_rules(config: Any) -> list[Rule]:
    """The table of a `WanVaeConfig`, as AutoencoderKLWan names it."""
    table = {"conv1.": "quant_conv.", "conv2.": "post_quant_conv."}
    for half, layers in config.layers.items():
        for layer in layers:
            table[f"{half}.{layer.published}."] = f"{half}.{_place(half, layer)}."
    rules = []
    for rule in names_vae.wan_rules(config):
        name = _renamed(rule.theirs, table)
        for theirs, diffusers in _RESIDUAL.items():
            name = name.replace(f".{theirs}", f".{diffusers}")
        rules.append(
            dataclasses.replace(rule, theirs=name.replace(".head.0.", ".norm_out.").replace(".head.2.", ".conv_out."))
        )
    return rules


def _place(half: str, layer: Any) -> str:
    """Where a half of AutoencoderKLWan keeps a layer."""
    kind, *place = layer.name.split("_")
    if kind == "conv":
        return "conv_in"
    if kind == "head":
        return "head"
    if kind == "middle":
        return {"0": "mid_block.resnets.0", "1": "mid_block.attentions.0", "2": "mid_block.resnets.1"}[place[0]]
    if half == "encoder":
        return f"down_blocks.{layer.published.split('.')[1]}"
    return f"up_blocks.{place[0]}.resnets.{place[1]}" if kind == "block" else f"up_blocks.{place[0]}.upsamplers.0"
