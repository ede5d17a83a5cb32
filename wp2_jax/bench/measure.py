"""Timing: warm-up, repeated runs, median and spread; what the machine's matrix product reaches."""

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of each run, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def once(run: Callable[[], Any]) -> float:
    """Seconds of one run, until its results are there."""
    before = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - before


def timed(run: Callable[[], Any], repeats: int, warmup: int = 1) -> Timing:
    """`repeats` runs after `warmup` that do not count; the first compiles."""
    for _ in range(warmup):
        once(run)
    return Timing(tuple(once(run) for _ in range(repeats)))


def matmul_peak(size: int = 2048, repeats: int = 7) -> float:
    """FLOP/s of the best float32 matrix product of this size on the first device."""
    a = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(lambda a, b: jnp.dot(a, b, precision="highest"))
    return 2 * size**3 / min(timed(lambda: product(a, a), repeats).seconds)


def memory() -> int:
    """Bytes that are held now: on the first device, by this process where that is a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None:
        return stats["bytes_in_use"]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "processor": platform.processor() or platform.machine(),
        "cores": cores,
        "jax": jax.__version__,
    }
