"""The smallest worlds that a few-step student can roll out, for the tests of Stable Forcing."""

import dataclasses
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from tiny_objectives import CHUNK, CONFIG, TEXT_DIM, TEXT_LEN

from wp2_jax import tree, xla_flags
from wp2_jax.diffusion.experts import Experts
from wp2_jax.inference import stream
from wp2_jax.inference.spec import StreamSpec
from wp2_jax.models import autoencoder, passes
from wp2_jax.objectives import dmd, rollout

SIZE = 64
VAE = autoencoder.build("tiny", encoder_width=8, decoder_widths=(8, 8, 8, 8))
_jit = jax.jit


def quick_jit(function, compiler_options=None, **options):
    """`jax.jit` for tests whose time goes almost wholly into compiling."""
    return _jit(function, compiler_options=compiler_options or xla_flags.quick_compile("cpu"), **options)


def quick_compilation():
    """A context in which `jax.jit` is `quick_jit`."""
    return mock.patch.object(jax, "jit", quick_jit)


def stream_spec(capacity: int, **changes) -> StreamSpec:
    """A few-step stream of four blocks; `changes` are fields of the backbone's config."""
    return StreamSpec(
        dit=dataclasses.replace(CONFIG, rope_frames=512, **changes),
        experts=Experts(0.9),
        autoencoder=VAE,
        mode="few_step",
        height=SIZE,
        width=SIZE,
        capacity=capacity,
        intervals=(4, 4),
    )


def _weights(shapes, seed: int, gain: float) -> dict:
    """Normal weights of these shapes, none of them zero: kernels by their fan-in, scales around 1."""
    random = np.random.default_rng(seed)

    def leaf(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        shape = like.shape
        if name.endswith("kernel"):
            fan = math.prod(shape[1 if name.startswith("blocks/") else 0 : -1])
            return jnp.asarray(gain * random.standard_normal(shape) / fan**0.5, jnp.float32)
        middle = 1.0 if name.endswith(("scale", "gain")) else 0.0
        return jnp.asarray(middle + 0.1 * random.standard_normal(shape), jnp.float32)

    return tree.map_named(leaf, shapes)


def vae_weights() -> dict:
    return _weights(jax.eval_shape(lambda key: autoencoder.init_params(VAE, key), jax.random.key(0)), 5, 1.4)


def _experts(models, seed: int) -> dict:
    return {
        name: _weights(jax.eval_shape(functools.partial(passes.init, model.config), jax.random.key(0)), seed + i, 1.0)
        for i, (name, model) in enumerate(models.items())
    }


def student_weights(spec: StreamSpec, seed: int = 10) -> dict:
    """{"high", "low"}: random experts with fused heads."""
    return _experts(spec.models, seed)


def teacher_weights(spec: StreamSpec, seed: int) -> dict:
    """{"high", "low"}: random many-step experts."""
    return _experts(dmd.scorers(spec), seed)


def world_batch(seed: int, rows: int, chunks: int) -> dict[str, np.ndarray]:
    """Start pictures, action rows and encoded captions of `chunks` chunks, another caption for each."""
    random = np.random.default_rng(seed)
    turns = 3 * random.standard_normal((rows, chunks * CHUNK, 2))
    keys = random.integers(0, 2, (rows, chunks * CHUNK, 4))
    contexts = random.standard_normal((rows, chunks, TEXT_LEN, TEXT_DIM))
    contexts[:, :, -1] = 0
    batch = {
        "image": random.uniform(-1, 1, (rows, SIZE, SIZE, 3)),
        "actions": np.concatenate([turns, keys], axis=-1),
        "contexts": contexts,
    }
    return {name: x.astype(np.float32) for name, x in batch.items()}


def null_context() -> jax.Array:
    return jax.random.normal(jax.random.key(3), (1, TEXT_LEN, TEXT_DIM))


def world_conditions(spec: StreamSpec, batch: dict[str, np.ndarray]) -> rollout.Conditions:
    return rollout.conditions(spec, batch["image"], batch["actions"], batch["contexts"], null_context())


def chunk_of(x: jax.Array, index: int, size: int = CHUNK) -> jax.Array:
    return x[:, index * size : (index + 1) * size]


@functools.cache
def _jitted():
    return (
        quick_jit(stream.start, static_argnums=(0, 3)),
        quick_jit(stream.emit, static_argnums=0, static_argnames=("first", "trace")),
        quick_jit(stream.absorb, static_argnums=0, static_argnames=("first",)),
    )


def streamed(spec: StreamSpec, params, given: rollout.Conditions, key: jax.Array, chunks: int):
    """(states, made): the stream before each chunk and the chunks, straight from the functions that generate."""
    start, emit, absorb = _jitted()
    state = start(spec, params, given.image, spec.capacity * CHUNK, given.null_context, key)
    states, made = [], []
    for index in range(chunks):
        states.append(state)
        actions, context = chunk_of(given.actions, index), chunk_of(given.contexts, index, 1)
        emitted, chunk = emit(spec, params, state, actions, context, first=index == 0, trace=True)
        made.append(chunk)
        if index < chunks - 1:
            state, _ = absorb(spec, params, emitted, chunk, first=index == 0)
    return states, made
