"""The streaming step of a world on a target: the functions that generation and play call, at full shapes."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wp2_jax import sharding
from wp2_jax.inference import generate, precision, stream
from wp2_jax.inference.spec import capacity_for
from wp2_jax.inference.world import World
from wp2_jax.models import autoencoder, passes, umt5
from wp2_jax.plan import fit
from wp2_jax.plan.targets import Target

# Weights that are not in eight bits are published in this.
STORED = jnp.bfloat16


def programs(
    world: World, target: Target, mode: str, chunks: int, preset: precision.Precision, cut_weights: bool
) -> Iterator[fit.Fit]:
    """Compile a world of `chunks` chunks, program by program; what one gives is how the next is given it.

    Raises ValueError for more chunks than the world can have, and ShardingError where heads do not divide.
    """
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=1, seq=target.count), target.devices())
    world = precision.world_in(world, preset)
    if target.chip.gpu:
        # cuDNN is asked for its kernels while a program is compiled, and is not here: XLA's take more memory.
        world = dataclasses.replace(world, dit=dataclasses.replace(world.dit, attention="xla"))
    if not 1 <= chunks <= world.longest:
        raise ValueError(f"chunks {chunks}: give 1 to {world.longest}")
    sharding.check(mesh, batch_size=1, num_heads=world.dit.num_heads)
    spec = world.stream(mode, capacity_for(chunks))
    rules = sharding.one_world(cut_weights)
    key = jax.random.key(0)
    experts = {
        name: jax.eval_shape(lambda m=model: precision.cast(_stored(passes.init(m.config, key)), preset))
        for name, model in spec.models.items()
    }
    # The autoencoder stays as it is published; float32.
    shapes = {
        "experts": experts,
        "autoencoder": jax.eval_shape(lambda: autoencoder.init_params(world.autoencoder, key)),
    }
    params = sharding.abstract(shapes, rules, mesh)
    text = sharding.abstract(jax.eval_shape(lambda: _stored(umt5.init(world.text, key))), rules, mesh)
    ids = _whole(jax.ShapeDtypeStruct((1, 1, world.config.text_len), jnp.int32), mesh)
    rows = _whole(jax.ShapeDtypeStruct((1, spec.chunk, 6), jnp.float32), mesh)
    image = _whole(jax.ShapeDtypeStruct((1, spec.height, spec.width, 3), jnp.float32), mesh)
    random = _whole(jax.eval_shape(lambda: key), mesh)

    def one(name: str, function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> tuple[fit.Fit, Any]:
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
        return fit.compiled(name, traced, target.chip.compiler_options)

    with jax.set_mesh(mesh):
        found, context = one("encode_text", world.encode_text, text, ids)
        yield found
        found, told = one("caption", functools.partial(stream.caption, spec), params, context)
        yield found
        frames = generate.condition_frames(spec)
        null = told if spec.guided else None

        def start(params: Any, image: Any, null: Any, key: Any) -> Any:
            return stream.start(spec, params, image, frames, null, key)

        found, state = one("start", start, params, image, null, random)
        yield found
        for first in (True, False):
            suffix = " (first)" if first else ""
            emit, absorb = (functools.partial(part, spec, first=first) for part in (stream.emit, stream.absorb))
            found, (state, made) = one(f"emit{suffix}", emit, params, state, rows, told, donate=(1,))
            yield found
            found, (state, _) = one(f"absorb{suffix}", absorb, params, state, made, donate=(1,))
            yield found


def _stored(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(STORED), params)


def _whole(shape: Any, mesh: Mesh) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
