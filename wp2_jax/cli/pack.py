"""`wp2 pack`: the weights of a curriculum as a small folder."""

import argparse
from pathlib import Path

HELP = "pack the weights of a curriculum into small files, to ship or to go on from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Writes the averaged weights of each stage as bfloat16 (safetensors) with their config, and the tokenizer: a\n"
        "folder that serves as --checkpoint, or, copied to a new workdir, as finished stages for `wp2 curriculum`,\n"
        "which then trains those that are not there."
    )
    parser.epilog = "example:\n  wp2 pack --workdir runs/tiny --output weights/tiny"
    parser.add_argument("--workdir", required=True, type=Path, metavar="DIR", help="workdir of a curriculum")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the packed weights")
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help="default: those that generation reads")


def run(args: argparse.Namespace) -> int:
    from wp2_jax.stages import pack

    for path in pack.pack(args.workdir, args.output, args.stages):
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0
