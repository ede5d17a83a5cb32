"""`wp2 convert`: weights of PyTorch programs in and out."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

HELP = "look into files of weights, read them in, write weights for PyTorch"
OVERRIDES = True
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

    take = actions.add_parser(
        "import",
        help="read weights of PyTorch programs into a checkpoint folder of ours",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  wp2 convert import Wan2.2-I2V-A14B --config experiments/a14b.py --output runs/a14b\n"
        "  wp2 convert import --high high.safetensors --low low.safetensors --stage memory_2 --output runs/a14b",
    )
    take.add_argument(
        "source", nargs="?", type=Path, metavar="FOLDER", help="an export of ours, or a release; options add to it"
    )
    take.add_argument("--output", type=Path, required=True, metavar="DIR", help="a workdir; stages are added to it")
    for name, what in (
        ("high", "the expert of high noise"),
        ("low", "the expert of low noise"),
        ("single", "the expert of a world that has one"),
        ("autoencoder", "the autoencoder"),
        ("text", "the text encoder"),
        ("tokenizer", "its sentencepiece model, or the folder that holds it"),
    ):
        take.add_argument(f"--{name}", type=Path, metavar="PATH", help=what)
    take.add_argument("--stage", metavar="NAME", help="the stage of the curriculum that the experts stand for")
    take.add_argument(
        "--config", metavar="FILE.py:STAGE", help="experiment whose world this is (default: told by the files)"
    )
    take.add_argument("--weights", choices=("ema", "raw"), help="which ones of experts' .pt files that hold both")
    take.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
    take.add_argument("--fuse", action="store_true", help="a bank of heads as fused heads, for stage stable_forcing")
    take.add_argument("--seed", type=int, default=0, help="of action and memory weights that a file lacks (default 0)")
    take.add_argument("--licence", metavar="TEXT", help="of files in the published layout that are not of the release")

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

    verify = actions.add_parser(
        "verify", help="an export in PyTorch's modules and in ours, on the same random input; needs 'wp2_jax[bench]'"
    )
    verify.add_argument("source", type=Path, metavar="FOLDER", help="an export of ours, or a release")
    verify.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    verify.add_argument("--seed", type=int, default=0, help="of the input (default 0)")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(KB|MB|GB|)", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of bytes, or one with KB, MB or GB, such as 5GB")
    return int(float(match[1]) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]])


def run(args: argparse.Namespace) -> int:
    if args.overrides and getattr(args, "config", None) is None:
        raise ValueError(f"{args.overrides[0]} changes a value of --config, which is not given")
    return {"inspect": _inspect, "import": _import, "export": _export, "verify": _verify}[args.action](args)


def _import(args: argparse.Namespace) -> int:
    from wp2_jax.convert import importing, sources
    from wp2_jax.train import config

    files = sources.find(args.source) if args.source else {}
    options = {**{part: getattr(args, part, None) for part in sources.PLACES}, "all": args.single}
    request = importing.Request(
        files=files | {part: path for part, path in options.items() if path is not None},
        stage=args.stage,
        config=config.load(args.config, args.overrides).record()["config"] if args.config else None,
        average=_WEIGHTS[args.weights],
        dtype=args.dtype,
        fuse=args.fuse,
        seed=args.seed,
        licence=args.licence,
    )
    paths, said = importing.import_files(request, args.output)
    _report(paths, said)
    return 0


def _report(paths: list[Path], said: list[str]) -> None:
    for path in paths:
        print(f"{path}: {path.stat().st_size / 1e6:,.2f} MB")
    for line in said:
        print(f"note: {line}")


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
    _report(paths, said)
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


def _verify(args: argparse.Namespace) -> int:
    from wp2_jax.convert import comparison, sources

    good, compared = True, 0
    for result in comparison.verify(sources.find(args.source), args.dtype, args.seed):
        if isinstance(result, str):
            print(f"  --   {result}: not compared")
            continue
        good, compared = good and result.ok, compared + 1
        numbers = f"abs {result.max_abs:9.3g}  rel {result.max_rel:9.3g}  tolerance {result.tolerance:7.3g}"
        print(f"  {'ok  ' if result.ok else 'FAIL'} {result.item:<28} {numbers}  {result.note}".rstrip(), flush=True)
    print(f"{compared} compared in {args.dtype}")
    return 0 if good and compared else 1
