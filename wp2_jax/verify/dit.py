"""Checks of the backbone: golden kinds a (embeddings), b (one block), c (bidirectional pass), d (memory), e (KV cache).

Everything that differs between folders is read from the sidecars.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.models import cache as kv
from wp2_jax.models import layers, passes, rope
from wp2_jax.models.dit import Block, DiT, DiTConfig
from wp2_jax.models.frames import Stream
from wp2_jax.verify import golden
from wp2_jax.verify.core import Result, compare, compare_bfloat16, compare_rows, equal
from wp2_jax.verify.experts import Inputs, apply, channels_first, dit_config, expert_of, timesteps

TOLERANCE_TABLE = 1e-6
TOLERANCE = 1e-5

_bidirectional = jax.jit(passes.bidirectional, static_argnums=0, static_argnames=("token_t",))


# --- a ---------------------------------------------------------------------------------------------------------------


def check_embeddings(folder: Path, name: str) -> Iterator[Result]:
    """Kind a: sinusoid, time embedding and projection, RoPE tables, QK norm with RoPE in float32 and bfloat16."""
    sidecar, tensors = golden.load(folder, name)
    t = jnp.asarray(tensors["in.t"], jnp.float32)
    for key in tensors:
        if match := re.fullmatch(r"out\.sinusoid_(\d+)", key):
            table = rope.timestep_sinusoid(t, int(match[1]))
            yield compare(f"{name}/sinusoid_{match[1]}", table, tensors[key], TOLERANCE_TABLE)

    model, params = expert_of(folder, sidecar)
    e, e0 = apply(model, params, t[None], method="encode_time")
    projection = e0[0].reshape(len(t), -1)
    yield compare(f"{name}/time_embedding", e[0], tensors["out.time_embedding"], TOLERANCE)
    yield compare(f"{name}/time_projection", projection, tensors["out.time_projection"], TOLERANCE)

    head_dim, text = sidecar["head_dim"], sidecar["what"]
    tables = {f"freqs_tiny_{i}": (grid, shift, head_dim) for i, (grid, shift) in enumerate(sidecar["grids"])}
    for key in tensors:
        if match := re.fullmatch(r"out\.freqs_hd(\d+)\.re", key):
            tables[f"freqs_hd{match[1]}"] = (*_grid_in_text(text, f"freqs_hd{match[1]}"), int(match[1]))
    for key, (grid, shift, size) in tables.items():
        cos, sin = _tables(grid, shift, size)
        yield compare(f"{name}/{key}.re", cos[0], tensors[f"out.{key}.re"], TOLERANCE_TABLE)
        yield compare(f"{name}/{key}.im", sin[0], tensors[f"out.{key}.im"], TOLERANCE_TABLE)
    for key, size in (("head_dim_split_tiny", head_dim), ("head_dim_split_full", None)):
        split = sidecar.get(key)
        if split is not None:
            yield equal(f"{name}/{key}", [2 * n for n in rope.axis_pairs(size or sum(split))], split)

    used = re.search(r"q/k outputs use grids\[(\d+)\]", text)
    if used is None:
        raise ValueError("the sidecar's text does not say 'q/k outputs use grids[i]'")
    grid, shift = sidecar["grids"][int(used[1])]
    cos, sin = _tables(grid, shift, head_dim)
    for side in ("q", "k"):
        for suffix, dtype in (("", jnp.float32), ("_bf16in", jnp.bfloat16)):
            x = jnp.asarray(tensors[f"in.{side}"], dtype)
            scale = jnp.asarray(tensors[f"in.norm_{side}_weight"], dtype)
            norm = layers.RMSNorm(sidecar["eps"], scale.dtype)
            x = jnp.asarray(norm.apply({"params": {"scale": scale}}, x))
            x = x.reshape(*x.shape[:2], sidecar["num_heads"], head_dim)
            turns = (jnp.broadcast_to(a, (x.shape[0], *a.shape[1:])) for a in (cos, sin))
            actual, expected = rope.apply_rope(x, *turns), tensors[f"out.{side}{suffix}"]
            item = f"{name}/{side}{suffix}"
            if dtype == jnp.bfloat16:
                # The published code keeps the rotated float32; the model goes on in bfloat16.
                yield compare_bfloat16(item, actual, expected.astype(jnp.bfloat16))
            else:
                yield compare(item, actual, expected, TOLERANCE)


def _tables(grid: list[int], shift: int, head_dim: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    frames, rows, cols = grid
    positions = shift + jnp.arange(frames, dtype=jnp.int32)[None]
    return rope.rope_tables(positions, rows, cols, head_dim=head_dim, table_frames=shift + frames)


def _grid_in_text(text: str, key: str) -> tuple[list[int], int]:
    """Grid and temporal shift of "KEY: ... grid (2,3,4) at temporal shift 5" in a sidecar's text."""
    match = re.search(rf"{key}:[^.]*?grid \((\d+), *(\d+), *(\d+)\) at temporal shift (\d+)", text)
    if match is None:
        raise ValueError(f"the sidecar's text gives no '{key}: ... grid (f,h,w) at temporal shift n'")
    *grid, shift = (int(number) for number in match.groups())
    return grid, shift


