"""The stages with one loss: autoencoder, base, action, events, memory (two phases), teacher forcing, PDD (spec
section 5)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from data_pipelines.loader import HeldOut, Loader, LoaderConfig, PictureWindows
from wp2_jax import rng
from wp2_jax.array_types import Params
from wp2_jax.models import autoencoder as autoencoders
from wp2_jax.models import passes, shortcut, umt5
from wp2_jax.models.experts import expert_models
from wp2_jax.objectives import autoencoder, flow_matching, memory, pdd, teacher_forcing
from wp2_jax.stages import samples
from wp2_jax.stages.context import Context
from wp2_jax.train import config as configs
from wp2_jax.train import optim, step


class Setup(NamedTuple):
    """What the loop is given."""

    program: step.Program
    loader: Loader
    held_out: HeldOut


def optimiser(context: Context, **changes) -> Any:
    """The optimiser of the config's `optim` section; `steps` 0 there means the stage's own."""
    section = {**context.config.optim, **changes}
    section["steps"] = section["steps"] or context.config.train.steps
    return optim.make(configs.section(section, optim.OptimConfig, "optim"))


def loss_program(
    context: Context,
    loss_fn: Callable,
    init_params: Callable[[jax.Array, dict], Params],
    *,
    roles: tuple[str, ...] = ("experts",),
    given: Callable[[], dict] = dict,
    frozen: dict[str, Any] | None = None,
    sample: Callable[[Params], dict] | None = None,
    untrained: tuple[str, ...] = (),
    history: int = 0,
) -> step.LossProgram:
    """A `LossProgram` with this context's optimiser, mesh and averages; `untrained` path patterns stay as they are.

    With `history`, the longest history (latent frames) grows from one chunk to it over the first half of the steps.
    """
    config, chunk = context.config, context.world.config.chunk
    decay = config.train.ema_decay

    def longest(now: jax.Array) -> dict[str, Any]:
        if not history:
            return {}
        grown = chunk + (history - chunk) * 2 * now // config.train.steps
        return {"max_history": jnp.minimum(grown, history).astype(jnp.int32)}

    def pictures(state):
        averaged = state.ema or state.params
        return {} if sample is None else sample(jax.device_get(averaged))

    frozen = dict(frozen or {}) | ({"max_history": jnp.asarray(history, jnp.int32)} if history else {})
    return step.LossProgram(
        init_params=init_params,
        loss_fn=loss_fn,
        optimisers={role: optimiser(context, frozen=untrained) for role in roles},
        mesh=context.mesh,
        frozen=context.place(frozen),
        load_given=given,
        sample_fn=pictures,
        by_step=longest,
        ema_decay=decay,
        accumulate=config.train.accumulate,
        quick_compile=config.train.quick_compile,
    )


def encode_text(context: Context, trained: bool = False):
    """How captions are encoded: by params["text"] while the encoder trains, by frozen["text"] later."""

    def encode(params: Params, frozen: dict[str, Any], ids: jax.Array) -> jax.Array:
        return context.world.encode_text(params["text"] if trained else frozen["text"], ids)

    return encode


def _text_frozen(context: Context) -> dict[str, Any]:
    return {"text": context.text_params, "null_context": context.null_context}


def _shared(context: Context) -> dict[str, Any]:
    """Static arguments that the backbone's objectives have in common."""
    config = context.config
    return {
        "models": expert_models(context.world.dit, context.world.experts.names),
        "experts": context.world.experts,
        "encode_text": encode_text(context),
        "chunk": config.world.chunk,
        "caption_dropout": config.objective.dropout,
    }


def _history(context: Context) -> dict[str, Any]:
    """Static arguments of the objectives whose target follows a history."""
    config = context.config
    sizes = {"sink": config.world.sink, "temporal": config.world.temporal}
    return sizes | {"change_weight": config.objective.change_weight}


def _fresh_experts(context: Context, key: jax.Array) -> Params:
    return {name: passes.init(context.world.dit, rng.fold(key, name)) for name in context.world.experts.names}


def _from_experts(context: Context) -> Callable[[jax.Array, dict], Params]:
    """Parameters of a stage that goes on from earlier experts, whose shapes are those of fresh ones."""

    def init(key: jax.Array, given: dict) -> Params:
        return {"experts": given["experts"] if given else _fresh_experts(context, key)}

    return init


