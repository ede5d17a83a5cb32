"""A backbone, weights and batches that are as small as they get, for the tests of the objectives."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import tree
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT, DiTConfig
from wp2_jax.models.memory import MemoryConfig

CHUNK = 4
TEXT_LEN, TEXT_DIM = 3, 12
CONFIG = DiTConfig(
    dim=24,
    num_heads=2,
    num_layers=2,
    ffn_dim=32,
    freq_dim=16,
    text_dim=TEXT_DIM,
    text_len=TEXT_LEN,
    rope_frames=64,
    memory=MemoryConfig(
        widths=(4, 4, 8, 8), spatial_down=(1, 1, 1), temporal_down=(1, 0, 0), attention_blocks=1, attention_heads=2
    ),
)
VELOCITY = DiT(CONFIG)


@functools.cache
def random_weights(seed: int, config: DiTConfig = CONFIG) -> dict:
    """Weights with noise on every one of them, so that no layer is zero and no two are equal."""
    random = np.random.default_rng(seed)

    def draw(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        spread = like.shape[-2] ** -0.5 if name.endswith("kernel") else 0.1
        centre = 1.0 if name.endswith(("scale", "gain")) else 0.0
        return jnp.asarray(centre + spread * random.standard_normal(like.shape), jnp.float32)

    return tree.map_named(draw, jax.eval_shape(functools.partial(passes.init, config), jax.random.key(0)))


def random_batch(seed: int, rows: int, frames: int, height: int = 8, width: int = 8) -> dict[str, np.ndarray]:
    """A loader's batch of normal latents and random actions; caption ids 1..9, the last place empty."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal((rows, *shape)).astype(np.float32)

    ids = random.integers(1, 10, (rows, frames // CHUNK, TEXT_LEN)).astype(np.int32)
    ids[..., -1] = 0
    discrete = random.integers(0, 2, (rows, frames, 4)).astype(np.float32)
    return {
        "latents": normal(frames, height, width, 16),
        "y": normal(frames, height, width, 20),
        "lr_latents": normal(frames // 2, height // 4, width // 4, 16),
        "lr_y": normal(frames // 2, height // 4, width // 4, 20),
        "actions": np.concatenate([3 * normal(frames, 2), discrete], axis=-1),
        "caption_ids": ids,
    }


def encode_text(params, frozen, ids: jax.Array) -> jax.Array:
    """A table as text encoder: params["text"] where it trains, else frozen["text"], [10, TEXT_DIM]."""
    table = params["text"] if "text" in params else frozen["text"]
    return jnp.take(table, ids, axis=0) * (ids > 0).astype(jnp.float32)[..., None]


def frozen_trees(max_history: int) -> dict:
    """The text table, the negative prompt's encoding and the curriculum's present history."""
    table = jax.random.normal(jax.random.key(7), (10, TEXT_DIM))
    return {
        "text": table,
        "null_context": jnp.take(table, jnp.asarray([[9, 0, 0]]), axis=0).at[:, 1:].set(0.0),
        "max_history": jnp.asarray(max_history, jnp.int32),
    }


def counted(function: Callable) -> tuple[Callable, list[None]]:
    """`function` under jit, and a list that grows by one at every compilation."""
    compilations: list[None] = []

    def traced(*args):
        compilations.append(None)
        return function(*args)

    return jax.jit(traced), compilations


def relative(a, b) -> float:
    """The largest difference over the largest magnitude."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a - b).max() / np.abs(b).max())
