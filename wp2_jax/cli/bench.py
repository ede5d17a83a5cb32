"""`wp2 bench`: what the parts of a world cost."""

import argparse
from pathlib import Path

HELP = "time the parts of a world, also beside PyTorch"
COMPUTES = True
SIZES = ("tiny", "mid", "full")
PARTS = ("dit", "text", "vae_decode", "vae_encode", "train", "stream", "history")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Weights are random, results are thrown away; each part is warmed up and then run --repeats times.\n\n"
        "  dit         one forward pass of an expert over one chunk, without memory\n"
        "  text        the text encoder on one caption of full length\n"
        "  vae_decode, vae_encode   the autoencoder's next chunk of a stream\n"
        "  train       one update by flow matching, batch of 4 chunks\n"
        "  stream      a few-step world of --chunks chunks: emit (the pictures), absorb (into the memory), both\n"
        "  history     seconds a chunk by length of history, with a plot\n\n"
        "With --torch (pip install 'wp2_jax[bench]') the first four run in turns with diffusers' and transformers'\n"
        "modules: same weights, same threads, a process of their own."
    )
    parser.epilog = (
        "example:\n  wp2 bench --size mid --parts dit text --torch --output runs/bench\n"
        "  wp2 bench --precisions bf16 int8 fp8 --input launch/example/long_walk.json"
    )
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="tiny",
        help="tiny: the shipped world (default); mid: width 1024, 12 layers, 256 x 448; full: the published sizes",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="default: all")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="runs that count (default 7)")
    parser.add_argument("--chunks", type=int, default=64, metavar="N", help="chunks of the stream (default 64)")
    parser.add_argument("--torch", action="store_true", help="compare with PyTorch")
    parser.add_argument("--compile", action="store_true", help="with torch.compile too")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for bench.json and history.png")
    parser.add_argument(
        "--precisions",
        nargs="+",
        metavar="NAME",
        help="instead of parts: the first world of --input in each of these precisions, its speed, size and PSNR "
        "against full precision",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="input file as for wp2 generate, for --precisions")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="weights for --precisions (default: the tiny ones that ship)"
    )


def run(args: argparse.Namespace) -> int:
    if args.precisions:
        return _precisions(args)
    from wp2_jax.bench import report

    if args.repeats < 1 or args.chunks < 3:
        raise ValueError(f"repeats {args.repeats}, chunks {args.chunks}: give at least 1 and 3")
    report.bench(
        args.size,
        args.parts,
        args.repeats,
        args.chunks,
        torch=args.torch or args.compile,
        compiled=args.compile,
        output=args.output,
    )
    return 0


def _precisions(args: argparse.Namespace) -> int:
    from wp2_jax.bench import measure, quality
    from wp2_jax.inference import load

    if args.input is None:
        raise ValueError("--precisions needs a world: give --input FILE, launch/example/long_walk.json for one")
    checkpoint = args.checkpoint or load.shipped()
    request = quality.requests(checkpoint, "few_step", args.input)[0]
    print(", ".join(f"{name} {value}" for name, value in measure.machine().items()))
    print(request.timeline, flush=True)
    rows = []
    for row in quality.compare(checkpoint, "few_step", request, args.precisions):
        rows.append(row)
        print(f"{row.name}: PSNR by chunk {' '.join(f'{value:.1f}' for value in row.psnr)}", flush=True)
    print(quality.table(rows))
    return 0
