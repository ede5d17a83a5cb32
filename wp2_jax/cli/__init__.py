"""The console command `wp2` (also `python -m wp2_jax`): one module of this package a sub-command.

A command's module has HELP, add_arguments(parser) and run(args) -> exit code, and imports what is heavy inside `run`:
`wp2 --help` needs no jax. One with OVERRIDES = True gets words like --config.section.key=value in `args.overrides`.
One with COMPUTES = True runs models for long: it keeps freed memory where that is faster (`allocator`).
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence

from wp2_jax import allocator, xla_flags

COMMANDS = (
    "data",
    "train",
    "curriculum",
    "report",
    "generate",
    "serve",
    "evaluate",
    "pack",
    "quantize",
    "convert",
    "warmup",
    "bench",
    "plan",
    "verify",
)
"""Sub-commands in the order of use; each is the module of this name."""

_OWN_PACKAGES = ("wp2_jax", "data_pipelines", "experiments")

_EXAMPLES = """examples:
  wp2 data record --output data --clips 160
  wp2 curriculum --config experiments/tiny.py:quick --workdir runs/quick
  wp2 train --config experiments/tiny.py:base --workdir runs/base
  wp2 generate --checkpoint runs/quick --input world.json --output out --mode few_step
  wp2 serve
  wp2 verify tests/golden

`wp2 COMMAND --help` explains each."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wp2",
        description="WorldPlay2 in JAX: record data, train and distil an interactive world model, play it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        command = commands.add_parser(name, help=module.HELP)
        module.add_arguments(command)
        # After the command too; SUPPRESS, or its absence there would undo `wp2 --debug COMMAND`.
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        command.set_defaults(run=module.run, takes_overrides=getattr(module, "OVERRIDES", False))
        command.set_defaults(computes=getattr(module, "COMPUTES", False))
    return parser


def _is_ours(error: Exception) -> bool:
    """Whether an error is a message to the user: files that cannot be used, and values that our own checks refuse."""
    if isinstance(error, OSError):
        return True
    if not isinstance(error, ValueError):
        return False
    last = traceback.walk_tb(error.__traceback__)
    module = [frame.f_globals.get("__name__", "") for frame, _ in last][-1]
    return module.split(".")[0] in _OWN_PACKAGES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 0 for success, 1 for a negative answer, 2 for a wrong input."""
    parser = _parser()
    args, args.overrides = parser.parse_known_args(argv)
    unknown = [word for word in args.overrides if not (args.takes_overrides and word.startswith("--config."))]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    xla_flags.tune_cpu()
    if args.computes:
        allocator.keep_memory()
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.debug or not _is_ours(error):
            raise
        print(f"wp2 {args.command}: {error}\n(--debug shows where)", file=sys.stderr)
        return 2
