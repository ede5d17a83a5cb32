"""`wp2 warmup`: compile a world's programs before anybody waits for them."""

import argparse
from pathlib import Path

HELP = "compile a world's programs and keep them, so that it starts at once"
COMPUTES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Programs are kept in $XDG_CACHE_HOME/wp2_jax (~/.cache/wp2_jax), which `wp2 generate` uses too. They are\n"
        "made anew when the code, jax or the device changes. Run it twice to see what a second start takes."
    )
    parser.epilog = "example:\n  wp2 warmup --checkpoint runs/tiny --chunks 16 64"
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="as for wp2 generate (default: the tiny weights that ship)"
    )
    parser.add_argument("--mode", choices=("bi", "ar", "few_step"), default="few_step", help="default few_step")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[16], metavar="N", help="lengths of worlds to get ready (default 16)"
    )
    parser.add_argument("--precision", default=None, metavar="NAME", help="as for wp2 generate")


def run(args: argparse.Namespace) -> int:
    import time

    from wp2_jax.inference import aot, generate, load

    source = load.locate(args.checkpoint or load.shipped(), args.mode, args.precision)
    requests = [generate.idle_request(source, chunks) for chunks in args.chunks]
    before = time.monotonic()
    loaded = load.load(source)
    programs = aot.kept(generate.PROGRAMS, aot.default_folder())
    print(f"weights: {time.monotonic() - before:.2f} s", flush=True)
    for request in requests:
        before = time.monotonic()
        for index, _ in zip(range(3), generate.generate(loaded, request, 0, programs=programs), strict=False):
            now = time.monotonic()
            print(f"{request.name}, chunk {index}: {now - before:.2f} s", flush=True)
            before = now
    return 0
