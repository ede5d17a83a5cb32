"""The workdir of a curriculum with random weights, saved as the training loop saves them, as small as it gets."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image

from wp2_jax import tree
from wp2_jax.checkpoints.orbax_io import Checkpoints
from wp2_jax.controls.captions import Caption
from wp2_jax.controls.tokenizer import Tokenizer
from wp2_jax.inference.world import World, from_config
from wp2_jax.models import autoencoder, passes, umt5
from wp2_jax.models.experts import expert_models
from wp2_jax.train import state

SIZE = 64
SCENE = Caption(scene="a room with red walls", character="a soldier")
FOG = SCENE.with_event("thick white fog fills the rooms")
CAPTIONS = [SCENE.text, FOG.text, SCENE.with_event("the lights go out").text, "nothing"]
YAW, PITCH = 11.25, 2.8125


def config(stage: str, **changes) -> dict:
    """The resolved config of a stage, as plain as JSON has it; `changes` replace keys of its sections by name."""
    memory = dict(widths=[8, 8, 8, 8], spatial_down=[1, 1, 1], temporal_down=[1, 0, 0])
    values = {
        "stage": stage,
        "world": dict(height=SIZE, width=SIZE, steps=4, guidance=[1.5, 1.5], text_len=112, negative_prompt="nothing"),
        "model": dict(dim=32, num_heads=2, num_layers=2, ffn_dim=48, freq_dim=16, text_dim=16, text_len=112),
        "autoencoder": dict(kind="tiny", encoder_width=8, decoder_widths=[16, 8, 8, 8]),
        "text": dict(vocab_size=340, dim=16, attention_dim=16, ffn_dim=24, num_heads=2, num_layers=1, num_buckets=8),
        "data": dict(yaw_degrees=YAW, pitch_degrees=PITCH),
    }
    values["world"].update(intervals=[6, 8], blocks=[2, 2])
    values["model"].update(rope_frames=80, memory=memory | dict(attention_blocks=1, attention_heads=2))
    for name, section in changes.items():
        values[name].update(section)
    return values


def random_like(shapes, seed: int, gain: float = 1.2):
    """Random weights, none zero: kernels of variance gain^2 / inputs, scales about 1. Nothing compiles."""
    random = np.random.default_rng(seed)

    def leaf(name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        noise = random.standard_normal(like.shape).astype(np.float32)
        if name.endswith(("scale", "gain")):
            return 1 + 0.1 * noise
        if name.endswith("kernel"):
            inputs = like.shape[1:-1] if name.startswith("blocks/") else like.shape[:-1]
            return np.float32(gain / np.sqrt(np.prod(inputs))) * noise
        return 0.1 * noise

    return tree.map_named(leaf, shapes)


@functools.cache
def experts(seed: int, form: str = "velocity") -> dict:
    """Random experts with a velocity head, a bank of heads or fused heads."""
    world = the_world()
    names, table = world.experts.names, world.stream("few_step", 1).pdd_schedule
    models = expert_models(
        world.dit,
        names,
        head=form,
        intervals={name: table.intervals(name) for name in names},
        blocks={name: len(table.expert_blocks(name)) for name in names},
    )
    key = jax.random.key(0)
    trees = {}
    for number, (name, model) in enumerate(models.items()):
        shapes = jax.eval_shape(lambda model=model: passes.init(model.config, key))
        trees[name] = random_like(shapes, seed + number)
        if form == "bank":
            # The heads of a bank start alike and differ little.
            head = trees[name]["head"]
            kernel = head["kernel"][:1] * 3 + 0.05 * head["kernel"]
            trees[name] = {**trees[name], "head": {**head, "kernel": kernel}}
    return trees


@functools.cache
def the_world() -> World:
    return from_config(config("base"))


def save(workdir: Path, stage: str, params: dict, averaged: tuple[str, ...], values: dict | None = None) -> None:
    """A checkpoint of step 7 of a stage; the average is 1.25 times the weights, so that the two can be told apart."""
    optimisers = {role: optax.sgd(0.1) for role in params}
    whole = state.create(jax.random.key(0), params, optimisers, ema=averaged)
    whole = whole.replace(ema=jax.tree.map(lambda x: 1.25 * x, whole.ema), step=jnp.asarray(7, jnp.int32))
    with Checkpoints(workdir / stage / "checkpoints") as checkpoints:
        values = values or config(stage)
        checkpoints.save(7, whole, {"config": values, "stage": stage, "loader": b"12"})
        checkpoints.wait()


def write(workdir: Path, stages: tuple[str, ...] = ("base", "teacher_forcing", "pdd", "stable_forcing")) -> Path:
    """Autoencoder, the stages asked for, and a tokenizer."""
    world = the_world()
    key = jax.random.key(1)
    vae = random_like(jax.eval_shape(lambda: autoencoder.init_params(world.autoencoder, key)), 2, gain=1.0)
    # Mid-grey, so that pictures are not clamped and show what changes.
    vae["decoder"]["conv_out"]["bias"] = np.full(3, 0.5, np.float32)
    save(workdir, "autoencoder", {"autoencoder": vae}, ("autoencoder",))
    text = random_like(jax.eval_shape(lambda: umt5.init(world.text, key)), 3)
    roles = {
        "base": lambda: {"experts": experts(10), "text": text},
        "events": lambda: {"experts": experts(15), "text": jax.tree.map(lambda x: 2 * x, text)},
        "teacher_forcing": lambda: {"experts": experts(20)},
        "pdd": lambda: {"experts": experts(30, "bank")},
        "stable_forcing": lambda: {"student": experts(40, "fused"), "fake": experts(50)},
    }
    for stage in stages:
        params = roles[stage]()
        values = config(stage) | ({"stages": ("autoencoder", *stages)} if "events" in stages else {})
        save(workdir, stage, params, tuple(role for role in params if role != "fake"), values)
    Tokenizer.train(CAPTIONS, workdir / "tokenizer.model", vocab_size=340)
    return workdir


def write_inputs(folder: Path, *lengths: int, action: str | None = None) -> Path:
    """An input file with a world of each length (latent frames): a caption that changes to fog for its second half."""
    folder.mkdir(parents=True, exist_ok=True)
    x = np.linspace(0, 255, SIZE, dtype=np.uint8)
    picture = np.stack(np.broadcast_arrays(x[:, None], x[None, :], np.uint8(90)), axis=-1)
    Image.fromarray(picture).save(folder / "start.png")
    items = []
    for number, length in enumerate(lengths):
        chunks = length // 4
        first = 4 * ((chunks + 1) // 2)
        schedule = f"prompt-{first}" + (f",prompt2-{length - first}" if length > first else "")
        items.append(
            {
                "image_path": "start.png",
                "perspective": "tps",
                "action": action or f"w-3,w+right-{length - 3}",
                "prompt_event": schedule,
                "prompt": SCENE.text,
                "prompt2": FOG.text,
                "output_name": f"world{number}",
            }
        )
    (folder / "input.json").write_text(json.dumps(items))
    return folder / "input.json"
