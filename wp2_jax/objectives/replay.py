"""Gradient replay: the kept block of one chunk again, with gradients (spec section 5, Stable Forcing 3).

What the gradient of chunk n reaches besides the block's own tokens, by `memory_grad`. The keys and values of chunks
before n-1 are constants throughout, and so are all latents and low-resolution latents.

    "none"        nothing: the cache is a constant. Its sink and compressed part are a prefix of the final cache; the
                  tmp entries are computed again from the last latent frame of chunk n-1, with constant weights.
    "tokens"      the prefill of chunk n-1 (cmp and tmp; for n = 1 the sink too) runs inside the gradient: it reaches
                  all that turns memory tokens into keys and values (blocks, text, time and action embeddings), while
                  the tokens themselves (patch embedding, compressor) are constants.
    "compressor"  as "tokens", and the tokens are computed inside the gradient too: it reaches the patch embedding and
                  the compressor, whose state before chunk n-1 is a constant.

Chunk 0 has no memory and no such gradient.
"""

import jax
import jax.numpy as jnp

from wp2_jax.array_types import Params, Scalar
from wp2_jax.diffusion import pdd
from wp2_jax.inference import stream
from wp2_jax.inference.spec import StreamSpec
from wp2_jax.models import cache as kv
from wp2_jax.models import passes
from wp2_jax.models.frames import Frames
from wp2_jax.objectives import dmd
from wp2_jax.objectives.rollout import Conditions, Rollout, part

MEMORY_GRADS = ("none", "tokens", "compressor")


def cache_at(
    spec: StreamSpec,
    name: str,
    weights: Params,
    rollout: Rollout,
    given: Conditions,
    index: jax.Array,
    *,
    memory_grad: str,
    second: bool,
) -> kv.KVCache:
    """Expert `name`'s cache as it was when chunk `index` (int32 []) was generated.

    `second` (static) says that index is 1, where the prefill also holds the sink; "none" does not look at it. Raises
    ValueError for an unknown memory_grad or a rollout without the compressors that it needs.
    """
    if memory_grad not in MEMORY_GRADS:
        raise ValueError(f"replay.memory_grad={memory_grad!r}: choose one of {', '.join(MEMORY_GRADS)}")
    model, expert = spec.models[name], rollout.state.experts[name]
    assert expert.cache is not None
    # Chunk 0 goes through the same code with chunk 0 as its past; the length of 0 then hides all of it.
    past = jnp.maximum(index - 1, 0)
    state = rollout.state.replace(index=past)
    actions, context = part(given.actions, past, spec.chunk), part(given.contexts, past, 1)
    latents = part(rollout.latents, past, spec.chunk)
    constant = jax.lax.stop_gradient(expert.cache)
    if memory_grad == "none":
        if not spec.temporal:
            return kv.truncate(constant, index)
        weights = jax.lax.stop_gradient(weights)
        y, _ = stream.chunk_y(spec, state)
        temporal = _last_frames(spec, model, weights, latents, y, actions, past)
        cache = passes.prefill(
            model, weights, kv.truncate(constant, index), None, _no_memory(spec, temporal), temporal, context
        )
        return jax.lax.stop_gradient(cache)

    if rollout.compressors is None:
        raise ValueError(f"replay.memory_grad={memory_grad!r} needs a rollout made with keep_compressors=True")
    before = jax.tree.map(lambda x: part(x, past, 1, axis=0)[0], rollout.compressors[name])
    chunk = stream.Chunk(latents, jnp.zeros(()), actions, context, {})
    half = spec.chunk // spec.dit.memory.time_factor
    (sink, memory, temporal), _ = stream.memory_frames(
        spec, model, weights, state, chunk, part(rollout.lr_latents, past, half), before, second
    )
    if memory_grad == "tokens":
        sink = None if sink is None else _constant_tokens(sink)
        memory, temporal = _constant_tokens(memory), _constant_tokens(temporal)
    cache = passes.prefill(model, weights, kv.truncate(constant, past), sink, memory, temporal, context)
    return cache.replace(chunks=index)


def _constant_tokens(group: Frames) -> Frames:
    return group.replace(tokens=jax.lax.stop_gradient(group.tokens))


def replay_x0(
    spec: StreamSpec,
    weights: Params,
    rollout: Rollout,
    given: Conditions,
    index: jax.Array,
    *,
    block: int,
    memory_grad: str = "none",
    second: bool = False,
) -> jax.Array:
    """x0 [B, chunk, h, w, 16] of the kept block of chunk `index` (int32 []), differentiable in `weights`.

    `block` (static) is the chunk's kept d, `weights` the tree of the expert that runs it. For the last block this is
    the rolled-out chunk itself.
    """
    table = spec.pdd_schedule
    kept = table.blocks[block]
    cache = cache_at(spec, kept.expert, weights, rollout, given, index, memory_grad=memory_grad, second=second)
    expert = rollout.state.experts[kept.expert].replace(cache=cache)
    state = rollout.state.replace(index=index, experts={kept.expert: expert})
    x = part(rollout.record.x, index, 1, axis=0)[0]
    y, _ = stream.chunk_y(spec, state)
    actions, context = part(given.actions, index, spec.chunk), part(given.contexts, index, 1)
    displacement, velocity = stream.run_block(
        spec, {"experts": {kept.expert: weights}}, state, kept, x, y, actions, context
    )
    return pdd.block_x0(x, displacement, velocity, float(table.lasts[block]))


def loss(
    spec: StreamSpec,
    weights: Params,
    rollout: Rollout,
    given: Conditions,
    g: jax.Array,
    index: jax.Array,
    *,
    block: int,
    memory_grad: str = "none",
    second: bool = False,
) -> Scalar:
    """0.5 MSE(x0, sg(x0 - g)) of one chunk; g [B, T, h, w, 16] of the whole rollout. See `replay_x0`."""
    x0 = replay_x0(spec, weights, rollout, given, index, block=block, memory_grad=memory_grad, second=second)
    return dmd.generator_loss(x0, part(g, index, spec.chunk))


def _last_frames(spec: StreamSpec, model, weights, latents, y, actions, index) -> Frames:
    """The tmp frames of chunk `index`, as `stream.memory_frames` has them."""
    last = slice(spec.chunk - spec.temporal, None)
    batch = latents.shape[0]
    positions = (index + 1) * spec.chunk - spec.temporal + jnp.arange(spec.temporal, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, (batch, spec.temporal))
    t, captions = jnp.zeros(positions.shape, jnp.float32), jnp.zeros(positions.shape, jnp.int32)
    return passes.full_frames(model, weights, latents[:, last], y[:, last], t, actions[:, last], positions, captions)


def _no_memory(spec: StreamSpec, like: Frames) -> Frames:
    """Zero memory frames."""
    return Frames(
        like.tokens[:, :0],
        like.t[:, :0],
        None if like.actions is None else like.actions[:, :0],
        like.positions[:, :0],
        like.captions[:, :0],
        spec.layout.memory_rows,
        spec.layout.memory_cols,
    )
