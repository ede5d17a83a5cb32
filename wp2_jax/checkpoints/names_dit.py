"""The published names of an expert's parameters (layout of the WorldPlay2 checkpoints, many-step and few-step)."""

import numpy as np

from wp2_jax.checkpoints.torch_names import (
    CONV2D,
    CONV3D,
    IDENTITY,
    LINEAR,
    Rule,
    Transform,
    leading_one,
    trailing_ones,
)

_PATCH = Transform(  # [D, C, 1, p, p] <-> [p, p, C, D]
    lambda a: np.transpose(a[:, :, 0], (2, 3, 1, 0)), lambda a: np.transpose(a, (3, 2, 0, 1))[:, :, None]
)
_POINTWISE3D = Transform(lambda a: a[:, :, 0, 0, 0].T, lambda a: a.T[:, :, None, None, None])
_POINTWISE2D = Transform(lambda a: a[:, :, 0, 0].T, lambda a: a.T[:, :, None, None])
_BANK = Transform(lambda a: np.swapaxes(a, 1, 2), lambda a: np.swapaxes(a, 1, 2))  # [n, out, in] <-> [n, in, out]


def _linear(ours: str, theirs: str, layers: int = 0, transform: Transform = LINEAR) -> list[Rule]:
    return [
        Rule(f"{ours}/kernel", f"{theirs}.weight", transform, layers),
        Rule(f"{ours}/bias", f"{theirs}.bias", IDENTITY, layers),
    ]


def _block_rules(layers: int) -> list[Rule]:
    rules = [Rule("blocks/modulation", "blocks.{i}.modulation", leading_one(), layers)]
    for ours, theirs in (("self_attention", "self_attn"), ("cross_attention", "cross_attn")):
        for name, their_name in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")):
            rules += _linear(f"blocks/{ours}/{name}", f"blocks.{{i}}.{theirs}.{their_name}", layers)
        for name in ("norm_q", "norm_k"):
            rules.append(Rule(f"blocks/{ours}/{name}/scale", f"blocks.{{i}}.{theirs}.{name}.weight", IDENTITY, layers))
    rules += [
        Rule("blocks/cross_norm/scale", "blocks.{i}.norm3.weight", IDENTITY, layers),
        Rule("blocks/cross_norm/bias", "blocks.{i}.norm3.bias", IDENTITY, layers),
        Rule("blocks/action/kernel", "blocks.{i}.img_action_mlp.0.weight", LINEAR, layers),
        Rule("blocks/action/bias", "blocks.{i}.img_action_mlp.0.bias", IDENTITY, layers),
    ]
    rules += _linear("blocks/action/out", "blocks.{i}.img_action_mlp.2", layers)
    rules += _linear("blocks/ffn/layer_0", "blocks.{i}.ffn.0", layers)
    return rules + _linear("blocks/ffn/layer_1", "blocks.{i}.ffn.2", layers)


def _compressor_rules(memory) -> list[Rule]:
    rules = _linear("compressor/in", "memory_compress.input_layer")
    for stage in range(len(memory.widths) - 1):
        ours, theirs = f"compressor/stage_{stage}", f"memory_compress.blocks.{stage}"
        rules += _linear(f"{ours}/conv", f"{theirs}.conv", transform=CONV3D)
        if memory.spatial_down[stage]:
            rules += _linear(f"{ours}/spatial", f"{theirs}.resample.1", transform=CONV2D)
        if memory.temporal_down[stage]:
            rules += _linear(f"{ours}/temporal", f"{theirs}.time_conv", transform=CONV3D)
        if not (memory.spatial_down[stage] or memory.temporal_down[stage]):
            rules += _linear(f"{ours}/shortcut", f"{theirs}.avg_shortcut", transform=_POINTWISE3D)
    for index in range(memory.attention_blocks):
        ours, theirs = f"compressor/attention_{index}", f"memory_compress.attn_blocks.{index}"
        rules.append(Rule(f"{ours}/gain", f"{theirs}.norm.gamma", trailing_ones(2)))
        rules += _linear(f"{ours}/qkv", f"{theirs}.to_qkv", transform=_POINTWISE2D)
        rules += _linear(f"{ours}/out", f"{theirs}.proj", transform=_POINTWISE2D)
    return rules + _linear("compressor/out", "memory_compress.output_layer")


def rules(config) -> list[Rule]:
    """The table of a `DiTConfig`; its head form decides how the last layer is named."""
    table = [
        Rule("patch_kernel", "patch_embedding.weight", _PATCH),
        Rule("patch_bias", "patch_embedding.bias"),
    ]
    table += _linear("text_embedding/layer_0", "text_embedding.0") + _linear(
        "text_embedding/layer_1", "text_embedding.2"
    )
    table += _linear("time_embedding/layer_0", "time_embedding.0") + _linear(
        "time_embedding/layer_1", "time_embedding.2"
    )
    table += _linear("time_projection", "time_projection.1")
    for index, theirs in enumerate((0, 2, 4)):
        table += _linear(f"action_encoder/continuous/layer_{index}", f"action_in_cont.{theirs}")
    table += [Rule(f"action_encoder/table_{i}", f"action_in_disc.{i}.weight") for i in range(4)]
    table += _block_rules(config.num_layers) + _compressor_rules(config.memory)
    table.append(Rule("head/modulation", "head.modulation", leading_one()))
    head = {"velocity": ("head.head", LINEAR), "bank": ("head", _BANK), "fused": ("head.block", _BANK)}
    theirs, transform = head[config.head]
    joint = "_" if config.head == "fused" else "."
    return [
        *table,
        Rule("head/kernel", f"{theirs}{joint}weight", transform),
        Rule("head/bias", f"{theirs}{joint}bias"),
    ]
