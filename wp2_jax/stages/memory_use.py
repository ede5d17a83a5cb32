"""Whether the teacher uses its memory: flow loss of a chunk under its own history and under another clip's."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from data_pipelines.latents import Encoder
from data_pipelines.loader import with_mask
from wp2_jax import rng
from wp2_jax.array_types import Params
from wp2_jax.diffusion import flow
from wp2_jax.inference import condition
from wp2_jax.inference.load import Loaded
from wp2_jax.inference.world import World
from wp2_jax.models import passes
from wp2_jax.models.experts import expert_models
from wp2_jax.objectives.batch import first_frames
from wp2_jax.stages.cases import Case, encode_captions

# Levels at which the loss is taken: u in the middle of equal parts of 0..1, then shifted as in training.
_LEVELS = 8
_SHIFT = 5.0


def compare(loaded: Loaded, cases: Sequence[Case], seeds: int) -> dict[str, list]:
    """own, other: mean squared velocity error of the last chunk of each case, a list [seeds] each, after its own
    history and after that of the next case, with the same noise; gain: 1 - own / other.

    Raises ValueError for a single case, which has no other.
    """
    if len(cases) < 2:
        raise ValueError("the loss under another clip's history needs 2 cases or more")
    world = loaded.world
    encoder = Encoder(
        kind=world.autoencoder_kind,
        config=world.autoencoder_config,
        module=world.autoencoder,
        params=loaded.params["autoencoder"],
        image_latents=condition.image_latents,
        chunk_low_res=condition.chunk_low_res,
        chunk=world.config.chunk,
    )
    clips = [_clip(encoder, case) for case in cases]
    frames = world.config.chunk
    contexts = encode_captions(loaded, [[case.captions[-1]] for case in cases])
    found: dict[str, list] = {"own": [], "other": [], "gain": []}
    for index, clip in enumerate(clips):
        room = clip.latents.shape[1] - frames
        histories = [first_frames(clips[which], room) for which in (index, (index + 1) % len(clips))]
        own, other = (
            [
                float(_loss(world, loaded.params["experts"], clip, history, contexts[index][None], s))
                for s in range(seeds)
            ]
            for history in histories
        )
        found["own"].append(own)
        found["other"].append(other)
        found["gain"].append([1 - a / b for a, b in zip(own, other, strict=True)])
    return found


def _clip(encoder: Encoder, case: Case) -> passes.History:
    assert case.recorded is not None
    arrays = {name: value[0] for name, value in encoder.encode(case.recorded[None]).items()}
    arrays["y"], arrays["lr_y"] = with_mask(arrays["y"]), with_mask(arrays["lr_y"])
    arrays["actions"] = case.rows.astype(np.float32)
    arrays["captions"] = np.zeros(len(case.rows), np.int32)
    return passes.History(**{name: jnp.asarray(value)[None] for name, value in arrays.items()})


@functools.partial(jax.jit, static_argnums=0)
def _loss(
    world: World, experts: Params, clip: passes.History, history: passes.History, contexts: jax.Array, seed: int
) -> jax.Array:
    chunk, config = world.config.chunk, world.config
    models = expert_models(world.dit, world.experts.names)
    length = history.latents.shape[1]
    x0, y, rows = (x[:, length:] for x in (clip.latents, clip.y, clip.actions))
    eps = jax.random.normal(rng.fold(jax.random.key(seed), "noise"), x0.shape)
    positions = length + jnp.arange(chunk, dtype=jnp.int32)[None]
    total = jnp.zeros(())
    for level in range(_LEVELS):
        sigma = flow.shift((level + 0.5) / _LEVELS, _SHIFT)
        name, sigmas = world.experts.at(1000 * sigma), jnp.full((1,), sigma, jnp.float32)
        velocity = passes.bidirectional(
            models[name],
            experts[name],
            flow.interpolate(x0, eps, sigmas),
            y,
            jnp.broadcast_to(flow.timestep(sigmas)[:, None], positions.shape),
            rows,
            contexts,
            jnp.zeros_like(positions),
            positions,
            history=history,
            length=jnp.full((1,), length, jnp.int32),
            sink=config.sink,
            temporal=config.temporal,
        )
        total += jnp.square(velocity - flow.velocity(x0, eps)).mean()
    return total / _LEVELS