def autoencoder_stage(context: Context) -> Setup:
    """Stage 0: the autoencoder, where none is given."""
    config, model = context.config, context.world.autoencoder

    def init(key: jax.Array, given: dict) -> Params:
        params = autoencoders.init_params(model, key)
        return {"autoencoder": shortcut.from_pictures(params, given["video"]) if given else params}

    settings = {k: v for k, v in config.objective.items() if k != "pictures"}
    windows = {split: PictureWindows(context.records(split), config.objective.pictures) for split in SPLITS}
    train, held_out = context.loaders(lambda split: windows[split])
    shown = next(iter(held_out))["video"]

    def pictures() -> dict:
        # The same for every process, and past unreadable clips, as batches are.
        count = min(len(windows["train"]), SHORTCUT_WINDOWS)
        settings = LoaderConfig(batch=count, seed=config.seed, ahead=0)
        return {"video": next(iter(HeldOut(windows["train"], settings, limit=1)))["video"]}

    program = loss_program(
        context,
        functools.partial(autoencoder.loss, model=model, **settings),
        init,
        given=pictures if config.autoencoder.get("shortcut") else dict,
        roles=("autoencoder",),
        sample=lambda params: samples.reconstruction(context.world, params["autoencoder"], shown),
    )
    return Setup(program, train, held_out)


SPLITS = ("train", "test")
SHORTCUT_WINDOWS = 256
"""Clips whose pictures the linear start of the autoencoder is computed from."""


def base_stage(context: Context) -> Setup:
    """Stage 1: image and caption to video; the text encoder trains along."""

    def init(key: jax.Array, given: dict) -> Params:
        return {"experts": _fresh_experts(context, key), "text": _fresh_text(context, key)}

    frozen = (r"(^|/)(compressor|action|action_encoder)(/|$)",)
    return _start_of_world(context, init, text=True, window=True, actions=False, untrained=frozen)


def action_stage(context: Context) -> Setup:
    """Stage 2: actions."""
    return _start_of_world(
        context,
        _from_experts(context),
        given=lambda: {"experts": context.weights("base", "experts", ema=True)},
        window=True,
    )


def events_stage(context: Context) -> Setup:
    """Between stages 2 and 3, where a curriculum has it: what captions ask for, in clips in which an event begins.

    A short target shows a scene as the event has left it; here it is seen to begin, still without a history's cost.
    The text encoder trains along once more.
    """

    def init(key: jax.Array, given: dict) -> Params:
        return _from_experts(context)(key, given) | {"text": given["text"] if given else _fresh_text(context, key)}

    def given() -> dict:
        return {
            "experts": context.weights("action", "experts", ema=True),
            "text": context.weights("base", "text", ema=True),
        }

    return _start_of_world(context, init, given=given, text=True, window=False)


def _start_of_world(
    context: Context,
    init: Callable[[jax.Array, dict], Params],
    *,
    window: bool,
    given: Callable[[], dict] = dict,
    text: bool = False,
    actions: bool = True,
    untrained: tuple[str, ...] = (r"(^|/)compressor/",),
) -> Setup:
    """The model without memory: targets that start a clip, or with `window` any window of one. `text`: the encoder
    trains too."""
    objective = context.config.objective
    loss = functools.partial(
        flow_matching.loss,
        **(_shared(context) | {"encode_text": encode_text(context, trained=text)}),
        frames=objective.target,
        memory=False,
        actions=actions,
        image_dropout=objective.image_dropout,
    )

    def sample(params: Params) -> dict:
        encoder = params["text"] if text else context.text_params
        return samples.rollout(context, "bi", params["experts"], encoder, chunks=1)

    train, held_out = context.loaders(lambda split: context.clips(split, objective.target, window=window))
    program = loss_program(
        context,
        loss,
        init,
        roles=("experts", "text") if text else ("experts",),
        given=given,
        frozen={"null_ids": jnp.asarray(context.null_ids)} if text else _text_frozen(context),
        sample=sample,
        untrained=untrained,
    )
    return Setup(program, train, held_out)


def _fresh_text(context: Context, key: jax.Array) -> Params:
    return umt5.init(context.world.text, rng.fold(key, "text"))


def _without_memory(context: Context) -> Params:
    """The experts that the memory is added to."""
    stage = "events" if "events" in context.config.stages else "action"
    return context.weights(stage, "experts", ema=True)


