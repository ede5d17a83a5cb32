"""Named precisions of a world's backbone, for playing and generating.

Only the large matrices of the blocks change. Everything else keeps the checkpoint's dtype: patch, text, time and action
embeddings, modulation, norms, head, compressor, autoencoder and text encoder.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from wp2_jax import tree
from wp2_jax.array_types import Params
from wp2_jax.inference.world import World
from wp2_jax.models import quantized

MATRICES = (
    r"^blocks/(self_attention|cross_attention)/(q|k|v|out)/kernel$",
    r"^blocks/ffn/layer_\d/kernel$",
    r"^blocks/action/(out/)?kernel$",
)


@dataclasses.dataclass(frozen=True)
class Precision:
    """`form`: one of quantized.FORMATS, or empty; `activations`: they are in eight bits too where matrices are used;
    `dtype`: of the computation, empty for the checkpoint's own."""

    form: str = ""
    activations: bool = False
    dtype: str = ""


PRESETS = {
    "full": Precision(),
    "bf16": Precision(dtype="bfloat16"),
    "int8": Precision("int8"),
    "fp8": Precision("fp8"),
    "int8-w8a8": Precision("int8", activations=True),
    "fp8-w8a8": Precision("fp8", activations=True),
}
"""full: as trained; bf16: matrices and computation in bfloat16; int8, fp8: matrices in eight bits, computation as
trained; int8-w8a8, fp8-w8a8: what they are multiplied with too, where the hardware can."""


def preset(name: str, stored: str = "full") -> Precision:
    """The preset of this name, for weights that are stored in the preset `stored`.

    Raises:
      ValueError: an unknown name, weights stored in another form, or a device that cannot run it, with what can be
        asked for instead.
    """
    if name not in PRESETS:
        raise ValueError(f"precision {name!r}: give one of {', '.join(PRESETS)}")
    chosen, form = PRESETS[name], PRESETS[stored].form
    if form and chosen.form != form:
        fitting = [other for other, precision in PRESETS.items() if precision.form == form]
        raise ValueError(
            f"precision {name}: the checkpoint's weights are {form}, which gives {' or '.join(fitting)}; others need "
            "the checkpoint it was made from"
        )
    device = jax.devices()[0]
    if chosen.activations and not _multiplies(chosen.form, device):
        raise ValueError(
            f"precision {name}: a device of kind {device.device_kind} does not multiply {chosen.form} by "
            f"{chosen.form}; use {chosen.form} (the same weights, turned back where they are used), bf16 or full"
        )
    return chosen


def _multiplies(form: str, device: Any) -> bool:
    """Whether the hardware has the product; int8 runs on every CPU, if slowly."""
    if device.platform == "gpu":
        return float(getattr(device, "compute_capability", "0")) >= (7.5 if form == "int8" else 8.9)
    if device.platform == "tpu":
        generation = int("".join(c for c in device.device_kind if c.isdigit())[:1] or 0)
        return generation >= (5 if form == "int8" else 7)
    return form == "int8"


def world_in(world: World, precision: Precision) -> World:
    """The world that computes in a precision's dtype."""
    if not precision.dtype:
        return world
    return dataclasses.replace(world, dit=dataclasses.replace(world.dit, dtype=precision.dtype))


def cast(expert: Params, precision: Precision) -> Params:
    """One expert's weights in a precision; those in eight bits already stay, but for what they are multiplied with."""

    def one(name: str, leaf: Any) -> Any:
        if not tree.matches(name, MATRICES):
            return leaf
        if isinstance(leaf, quantized.Matrix):
            return leaf.replace(activations=precision.activations)
        if precision.form:
            return quantized.quantize(leaf, precision.form, activations=precision.activations)
        return leaf.astype(precision.dtype) if precision.dtype else leaf

    return tree.map_named(one, expert, leaf=lambda x: isinstance(x, quantized.Matrix))


@dataclasses.dataclass(frozen=True)
class Loss:
    """What eight bits cost one kind of matrix: the largest relative error (root mean square) of a layer, the range of
    its scales, bytes in float32 and in eight bits."""

    expert: str
    name: str
    error: float
    scales: tuple[float, float]
    before: int
    after: int


def losses(expert: str, weights: Params, made: Params) -> list[Loss]:
    """The rows of a quality table: `made` is `cast` of an expert's `weights` to eight bits."""
    whole = tree.named_leaves(weights)
    found = []
    for name, before in whole.items():
        if not tree.matches(name, MATRICES):
            continue
        node: Any = made
        for part in name.split("/"):
            node = node[part]
        axes, before = (-2, -1), jnp.asarray(before, jnp.float32)
        error = jnp.sqrt(jnp.square(quantized.dequantize(node) - before).mean(axes) / jnp.square(before).mean(axes))
        scales = float(node.scale.min()), float(node.scale.max())
        after = node.values.nbytes + node.scale.nbytes
        found.append(Loss(expert, name, float(error.max()), scales, before.nbytes, after))
    return found
