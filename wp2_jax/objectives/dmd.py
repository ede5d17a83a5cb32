"""Score distillation, clip by clip (DMD2, arXiv 2405.14867; spec section 5, Stable Forcing 2 and 4).

With x = (1 - sigma) x0 + sigma eps of a clip x0, and the clean data each scorer sees in it, x0_s = x - sigma v_s,

    g = (x0_fake - x0_real) / mean |x0 - x0_real|  =  -sigma (v_fake - v_real) / mean |x0 - x0_real|

which is, up to a positive factor a clip, the gradient by x0 of KL(student || teacher) at level sigma: descending it
moves x0 from where the student's distribution has too much mass to where the teacher's has it. The mean is over the
clip, at least 1e-6. The student then minimises 0.5 MSE(x0, sg(x0 - g)), whose gradient by x0 is g over the number of
elements.
"""

import dataclasses
from collections.abc import Callable, Mapping

import flax.struct
import jax
import jax.numpy as jnp

from wp2_jax import rng
from wp2_jax.array_types import Params, PRNGKey, Scalar
from wp2_jax.diffusion import flow, guidance
from wp2_jax.inference.spec import StreamSpec
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT
from wp2_jax.models.experts import expert_models
from wp2_jax.objectives import batch as batches
from wp2_jax.objectives.rollout import Conditions, Rollout, part

FLOOR = 1e-6

Velocity = Callable[[jax.Array, jax.Array], jax.Array]
"""velocity(x [B, ...], sigma [B]) -> v [B, ...]"""


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """`clip` latent frames are scored at once. The level is shift(u), u uniform in `u_range`, for the score as well as
    for the fake score's training; `guide_scale` is the real score's."""

    clip: int = 32
    u_range: tuple[float, float] = (0.02, 0.98)
    shift: float = 5.0
    guide_scale: float = 3.5

    def __post_init__(self):
        # A list (from JSON) becomes a tuple: the config is a static argument.
        object.__setattr__(self, "u_range", tuple(self.u_range))
        if not 0.0 <= self.u_range[0] < self.u_range[1] <= 1.0:
            raise ValueError(f"score.u_range={self.u_range}: must rise within 0..1")


def gradient(x0: jax.Array, x0_real: jax.Array, x0_fake: jax.Array) -> jax.Array:
    """g of clips [B, ...], float32, each row normalised by itself; see the top of this file."""
    size = jnp.abs(x0 - x0_real).mean(axis=tuple(range(1, x0.ndim)), keepdims=True)
    return (x0_fake - x0_real) / jnp.maximum(size, FLOOR)


def score(x0: jax.Array, eps: jax.Array, sigma: jax.Array, real: Velocity, fake: Velocity) -> jax.Array:
    """g [B, ...] of clips x0 [B, ...] at levels sigma [B] under noise eps; no gradient passes through it."""
    x = flow.interpolate(x0, eps, sigma)
    x0_real, x0_fake = (flow.x0_from_velocity(x, velocity(x, sigma), sigma) for velocity in (real, fake))
    return jax.lax.stop_gradient(gradient(x0.astype(jnp.float32), x0_real, x0_fake))


def generator_loss(x0: jax.Array, g: jax.Array) -> Scalar:
    """0.5 MSE(x0, sg(x0 - g)), the mean over all elements."""
    target = jax.lax.stop_gradient(x0 - g)
    return 0.5 * jnp.square(x0 - target).mean()


class Clip(flax.struct.PyTreeNode):
    """A clip of a rollout as the bidirectional scorers see it: L target frames and the memory of all before them.

    latents [B, L, h, w, 16]; y [B, L, h, w, 20]; actions [B, L, 6]; positions [B, L] int32; contexts [B, L/chunk, S,
    text_dim], captions [B, L] int32 into them; history padded, of which the first `length` [B] int32 frames are valid
    (0: no memory); null_context [B, 1, S, text_dim].
    """

    latents: jax.Array
    y: jax.Array
    actions: jax.Array
    positions: jax.Array
    contexts: jax.Array
    captions: jax.Array
    history: passes.History
    length: jax.Array
    null_context: jax.Array


def clip_count(spec: StreamSpec, config: ScoreConfig, chunks: int) -> int:
    """How many clips a rollout of `chunks` chunks is cut into. Raises ValueError where something would be left over."""
    frames = chunks * spec.chunk
    if config.clip % spec.chunk or frames % config.clip or not frames:
        raise ValueError(
            f"score.clip={config.clip} does not cut a rollout of {frames} latent frames in chunks of {spec.chunk}: "
            "use a multiple of the chunk that divides the rollout"
        )
    return frames // config.clip


