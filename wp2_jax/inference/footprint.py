"""The memory that a world takes on each device, from shapes alone: known before anything is allocated."""

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from wp2_jax import sharding
from wp2_jax.inference import stream
from wp2_jax.inference.load import Source
from wp2_jax.inference.spec import StreamSpec


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes on each device: all weights, the states of `worlds` worlds (one), the keys of a caption each.

    What a pass computes on its way comes on top.
    """

    weights: int
    world: int
    caption: int
    worlds: int = 1

    @property
    def total(self) -> int:
        return self.weights + self.world + self.caption

    def times(self, worlds: int) -> "Footprint":
        """Of several worlds with the same weights."""
        return Footprint(self.weights, worlds * self.world, worlds * self.caption, worlds)

    def __str__(self) -> str:
        return (
            f"{_size(self.total)} on each device (weights {_size(self.weights)}, {self._named('world')} "
            f"{_size(self.world)}, {self._named('caption')} {_size(self.caption)}) and the working memory of a pass"
        )

    def _named(self, what: str) -> str:
        return what if self.worlds == 1 else f"{self.worlds} {what}s"

    def check(self) -> None:
        """Raises ValueError where the device has less memory than this."""
        room = device_memory()
        if self.total > room:
            raise ValueError(
                f"this world takes {self}; a device of kind {jax.devices()[0].device_kind} has {_size(room)}: use "
                "--precision int8, --devices N --shard-weights, or a shorter world"
            )


def of(
    source: Source, spec: StreamSpec, frames: int, mesh: Mesh | None = None, rules: sharding.Rules = sharding.RULES
) -> Footprint:
    """What a world of `source` takes that is started with `frames` latent frames of conditioning.

    With `mesh` the weights are counted as `rules` cut them, worlds and captions as if every device held them whole.
    """
    shapes = source.shapes
    params = {"experts": jax.eval_shape(source.as_run, shapes["experts"]), "autoencoder": shapes["autoencoder"]}
    context = jax.ShapeDtypeStruct((1, 1, source.world.config.text_len, source.world.text.dim), jnp.float32)
    caption = jax.eval_shape(functools.partial(stream.caption, spec), params, context)
    image = jax.ShapeDtypeStruct((1, spec.height, spec.width, 3), jnp.float32)

    def start(params: Any, image: jax.Array, null: stream.Caption | None) -> stream.StreamState:
        return stream.start(spec, params, image, frames, null, jax.random.key(0))

    state = jax.eval_shape(start, params, image, caption if spec.guided else None)
    weights = {**params, "text": shapes["text"]}
    held = weights if mesh is None else sharding.abstract(weights, rules, mesh)
    return Footprint(_bytes(held), _bytes(state), _bytes(caption))


def device_memory() -> int:
    """Bytes of the first device, of the host where that is a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes(shapes: Any) -> int:
    """Bytes of the leaves on one device."""

    def one(leaf: Any) -> int:
        sharding_ = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding_ is None else sharding_.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(one, jax.tree.leaves(shapes)))


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
