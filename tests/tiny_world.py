"""The smallest worlds that a few-step student can roll out, for the tests of Stable Forcing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny_objectives import CHUNK, CONFIG, TEXT_DIM, TEXT_LEN, random_weights

from wp2_jax.diffusion.experts import Experts
from wp2_jax.inference.spec import StreamSpec
from wp2_jax.models import autoencoder
from wp2_jax.objectives import dmd, rollout

SIZE = 64
VAE = autoencoder.build("tiny", encoder_width=8, decoder_widths=(8, 8, 8, 8))


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


@functools.cache
def _vae_weights() -> dict:
    return jax.jit(lambda key: autoencoder.init_params(VAE, key))(jax.random.key(5))


def vae_weights() -> dict:
    """A copy each time: a test may hand it to a function that takes it over."""
    return jax.tree.map(jnp.copy, _vae_weights())


def student_weights(spec: StreamSpec) -> dict:
    """{"high", "low"}: random experts with fused heads."""
    return {
        name: jax.tree.map(jnp.copy, random_weights(10 + seed, model.config))
        for seed, (name, model) in enumerate(spec.models.items())
    }


def teacher_weights(spec: StreamSpec, seed: int) -> dict:
    """{"high", "low"}: random many-step experts."""
    return {
        name: jax.tree.map(jnp.copy, random_weights(seed + number, model.config))
        for number, (name, model) in enumerate(dmd.scorers(spec).items())
    }


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
