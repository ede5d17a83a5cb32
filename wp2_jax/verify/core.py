"""What a check of one golden item reports, and how arrays are compared."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of `wp2 verify`.

    `max_abs` is the largest absolute difference; `max_rel` is that difference over the largest magnitude of the
    expected tensor. `ok` is the verdict against `tolerance`; `note` says what went wrong where nothing could be
    compared.
    """

    item: str
    max_abs: float
    max_rel: float
    tolerance: float
    ok: bool
    note: str = ""


def failed(item: str, note: str) -> Result:
    """An item that could not be compared: unknown, missing or malformed."""
    return Result(item, float("nan"), float("nan"), 0.0, False, note)


def compare(item: str, actual, expected, tolerance: float, *, absolute: bool = False) -> Result:
    """Compares two arrays relative to the largest magnitude of `expected` (or absolutely).

    A difference of shape and any non-finite number is a failure.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return failed(item, f"shape {actual.shape}, expected {expected.shape}")
    if not np.isfinite(expected).all():
        return failed(item, "the expected tensor holds non-finite numbers")
    if not np.isfinite(actual).all():
        return failed(item, "the computed tensor holds non-finite numbers")
    max_abs = float(np.abs(actual - expected).max(initial=0.0))
    scale = float(np.abs(expected).max(initial=0.0))
    max_rel = max_abs / scale if scale else max_abs
    return Result(item, max_abs, max_rel, tolerance, (max_abs if absolute else max_rel) <= tolerance)


def compare_rows(item: str, actual, expected, tolerance: float) -> Result:
    """Compares row by row (last axis), each relative to its own largest magnitude; a row of zeros must be exact."""
    whole = compare(item, actual, expected, tolerance)
    if whole.note:
        return whole
    expected = np.asarray(expected, np.float64)
    difference = np.abs(np.asarray(actual, np.float64) - expected).max(axis=-1)
    scale = np.abs(expected).max(axis=-1)
    relative = np.divide(difference, scale, out=np.where(difference > 0, np.inf, 0.0), where=scale > 0)
    worst = float(relative.max(initial=0.0))
    return Result(item, whole.max_abs, worst, tolerance, worst <= tolerance)


def equal(item: str, actual, expected) -> Result:
    """Plain values (counts, sizes, tables of names) that must be the same."""
    if actual == expected:
        return Result(item, 0.0, 0.0, 0.0, True)
    return failed(item, f"{actual}, expected {expected}")


def compare_bfloat16(item: str, actual, expected, share: float = 1e-3) -> Result:
    """bfloat16 values may be one unit in the last place off in at most `share` of the elements."""
    actual = np.asarray(actual, np.float32)
    expected = np.asarray(expected, np.float32)
    if actual.shape != expected.shape:
        return failed(item, f"shape {actual.shape}, expected {expected.shape}")
    difference = np.abs(actual - expected)
    # 8 bits of mantissa: one unit is 2^-7 of the power of two below the magnitude.
    magnitude = np.maximum(np.abs(expected), np.float32(2.0**-126))
    unit = 2.0 ** (np.floor(np.log2(magnitude)) - 7)
    off = float((difference > 0).mean())
    ok = bool((difference <= unit).all()) and off <= share
    scale = float(np.abs(expected).max()) or 1.0
    return Result(
        item, float(difference.max()), float(difference.max()) / scale, share, ok, f"{off:.4%} of elements off"
    )