def cut(spec: StreamSpec, config: ScoreConfig, rollout: Rollout, given: Conditions, index: jax.Array) -> Clip:
    """Clip `index` (int32 []) of a rollout, with everything before it as history.

    Target frames are under their chunk's caption, the memory under the clip's first (spec section 4).
    """
    frames = config.clip
    latents = part(rollout.latents, index, frames)
    rows = latents.shape[0]
    start = jnp.broadcast_to(index * frames, (rows,))
    chunks = frames // spec.chunk
    # The last clip that fits the buffers has all frames but its own before it.
    room = max(spec.capacity * spec.chunk - frames, spec.chunk)
    return Clip(
        latents=latents,
        y=part(rollout.state.y, index, frames),
        actions=part(given.actions, index, frames),
        positions=batches.frame_range(start, frames),
        contexts=part(given.contexts, index, chunks),
        captions=jnp.broadcast_to(jnp.arange(frames, dtype=jnp.int32) // spec.chunk, (rows, frames)),
        history=batches.first_frames(rollout.history(given), room),
        length=start,
        null_context=given.null_context,
    )


def scorers(spec: StreamSpec) -> Mapping[str, DiT]:
    """The modules of the real and the fake score: many-step models of the student's sizes."""
    return expert_models(spec.dit, spec.experts.names)


def clip_velocity(spec: StreamSpec, model: DiT, weights: Params, clip: Clip, *, null: bool = False) -> Velocity:
    """One expert's velocity of a clip; its memory tokens come from its own patch embedding and compressor.

    `null` puts the null caption everywhere, and leaves memory and actions as they are.
    """
    contexts = clip.null_context if null else clip.contexts
    captions = jnp.zeros_like(clip.captions) if null else clip.captions

    def velocity(x: jax.Array, sigma: jax.Array) -> jax.Array:
        return passes.bidirectional(
            model,
            weights,
            x,
            clip.y,
            jnp.broadcast_to(flow.timestep(sigma)[:, None], captions.shape),
            clip.actions,
            contexts,
            captions,
            clip.positions,
            history=clip.history,
            length=clip.length,
            sink=spec.sink,
            temporal=spec.temporal,
        )

    return velocity


def draw(spec: StreamSpec, config: ScoreConfig, name: str, key: PRNGKey, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """(eps, sigma [B]) of a clip, the level given that it lies in expert `name`'s range."""
    rows = clip.latents.shape[0]
    sigma = spec.experts.sample_sigma(rng.fold(key, "sigma"), name, (rows,), config.shift, config.u_range)
    return jax.random.normal(rng.fold(key, "noise"), clip.latents.shape, jnp.float32), sigma


def score_clip(
    spec: StreamSpec, config: ScoreConfig, name: str, real: Params, fake: Params, clip: Clip, key: PRNGKey
) -> jax.Array:
    """g [B, L, h, w, 16] of one clip at a level of expert `name`; real and fake are that expert's trees."""
    model = scorers(spec)[name]
    eps, sigma = draw(spec, config, name, key, clip)
    guided = guidance.guided(
        clip_velocity(spec, model, real, clip),
        clip_velocity(spec, model, real, clip, null=True),
        config.guide_scale,
    )
    return score(clip.latents, eps, sigma, guided, clip_velocity(spec, model, fake, clip))


def fake_loss(spec: StreamSpec, config: ScoreConfig, name: str, weights: Params, clip: Clip, key: PRNGKey) -> Scalar:
    """Flow matching of the fake score's expert `name` on one clip: mean squared velocity error, unguided."""
    eps, sigma = draw(spec, config, name, key, clip)
    velocity = clip_velocity(spec, scorers(spec)[name], weights, clip)
    predicted = velocity(flow.interpolate(clip.latents, eps, sigma), sigma)
    return batches.squared_error(predicted, flow.velocity(clip.latents, eps), keep=0)


def expert_of(spec: StreamSpec, config: ScoreConfig, place: float) -> str:
    """The expert that scores a clip, on the host; `place` uniform in 0..1 gives each expert its share of the levels."""
    low, high = config.u_range
    return spec.experts.at(float(flow.timestep(flow.shift(low + (high - low) * place, config.shift))))
