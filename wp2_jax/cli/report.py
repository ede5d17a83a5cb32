"""`wp2 report`: the page of a curriculum's workdir."""

import argparse
from pathlib import Path

HELP = "write report.html: curves, sample pictures and generated videos of a workdir"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes WORKDIR/report.html from what the stages have left so far; it needs no network."
    parser.add_argument("--workdir", required=True, type=Path, help="folder of a curriculum")


def run(args: argparse.Namespace) -> int:
    from wp2_jax.stages import report

    print(report.write(args.workdir, list(report.TITLES)))
    return 0
