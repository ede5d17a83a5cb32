"""Check of golden kind f: the few-step student's passes, chunk by chunk (its schedule is checked in `samplers.py`)."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.diffusion import pdd
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT
from wp2_jax.verify import golden
from wp2_jax.verify.core import Result, compare
from wp2_jax.verify.dit import TOLERANCE, denoise, memory_layout, prefill
from wp2_jax.verify.experts import Inputs, channels_first, channels_last, load_expert, weights_named, with_fused_head
from wp2_jax.verify.samplers import schedule_of

# "c=1: both experts have memory compressed from history 4 (sink 1, temporal 1) prefilled with context0, then denoise
# uses context1": these numbers stand only in the sidecar's text. The first chunk's pass uses context1 as well.
_MEMORY = re.compile(
    r"c=(?P<chunk>\d+): [^.]*?history (?P<history>\d+) \(sink (?P<sink>\d+), temporal (?P<temporal>\d+)\) prefilled "
    r"with context(?P<before>\d+), then denoise uses context(?P<context>\d+)(?:, ar_chunk_start (?P<start>\d+))?"
)


def _experts(folder: Path, sidecar: Mapping, schedule: pdd.PddSchedule) -> dict[str, tuple[DiT, dict]]:
    """(model, params) of each expert in few-step form. The text names the high expert's weights and the heads."""
    named = weights_named({"weights": f"{sidecar.get('weights') or ''} {sidecar['what']}"})
    _, heads = golden.load(folder, next(name for name in named if "heads" in name))
    base = next(name for name in named if "dit" in name)
    experts = {}
    for name in dict.fromkeys(block.expert for block in schedule.blocks):
        config, params = load_expert(folder, re.sub("high|low", name, base))
        config = dataclasses.replace(
            config, head="fused", intervals=schedule.intervals(name), blocks=len(schedule.expert_blocks(name))
        )
        experts[name] = DiT(config), jax.tree.map(jnp.asarray, with_fused_head(params, heads, name))
    return experts


def _memories(text: str) -> dict[int, dict[str, int]]:
    """Chunk -> the numbers of its memory in a sidecar's text; at least one chunk must have some."""
    found = [
        {key: int(value) for key, value in match.groupdict().items() if value is not None}
        for match in _MEMORY.finditer(text)
    ]
    if not found:
        raise ValueError("the sidecar's text does not say which memory a chunk has ('c=1: ... history n (sink ...')")
    return {memory["chunk"]: memory for memory in found}


def check_few_step(folder: Path, name: str) -> Iterator[Result]:
    """Displacement and endpoint of every block on the golden chain, and the clean result of our own chain."""
    sidecar, tensors = golden.load(folder, name)
    schedule = schedule_of(sidecar)
    experts = _experts(folder, sidecar, schedule)
    inputs = Inputs.load(folder, sidecar["inputs"])
    memories = _memories(sidecar["what"])
    pattern = memories[min(memories)]
    chunks = sorted(int(match[1]) for key in tensors if (match := re.fullmatch(r"in\.c(\d+)\.latent", key)))
    for chunk in chunks:
        latent = channels_last(tensors[f"in.c{chunk}.latent"])[None]
        frames = latent.shape[1]
        memory = memories.get(chunk, {**pattern, "history": chunk * frames, "start": chunk * frames})
        start, length = memory.get("start", chunk * frames), memory["history"]
        caches = {}
        for expert, (model, params) in experts.items():
            factor = model.config.memory.time_factor
            layout = memory_layout(model.config, latent, [length or frames], memory["sink"], memory["temporal"])
            caches[expert] = passes.empty_cache(model, layout, 1)
            if length:
                state = passes.init_state(model.config.memory, 1, latent.shape[2], latent.shape[3])
                context = inputs.context(memory["before"], model.config.text_len, 1)
                past = inputs.history(1, 0, length, factor)
                caches[expert], _ = prefill(
                    model, params, caches[expert], state, past, jnp.int32(0), context, first=True
                )
        # y and actions of frames 4c..4c+3.
        target = inputs.history(1, chunk * frames, (chunk + 1) * frames, factor)

        def outputs(x, block: pdd.Block, start=start, target=target, caches=caches, context=memory["context"]):
            model, params = experts[block.expert]
            t = jnp.full(x.shape[:2], schedule.timesteps[block.start], jnp.float32)
            context = inputs.context(context, model.config.text_len, 1)
            index = jnp.int32(block.local_index)
            return denoise(model, params, caches[block.expert], x, target, t, jnp.int32(start), context, index)

        x = own = latent
        for index, block in enumerate(schedule.blocks):
            last, end = float(schedule.lasts[index]), float(schedule.ends[index])
            key = f"c{chunk}.b{index}"
            moved, velocity = (
                channels_last(tensors[f"out.{key}.{part}"])[None] for part in ("displacement", "endpoint")
            )
            displacement, endpoint = outputs(x, block)
            for part, actual, right in (("displacement", displacement, moved), ("endpoint", endpoint, velocity)):
                yield compare(f"{name}/{key}.{part}", channels_first(actual), channels_first(right), TOLERANCE)
            # The last block's x0 is the result: there is no noise to mix in.
            noise = tensors.get(f"in.{key}.noise", np.zeros(tensors[f"in.c{chunk}.latent"].shape, np.float32))
            noise = channels_last(noise)[None]
            x = pdd.step(x, moved, velocity, last, end, noise)
            displacement, endpoint = outputs(own, block)
            own = pdd.step(own, displacement, endpoint, last, end, noise)
        yield compare(f"{name}/c{chunk}.x0_final", channels_first(own[0]), tensors[f"out.c{chunk}.x0_final"], TOLERANCE)