# --- b ---------------------------------------------------------------------------------------------------------------


def check_block(folder: Path, name: str) -> Iterator[Result]:
    """Kind b: action rows, and one block with and without actions, with its two attention branches."""
    sidecar, tensors = golden.load(folder, name)
    model, params = expert_of(folder, sidecar)
    rows = apply(model, params, jnp.asarray(tensors["in.action_rows"])[None], method="encode_actions")
    yield compare_rows(f"{name}/vec_action_rows", rows[0], tensors["out.vec_action_rows"], TOLERANCE)

    x, e = jnp.asarray(tensors["in.x"]), jnp.asarray(tensors["in.e"])
    batch, length = x.shape[:2]
    index = jnp.arange(length)
    stream = Stream(
        e0=e,
        action=jnp.asarray(tensors["in.vec_action"]),
        cos=jnp.broadcast_to(jnp.asarray(tensors["in.freqs.re"]), (batch, *tensors["in.freqs.re"].shape)),
        sin=jnp.broadcast_to(jnp.asarray(tensors["in.freqs.im"]), (batch, *tensors["in.freqs.im"].shape)),
        spans=(),
        context=jnp.asarray(tensors["in.context_projected"])[:, None],
        captions=None,
        chunks=None,
        frame_index=index,
        time_index=index,
        tokens=length,
    )
    block = jax.tree.map(lambda a: a[sidecar["block_index"]], params["blocks"])

    @jax.jit
    def run(stream: Stream) -> Any:
        return Block(model.config).apply({"params": block}, x, None, None, stream, capture_intermediates=True)

    (with_action, _), state = run(stream)
    (without, _), _ = run(stream.replace(action=None))
    inner = state["intermediates"]
    produced = {
        "block_with_action": with_action,
        "self_attn_branch": inner["self_attention"]["__call__"][0][0],
        "cross_attn_branch": inner["cross_attention"]["__call__"][0],
        "block_without_action": without,
        "layernorm_mod_only": layers.layer_norm(x, model.config.eps) * (1 + e[:, :, 1]) + e[:, :, 0],
    }
    for key, actual in produced.items():
        yield compare(f"{name}/{key}", actual, tensors[f"out.{key}"], TOLERANCE)


# --- c, d ------------------------------------------------------------------------------------------------------------


def _pass(model: DiT, inputs: Inputs, case: Mapping, tensors, start: int, batch: int) -> tuple[tuple, bool]:
    """Arguments of `passes.bidirectional` for a case {s, L, t, context, action?} that stands at RoPE frame `start`, and
    whether t is one a token."""
    s, frames = case["s"], case["L"]
    t, token_t = timesteps(case["t"], tensors, batch, frames)
    target = inputs.history(batch, s, s + frames, model.config.memory.time_factor)
    without_action = "action" in case and case["action"] is None
    positions = jnp.broadcast_to(start + jnp.arange(frames, dtype=jnp.int32), (batch, frames))
    arguments = (
        inputs.noisy(batch, s, s + frames),
        target.y,
        t,
        None if without_action else target.actions,
        inputs.context(case["context"], model.config.text_len, batch),
        target.captions,
        positions,
    )
    return arguments, token_t


def check_bidirectional(folder: Path, name: str) -> Iterator[Result]:
    """Kind c: the bidirectional pass without memory."""
    sidecar, tensors = golden.load(folder, name)
    model, params = expert_of(folder, sidecar)
    if "model_config" in sidecar:
        yield equal(f"{name}/model_config", dit_config(sidecar), model.config)
    inputs = Inputs.load(folder, sidecar["inputs"])
    for case in sidecar["cases"]:
        key = f"case{case['case']}"
        arguments, token_t = _pass(model, inputs, case, tensors, 0, case.get("batch", 1))
        velocity = _bidirectional(model, params, *arguments, token_t=token_t)
        yield compare(f"{name}/{key}", channels_first(velocity), tensors[f"out.{key}"], TOLERANCE)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("sink", "temporal", "token_t"))
