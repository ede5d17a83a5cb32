"""Flow matching of the bidirectional model (spec section 5): stages base and action, memory phase 2, the teacher.

    || N(x_sigma, sigma, m, A) - (eps - x0) ||^2

One sigma a clip. The samples are shared out evenly among the experts; each trains on its own noise range.
"""

from collections.abc import Mapping
from typing import Any

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


def loss(
    params: Params,
    batch: Batch,
    frozen: dict[str, Any],
    key: PRNGKey,
    *,
    models: Mapping[str, DiT],
    experts: Experts,
    encode_text: batches.EncodeText,
    frames: int,
    memory: bool,
    actions: bool = True,
    chunk: int = 4,
    sink: int = 1,
    temporal: int = 1,
    shift: float = 5.0,
    caption_dropout: float = 0.1,
    image_dropout: float = 0.0,
    change_weight: float = 1.0,
) -> tuple[Scalar, Metrics]:
    """Mean squared velocity error of `frames` target latent frames.

    With `memory` the target follows a history of random length (a multiple of `chunk`, 0 included, up to
    frozen["max_history"] and to what the clip has room for), uniform but for `batches.change_weights`; without, it
    starts the world. With probability `image_dropout` a sample is shown no picture (y all 0, its mask too): then only
    the caption says what there is, which teaches to listen to it. `actions` False leaves the action modules out (stage
    base). Target frames are under their chunk's
    caption; the memory is under the target's first, as it is where a pass has one caption.

    params["experts"][name] are velocity models; all that encode_text needs is in params and frozen. Metrics:
    loss/<expert> and loss/<expert>/q0..q3 by quarter of the expert's range, q3 the noisiest.

    Raises ValueError where the clip is too short for the target (and, with memory, a chunk before it), the target does
    not fill chunks, or pictures are dropped of a world that has a history.
    """
    room = batch["latents"].shape[1] - frames
    if room < (chunk if memory else 0) or frames % chunk:
        raise ValueError(
            f"frames {frames} as target in clips of {frames + room} latent frames: use a multiple of chunk {chunk} "
            f"that leaves {f'at least {chunk} frames of history' if memory else 'nothing out'}"
        )

    if memory and image_dropout:
        raise ValueError(f"image_dropout {image_dropout}: a history shows what there is; use 0 with memory")

    def one(name: str, rows: Batch, key: PRNGKey) -> tuple[Scalar, Metrics]:
        count = rows["latents"].shape[0]
        clip = batches.clip_from_batch(rows, chunk)
        start = jnp.zeros((count,), jnp.int32)
        if memory:
            start = batches.draw_history(
                rng.fold(key, "history"),
                count,
                chunk=chunk,
                maximum=frozen["max_history"],
                limit=room,
                weights=batches.change_weights(rows["caption_ids"], change_weight),
            )
        positions = batches.frame_range(start, frames)
        x0, y, rows_of_actions = (take_frames(a, positions) for a in (clip.latents, clip.y, clip.actions))

        if image_dropout:
            shown = jax.random.bernoulli(rng.fold(key, "image"), 1 - image_dropout, (count, 1, 1, 1, 1))
            y = jnp.where(shown, y, 0)

        # Only the target's captions are encoded; they are numbered from its first chunk.
        ids = take_frames(rows["caption_ids"], batches.frame_range(start // chunk, frames // chunk))
        contexts = batches.encode_captions(
            params, frozen, ids, rng.fold(key, "captions"), encode_text=encode_text, dropout=caption_dropout
        )
        captions = clip.captions[:, :frames]
        history, length = None, None
        if memory:
            history = batches.first_frames(clip, room)
            history, length = history.replace(captions=jnp.zeros_like(history.captions)), start

        sigma = experts.sample_sigma(rng.fold(key, "sigma"), name, (count,), shift)
        eps = jax.random.normal(rng.fold(key, "noise"), x0.shape, jnp.float32)
        velocity = passes.bidirectional(
            models[name],
            params["experts"][name],
            flow.interpolate(x0, eps, sigma),
            y,
            jnp.broadcast_to(flow.timestep(sigma)[:, None], positions.shape),
            rows_of_actions if actions else None,
            contexts,
            captions,
            positions,
            history=history,
            length=length,
            sink=sink,
            temporal=temporal,
        )
        errors = batches.squared_error(velocity, flow.velocity(x0, eps), keep=1)
        return errors.mean(), batches.quarters(errors, batches.sigma_place(sigma, experts, name, shift))

    return batches.over_experts(experts.names, batch, key, one)
