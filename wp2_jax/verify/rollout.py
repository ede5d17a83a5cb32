"""Checks golden items of kind k: whole rollouts through the streaming step that generation uses."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.controls.actions import parse_actions
from wp2_jax.controls.images import low_resolution, resize_bicubic
from wp2_jax.diffusion.experts import Experts
from wp2_jax.inference import condition, stream
from wp2_jax.inference.spec import StreamSpec, capacity_for
from wp2_jax.verify import golden
from wp2_jax.verify.autoencoders import tiny_model, wan_model
from wp2_jax.verify.core import Result, compare, compare_rows, equal, failed
from wp2_jax.verify.experts import (
    channels_first,
    channels_last,
    load_expert,
    padded_context,
    weights_named,
    with_fused_head,
)

TOLERANCE = 3e-5
# rgb_f16_sub is rounded to float16.
TOLERANCE_F16 = TOLERANCE + 2.5e-4
MODES = {"pdd": "few_step", "ar": "ar", "bi": "bi"}

_emit = jax.jit(stream.emit, static_argnums=0, static_argnames=("first", "trace"))
_absorb = jax.jit(stream.absorb, static_argnums=0, static_argnames=("first",))
_start = jax.jit(stream.start, static_argnums=(0, 3))


def _guidance(scale) -> tuple[float, float]:
    """(high, low) from a number or from the published (low, high)."""
    return (scale, scale) if isinstance(scale, int | float) else (scale[1], scale[0])


def build(folder: Path, sidecar: dict) -> tuple[StreamSpec, dict]:
    """The stream that a sidecar describes, and its parameters."""
    names = weights_named(sidecar)
    settings, mode = sidecar["params"], MODES[sidecar["mode"]]
    by_expert = {expert: next(name for name in names if name.endswith(expert)) for expert in ("high", "low")}
    experts, config = {}, None
    for expert, name in by_expert.items():
        config, experts[expert] = load_expert(folder, name)
    assert config is not None
    if mode == "few_step":
        _, heads = golden.load(folder, next(name for name in names if "heads" in name))
        experts = {name: with_fused_head(tree, heads, name) for name, tree in experts.items()}
    vae = next((name for name in names if "vae" in name), None)
    autoencoder, vae_params = wan_model(folder, vae) if vae else tiny_model(sidecar)
    chunk, total = settings["chunk_length"], settings["total_latent_frames"]
    spec = StreamSpec(
        dit=config,
        experts=Experts(sidecar["boundary_timestep"] / 1000),
        autoencoder=autoencoder,
        mode=mode,
        height=sidecar["height"],
        width=sidecar["width"],
        capacity=capacity_for(total // chunk),
        chunk=chunk,
        sink=settings["sink_size"],
        temporal=settings["temporal_size"],
        solver=settings.get("solver") or settings.get("sample_solver") or sidecar.get("solver") or "unipc",
        steps=settings["sampling_steps"],
        shift=settings["shift"],
        guidance=_guidance(settings["guide_scale"]),
        pdd_shift=settings["shift"],
    )
    return spec, {"experts": experts, "autoencoder": vae_params}


def check_rollout(folder: Path, name: str) -> list[Result]:
    """Runs one rollout and compares pictures in, latents, low-resolution latents, pictures and the inner states."""
    sidecar, tensors = golden.load(folder, name)
    spec, params = build(folder, sidecar)
    settings = sidecar["params"]
    total, chunk = settings["total_latent_frames"], spec.chunk
    inputs = golden.below(tensors, "in.")

    picture = np.moveaxis(inputs["image_float"], 0, -1) * 2 - 1
    image = jnp.asarray(resize_bicubic(picture, spec.height, spec.width))
    text_len = spec.dit.text_len
    null = padded_context(inputs["context_null"], text_len)
    state = _start(spec, params, image[None], total, null, jax.random.key(0))
    actions = jnp.asarray(inputs["hr_action"])[None]
    noise = channels_last(inputs["noise"])[None]
    produced: dict[str, np.ndarray] = {
        "img_pixel": np.moveaxis(np.asarray(image), -1, 0),
        "img_pixel_lr": np.moveaxis(np.asarray(low_resolution(image)), -1, 0),
        "hr_y": channels_first(state.y[0]),
        "lr_y": channels_first(state.lr_y[0]),
    }
    chunks, lr_latents = [], []
    for index, prompt in enumerate(sidecar["chunk_prompts"]):
        part = slice(index * chunk, (index + 1) * chunk)
        renoise = channels_last(inputs["renoise"][index])[:, None] if "renoise" in inputs else None
        state, made = _emit(
            spec,
            params,
            state,
            actions[:, part],
            padded_context(inputs[f"context_{prompt}"], text_len),
            first=index == 0,
            noise=stream.Noise(noise[:, part], renoise),
            trace=True,
        )
        chunks.append(made)
        if index < len(sidecar["chunk_prompts"]) - 1:
            produced[f"lr_pix_chunk{index}"] = channels_first(condition.chunk_low_res(made.video)[0])
            state, lr = _absorb(spec, params, state, made, first=index == 0)
            lr_latents.append(lr)
    video = channels_first(jnp.concatenate([made.video for made in chunks], axis=1)[0])
    produced |= {
        "latents": channels_first(jnp.concatenate([made.latents for made in chunks], axis=1)[0]),
        "lr_latents": channels_first(jnp.concatenate(lr_latents, axis=1)[0]),
        "rgb_f16_sub": video[:, :, ::2, ::2],
        "rgb_first2": video[:, :2],
        "rgb_last2": video[:, -2:],
    }
    inner = {"x0": "x0"} if spec.mode == "few_step" else {"state": "state", "velocity_step0": "guided_velocity_step0"}
    for ours, theirs in inner.items():
        # The batch axis is the last but four; it has one entry.
        produced[theirs] = channels_first(np.stack([np.asarray(made.trace[ours]).squeeze(-5) for made in chunks]))
    results = []
    for key, expected in golden.below(tensors, "out.").items():
        item = f"{name}/{key}"
        if key == "timesteps":
            results.append(compare(item, spec.schedule.timesteps, expected, 0.0))
        elif key == "sigmas":
            results.append(compare(item, spec.schedule.sigmas, expected, 1e-6))
        elif key in produced:
            results.append(compare(item, produced[key], expected, TOLERANCE_F16 if key == "rgb_f16_sub" else TOLERANCE))
        else:
            results.append(failed(item, "unknown tensor"))
    if "image_uint8" in inputs:
        results.append(compare(f"{name}/image_float", inputs["image_uint8"] / 255, inputs["image_float"], 1e-6))
    if "actions" in sidecar:
        rows = parse_actions(sidecar["actions"], perspective=sidecar["perspective"])
        results.append(compare_rows(f"{name}/hr_action", rows, inputs["hr_action"], 1e-6))
    if "chunk_frames" in sidecar:
        counts = [made.video.shape[1] for made in chunks]
        results.append(equal(f"{name}/chunk_frames", counts, sidecar["chunk_frames"]))
    return results