def _memory(
    model: DiT, params, history: passes.History, length, arguments, *, sink: int, temporal: int, token_t: bool
) -> dict[str, jnp.ndarray]:
    """All that d lists: the memory [sink | cmp | tmp] of whole histories, and the pass that sees it. One program, so
    that the compressor is compiled once."""
    past = passes.memory(model, params, history, length, sink, temporal)
    groups = [group for group in past if group is not None]
    tokens, e, stream = apply(model, params, groups, arguments[4], method="prepare")
    batch, _, h, w, _ = history.latents.shape
    state = passes.init_state(model.config.memory, batch, h, w)
    compressed, _ = apply(model, params, history.latents, history.y, state, method="compress")
    velocity = passes.bidirectional(
        model,
        params,
        *arguments,
        history=history,
        length=length,
        sink=sink,
        temporal=temporal,
        token_t=token_t,
    )
    return {
        "tokens": tokens,
        "freqs_flat.re": stream.cos[0],
        "freqs_flat.im": stream.sin[0],
        "vec_action": jnp.take(stream.action, stream.frame_index, axis=1),
        "e0_one": stream.e0[:1, :1],
        "e_one": e[:1, :1],
        "memory_compress": compressed,
        "bi_denoise": jnp.moveaxis(velocity, -1, 1),
    }


