"""All measurements of a world, one after the other, as rows of a table."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from wp2_jax.bench import measure, parts
from wp2_jax.bench.measure import Timing
from wp2_jax.bench.peer import Peer
from wp2_jax.inference.world import World


@dataclasses.dataclass(frozen=True)
class Row:
    """One part: its timing, operations (0: not counted), and PyTorch's timings of the same work by variant.

    `difference`: largest difference of the results over the largest of PyTorch's.
    """

    name: str
    timing: Timing
    flops: int = 0
    theirs: dict[str, Timing] = dataclasses.field(default_factory=dict)
    difference: float | None = None

    def ratio(self, variant: str) -> float:
        """PyTorch's seconds over ours, the median of the pairs that ran one after the other."""
        pairs = zip(self.theirs[variant].seconds, self.timing.seconds, strict=True)
        return float(np.median([theirs / ours for theirs, ours in pairs]))


def single(world: World, names: Sequence[str]) -> Iterator[parts.Part]:
    """The parts that are one function each, made when their turn comes: at full size their weights fill a device."""
    if "dit" in names:
        yield parts.dit(world)
    if "text" in names:
        yield parts.text(world)
    if {"vae_decode", "vae_encode"} & set(names):
        yield from (part for part in parts.vae(world) if part.name in names)
    if "train" in names:
        yield parts.train(world)


def row(part: parts.Part, repeats: int, peer: Peer | None, compiled: bool) -> Row:
    """Time a part; with a peer that has it, run by run in turns."""
    if peer is None or not peer.has(part):
        return Row(part.name, measure.timed(part.run, repeats), part.flops)
    theirs = peer.give(part)
    ours = part.run()
    ours = np.asarray(ours[-1] if isinstance(ours, tuple) else ours).reshape(theirs.shape)
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    variants = {"eager": False} | ({"compiled": True} if compiled else {})
    for wanted in variants.values():
        peer.once(part, compiled=wanted)
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *variants)}
    for _ in range(repeats):
        seconds["ours"].append(measure.once(part.run))
        for name, wanted in variants.items():
            seconds[name].append(peer.once(part, compiled=wanted))
    timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
    return Row(part.name, timings.pop("ours"), part.flops, timings, difference)


def stream(world: World, chunks: int) -> tuple[list[Row], list[int]]:
    """A world of `chunks` chunks: emit, absorb and both, each chunk after the first two one run; and the bytes that are
    held after each of these."""
    play = parts.world_in_play(world, chunks)
    flops = play.flops()
    seconds: dict[str, list[float]] = {"emit": [], "absorb": [], "chunk": []}
    held = []
    for index in tqdm(range(chunks), desc="stream", unit="chunk", mininterval=1.0):
        before = time.perf_counter()
        emit, absorb = measure.once(play.emit), measure.once(play.absorb)
        if index > 1:
            for name, value in (("emit", emit), ("absorb", absorb), ("chunk", time.perf_counter() - before)):
                seconds[name].append(value)
            held.append(measure.memory())
    flops["chunk"] = sum(flops.values())
    return [Row(name, Timing(tuple(values)), flops[name]) for name, values in seconds.items()], held


def history(world: World, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds a chunk at each memory of so many chunks: the cost is that of the capacity, however full it is."""
    found = []
    for size in sizes:
        play = parts.world_in_play(world, size + 1)
        for _ in range(2):
            play.emit()
            play.absorb()
        seconds = []
        for _ in range(repeats):
            before = time.perf_counter()
            measure.once(play.emit)
            measure.once(play.absorb)
            seconds.append(time.perf_counter() - before)
        timing = Timing(tuple(seconds))
        found.append({"latents": size * world.config.chunk, "seconds": timing.median, "spread": timing.spread})
    return found


def table(rows: Sequence[Row], peak: float) -> str:
    """The rows as a Markdown table; `peak` FLOP/s of the machine's matrix product."""
    variants = list(dict.fromkeys(name for row in rows for name in row.theirs))
    head = ["part", "seconds (median)", "spread", "GFLOP", "of matmul peak"]
    head += [cell for name in variants for cell in (f"PyTorch {name}, s", "times as fast")]
    head += ["difference"] if variants else []
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        median = row.timing.median
        cells = [row.name, f"{median:.4g}", f"{row.timing.spread:.1%}"]
        cells += [f"{row.flops / 1e9:.4g}", f"{row.flops / median / peak:.0%}"] if row.flops else ["", ""]
        for name in variants:
            timing = row.theirs.get(name)
            cells += ["", ""] if timing is None else [f"{timing.median:.4g}", f"{row.ratio(name):.2f}"]
        if variants:
            cells.append("" if row.difference is None else f"{row.difference:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
