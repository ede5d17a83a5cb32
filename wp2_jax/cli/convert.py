"""`wp2 convert`: weights of PyTorch programs in and out."""

from __future__ import annotations

import argparse
import re
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

    export = actions.add_parser("export", help="write a stage's models as safetensors for PyTorch, with their configs")
    export.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a stage's folder, or a workdir with --stage"
    )
    export.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--stage", metavar="NAME", help="the stage of a workdir, such as stable_forcing")
    export.add_argument("--role", metavar="NAME", help="experts, student or fake (default: the stage's own)")
    export.add_argument("--weights", choices=("ema", "raw"), default="ema", help="average or trained (default ema)")
    export.add_argument(
        "--layout",
        choices=("published", "wan", "diffusers"),
        default="published",
        help="published: everything (default); wan, diffusers: the many-step backbone without actions and memory",
    )
    export.add_argument(
        "--parts",
        nargs="+",
        choices=("experts", "autoencoder", "text"),
        default=("experts", "autoencoder", "text"),
        help="default all that are there",
    )
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
    export.add_argument(
        "--max-shard-size", type=_size, default=5 * 10**9, metavar="SIZE", help="such as 500MB or 5GB (default 5GB)"
    )
    export.add_argument("--fuse", action="store_true", help="stage pdd: the bank of heads as fused heads")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(KB|MB|GB|)", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of bytes, or one with KB, MB or GB, such as 5GB")
    return int(float(match[1]) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]])


def run(args: argparse.Namespace) -> int:
    return {"inspect": _inspect, "export": _export}[args.action](args)


def _export(args: argparse.Namespace) -> int:
    from wp2_jax.convert import export

    folder = export.stage_folder(args.checkpoint, args.stage)
    request = export.Request(
        layout=args.layout,
        role=args.role,
        average=_WEIGHTS[args.weights] is not False,
        parts=tuple(args.parts),
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        fuse=args.fuse,
    )
    paths, said = export.export(folder, args.output, request)
    for path in paths:
        print(f"{path}: {path.stat().st_size / 1e6:,.2f} MB")
    for line in said:
        print(f"note: {line}")
    return 0


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
