"""What is measured: each part of a world as a function without arguments, and its floating-point operations.

Weights and inputs are random: what a part costs does not depend on them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import tree
from wp2_jax.bench import flops
from wp2_jax.diffusion.experts import Experts
from wp2_jax.inference import generate, stream
from wp2_jax.inference.spec import capacity_for
from wp2_jax.inference.world import World
from wp2_jax.models import autoencoder, passes, umt5
from wp2_jax.models.experts import expert_models
from wp2_jax.models.layers import call
from wp2_jax.objectives import flow_matching
from wp2_jax.train import optim, state, step


@dataclasses.dataclass(frozen=True)
class Part:
    """`run` starts the work and returns its results; `arrays` are what PyTorch's module is given for the same work."""

    name: str
    run: Callable[[], Any]
    flops: int
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: Any = None


def random_weights(shapes: Any, seed: int) -> Any:
    """Kernels of spread inputs ** -0.5, scales about one, the rest small."""
    random = np.random.default_rng(seed)

    def leaf(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        stacked = name.startswith("blocks/")
        fan = int(np.prod(like.shape[1 if stacked else 0 : -1])) if name.endswith(("kernel", "patch_kernel")) else 100
        noise = random.standard_normal(like.shape, np.float32) * np.float32(fan**-0.5)
        return jnp.asarray(1 + noise if name.endswith(("scale", "gain")) else noise, like.dtype)

    return tree.map_named(leaf, shapes)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def dit(world: World) -> Part:
    """One forward pass of one expert over one chunk, without memory and actions, one caption."""
    model = next(iter(expert_models(world.dit, world.experts.names).values()))
    params = random_weights(jax.eval_shape(lambda: passes.init(model.config, jax.random.key(0))), 0)
    chunk, (h, w) = world.config.chunk, world.latent_size
    noisy, y = _normal(1, 1, chunk, h, w, 16), _normal(2, 1, chunk, h, w, 20)
    contexts = _normal(3, 1, 1, world.config.text_len, world.dit.text_dim)
    places = jnp.arange(chunk, dtype=jnp.int32)[None]

    @jax.jit
    def forward(params, noisy, y, contexts):
        t = jnp.full((1, chunk), 900.0)
        return passes.bidirectional(model, params, noisy, y, t, None, contexts, jnp.zeros_like(places), places)

    arguments = (params, noisy, y, contexts)
    arrays = {"noisy": noisy, "y": y, "contexts": contexts[:, 0], "t": jnp.full((1,), 900.0)}
    return Part("dit", lambda: forward(*arguments), flops.count(forward, *arguments), arrays, params)


def train(world: World, batch: int = 4) -> Part:
    """One update of one expert by flow matching on `batch` chunks that start a world: gradient, AdamW, average."""
    experts, chunk, (h, w) = Experts(None), world.config.chunk, world.latent_size
    models = expert_models(world.dit, experts.names)
    shapes = jax.eval_shape(lambda: passes.init(world.dit, jax.random.key(0)))
    optimisers = {"experts": optim.make(optim.OptimConfig())}
    loss = functools.partial(
        flow_matching.loss,
        models=models,
        experts=experts,
        encode_text=lambda params, frozen, ids: jnp.take(frozen["text"], ids, axis=0),
        frames=chunk,
        memory=False,
        caption_dropout=0.0,
    )
    update = step.make_update(loss, optimisers, ema_decay=0.99)
    params = {"experts": {name: random_weights(shapes, 0) for name in experts.names}}
    # Copies, because what is donated must not be there twice.
    now = [jax.tree.map(jnp.copy, state.create(jax.random.key(0), params, optimisers, ema=params))]
    rows = {
        "latents": _normal(1, batch, chunk, h, w, 16),
        "y": _normal(2, batch, chunk, h, w, 20),
        "lr_latents": _normal(3, batch, chunk // 2, h // 4, w // 4, 16),
        "lr_y": _normal(4, batch, chunk // 2, h // 4, w // 4, 20),
        "actions": jnp.zeros((batch, chunk, 6), jnp.float32),
        "caption_ids": jnp.zeros((batch, 1, world.config.text_len), jnp.int32),
    }
    frozen = {"text": _normal(5, 2, world.dit.text_dim)}
    work = flops.count(update, now[0], rows, frozen)
    compiled = jax.jit(update, donate_argnums=0)

    def run() -> Any:
        now[0], metrics = compiled(now[0], rows, frozen)
        return metrics["loss"]

    return Part("train", run, work)


def text(world: World) -> Part:
    """The text encoder on one caption of full length."""
    params = random_weights(jax.eval_shape(lambda: umt5.init(world.text, jax.random.key(0))), 1)
    length = world.config.text_len
    ids = jnp.asarray(np.random.default_rng(0).integers(2, world.text.vocab_size, (1, length)), jnp.int32)
    arguments = (world, params, ids)
    work = flops.count(functools.partial(generate.encode_text, world), params, ids)
    return Part("text", lambda: generate.encode_text(*arguments), work, {"ids": ids}, params)


def vae(world: World) -> Iterator[Part]:
    """The autoencoder's next chunk of a stream, after a first latent: decoding of latents, encoding of pictures."""
    module, (h, w), chunk = world.autoencoder, world.latent_size, world.config.chunk
    params = random_weights(jax.eval_shape(lambda: autoencoder.init_params(module, jax.random.key(0))), 2)
    height, width = world.config.height, world.config.width
    latents = _normal(4, 1, chunk + 1, h, w, 16)
    video = jnp.clip(_normal(5, 1, 4 * chunk + 1, height, width, 3), -1, 1)
    for name, method, x in (("decode", "decode_chunk_raw", latents), ("encode", "encode_chunk", video)):
        first, x = x[:, :1], x[:, 1:]
        empty = call(module, params, f"init_{name}_state", 1, height, width)
        step = jax.jit(functools.partial(call, module), static_argnums=(1, 4))
        state, _ = step(params, method, empty, first, True)
        work = flops.count(functools.partial(_next_chunk, module, method), params, state, x)
        arrays = {"first": first, "x": x}
        yield Part(f"vae_{name}", functools.partial(step, params, method, state, x, False), work, arrays, params)


def _next_chunk(module: Any, method: str, params: Any, state: Any, x: jax.Array) -> Any:
    return call(module, params, method, state, x, False)


def world_in_play(world: World, chunks: int) -> "Play":
    """A few-step world of `chunks` chunks with random weights, before its first chunk."""
    spec = world.stream("few_step", capacity_for(chunks))
    key = jax.random.key(0)
    experts = {
        name: random_weights(jax.eval_shape(functools.partial(passes.init, model.config), key), 3)
        for name, model in spec.models.items()
    }
    vae_shapes = jax.eval_shape(lambda: autoencoder.init_params(world.autoencoder, key))
    params = {"experts": experts, "autoencoder": random_weights(vae_shapes, 2)}
    return Play(spec, params)


class Play:
    """A world that goes on chunk by chunk; the state is the newest."""

    def __init__(self, spec: Any, params: Any):
        self.spec, self.params = spec, params
        self.rows = jnp.zeros((1, spec.chunk, 6), jnp.float32)
        context = _normal(3, 1, 1, spec.dit.text_len, spec.dit.text_dim)
        self.caption = generate.caption(spec, params, context)
        image = jnp.zeros((1, spec.height, spec.width, 3), jnp.float32)
        self.state = generate.start(spec, params, image, generate.condition_frames(spec), None, jax.random.key(1))
        self.first = True

    def emit(self) -> Any:
        self.state, self.made = generate.emit(
            self.spec, self.params, self.state, self.rows, self.caption, first=self.first
        )
        return self.made.video

    def absorb(self) -> Any:
        self.state, _ = generate.absorb(self.spec, self.params, self.state, self.made, first=self.first)
        self.first = False
        return self.state.index

    def flops(self) -> dict[str, int]:
        """Of a chunk after the first, by part."""
        emit = functools.partial(stream.emit, self.spec, first=False)
        absorb = functools.partial(stream.absorb, self.spec, first=False)
        state, made = jax.eval_shape(emit, self.params, self.state, self.rows, self.caption)
        return {
            "emit": flops.count(emit, self.params, self.state, self.rows, self.caption),
            "absorb": flops.count(absorb, self.params, state, made),
        }
