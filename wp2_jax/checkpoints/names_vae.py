"""Published parameter names of the two autoencoders against ours."""

from wp2_jax.checkpoints.torch_names import CONV2D, CONV3D, IDENTITY, Rule, Transform, trailing_ones

POINTWISE = Transform(  # [out, in, 1, 1, 1] <-> [1, 1, in, out]
    lambda a: a[:, :, 0].transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1)[:, :, None]
)


def tiny_rules(config) -> list[Rule]:
    """The table of a `TinyVaeConfig`: the layers of each half are numbered in the order they run.

    The linear path of `models/shortcut.py`, which the published model does not have, goes under our own names.
    """
    blocks = config.blocks
    rules = _conv("encoder/conv_in", "enc.encoder.0") + _conv("encoder/conv_out", f"enc.encoder.{2 + 3 * (blocks + 2)}")
    for level in range(3):
        at = 2 + level * (blocks + 2)
        rules += _conv(f"encoder/pool_{level}/conv", f"enc.encoder.{at}.conv", bias=False)
        rules += _conv(f"encoder/down_{level}", f"enc.encoder.{at + 1}", bias=False)
        rules += _memory_blocks(f"encoder/block_{level}", "enc.encoder", at + 2, blocks)
    rules += _conv("decoder/conv_in", "dec.decoder.1") + _conv(
        "decoder/conv_out", f"dec.decoder.{4 + 3 * (blocks + 3)}"
    )
    for level in range(3):
        at = 3 + level * (blocks + 3)
        rules += _memory_blocks(f"decoder/block_{level}", "dec.decoder", at, blocks)
        rules += _conv(f"decoder/grow_{level}/conv", f"dec.decoder.{at + blocks + 1}.conv", bias=False)
        rules += _conv(f"decoder/up_{level}", f"dec.decoder.{at + blocks + 2}", bias=False)
    for half in ("linear_encoder", "linear_decoder") if config.shortcut else ():
        rules += _conv(f"{half}/conv", f"{half}.conv")
    return rules


def _memory_blocks(ours: str, theirs: str, at: int, blocks: int) -> list[Rule]:
    rules = []
    for block in range(blocks):
        for conv in range(3):
            rules += _conv(f"{ours}_{block}/conv_{conv}", f"{theirs}.{at + block}.conv.{2 * conv}")
    return rules


def wan_rules(config) -> list[Rule]:
    """The table of a `WanVaeConfig` (names of Wan2.1_VAE.pth)."""
    rules = _conv("quantise", "conv1", POINTWISE) + _conv("dequantise", "conv2", POINTWISE)
    for half, layers in config.layers.items():
        for layer in layers:
            rules += _LAYER_RULES[layer.kind](layer, f"{half}/{layer.name}", f"{half}.{layer.published}")
    return rules


def _conv(ours: str, theirs: str, transform: Transform = CONV2D, bias: bool = True) -> list[Rule]:
    rules = [Rule(f"{ours}/kernel", f"{theirs}.weight", transform)]
    return [*rules, Rule(f"{ours}/bias", f"{theirs}.bias", IDENTITY)] if bias else rules


def _input(layer, ours: str, theirs: str) -> list[Rule]:
    return _conv(f"{ours}/conv", theirs, CONV3D)


def _residual(layer, ours: str, theirs: str) -> list[Rule]:
    rules = []
    for index, (norm, conv) in enumerate(((0, 2), (3, 6))):
        rules.append(Rule(f"{ours}/gain_{index}", f"{theirs}.residual.{norm}.gamma", trailing_ones(3)))
        rules += _conv(f"{ours}/conv_{index}", f"{theirs}.residual.{conv}", CONV3D)
    if layer.width_in != layer.width_out:
        rules += _conv(f"{ours}/shortcut", f"{theirs}.shortcut", POINTWISE)
    return rules


def _attention(layer, ours: str, theirs: str) -> list[Rule]:
    gain = Rule(f"{ours}/gain", f"{theirs}.norm.gamma", trailing_ones(2))
    return [gain, *_conv(f"{ours}/qkv", f"{theirs}.to_qkv"), *_conv(f"{ours}/out", f"{theirs}.proj")]


def _resample(layer, ours: str, theirs: str) -> list[Rule]:
    rules = _conv(f"{ours}/space", f"{theirs}.resample.1")
    return rules + _conv(f"{ours}/time", f"{theirs}.time_conv", CONV3D) if layer.temporal else rules


def _head(layer, ours: str, theirs: str) -> list[Rule]:
    gain = Rule(f"{ours}/gain", f"{theirs}.0.gamma", trailing_ones(3))
    return [gain, *_conv(f"{ours}/conv", f"{theirs}.2", CONV3D)]


_LAYER_RULES = {
    "input": _input,
    "residual": _residual,
    "attention": _attention,
    "down": _resample,
    "up": _resample,
    "head": _head,
}
