"""`wp2 verify`: run every item of a folder of golden tensors and say how far each is from the published numbers."""

import argparse
import json
import math
import sys
import time
from pathlib import Path

HELP = "compare the models with a folder of published numbers (golden tensors)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs every item of a folder laid out like tests/golden and prints one line an item: largest absolute error, "
        "largest error relative to the tensor, tolerance, verdict. Exits with 1 if any item fails, is unknown or is "
        "missing. INDEX.json, which lists the files and their digests, is always checked."
    )
    parser.add_argument("folder", type=Path, help="folder of golden tensors, such as tests/golden")
    parser.add_argument(
        "--only",
        metavar="KIND[,KIND]",
        type=lambda text: [kind.strip() for kind in text.split(",") if kind.strip()],
        default=[],
        help="only these kinds: a to l, weights, inputs, manifests (default all, and that none is missing)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file as well")


def run(args: argparse.Namespace) -> int:
    from wp2_jax.verify.run import verify

    begin = time.perf_counter()

    def starting(name: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] checking {name}", file=sys.stderr, flush=True)

    groups = []
    for group in verify(args.folder, args.only, starting):
        groups.append(group)
        print(f"{group.name} ({group.seconds:.1f} s)")
        for result in group.results:
            verdict = "ok  " if result.ok else "FAIL"
            numbers = f"abs {result.max_abs:9.3g}  rel {result.max_rel:9.3g}  tolerance {result.tolerance:7.3g}"
            note = f"  {result.note}" if result.note else ""
            print(f"  {verdict} {result.item:<52} {numbers}{note}", flush=True)
    results = [result for group in groups for result in group.results]
    bad = [result for result in results if not result.ok]
    print("\nsummary")
    for group in groups:
        print(f"  {'ok  ' if not group.failures else 'FAIL'} {group.name:<32} {_count(group.results)}")
    for result in bad:
        print(f"  FAIL {result.item}: {result.note or f'rel {result.max_rel:.3g} > {result.tolerance:g}'}")
    print(f"{_count(results)} in {len(groups)} files, {time.perf_counter() - begin:.0f} s")
    if args.json:
        report = {"folder": str(args.folder), "ok": not bad, "items": [_record(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if bad else 0


def _count(results) -> str:
    return f"{sum(result.ok for result in results)} of {len(results)} ok"


def _record(result) -> dict:
    """A result for JSON, which has no word for what could not be computed."""
    numbers = {key: getattr(result, key) for key in ("max_abs", "max_rel", "tolerance")}
    finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return {"item": result.item, **finite, "ok": result.ok, "note": result.note}
