"""Means over cases with 95% intervals, by the bootstrap over cases."""

import dataclasses
import math
import warnings
from collections.abc import Sequence

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean of `count` cases and its 95% interval. All three are NaN where there was no case."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return "-" if not self.count else f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def estimate(cases: Sequence[float | Sequence[float]]) -> Estimate:
    """The mean over cases; a case is a number, or the numbers of its seeds or pairs, whose mean counts.

    Cases without a finite number are left out. The interval resamples cases, not the numbers within one: those of one
    video depend on each other.
    """
    means = [float(np.mean(values)) for case in cases if (values := _finite(case)).size]
    if not means:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(means) / len(means)
    if len(set(means)) == 1:
        return Estimate(mean, mean, mean, len(means))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interval = stats.bootstrap(
            (np.asarray(means),), np.mean, method="percentile", n_resamples=2000, rng=np.random.default_rng(0)
        ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high), len(means))


def _finite(case: float | Sequence[float]) -> np.ndarray:
    values = np.atleast_1d(np.asarray(case, np.float64)).reshape(-1)
    return values[np.isfinite(values)]
