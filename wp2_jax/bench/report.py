"""`wp2 bench`: measures, prints tables, and keeps them with a plot of the history."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
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
      ValueError: an unknown size, more chunks than a world of it can have, or a PyTorch process that fails.
    """
    world, about = sizes.world(size), measure.machine()
    if "stream" in names and chunks > world.longest:
        raise ValueError(f"chunks {chunks}: a world of size {size} has at most {world.longest}")
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    peak = measure.matmul_peak()
    print(f"float32 matrix product of 2048: {peak / 1e9:.0f} GFLOP/s", flush=True)
    rows: list[run.Row] = []
    held: list[int] = []
    with Peer(world, about["cores"]) if torch else contextlib.nullcontext() as peer:
        for part in run.single(world, names):
            rows.append(run.row(part, repeats, peer, compiled))
            print(run.table(rows[-1:], peak), flush=True)
    if "stream" in names:
        streamed, held = run.stream(world, chunks)
        rows += streamed
        chunk = rows[-1].timing.seconds
        pictures, quarter = 4 * world.config.chunk, max(1, len(chunk) // 4)
        first, last = (measure.Timing(part).median for part in (chunk[:quarter], chunk[-quarter:]))
        print(
            f"{pictures / rows[-1].timing.median:.1f} pictures a second over {chunks} chunks; "
            f"{pictures / first:.1f} in their first quarter, {pictures / last:.1f} in the last; "
            f"memory {held[len(held) // 4] / 2**20:.0f} MiB after the first quarter, {held[-1] / 2**20:.0f} at the end"
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
        "held": held,
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "bench.json").write_text(json.dumps(found, indent=1))
        if curve:
            latents, seconds = ([point[name] for point in curve] for name in ("latents", "seconds"))
            with _figure(output / "history.png", f"size {size}", "history, latent frames") as axes:
                axes.plot(latents, seconds, "o-")
                axes.set(ylabel="seconds a chunk", xscale="log", ylim=0)
        if held:
            with _figure(output / "stream.png", f"size {size}, a world of {chunks} chunks", "chunk") as axes:
                axes.plot(range(2, chunks), rows[-1].timing.seconds, ".", label="seconds a chunk")
                axes.set(ylabel="seconds a chunk", ylim=0)
                other = axes.twinx()
                other.plot(range(2, chunks), [size / 2**20 for size in held], "C1-", label="memory")
                other.set(ylabel="memory held, MiB", ylim=0)
    return found


@contextlib.contextmanager
def _figure(path: Path, title: str, across: str) -> Iterator[Any]:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.set(title=title, xlabel=across)
    axes.grid(alpha=0.3)
    yield axes
    figure.savefig(path, dpi=120)
    plt.close(figure)
