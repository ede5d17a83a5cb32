"""`wp2 convert`: weights of PyTorch programs in and out."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "look into files of weights, write weights for PyTorch"
_WEIGHTS = {None: None, "ema": True, "raw": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="what a file or folder of weights is, from its header")
    inspect.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help=".safetensors, .safetensors.index.json, .pt or .pth, a folder with one, or a checkpoint of ours",
    )
    inspect.add_argument("--weights", choices=("ema", "raw"), help="which ones of a .pt file that holds both")


def run(args: argparse.Namespace) -> int:
    return {"inspect": _inspect}[args.action](args)


def _inspect(args: argparse.Namespace) -> int:
    from wp2_jax.convert import inspection

    fits = True
    for path in args.paths:
        rows = inspection.describe(path, _WEIGHTS[args.weights])
        width = max(len(label) for label, _ in rows) + 2
        for label, text in rows:
            print(f"{label:<{width}}{text}")
        print()
        fits = fits and not any(label == "fits" and text.startswith("no") for label, text in rows)
    return 0 if fits else 1
