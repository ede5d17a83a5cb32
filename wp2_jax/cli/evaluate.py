"""`wp2 evaluate`: checkpoints measured side by side."""

import argparse
from pathlib import Path

HELP = "measure checkpoints on held-out recordings: control, memory, events, stability"
COMPUTES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Generates worlds from held-out start pictures, commands and captions, and writes report.html and report.json\n"
        "with means and 95% intervals over cases. The recordings themselves stand in the first column: the ceiling.\n\n"
        "Motion and events are read from pictures by two small networks, trained on the recordings the first time\n"
        "(minutes) and kept in DATA/judges; their accuracy on held-out recordings stands in the report.\n\n"
        "What is found is kept in OUTPUT/parts: a command that was stopped goes on where it was, and one with more\n"
        "checkpoints or measures than the last measures only those."
    )
    parser.epilog = (
        "example:\n  wp2 evaluate --checkpoint runs/tiny:few_step runs/tiny:ar runs/tiny/pdd:few_step \\\n"
        "    --data runs/tiny/data --output runs/tiny/evaluation"
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        nargs="+",
        metavar="DIR:MODE",
        help="workdir of a curriculum or a stage's folder in it, and a mode: bi, ar or few_step",
    )
    parser.add_argument("--data", required=True, type=Path, help="recorded dataset with a split `test`")
    parser.add_argument("--output", required=True, type=Path, help="folder for the report")
    parser.add_argument("--measures", nargs="+", metavar="NAME", help="default: all that there are")
    parser.add_argument("--cases", type=int, default=32, help="held-out clips a measure (default 32)")
    parser.add_argument("--seeds", type=int, default=1, help="worlds a clip (default 1)")
    parser.add_argument("--sheet", type=int, default=16, help="start pictures in the sheet of commands (default 16)")
    parser.add_argument("--drift-cases", type=int, default=20, help="long worlds (default 20)")
    parser.add_argument("--drift-latents", type=int, default=320, help="their length in latent frames (default 320)")


def run(args: argparse.Namespace) -> int:
    from wp2_jax.stages import evaluate, evaluation_report

    settings = evaluate.Settings(
        measures=tuple(args.measures or evaluate.MEASURES),
        cases=args.cases,
        seeds=args.seeds,
        sheet=args.sheet,
        drift_cases=args.drift_cases,
        drift_latents=args.drift_latents,
    )
    checkpoints = evaluate.load(args.checkpoint)
    results, accuracy = evaluate.run(
        checkpoints, args.data, args.data / "judges", settings, parts=args.output / "parts"
    )
    about = {
        "checkpoints": {
            name: f"stage {loaded.source.stage}, step {loaded.source.step}" for name, loaded in checkpoints.items()
        },
        "data": str(args.data),
        "cases": args.cases,
        "seeds": args.seeds,
        "drift": f"{args.drift_cases} worlds of {args.drift_latents} latent frames",
    }
    page = evaluation_report.write(results, accuracy, about, args.output)
    print(evaluation_report.text(results))
    print(page)
    return 0