def memory_1_stage(context: Context) -> Setup:
    """Stage 3, phase 1: the compressor, with low-rank updates of the backbone."""
    objective, names = context.config.objective, context.world.experts.names
    backbone = _without_memory(context)

    def init(key: jax.Array, given: dict) -> Params:
        experts = given["experts"] if given else _fresh_experts(context, key)
        return memory.init_params(experts, objective.rank, rng.fold(key, "low_rank"))

    loss = functools.partial(memory.loss, **_shared(context), drawn=objective.drawn, scale=LOW_RANK_SCALE)
    train, held_out = context.loaders(lambda split: context.clips(split, objective.history))
    program = loss_program(
        context,
        loss,
        init,
        roles=("compressor", "adapters"),
        given=lambda: {"experts": backbone},
        frozen=_text_frozen(context) | {"experts": {name: backbone[name] for name in names}},
        history=objective.history,
        sample=lambda params: samples.rollout(
            context, "bi", memory.merged(params, backbone, LOW_RANK_SCALE), context.text_params, chunks=2
        ),
    )
    return Setup(program, train, held_out)


LOW_RANK_SCALE = 1.0


def memory_2_stage(context: Context) -> Setup:
    """Stage 3, phase 2: clean history, the next clip as target, everything trains. Its result is the teacher."""
    objective = context.config.objective

    def given() -> dict:
        trained = {role: context.weights("memory_1", role, ema=True) for role in ("compressor", "adapters")}
        backbone = _without_memory(context)
        return {"experts": memory.merged(trained, backbone, LOW_RANK_SCALE)}

    loss = functools.partial(
        flow_matching.loss, **_shared(context), **_history(context), frames=objective.target, memory=True
    )
    length = objective.history + objective.target
    train, held_out = context.loaders(lambda split: context.clips(split, length))
    program = loss_program(
        context,
        loss,
        _from_experts(context),
        given=given,
        frozen=_text_frozen(context),
        history=objective.history,
        sample=lambda params: samples.rollout(context, "bi", params["experts"], context.text_params, chunks=3),
    )
    return Setup(program, train, held_out)


def teacher_forcing_stage(context: Context) -> Setup:
    """Stage 4: the causal student, all chunks of a target in one masked pass."""
    objective = context.config.objective
    loss = functools.partial(teacher_forcing.loss, **_shared(context), **_history(context), frames=objective.target)
    length = objective.history + objective.target
    train, held_out = context.loaders(lambda split: context.clips(split, length))
    program = loss_program(
        context,
        loss,
        _from_experts(context),
        given=lambda: {"experts": context.weights("memory_2", "experts", ema=True)},
        frozen=_text_frozen(context),
        history=objective.history,
        sample=lambda params: samples.rollout(context, "ar", params["experts"], context.text_params, chunks=3),
    )
    return Setup(program, train, held_out)


def pdd_stage(context: Context) -> Setup:
    """Stage 5: the few-step initialisation of the student."""
    objective, world = context.config.objective, context.world
    spec = world.stream("few_step", 1)
    table, names = spec.pdd_schedule, world.experts.names
    intervals = {name: table.intervals(name) for name in names}
    blocks = {name: len(table.expert_blocks(name)) for name in names}
    teacher = context.weights("teacher_forcing", "experts", ema=True)

    def init(key: jax.Array, given: dict) -> Params:
        experts = given["experts"] if given else _fresh_experts(context, key)
        return {"experts": {name: pdd.bank_params(experts[name], intervals[name]) for name in names}}

    shared = _shared(context) | {
        "models": expert_models(world.dit, names, head="bank", intervals=intervals, blocks=blocks)
    }
    loss = functools.partial(
        pdd.loss,
        **shared,
        **_history(context),
        teachers=expert_models(world.dit, names),
        schedule=table,
        frames=objective.target,
        solver=objective.solver,
        guide_scale=objective.guidance,
    )
    length = objective.history + objective.target
    train, held_out = context.loaders(lambda split: context.clips(split, length))

    def sheet(params: Params) -> dict:
        fused = {name: pdd.fused_params(params["experts"][name], table, name) for name in names}
        return samples.rollout(context, "few_step", fused, context.text_params, chunks=3)

    program = loss_program(
        context,
        loss,
        init,
        given=lambda: {"experts": teacher},
        frozen=_text_frozen(context) | {"teacher": teacher},
        history=objective.history,
        sample=sheet,
    )
    return Setup(program, train, held_out)
