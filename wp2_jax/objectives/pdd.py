"""Stage 5: the few-step student by parallel decoding distillation (arXiv 2607.26004; spec section 5).

One pass at the start of a block predicts the mean velocity u_k of every interval of the block. With
d_i = sigma_{i+1} - sigma_i and x at the start of the block,

    x_k = x + sum_{i<k} d_i u_i                        the student's own displacements, no gradient
    v   = teacher(x_k, sigma_k)                        Euler; or midpoint:
    v   = teacher(x_k + d_k/2 teacher(x_k, sigma_k), sigma_k + d_k/2)
    loss = || u_k - v ||^2                             k uniform

The fixed point is the teacher's own solver with one step an interval.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import rng
from wp2_jax.array_types import Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.diffusion import flow, guidance
from wp2_jax.diffusion import pdd as schedules
from wp2_jax.diffusion.experts import Experts
from wp2_jax.models import passes, pdd_heads
from wp2_jax.models.dit import DiT
from wp2_jax.objectives import batch as batches
from wp2_jax.objectives import teacher_forcing

SOLVERS = ("euler", "midpoint")


def regression(
    student: Callable[[jax.Array], jax.Array],
    teacher: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    sigmas: jax.Array,
    interval: jax.Array,
    *,
    solver: str,
) -> jax.Array:
    """Squared error [B] of one interval's mean velocity in each sample.

    student(x) -> u [n, B, ...], the mean velocities of the block's n intervals; teacher(x, sigma [B]) -> v [B, ...];
    x [B, ...] at the block's start; sigmas [n + 1], the block's grid; interval [B] int32 in 0..n-1, the k of each
    sample; solver "euler" or "midpoint" (ValueError for another). Only the student's u_k carries a gradient.
    """
    if solver not in SOLVERS:
        raise ValueError(f"pdd.solver={solver!r}: choose one of {', '.join(SOLVERS)}")
    sigmas = jnp.asarray(sigmas, jnp.float32)
    widths = jnp.diff(sigmas)
    u = student(x).astype(jnp.float32)
    index = jnp.arange(u.shape[0])[:, None]
    before = jnp.where(index < interval, widths[:, None], 0.0)
    at = x.astype(jnp.float32) + jnp.einsum("nb,nb...->b...", before, jax.lax.stop_gradient(u))
    sigma, width = jnp.take(sigmas, interval), jnp.take(widths, interval)
    target = teacher(at, sigma)
    if solver == "midpoint":
        target = teacher(at + flow.expand(width / 2.0, at) * target, sigma + width / 2.0)
    own = jnp.take_along_axis(u, interval.reshape(1, -1, *(1,) * (u.ndim - 2)), axis=0)[0]
    return batches.squared_error(own, jax.lax.stop_gradient(target), keep=1)


def bank_params(weights: Mapping[str, Any], intervals: int) -> dict[str, Any]:
    """A student expert before PDD: a velocity expert with its head repeated once an interval."""
    return {**weights, "head": pdd_heads.bank_from_velocity(weights["head"], intervals)}


def fused_params(weights: Mapping[str, Any], schedule: schedules.PddSchedule, expert: str) -> dict[str, Any]:
    """An expert with a bank as one with fused heads: inference here, and what stage 6 trains."""
    head = weights["head"]
    kernel, bias = schedules.fuse_heads(head["kernel"], head["bias"], schedule, expert)
    return {**weights, "head": {**head, "kernel": kernel, "bias": bias}}


def loss(
    params: Params,
    batch: Batch,
    frozen: dict[str, Any],
    key: PRNGKey,
    *,
    models: Mapping[str, DiT],
    teachers: Mapping[str, DiT],
    experts: Experts,
    schedule: schedules.PddSchedule,
    encode_text: batches.EncodeText,
    frames: int = 16,
    chunk: int = 4,
    sink: int = 1,
    temporal: int = 1,
    solver: str = "euler",
    guide_scale: float = 3.5,
    caption_dropout: float = 0.1,
    change_weight: float = 1.0,
) -> tuple[Scalar, Metrics]:
    """The regression of u_k on the frozen stage-4 model, all chunks of the target in one masked pass.

    params["experts"][name] belong to `models` (bank heads), frozen["teacher"][name] to `teachers` (velocity heads); the
    teacher of an interval is the expert that owns it. Each expert draws one block an update and k a sample. Every chunk
    of a sample stands at that block. In half of an expert's samples x is data plus noise, in the other half the
    student's own run from noise.

    Metrics: loss/<expert>, loss/<expert>/q0..q3 by quarter of the block (q0 next to its start), /data and /own.
    Raises ValueError where the target does not fit or an expert's share of the batch is odd.
    """
    teacher_forcing.check_frames(batch["latents"].shape[1], frames, chunk)

    def one(name: str, rows: Batch, key: PRNGKey) -> tuple[Scalar, Metrics]:
        clip, start, contexts, x0 = teacher_forcing.scene(
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
        null = jnp.broadcast_to(
            batches.null_context(params, frozen, encode_text).astype(contexts.dtype), contexts.shape
        )

        def masked(model, weights, x, sigma, scene, block=None):
            """Head outputs at noise levels sigma [B] or []; scene = (clip, start, contexts)."""
            t = jnp.broadcast_to(flow.timestep(flow.expand(sigma, x[:, :, 0, 0, 0])), x.shape[:2])
            options = {"chunk": chunk, "sink": sink, "temporal": temporal, "block": block}
            return passes.teacher_forcing(model, weights, x, t, *scene, **options)

        blocks = schedule.expert_blocks(name)
        block = jax.random.randint(rng.fold(key, "block"), (), 0, len(blocks), jnp.int32)
        grids = np.stack([schedule.sigmas[b.start : b.end + 1] for b in blocks])
        sigmas = jnp.take(jnp.asarray(grids, jnp.float32), block, axis=0)
        interval = jax.random.randint(rng.fold(key, "interval"), (len(x0),), 0, grids.shape[1] - 1, jnp.int32)

        noise = jax.random.normal(rng.fold(key, "noise"), x0.shape, jnp.float32)
        scene = (clip, start, contexts)
        data, own = (batches.share((x0, noise, scene), 2, half) for half in range(2))
        from_data = flow.interpolate(data[0], data[1], sigmas[0])
        from_own = own_run(
            params["experts"],
            lambda at, weights, x, sigma, local: masked(_fused(models[at]), weights, x, sigma, own[2], local),
            own[1],
            rng.fold(key, "renoise"),
            schedule=schedule,
            names=experts.names[: experts.names.index(name) + 1],
            block=block,
        )
        x = _interleave(from_data, from_own)

        weights = frozen["teacher"][name]
        # Both branches of the guidance in one pass, a sample's two rows side by side: they stay on its device.
        both = jax.tree.map(_interleave, scene, (clip, start, null))

        def teacher(x, sigma):
            if guide_scale == 1.0:
                return masked(teachers[name], weights, x, sigma, scene)
            velocity = masked(teachers[name], weights, _interleave(x, x), _interleave(sigma, sigma), both)
            return guidance.combine(batches.share(velocity, 2, 0), batches.share(velocity, 2, 1), guide_scale)

        errors = regression(
            lambda x: masked(models[name], params["experts"][name], x, sigmas[0], scene, block),
            teacher,
            x,
            sigmas,
            interval,
            solver=solver,
        )
        place = (interval.astype(jnp.float32) + 0.5) / (grids.shape[1] - 1)
        halves = {"data": batches.share(errors, 2, 0).mean(), "own": batches.share(errors, 2, 1).mean()}
        return errors.mean(), {**batches.quarters(errors, place), **halves}

    return batches.over_experts(experts.names, batch, key, one)


def own_run(
    weights: Mapping[str, Any],
    forward: Callable[[str, Any, jax.Array, jax.Array, jax.Array], jax.Array],
    noise: jax.Array,
    key: PRNGKey,
    *,
    schedule: schedules.PddSchedule,
    names: tuple[str, ...],
    block: jax.Array,
) -> jax.Array:
    """The student's x at the start of local block `block` (int32 []) of the last expert in `names`; no gradient.

    From `noise` through the steps of inference: all blocks of the earlier experts and the last one's before `block`.
    forward(expert, fused weights, x, sigma [], local block []) -> [displacement, last velocity] [2, B, ...].
    """
    x, weights = noise, jax.lax.stop_gradient(weights)
    first = 0
    for name in names:
        blocks = schedule.expert_blocks(name)
        part = slice(first, first + len(blocks))
        starts, lasts, ends = (
            jnp.asarray(level[part], jnp.float32) for level in (schedule.starts, schedule.lasts, schedule.ends)
        )
        fused = fused_params(weights[name], schedule, name)

        def step(local, x, name=name, fused=fused, first=first, starts=starts, lasts=lasts, ends=ends):
            moved, velocity = forward(name, fused, x, starts[local], local)
            fresh = jax.random.normal(rng.fold(key, "step", first + local), x.shape, jnp.float32)
            return schedules.step(x, moved, velocity, lasts[local], ends[local], fresh)

        steps = block if name == names[-1] else jnp.asarray(len(blocks), jnp.int32)
        x = jax.lax.fori_loop(jnp.zeros((), jnp.int32), steps, step, x)
        first += len(blocks)
    return jax.lax.stop_gradient(x)


def _interleave(a: jax.Array, b: jax.Array) -> jax.Array:
    """[B, ...] twice -> [2B, ...]: a's row 0, b's row 0, a's row 1, ...; `batches.share` takes it apart."""
    return jnp.stack([a, b], axis=1).reshape(-1, *a.shape[1:])


def _fused(model: DiT) -> DiT:
    return DiT(dataclasses.replace(model.config, head="fused"))
