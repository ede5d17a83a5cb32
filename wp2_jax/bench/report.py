"""`wp2 bench`: measures, prints tables, and keeps them with a plot of the history."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from wp2_jax.bench import measure, run, sizes
from wp2_jax.bench.peer import Peer
from wp2_jax.inference.spec import CAPACITIES

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def bench(
    size: str,
    names: Sequence[str],
    repeats: int,
    chunks: int,
    *,
    torch: bool = False,
    compiled: bool = False,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure the parts of a size and print them as they come; returns what `output`/bench.json gets.

    Raises:
      ValueError: an unknown size, or a PyTorch process that fails.
    """
    world, about = sizes.world(size), measure.machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    peak = measure.matmul_peak()
    print(f"float32 matrix product of 2048: {peak / 1e9:.0f} GFLOP/s", flush=True)
    rows: list[run.Row] = []
    with Peer(world, about["cores"]) if torch else contextlib.nullcontext() as peer:
        for part in run.single(world, names):
            rows.append(run.row(part, repeats, peer, compiled))
            print(run.table(rows[-1:], peak), flush=True)
    if "stream" in names:
        rows += run.stream(world, chunks)
        chunk = rows[-1].timing.seconds
        pictures, quarter = 4 * world.config.chunk, max(1, len(chunk) // 4)
        first, last = (measure.Timing(part).median for part in (chunk[:quarter], chunk[-quarter:]))
        print(
            f"{pictures / rows[-1].timing.median:.1f} pictures a second over {chunks} chunks; "
            f"{pictures / first:.1f} in their first quarter, {pictures / last:.1f} in the last"
        )
    print(run.table(rows, peak), flush=True)
    curve = []
    if "history" in names:
        longest = world.dit.rope_frames // world.config.chunk
        curve = run.history(world, [size for size in CAPACITIES if size <= longest], repeats)
        for point in curve:
            print(f"{point['latents']:5d} latent frames of history: {point['seconds']:.4g} s a chunk", flush=True)
    found = {
        "size": size,
        "machine": about,
        "matmul_flops": peak,
        "parts": [dataclasses.asdict(row) for row in rows],
        "history": curve,
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "bench.json").write_text(json.dumps(found, indent=1))
        if curve:
            _plot(curve, size, output / "history.png")
    return found


def _plot(curve: Sequence[dict[str, Any]], size: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([point["latents"] for point in curve], [point["seconds"] for point in curve], "o-")
    axes.set(xlabel="history, latent frames", ylabel="seconds a chunk", title=f"size {size}", xscale="log", ylim=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
