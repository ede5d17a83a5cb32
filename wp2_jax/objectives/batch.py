"""What the objectives make of a loader's batch: clips, captions, history lengths, the experts' shares.

A batch holds latents [B, T, h, w, 16], y [B, T, h, w, 20], lr_latents and lr_y (half the frames, a quarter of the
sides), actions [B, T, 6] float32 and caption_ids [B, T/chunk, S] int32. A clip starts its world: frame 0 is the start
picture.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wp2_jax import rng
from wp2_jax.array_types import ArrayTree, Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.diffusion import flow
from wp2_jax.diffusion.experts import Experts
from wp2_jax.models import passes

EncodeText = Callable[[Params, dict[str, Any], jax.Array], jax.Array]
"""(params, frozen, token ids [B, C, S] int32) -> contexts [B, C, S, text_dim], zeros past each length."""

_QUARTERS = 4


def clip_from_batch(batch: Batch, chunk: int) -> passes.History:
    """The batch as a clip whose captions count chunks: frame t is under caption t // chunk.

    Raises ValueError unless the frames fill the chunks of `caption_ids`.
    """
    rows, frames = batch["latents"].shape[:2]
    chunks = batch["caption_ids"].shape[1]
    if frames != chunk * chunks:
        raise ValueError(
            f"caption_ids holds {chunks} captions for {frames} latent frames in chunks of {chunk}: "
            "give one caption a chunk, and whole chunks"
        )
    captions = jnp.broadcast_to(jnp.arange(frames, dtype=jnp.int32) // chunk, (rows, frames))
    arrays = (batch[name] for name in ("latents", "y", "lr_latents", "lr_y", "actions"))
    return passes.History(*arrays, captions=captions)


def first_frames(clip: passes.History, frames: int) -> passes.History:
    """The first `frames` (even, static) latent frames of a clip, low-resolution twin included."""
    half = frames // 2
    return passes.History(
        latents=clip.latents[:, :frames],
        y=clip.y[:, :frames],
        lr_latents=clip.lr_latents[:, :half],
        lr_y=clip.lr_y[:, :half],
        actions=clip.actions[:, :frames],
        captions=clip.captions[:, :frames],
    )


def null_context(params: Params, frozen: dict[str, Any], encode_text: EncodeText) -> jax.Array:
    """[1, S, text_dim], the negative prompt: as it lies in `frozen`, or encoded now where the encoder still trains."""
    if "null_context" in frozen:
        return frozen["null_context"]
    return encode_text(params, frozen, frozen["null_ids"][:, None])[:, 0]


def encode_captions(
    params: Params, frozen: dict[str, Any], ids: jax.Array, key: PRNGKey, *, encode_text: EncodeText, dropout: float
) -> jax.Array:
    """Contexts [B, C, S, text_dim] of the captions `ids` [B, C, S].

    With probability `dropout` all captions of a sample become the negative prompt, which is what guidance needs.
    """
    contexts = encode_text(params, frozen, ids)
    if dropout == 0.0:
        return contexts
    null = null_context(params, frozen, encode_text).astype(contexts.dtype)
    dropped = jax.random.bernoulli(key, dropout, (contexts.shape[0], 1, 1, 1))
    return jnp.where(dropped, null[None], contexts)


def draw_history(
    key: PRNGKey,
    rows: int,
    *,
    chunk: int,
    maximum: jax.Array | int,
    limit: int,
    minimum: int = 0,
    weights: jax.Array | None = None,
) -> jax.Array:
    """History lengths [rows] int32: uniform over the multiples of `chunk` in minimum..min(maximum, limit).

    `maximum` may be traced: a growing curriculum does not recompile. `limit` (static) is what the clip has room for.
    `minimum` wins over a smaller `maximum`. With `weights` [rows, C > limit // chunk] a length of c chunks is drawn in
    proportion to weights[:, c]. Raises ValueError where `limit` is below `minimum`.
    """
    if limit < minimum:
        raise ValueError(
            f"a clip with room for {limit} latent frames of history cannot hold the {minimum} that are needed: "
            "use longer clips or fewer target frames"
        )
    lowest = -(-minimum // chunk)
    highest = jnp.minimum(jnp.asarray(maximum, jnp.int32), limit) // chunk
    highest = jnp.maximum(highest, lowest)
    if weights is None:
        return chunk * jax.random.randint(key, (rows,), lowest, highest + 1, jnp.int32)
    lengths = jnp.arange(limit // chunk + 1, dtype=jnp.int32)
    allowed = (lowest <= lengths) & (lengths <= highest)
    logits = jnp.where(allowed, jnp.log(weights[:, : len(lengths)]), -jnp.inf)
    return chunk * jax.random.categorical(key, logits).astype(jnp.int32)


def change_weights(ids: jax.Array, weight: float) -> jax.Array | None:
    """[B, C] float32 for `draw_history`: `weight` for chunks whose caption in `ids` [B, C, S] is not that of the chunk
    before, 1 for the others. None, uniform, for a weight of 1.

    What an event does is seen where its sentence begins, in a few chunks of a long clip.
    """
    if weight == 1.0:
        return None
    changed = jnp.any(ids[:, 1:] != ids[:, :-1], axis=-1)
    return jnp.where(jnp.pad(changed, ((0, 0), (1, 0))), weight, 1.0)


def frame_range(start: jax.Array, frames: int) -> jax.Array:
    """[B, frames] int32: start, start + 1, ..."""
    return start[:, None] + jnp.arange(frames, dtype=jnp.int32)


def share(tree: ArrayTree, parts: int, index: int) -> ArrayTree:
    """Rows index, index + parts, ... of every array: an even part that leaves each row on its device.

    Raises ValueError if the rows do not divide.
    """

    def rows(x: jax.Array) -> jax.Array:
        if x.shape[0] % parts:
            raise ValueError(f"a batch of {x.shape[0]} samples does not divide by {parts}: use a multiple of {parts}")
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:])[:, index]

    return jax.tree.map(rows, tree)


def over_experts(
    names: Sequence[str],
    batch: Batch,
    key: PRNGKey,
    one: Callable[[str, Batch, PRNGKey], tuple[Scalar, Metrics]],
) -> tuple[Scalar, Metrics]:
    """Gives every expert an equal share of the samples and a key of its own; the mean of their losses.

    `one(name, rows, key) -> (loss, metrics)`; the metrics become `loss/<name>` and `loss/<name>/<metric>`.
    """
    losses, metrics = [], {}
    for index, name in enumerate(names):
        loss, own = one(name, share(batch, len(names), index), rng.fold(key, name))
        losses.append(loss)
        metrics[f"loss/{name}"] = loss
        metrics |= {f"loss/{name}/{metric}": value for metric, value in own.items()}
    return jnp.mean(jnp.stack(losses)), metrics


def squared_error(predicted: jax.Array, target: jax.Array, keep: int) -> jax.Array:
    """Mean squared error in float32 over all but the first `keep` axes."""
    error = jnp.square(predicted.astype(jnp.float32) - target.astype(jnp.float32))
    return error.mean(axis=tuple(range(keep, error.ndim)))


def quarters(errors: jax.Array, place: jax.Array) -> Metrics:
    """Means of `errors` where `place` (in 0..1, same shape) lies in each quarter: q0 .. q3, NaN where none does."""
    quarter = jnp.clip((_QUARTERS * place).astype(jnp.int32), 0, _QUARTERS - 1)
    return {f"q{i}": jnp.mean(jax.lax.stop_gradient(errors), where=quarter == i) for i in range(_QUARTERS)}


def sigma_place(sigma: jax.Array, experts: Experts, name: str, shift: float) -> jax.Array:
    """Where a training level lies in the range its expert draws from: 0 the cleanest, 1 the noisiest, uniform."""
    low, high = (flow.unshift(edge, shift) for edge in experts.sigma_range(name))
    return (flow.unshift(sigma, shift) - low) / (high - low)
