"""Stage 6: Stable Forcing (spec section 5)."""

import functools

import jax

from data_pipelines.conditions import Conditions
from data_pipelines.kinematics import MotionConfig
from data_pipelines.script import ScriptConfig
from wp2_jax.array_types import Params
from wp2_jax.inference.spec import CAPACITIES
from wp2_jax.objectives import pdd
from wp2_jax.objectives.dmd import ScoreConfig
from wp2_jax.objectives.stable_forcing import FAKE, STUDENT, StableForcing, StableForcingConfig
from wp2_jax.stages import samples
from wp2_jax.stages.context import Context
from wp2_jax.stages.regression import Setup, encode_text, optimiser
from wp2_jax.train import state as states
from wp2_jax.train import step


def stable_forcing_stage(context: Context) -> Setup:
    """The few-step student rolled out in full, scored clip by clip, replayed one kept step a chunk."""
    config, world = context.config, context.world
    objective = config.objective
    spec = world.stream("few_step", objective.chunks)
    table = spec.pdd_schedule
    student = context.weights("pdd", "experts", ema=True)
    teacher = context.weights("memory_2", "experts", ema=True)
    optimisers = {
        STUDENT: optimiser(context),
        FAKE: optimiser(
            context, learning_rate=objective.fake_learning_rate, steps=config.train.steps * objective.fake_updates
        ),
    }

    def sheet(state: states.TrainState) -> dict:
        weights = jax.device_get(state.ema[STUDENT])
        # As many chunks as share the compiled programs of the sheets before.
        chunks = min(objective.chunks, CAPACITIES[0] + 1)
        return samples.rollout(context, "few_step", weights, context.text_params, chunks=chunks)

    program = StableForcing(
        spec=spec,
        config=StableForcingConfig(
            fake_updates=objective.fake_updates,
            memory_grad=objective.memory_grad,
            score=ScoreConfig(clip=objective.clip, guide_scale=objective.guidance),
        ),
        create=lambda key, params: states.create(key, params, optimisers, ema=(STUDENT,)),
        apply=functools.partial(step.apply_gradients, optimisers=optimisers, ema_decay=config.train.ema_decay),
        finish=step.finish,
        mesh=context.mesh,
        frozen=context.place(
            {
                "teacher": teacher,
                "autoencoder": context.encoder.params,
                "text": context.text_params,
                "null_context": context.null_context,
            }
        ),
        load_given=lambda: {"student": _fused(student, table), "teacher": teacher},
        sample_fn=sheet,
        encode_text=encode_text(context),
        quick_compile=config.train.quick_compile,
    )
    motion = MotionConfig(yaw_degrees=config.data.yaw_degrees, pitch_degrees=config.data.pitch_degrees)
    commands = ScriptConfig(motion=motion).commands
    train, held_out = context.loaders(
        lambda split: Conditions(
            context.records(split), context.tokenizer.encode, objective.chunks, commands, world.config.chunk
        )
    )
    return Setup(program, train, held_out)


def _fused(student: Params, table) -> Params:
    """The head bank is fused once; the fused heads train."""
    return {name: pdd.fused_params(tree, table, name) for name, tree in student.items()}
