"""`wp2 curriculum`: all stages in order."""

import argparse
from pathlib import Path

HELP = "train all stages of an experiment in order, and write report.html"
OVERRIDES = True
COMPUTES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Records the data, trains every stage from the one before, and writes WORKDIR/report.html. Finished stages\n"
        "are skipped, an unfinished one goes on from its checkpoint.\n\n"
        "--config.section.key=value changes a value for every stage."
    )
    parser.epilog = "example:\n  wp2 curriculum --config experiments/tiny.py:quick --workdir runs/quick"
    parser.add_argument("--config", required=True, metavar="FILE.py[:VARIANT]", help="experiment file, such as :quick")
    parser.add_argument("--workdir", required=True, type=Path, help="folder for everything that is made")


def run(args: argparse.Namespace) -> int:
    from wp2_jax.stages import run as stages

    return 0 if stages.curriculum(args.config, args.workdir, args.overrides) else 1
