"""Training one stage, and the curriculum: all stages in order, each from the one before."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wp2_jax.checkpoints import trained
from wp2_jax.stages import regression, report
from wp2_jax.stages.context import Context
from wp2_jax.stages.distillation import stable_forcing_stage
from wp2_jax.stages.regression import Setup
from wp2_jax.train import config as configs
from wp2_jax.train import loop

STAGES: dict[str, Callable[[Context], Setup]] = {
    "autoencoder": regression.autoencoder_stage,
    "base": regression.base_stage,
    "action": regression.action_stage,
    "events": regression.events_stage,
    "memory_1": regression.memory_1_stage,
    "memory_2": regression.memory_2_stage,
    "teacher_forcing": regression.teacher_forcing_stage,
    "pdd": regression.pdd_stage,
    "stable_forcing": stable_forcing_stage,
}


def train(experiment: configs.Experiment, workdir: Path) -> bool:
    """Trains the stage of an experiment in workdir/STAGE, from its newest checkpoint if it has one.

    Returns whether it reached its last step (False: a signal stopped it, with a checkpoint).
    """
    config = experiment.config
    if config.stage not in STAGES:
        raise ValueError(f"config.stage {config.stage!r} is not one of {', '.join(STAGES)}")
    context = Context(config, workdir)
    context.check()
    folder = context.folder(config.stage)
    settings = loop.LoopConfig(
        steps=config.train.steps,
        seed=config.seed,
        log_every=config.train.log_every,
        evaluate_every=config.train.evaluate_every,
        sample_every=config.train.sample_every,
        checkpoint_every=config.train.checkpoint_every,
        keep=config.train.keep,
    )
    if _finished(folder, settings.steps):
        return True
    setup = STAGES[config.stage](context)
    result = loop.run(
        setup.program,
        setup.loader,
        folder,
        settings,
        held_out=setup.held_out,
        record={**experiment.record(), "stage": config.stage, **trained.licence(workdir, _before(config))},
        name=config.stage,
    )
    return not result.stopped


def _before(config: Any) -> Sequence[str]:
    """The stages that the config's one builds on."""
    stages = tuple(config.stages)
    return stages[: stages.index(config.stage)] if config.stage in stages else stages


def _finished(folder: Path, steps: int) -> bool:
    """Whether the stage's newest checkpoint is its last, or its weights are packed: nothing is loaded to skip it."""
    return trained.is_packed(folder) or max(trained.steps(folder), default=-1) >= steps


def curriculum(spec: str, workdir: Path, overrides: Sequence[str] = ()) -> bool:
    """All stages of an experiment file, e.g. "experiments/tiny.py:quick", then the report.

    Finished stages are skipped, an unfinished one goes on from its checkpoint. `overrides` hold for every stage.
    Returns whether all stages are finished.
    """
    first = configs.load(spec, overrides)
    stages = list(first.config.stages)
    joint = f"{first.arg}-" if first.arg else ""
    print(f"curriculum of {len(stages)} stages in {workdir}: {', '.join(stages)}")
    for number, stage in enumerate(stages, 1):
        began = time.monotonic()
        done = train(configs.load(f"{first.file}:{joint}{stage}", overrides), workdir)
        if not done:
            print(f"stopped in stage {stage}; the same command goes on from here")
            return False
        print(f"[{number}/{len(stages)}] {stage}: done ({time.monotonic() - began:.0f} s)")
        report.write(workdir, stages)
    return True
