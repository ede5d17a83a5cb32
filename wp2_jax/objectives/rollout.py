"""The student's rollout without gradient, through the very step of inference (spec section 5, Stable Forcing 1).

Every chunk runs all D blocks of the few-step schedule (`stream.emit`) and is absorbed into the memory
(`stream.absorb`), the last one too: its low-resolution latents belong to the record. Of each chunk one block d is kept,
with what is needed to run that block again:

    its input x_d and d; the chunk's number, action rows and caption; and the key and value caches as they were then.
    The caches' sink and compressed part are a length prefix of the final cache, tmp is computed again from the latents
    (`replay.py`). A block needs no noise: its x0 is read off before x is noised for the next one.

Everything lies in buffers of the stream's capacity that each compiled call takes over (donation), so neither memory nor
compiled code depends on the number of chunks M, which is a number on the host.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.array_types import Params, PRNGKey
from wp2_jax.controls.images import LOW_RES_SCALE
from wp2_jax.inference import stream
from wp2_jax.inference.spec import StreamSpec
from wp2_jax.models import passes
from wp2_jax.models.memory import CompressorState

Call = Callable[..., Any]
"""call(name, *args): runs one of the compiled functions, by name."""


class Conditions(flax.struct.PyTreeNode):
    """What a rollout is asked for, zero-padded to the capacity of C chunks, T latent frames.

    image [B, H, W, 3] in [-1, 1]; actions [B, T, 6]; contexts [B, C, S, text_dim], one caption a chunk; null_context
    [B, 1, S, text_dim].
    """

    image: jax.Array
    actions: jax.Array
    contexts: jax.Array
    null_context: jax.Array


class ReplayRecord(flax.struct.PyTreeNode):
    """The kept block of every chunk; row n is chunk n.

    x [C, B, chunk, h, w, 16] float32, the block's input; block [C] int32, d.
    """

    x: jax.Array
    block: jax.Array


class Rollout(flax.struct.PyTreeNode):
    """M chunks and what scoring and replay need, in buffers of capacity C chunks, T latent frames; zeros past M.

    state: the stream after the last chunk, with its caches and the y [B, T, h, w, 20], lr_y of the whole length;
    latents [B, T, h, w, 16]; lr_latents [B, T/2, h/4, w/4, 16]; compressors {expert: state} with a leading axis of C,
    each expert's compressor before it saw chunk n, or None where it was not asked for.
    """

    state: stream.StreamState
    latents: jax.Array
    lr_latents: jax.Array
    record: ReplayRecord
    compressors: dict[str, CompressorState] | None

    def history(self, conditions: Conditions) -> passes.History:
        """The rollout as the memory of a scorer, all frames under caption 0."""
        return passes.History(
            latents=self.latents,
            y=self.state.y,
            lr_latents=self.lr_latents,
            lr_y=self.state.lr_y,
            actions=conditions.actions,
            captions=jnp.zeros(self.latents.shape[:2], jnp.int32),
        )


def part(buffer: jax.Array, index: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Entries index*size .. (index+1)*size of a buffer."""
    return jax.lax.dynamic_slice_in_dim(buffer, index * size, size, axis)


def conditions(
    spec: StreamSpec,
    image: jax.Array | np.ndarray,
    actions: jax.Array | np.ndarray,
    contexts: jax.Array | np.ndarray,
    null_context: jax.Array,
) -> Conditions:
    """Pads actions [B, 4M, 6] and contexts [B, M, S, text_dim] to the capacity; null_context [1, S, text_dim].

    Raises ValueError where actions and captions differ in length or the memory cannot hold M chunks.
    """
    chunks, frames = contexts.shape[1], actions.shape[1]
    if frames != chunks * spec.chunk:
        raise ValueError(f"actions hold {frames} latent frames for {chunks} captions: give {spec.chunk} a caption")
    if chunks > spec.capacity:
        raise ValueError(f"rollout of {chunks} chunks: set capacity, now {spec.capacity}, to at least as many")
    room = spec.capacity - chunks
    null = jnp.broadcast_to(null_context[None], (image.shape[0], 1, *null_context.shape[1:]))
    return Conditions(
        image=jnp.asarray(image),
        actions=jnp.pad(jnp.asarray(actions), ((0, 0), (0, room * spec.chunk), (0, 0))),
        contexts=jnp.pad(jnp.asarray(contexts), ((0, 0), (0, room), (0, 0), (0, 0))),
        null_context=null,
    )