def check_memory(folder: Path, name: str) -> Iterator[Result]:
    """Kind d: memory tokens and what goes with them for every history, sink and tmp size, and a pass that sees them."""
    sidecar, tensors = golden.load(folder, name)
    model, params = expert_of(folder, sidecar)
    inputs = Inputs.load(folder, sidecar["inputs"])
    factor = model.config.memory.time_factor
    for case in sidecar["cases"]:
        key, batch, length = f"case{case['case']}", case.get("batch", 1), case["history"]
        sizes = {"sink": case["sink_size"], "temporal": case["temporal_size"]}
        history = inputs.history(batch, 0, length, factor)
        lengths = jnp.full((batch,), length, jnp.int32)
        arguments, token_t = _pass(model, inputs, case["bi_denoise"], tensors, length, batch)
        produced = _memory(model, params, history, lengths, arguments, token_t=token_t, **sizes)
        for part, actual in produced.items():
            item, expected = f"{name}/{key}.{part}", tensors[f"out.{key}.{part}"]
            if part == "vec_action":
                yield compare_rows(item, actual, expected, TOLERANCE)
            else:
                yield compare(item, actual, expected, TOLERANCE_TABLE if "freqs" in part else TOLERANCE)
        grid = math.prod(n // model.config.patch for n in history.latents.shape[2:4])
        coarse = math.prod(passes.memory_grid(model, *history.latents.shape[2:4]))
        counts = {
            "rope_shift_idx": length,
            "sink_token_count": sizes["sink"] * grid,
            "cmp_token_count": length // factor * coarse,
            "tmp_token_count": sizes["temporal"] * grid,
        }
        yield equal(f"{name}/{key}.counts", counts, {part: case.get(part, count) for part, count in counts.items()})


# --- e ---------------------------------------------------------------------------------------------------------------


def memory_layout(config: DiTConfig, latents: jnp.ndarray, histories: list[int], sink: int, temporal: int):
    """A cache layout that holds the longest of `histories` and can be filled up to each of them."""
    h, w = latents.shape[2:4]
    chunk = math.gcd(*histories)
    rows, cols = passes.memory_grid(DiT(config), h, w)
    return kv.CacheLayout(
        sink=sink,
        temporal=temporal,
        chunk=chunk,
        chunks=max(histories) // chunk,
        rows=h // config.patch,
        cols=w // config.patch,
        memory_rows=rows,
        memory_cols=cols,
        time_factor=config.memory.time_factor,
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames=("first",))
def prefill(model: DiT, params, cache: kv.KVCache, state, new: passes.History, start, contexts, *, first: bool):
    """Takes the latent frames `new`, which begin at frame `start`, into a cache: (cache, compressor state)."""
    layout = cache.layout
    batch, frames = new.captions.shape
    compressed, state = passes.compress_chunk(model, params, state, new.latents, new.y, new.lr_latents, new.lr_y)
    grid = (layout.memory_rows, layout.memory_cols)
    compressed = passes.memory_frames(compressed, new.actions, new.captions, start // layout.time_factor, grid)

    def still(offset: int, count: int):
        part = slice(offset, offset + count)
        positions = jnp.broadcast_to(start + offset + jnp.arange(count, dtype=jnp.int32), (batch, count))
        t = jnp.zeros((batch, count), jnp.float32)
        return passes.full_frames(
            model,
            params,
            new.latents[:, part],
            new.y[:, part],
            t,
            new.actions[:, part],
            positions,
            new.captions[:, part],
        )

    sink = still(0, layout.sink) if first and layout.sink else None
    temporal = still(frames - layout.temporal, layout.temporal) if layout.temporal else None
    return passes.prefill(model, params, cache, sink, compressed, temporal, contexts), state


@functools.partial(jax.jit, static_argnums=0)
def denoise(model: DiT, params, cache: kv.KVCache, x, target: passes.History, t, start, contexts, block=None):
    """Head outputs for the noisy frames x, of which `target` holds y and actions, from RoPE frame `start` on."""
    positions = jnp.broadcast_to(start + jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    frames = passes.full_frames(model, params, x, target.y, t, target.actions, positions, target.captions)
    return passes.denoise(model, params, cache, frames, contexts, block)


def golden_cache(cache: kv.KVCache, layer: int, side: str) -> np.ndarray:
    """Keys ("k") or values ("v") of a layer in the published order [sink | cmp | tmp], without unused capacity."""
    layout, array = cache.layout, np.asarray(getattr(cache, side)[layer])
    tmp, cmp = layout.temporal_tokens, layout.compressed_start
    end = cmp + int(cache.chunks) * layout.chunk_tokens
    return np.concatenate([array[:, tmp:end], array[:, :tmp]], axis=1)


def check_cache(folder: Path, name: str) -> Iterator[Result]:
    """Kind e: the cache after every prefill, the pass of every chunk, and one prefill of a whole history."""
    sidecar, tensors = golden.load(folder, name)
    model, params = expert_of(folder, sidecar)
    inputs = Inputs.load(folder, sidecar["inputs"])
    config, factor = model.config, model.config.memory.time_factor
    latents = inputs.clip.latents
    for sequence in sidecar["sequences"]:
        batch, prefix = sequence.get("batch", 1), sequence["sequence"]
        prefills = [step["prefill"] for step in sequence["steps"] if "prefill" in step]
        oneshot = sequence.get("oneshot")
        histories = [p["history"] for p in (*prefills, *([oneshot] if oneshot else []))]
        layout = memory_layout(config, latents, histories, sequence["sink_size"], sequence["temporal_size"])
        empty = passes.empty_cache(model, layout, batch)
        h, w = latents.shape[2:4]
        fresh = passes.init_state(config.memory, batch, h, w)

        def caches(cache: kv.KVCache, key: str, prefix: str = prefix) -> Iterator[Result]:
            for layer in range(config.num_layers):
                for side in ("k", "v"):
                    item = f"{prefix}.{key}.layer{layer}.{side}"
                    expected = tensors[f"out.{item}"]
                    yield compare(f"{name}/{item}", golden_cache(cache, layer, side), expected, TOLERANCE)

        cache, state, length = empty, fresh, 0
        for step in sequence["steps"]:
            run = step["denoise"]
            key = f"{prefix}.denoise_chunk{step['chunk']}"
            expected, s = tensors[f"out.{key}"], run["s"]
            frames = expected.shape[2]
            context = inputs.context(run["context"], config.text_len, batch)
            target = inputs.history(batch, s, s + frames, factor)
            t, token_t = timesteps(run["t"], tensors, batch, frames)
            if token_t:  # all tokens of a frame have the frame's t in this path
                t = t.reshape(batch, frames, -1)[:, :, 0]
            start = jnp.int32(max(run.get("ar_chunk_start", s), length))
            velocity = denoise(model, params, cache, inputs.noisy(batch, s, s + frames), target, t, start, context)
            yield compare(f"{name}/{key}", channels_first(velocity), expected, TOLERANCE)
            if "prefill" not in step:
                continue
            fill = step["prefill"]
            context = inputs.context(fill["context"], config.text_len, batch)
            new = inputs.history(batch, length, fill["history"], factor)
            cache, state = prefill(model, params, cache, state, new, jnp.int32(length), context, first=length == 0)
            length = fill["history"]
            yield from caches(cache, f"prefill_after_chunk{step['chunk']}")
            counts = {"sink": layout.sink_tokens, "cmp": int(cache.chunks) * layout.chunk_tokens}
            counts["tmp"] = layout.temporal_tokens
            counts["cache_tokens"] = sum(counts.values())
            stated = {part: fill.get(part, count) for part, count in counts.items()}
            yield equal(f"{name}/{prefix}.prefill_after_chunk{step['chunk']}.counts", counts, stated)
        if oneshot:
            context = inputs.context(oneshot["context"], config.text_len, batch)
            new = inputs.history(batch, 0, oneshot["history"], factor)
            cache, _ = prefill(model, params, empty, fresh, new, jnp.int32(0), context, first=True)
            yield from caches(cache, f"oneshot{oneshot['history']}")
