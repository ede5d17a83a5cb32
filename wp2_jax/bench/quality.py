"""What a precision saves and what it costs in pictures: one world, one seed, once in every preset."""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from wp2_jax.bench.measure import Timing
from wp2_jax.controls.inputs import load_inputs
from wp2_jax.evaluation.quality import psnr
from wp2_jax.inference import generate, load, video
from wp2_jax.inference.generate import Request

REFERENCE = "full"


@dataclasses.dataclass(frozen=True)
class Row:
    """One preset: bytes of the experts' weights, seconds of each chunk after the first two, and the mean PSNR (dB, at
    most 60) of each chunk's pictures against those of full precision."""

    name: str
    weights: int
    timing: Timing
    psnr: tuple[float, ...]


def requests(checkpoint: str | os.PathLike[str], mode: str, file: str | os.PathLike[str]) -> list[Request]:
    """The worlds of an input file, checked against a checkpoint. Errors: those of `load.locate`, `generate.prepare`."""
    source = load.locate(checkpoint, mode)
    return generate.prepare(source, source.tokenizer(), load_inputs(file, generate.input_options(source)))


def compare(
    checkpoint: str | os.PathLike[str], mode: str, request: Request, presets: Sequence[str], seed: int = 0
) -> Iterator[Row]:
    """A row for full precision, then one for each other preset. ValueError for one that this device cannot run, at
    once."""
    sources = {name: load.locate(checkpoint, mode, name) for name in dict.fromkeys((REFERENCE, *presets))}
    exact: list[np.ndarray] = []
    for name, source in sources.items():
        loaded = load.load(source)
        chunks, seconds, before = [], [], time.perf_counter()
        for pictures in generate.generate(loaded, request, seed):
            chunks.append(video.to_uint8(pictures))
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        exact = exact or chunks
        near = tuple(float(psnr(a, b).mean()) for a, b in zip(chunks, exact, strict=True))
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params["experts"]))
        yield Row(name, weights, Timing(tuple(seconds[2:] or seconds)), near)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: PSNR of the first, the middle and the last chunk, and the mean."""
    chunks = len(rows[0].psnr)
    shown = sorted({0, chunks // 2, chunks - 1})
    head = ["precision", "MB of experts", "seconds a chunk", "spread", "times as fast"]
    head += [*(f"PSNR of chunk {index}, dB" for index in shown), "mean"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [row.name, f"{row.weights / 1e6:.1f}", f"{row.timing.median:.3g}", f"{row.timing.spread:.1%}"]
        cells.append(f"{rows[0].timing.median / row.timing.median:.2f}")
        values = [*(row.psnr[index] for index in shown), float(np.mean(row.psnr))]
        cells += ["" if row.name == REFERENCE else f"{value:.1f}" for value in values]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
