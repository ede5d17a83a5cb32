"""Stage 4: flow matching of the autoregressive student by teacher forcing (spec section 4, training in one pass).

All target chunks are noisy, each with its own sigma, and one masked pass shows each of them the clean past that prefill
would have put into its cache.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wp2_jax import rng
from wp2_jax.array_types import Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.diffusion import flow
from wp2_jax.diffusion.experts import Experts
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT
from wp2_jax.models.frames import take_frames
from wp2_jax.objectives import batch as batches


def check_frames(clip_frames: int, frames: int, chunk: int) -> None:
    """Raises ValueError unless `frames` targets fill chunks and fit the clips."""
    if frames % chunk or frames > clip_frames:
        raise ValueError(
            f"frames {frames} as target in clips of {clip_frames} latent frames: use a multiple of chunk {chunk} "
            f"up to {clip_frames}"
        )


class Scene(NamedTuple):
    """The clean side of a batch: `passes.teacher_forcing` takes the first three after the noisy frames."""

    clip: passes.History
    start: jax.Array  # [B] int32, first target frame
    contexts: jax.Array  # [B, C, S, text_dim]
    x0: jax.Array  # [B, frames, h, w, 16], the targets


def scene(
    params: Params,
    rows: Batch,
    frozen: dict[str, Any],
    key: PRNGKey,
    *,
    encode_text: batches.EncodeText,
    frames: int,
    chunk: int,
    caption_dropout: float,
    change_weight: float,
) -> Scene:
    """Draws the history's length (up to frozen["max_history"], uniform but for `batches.change_weights`) and which
    captions are dropped."""
    count, clip_frames = rows["latents"].shape[:2]
    clip = batches.clip_from_batch(rows, chunk)
    start = batches.draw_history(
        rng.fold(key, "history"),
        count,
        chunk=chunk,
        maximum=frozen["max_history"],
        limit=clip_frames - frames,
        weights=batches.change_weights(rows["caption_ids"], change_weight),
    )
    contexts = batches.encode_captions(
        params,
        frozen,
        rows["caption_ids"],
        rng.fold(key, "captions"),
        encode_text=encode_text,
        dropout=caption_dropout,
    )
    return Scene(clip, start, contexts, take_frames(clip.latents, batches.frame_range(start, frames)))


def loss(
    params: Params,
    batch: Batch,
    frozen: dict[str, Any],
    key: PRNGKey,
    *,
    models: Mapping[str, DiT],
    experts: Experts,
    encode_text: batches.EncodeText,
    frames: int = 16,
    chunk: int = 4,
    sink: int = 1,
    temporal: int = 1,
    shift: float = 5.0,
    caption_dropout: float = 0.1,
    change_weight: float = 1.0,
) -> tuple[Scalar, Metrics]:
    """Mean squared velocity error of `frames` target latent frames in chunks, one sigma a chunk.

    The history before them is a multiple of `chunk`, up to frozen["max_history"] and to what the clip has room for,
    drawn uniformly but for `batches.change_weights`. Captions go by token (`passes.teacher_forcing`).
    params["experts"][name] are velocity models. Metrics as in `flow_matching.loss`. Raises ValueError where the target
    does not fit.
    """
    check_frames(batch["latents"].shape[1], frames, chunk)

    def one(name: str, rows: Batch, key: PRNGKey) -> tuple[Scalar, Metrics]:
        clip, start, contexts, x0 = scene(
            params,
            rows,
            frozen,
            key,
            encode_text=encode_text,
            frames=frames,
            chunk=chunk,
            caption_dropout=caption_dropout,
            change_weight=change_weight,
        )
        sigma = experts.sample_sigma(rng.fold(key, "sigma"), name, (len(x0), frames // chunk), shift)
        level = jnp.repeat(sigma, chunk, axis=1)
        eps = jax.random.normal(rng.fold(key, "noise"), x0.shape, jnp.float32)
        velocity = passes.teacher_forcing(
            models[name],
            params["experts"][name],
            flow.interpolate(x0, eps, level),
            flow.timestep(level),
            clip,
            start,
            contexts,
            chunk=chunk,
            sink=sink,
            temporal=temporal,
        )
        errors = batches.squared_error(velocity, flow.velocity(x0, eps), keep=2)
        place = batches.sigma_place(level, experts, name, shift)
        return errors.mean(), batches.quarters(errors, place)

    return batches.over_experts(experts.names, batch, key, one)
