"""`wp2 train`: one stage of the curriculum."""

import argparse
from pathlib import Path

HELP = "train one stage of an experiment; goes on from its newest checkpoint"
OVERRIDES = True
COMPUTES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Trains one stage in WORKDIR/STAGE: metrics.jsonl, samples/, checkpoints/. Data are recorded and encoded when\n"
        "they are not there yet. SIGTERM and SIGINT save and stop; the same command goes on.\n\n"
        "Any value of the experiment file can be changed with --config.section.key=value."
    )
    parser.epilog = (
        "example:\n  wp2 train --config experiments/tiny.py:action --workdir runs/tiny --config.train.steps=500"
    )
    parser.add_argument("--config", required=True, metavar="FILE.py:STAGE", help="experiment file and stage")
    parser.add_argument("--workdir", required=True, type=Path, help="folder of the curriculum")


def run(args: argparse.Namespace) -> int:
    from wp2_jax.stages import run as stages
    from wp2_jax.train import config

    done = stages.train(config.load(args.config, args.overrides), args.workdir)
    return 0 if done else 1
