"""The programs of a training stage on a target: those that `wp2 train` runs, from the stage's own setup, with shapes in
place of weights and batches."""

import collections
import dataclasses
import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wp2_jax import sharding
from wp2_jax.array_types import Params
from wp2_jax.controls.images import LOW_RES_SCALE
from wp2_jax.models import autoencoder, passes, umt5
from wp2_jax.objectives import dmd, rollout
from wp2_jax.objectives.stable_forcing import FAKE, STUDENT, StableForcing
from wp2_jax.plan import fit
from wp2_jax.stages import run
from wp2_jax.stages.context import Context
from wp2_jax.train import config as configs
from wp2_jax.train import step


@dataclasses.dataclass(frozen=True, eq=False)
class Shapes(Context):
    """A stage's surroundings without data, checkpoints or devices: what would be read is a shape."""

    devices: tuple[Any, ...] = ()

    @functools.cached_property
    def mesh(self) -> Mesh:
        mesh = sharding.make_mesh(configs.section(self.config.mesh, sharding.MeshConfig), self.devices)
        train = self.config.train
        sharding.check(mesh, batch_size=train.batch, num_heads=self.world.dit.num_heads, accumulate=train.accumulate)
        return mesh

    def weights(self, stage: str, role: str, *, ema: bool = False) -> Params:
        key, world = jax.random.key(0), self.world
        if role == "autoencoder":
            return jax.eval_shape(lambda: autoencoder.init_params(world.autoencoder, key))
        if role == "text":
            return jax.eval_shape(lambda: umt5.init(world.text, key))
        # What a stage starts from is not read: a program's init gives the same shapes without it.
        return {name: jax.eval_shape(lambda: passes.init(world.dit, key)) for name in world.experts.names}

    def place(self, tree: Params) -> Params:
        return sharding.abstract(tree, sharding.RULES, self.mesh)

    def loaders(self, source: Any) -> Any:
        return None, None

    @functools.cached_property
    def encoder(self) -> Any:
        return types.SimpleNamespace(params=self.weights("autoencoder", "autoencoder"))

    @functools.cached_property
    def text_params(self) -> Params:
        return self.weights("base", "text")

    @functools.cached_property
    def null_ids(self) -> np.ndarray:
        return np.zeros((1, self.world.config.text_len), np.int32)

    @functools.cached_property
    def null_context(self) -> Any:
        return jax.ShapeDtypeStruct((1, self.world.config.text_len, self.world.text.dim), jnp.float32)


def programs(config: Any, devices: list[Any], options: dict[str, bool]) -> Iterator[fit.Fit]:
    """Compile what one update of a stage runs, on `devices` laid out as `config.mesh` says.

    Raises ValueError for sizes that do not fit together, as training would.
    """
    if config.stage not in run.STAGES:
        raise ValueError(f"config.stage {config.stage!r} is not one of {', '.join(run.STAGES)}")
    context = Shapes(config, Path(), tuple(devices))
    context.check()
    program = run.STAGES[config.stage](context).program
    shapes = jax.eval_shape(lambda: program.init(jax.random.key(0), {}))
    state = sharding.abstract(shapes, program.rules, program.mesh)
    batch = _batch(context)
    if isinstance(program, StableForcing):
        yield from _phases(program, state, batch, config.objective.chunks, options)
    else:
        assert isinstance(program, step.LossProgram)
        yield fit.compiled(config.stage, program.trace(state, batch, program.frozen), options)[0]


def _batch(context: Context) -> dict[str, Any]:
    """The loader's batch as shapes, cut along the batch."""
    config, world = context.config, context.world
    objective, (h, w) = config.objective, world.latent_size
    if config.stage == "stable_forcing":
        frames = objective.chunks * world.config.chunk
        arrays: dict[str, tuple[int, ...]] = {"image": (world.config.height, world.config.width, 3)}
    else:
        frames = objective.get("history", 0) + objective.get("target", 0)
        arrays = {
            "latents": (frames, h, w, world.dit.latent_channels),
            "y": (frames, h, w, world.dit.condition_channels),
            "lr_latents": (frames // 2, h // LOW_RES_SCALE, w // LOW_RES_SCALE, world.dit.latent_channels),
            "lr_y": (frames // 2, h // LOW_RES_SCALE, w // LOW_RES_SCALE, world.dit.condition_channels),
        }
    arrays["actions"] = (frames, 6)
    cut = NamedSharding(context.mesh, PartitionSpec(sharding.BATCH))

    def of(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((config.train.batch, *shape), dtype, sharding=cut)

    ids = (frames // world.config.chunk, world.config.text_len)
    return {name: of(shape, jnp.float32) for name, shape in arrays.items()} | {"caption_ids": of(ids, jnp.int32)}


def _phases(
    program: StableForcing, state: Any, batch: dict[str, Any], chunks: int, options: dict[str, bool]
) -> Iterator[fit.Fit]:
    """Each program of an update once, in order, with how often it runs; kept blocks and experts take turns."""
    found: dict[Any, tuple[fit.Fit, Any]] = {}
    counts: collections.Counter[Any] = collections.Counter()

    def call(name: str, *arguments: Any) -> Any:
        # A function that is given other shapes is another program.
        leaves, structure = jax.tree.flatten(arguments)
        called = (name, structure, tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves))
        counts[called] += 1
        if called not in found:
            with jax.set_mesh(program.mesh):
                found[called] = fit.compiled(name, program.functions[name].trace(*arguments), options)
        return found[called][1]

    program.call = call  # pyright: ignore[reportAttributeAccessIssue]
    spec, frozen = program.spec, program.frozen
    cut = NamedSharding(program.mesh, PartitionSpec(sharding.BATCH))
    key: Any = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=NamedSharding(program.mesh, PartitionSpec()))
    contexts = call("encode", frozen, batch["caption_ids"])
    shapes = jax.eval_shape(
        functools.partial(rollout.conditions, spec), batch["image"], batch["actions"], contexts, frozen["null_context"]
    )
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), shapes)
    blocks = np.arange(chunks) % len(spec.pdd_schedule.blocks)
    places = np.linspace(0, 1, dmd.clip_count(spec, program.config.score, chunks))
    student, fake = state.params[STUDENT], state.params[FAKE]
    rolled = program.roll_out(student, frozen, given, key, blocks)
    scored = program.score(fake, frozen, rolled, given, key, places, chunks)
    gradients = program.replay(student, rolled, given, scored.g, blocks)
    call("student_step", state, gradients, np.ones(len(spec.pdd_schedule.blocks), np.float32))
    once = counts.copy()
    gradients = program.fake_gradients(fake, rolled, given, key, places, chunks, 0)
    call("fake_step", state, gradients)
    for called, (one, _) in found.items():
        later = counts[called] - once[called]
        yield dataclasses.replace(one, times=once[called] + program.config.fake_updates * later)