def begin(spec: StreamSpec, params: Params, given: Conditions, key: PRNGKey, *, keep_compressors: bool) -> Rollout:
    """An empty rollout. params {"experts": {name: fused tree}, "autoencoder": tree}; `key` draws all its noise."""
    frames, batch = spec.capacity * spec.chunk, given.image.shape[0]
    channels = spec.dit.latent_channels
    height, width = spec.latent_height, spec.latent_width
    state = stream.start(spec, params, given.image, frames, given.null_context, key)
    compressors = None
    if keep_compressors:
        compressors = {
            name: jax.tree.map(lambda x: jnp.zeros((spec.capacity, *x.shape), x.dtype), expert.compressor)
            for name, expert in state.experts.items()
        }
    small = (frames // spec.dit.memory.time_factor, height // LOW_RES_SCALE, width // LOW_RES_SCALE)
    return Rollout(
        state=state,
        latents=jnp.zeros((batch, frames, height, width, channels), jnp.float32),
        lr_latents=jnp.zeros((batch, *small, channels), jnp.float32),
        record=ReplayRecord(
            x=jnp.zeros((spec.capacity, batch, spec.chunk, height, width, channels), jnp.float32),
            block=jnp.zeros((spec.capacity,), jnp.int32),
        ),
        compressors=compressors,
    )


def advance(
    spec: StreamSpec, rollout: Rollout, params: Params, given: Conditions, block: jax.Array, *, first: bool
) -> Rollout:
    """The next chunk, of which block `block` (int32 [], d) is kept. `first` (static): it is the world's first."""
    state = rollout.state
    index = state.index
    actions, context = part(given.actions, index, spec.chunk), part(given.contexts, index, 1)
    emitted, chunk = stream.emit(spec, params, state, actions, context, first=first, trace=True)
    absorbed, lr_latents = stream.absorb(spec, params, emitted, chunk, first=first)

    def put(buffer: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), start, axis)

    kept = jax.lax.dynamic_slice_in_dim(chunk.trace["input"], block, 1)
    compressors = rollout.compressors
    if compressors is not None:
        seen = {name: state.experts[name].compressor for name in compressors}
        compressors = jax.tree.map(lambda buffer, x: put(buffer, x[None], index, 0), compressors, seen)
    return Rollout(
        state=absorbed,
        latents=put(rollout.latents, chunk.latents, index * spec.chunk, 1),
        lr_latents=put(rollout.lr_latents, lr_latents, index * lr_latents.shape[1], 1),
        record=ReplayRecord(
            x=put(rollout.record.x, kept, index, 0),
            block=put(rollout.record.block, block[None], index, 0),
        ),
        compressors=compressors,
    )


def functions(
    spec: StreamSpec, *, keep_compressors: bool = False, compiler_options: dict[str, int] | None = None
) -> dict[str, Callable[..., Rollout]]:
    """The compiled functions of `run`: "begin", and "first_chunk" and "later_chunk", which take over the rollout.

    Raises ValueError for a stream that is not few-step.
    """
    if spec.mode != "few_step":
        raise ValueError(f"mode {spec.mode!r}: a rollout is made by the few-step student, use mode 'few_step'")

    def start(params, given, key):
        return begin(spec, params, given, key, keep_compressors=keep_compressors)

    def first_chunk(rollout, params, given, block):
        return advance(spec, rollout, params, given, block, first=True)

    def later_chunk(rollout, params, given, block):
        return advance(spec, rollout, params, given, block, first=False)

    jit = functools.partial(jax.jit, compiler_options=compiler_options)
    return {
        "begin": jit(start),
        "first_chunk": jit(first_chunk, donate_argnums=0),
        "later_chunk": jit(later_chunk, donate_argnums=0),
    }


def run(
    call: Call, params: Params, given: Conditions, key: PRNGKey, blocks: Sequence[int] | np.ndarray | jax.Array
) -> Rollout:
    """Rolls out len(blocks) chunks through `call` of `functions`; blocks: the kept d of each chunk, on the host."""
    rollout = call("begin", params, given, key)
    for index, block in enumerate(blocks):
        name = "later_chunk" if index else "first_chunk"
        rollout = call(name, rollout, params, given, np.asarray(block, np.int32))
    return rollout
