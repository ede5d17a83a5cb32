"""Memory phase 1, after TinyHistory (arXiv 2512.23851; spec section 5): a compressor that keeps what any frame needs.

Some frames of a history are drawn. The compressor sees those clean and all others noised, sigma uniform in 0.2..1, and
the model flow-matches the drawn frames at their positions from that memory alone (no sink, no tmp). Phase 2 is
`flow_matching.loss` with memory.

The low-resolution twin enters the memory too, and each of its frames stands for two latent frames. It is noised to the
lower of their two levels: clean where either is drawn (the memory from which that frame is to be rebuilt would lack its
twin otherwise), and never cleaner than what the compressor sees (it would give away what is hidden there).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from wp2_jax import rng
from wp2_jax.array_types import Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.diffusion import flow
from wp2_jax.diffusion.experts import Experts
from wp2_jax.models import low_rank, passes
from wp2_jax.models.dit import DiT
from wp2_jax.models.frames import take_frames
from wp2_jax.objectives import batch as batches


def draw_frames(key: PRNGKey, length: jax.Array, frames: int, drawn: int) -> jax.Array:
    """`drawn` distinct frames below `length` [B], rising: [B, drawn] int32. `frames` is the static capacity.

    Every length must be at least `drawn`.
    """
    score = jax.random.uniform(key, (length.shape[0], frames), jnp.float32)
    score = jnp.where(jnp.arange(frames) < length[:, None], score, -1.0)
    return jnp.sort(jax.lax.top_k(score, drawn)[1].astype(jnp.int32), axis=1)


def noise_history(
    key: PRNGKey, clip: passes.History, clean: jax.Array, sigma_range: tuple[float, float]
) -> passes.History:
    """The clip with all frames but `clean` [B, n] (indices) noised, twin included; see the top of this file."""
    rows, frames = clip.captions.shape
    sigma = jax.random.uniform(rng.fold(key, "sigma"), (rows, frames), jnp.float32, *sigma_range)
    sigma = jax.vmap(lambda level, index: level.at[index].set(0.0))(sigma, clean)
    twin = sigma.reshape(rows, clip.lr_latents.shape[1], -1).min(axis=2)

    def noised(x: jax.Array, name: str, level: jax.Array) -> jax.Array:
        eps = jax.random.normal(rng.fold(key, name), x.shape, jnp.float32)
        return flow.interpolate(x, eps, level)

    return clip.replace(
        latents=noised(clip.latents, "latents", sigma), lr_latents=noised(clip.lr_latents, "lr_latents", twin)
    )


def init_params(experts: Mapping[str, Any], rank: int, key: PRNGKey, patterns=low_rank.BACKBONE) -> Params:
    """What phase 1 trains: {"compressor": {name: tree}, "adapters": {name: tree}} for backbones {name: tree}."""
    return {
        "compressor": {name: weights["compressor"] for name, weights in experts.items()},
        "adapters": {
            name: low_rank.init(weights, rank, rng.fold(key, "adapters", index), patterns)
            for index, (name, weights) in enumerate(experts.items())
        },
    }


def merged(params: Params, experts: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Ordinary weights {name: tree}: the backbones with their low-rank updates and trained compressors."""
    return {
        name: {
            **low_rank.merge(weights, params["adapters"][name], scale),
            "compressor": params["compressor"][name],
        }
        for name, weights in experts.items()
    }


def loss(
    params: Params,
    batch: Batch,
    frozen: dict[str, Any],
    key: PRNGKey,
    *,
    models: Mapping[str, DiT],
    experts: Experts,
    encode_text: batches.EncodeText,
    drawn: int,
    scale: float = 1.0,
    chunk: int = 4,
    shift: float = 5.0,
    sigma_range: tuple[float, float] = (0.2, 1.0),
    caption_dropout: float = 0.1,
) -> tuple[Scalar, Metrics]:
    """Mean squared velocity error of `drawn` frames of a history of uniform length, one sigma a clip.

    params as `init_params` makes them, frozen["experts"] the backbones {name: tree} they update. The length is a
    multiple of `chunk` up to frozen["max_history"] and the clip, and at least `drawn`. A drawn frame is under its
    chunk's caption, the memory under that of the first drawn frame. Metrics as in `flow_matching.loss`.

    Raises ValueError where a clip holds fewer than `drawn` frames.
    """
    weights = merged(params, frozen["experts"], scale)

    def one(name: str, rows: Batch, key: PRNGKey) -> tuple[Scalar, Metrics]:
        count, frames = rows["latents"].shape[:2]
        clip = batches.clip_from_batch(rows, chunk)
        length = batches.draw_history(
            rng.fold(key, "history"), count, chunk=chunk, maximum=frozen["max_history"], limit=frames, minimum=drawn
        )
        index = draw_frames(rng.fold(key, "frames"), length, frames, drawn)
        x0, y, actions = (take_frames(a, index) for a in (clip.latents, clip.y, clip.actions))
        contexts = batches.encode_captions(
            params,
            frozen,
            take_frames(rows["caption_ids"], index // chunk),
            rng.fold(key, "captions"),
            encode_text=encode_text,
            dropout=caption_dropout,
        )
        history = noise_history(rng.fold(key, "memory"), clip, index, sigma_range)
        sigma = experts.sample_sigma(rng.fold(key, "sigma"), name, (count,), shift)
        eps = jax.random.normal(rng.fold(key, "noise"), x0.shape, jnp.float32)
        velocity = passes.bidirectional(
            models[name],
            weights[name],
            flow.interpolate(x0, eps, sigma),
            y,
            jnp.broadcast_to(flow.timestep(sigma)[:, None], index.shape),
            actions,
            contexts,
            jnp.broadcast_to(jnp.arange(drawn, dtype=jnp.int32), index.shape),
            index,
            history=history.replace(captions=jnp.zeros_like(clip.captions)),
            length=length,
            sink=0,
            temporal=0,
        )
        errors = batches.squared_error(velocity, flow.velocity(x0, eps), keep=1)
        return errors.mean(), batches.quarters(errors, batches.sigma_place(sigma, experts, name, shift))

    return batches.over_experts(experts.names, batch, key, one)
