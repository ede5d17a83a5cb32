"""`wp2 quantize`: a checkpoint with the backbone's matrices in eight bits."""

import argparse
from pathlib import Path

HELP = "write a checkpoint whose large matrices are in eight bits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Writes a folder that serves as --checkpoint: the stage that serves the mode with its attention, FFN and\n"
        "action matrices in eight bits, one scale a column, and autoencoder, text encoder and tokenizer beside it.\n"
        "Embeddings, modulation, norms, head and compressor stay float. Prints what each kind of matrix loses."
    )
    parser.epilog = (
        "example:\n  wp2 quantize --checkpoint runs/tiny --precision int8 --output runs/tiny-int8\n"
        "  wp2 generate --checkpoint runs/tiny-int8 --input world.json --output out\n\n"
        "`wp2 generate --precision int8` does the same at loading, without a folder."
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="as for wp2 generate (default: the tiny weights that ship)"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the new checkpoint")
    parser.add_argument("--precision", choices=("int8", "fp8"), default="int8", help="default int8")
    parser.add_argument("--mode", choices=("bi", "ar", "few_step"), default="few_step", help="default few_step")


def run(args: argparse.Namespace) -> int:
    from wp2_jax.inference import load
    from wp2_jax.inference.quantize import quantize

    source = load.locate(args.checkpoint or load.shipped(), args.mode)
    path, losses = quantize(source, args.output, args.precision)
    print(f"{'matrix':<44} {'error of a layer, at most':>26} {'scales':>21} {'MB':>16}")
    for loss in losses:
        low, high = loss.scales
        name = f"{loss.expert}/{loss.name.removesuffix('/kernel')}"
        sizes = f"{loss.before / 1e6:.2f} -> {loss.after / 1e6:.2f}"
        print(f"{name:<44} {loss.error:>25.2%} {low:>10.2e} {high:>10.2e} {sizes:>16}")
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, stage {source.stage}, step {source.step}")
    return 0
