"""Weights that a plain video backbone lacks: actions and memory, as they start (spec sections 2 and 4).

What they add to the backbone is zero at first. One layer of one array at a time: an expert's would take several GB.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import rng
from wp2_jax.array_types import PRNGKey
from wp2_jax.checkpoints.torch_names import flatten
from wp2_jax.models.actions import ACTION_WIDTH, ActionEncoder, ActionInjection
from wp2_jax.models.dit import DiTConfig
from wp2_jax.models.memory import Compressor, init_state

_INJECTION = "blocks/action/"


def extensions(config: DiTConfig, key: PRNGKey) -> Callable[[str], Iterator[np.ndarray]]:
    """A function from a path ("blocks/action/...", "action_encoder/...", "compressor/...") to its array, float32: of a
    stacked one a layer at a time. The same key gives the same weights."""
    float32 = jnp.dtype(jnp.float32)

    @functools.cache
    def module(name: str) -> dict[str, jax.Array]:
        if name == "action_encoder":
            encoder = ActionEncoder(config.dim, float32, float32)
            return flatten(encoder.init(rng.fold(key, name), jnp.zeros((1, ACTION_WIDTH)))["params"])
        memory = config.memory
        frames = jnp.zeros((1, memory.time_factor, memory.space_factor, memory.space_factor, config.in_channels))
        state = init_state(memory, 1, memory.space_factor, memory.space_factor)
        compressor = Compressor(memory, config.dim, float32, float32)
        return flatten(compressor.init(rng.fold(key, name), frames, state)["params"])

    @functools.cache
    def layer_of(path: str) -> Callable[[PRNGKey], jax.Array]:
        injection = ActionInjection(config.dim, float32, float32)
        h, frame = jnp.zeros((1, 1, config.dim)), jnp.zeros(1, jnp.int32)
        # One leaf alone: what else would be drawn with it is left out by the compiler.
        return jax.jit(lambda key: flatten(injection.init(key, h, h, frame)["params"])[path])

    def make(path: str) -> Iterator[np.ndarray]:
        if not path.startswith(_INJECTION):
            name, _, rest = path.partition("/")
            yield np.asarray(module(name)[rest])
            return
        draw = layer_of(path.removeprefix(_INJECTION))
        for layer in range(config.num_layers):
            yield np.asarray(draw(rng.fold(key, _INJECTION, layer)))

    return make
