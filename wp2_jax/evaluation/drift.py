"""How a long video changes: sharpness, saturation, exposure, contrast, and jumps where chunks meet.

Pictures are uint8 [F, H, W, 3]; every measure compares the last quarter of a video with its first.
"""

import dataclasses

import numpy as np
from scipy import ndimage

_LUMA = np.asarray([0.299, 0.587, 0.114])
# A video whose pictures have lost this much of their contrast shows nothing.
COLLAPSED_CONTRAST = 0.35


@dataclasses.dataclass(frozen=True)
class Curves:
    """A value a picture: sharpness (variance of the Laplacian of the luma in [0, 1]), saturation (largest less
    smallest colour, mean), exposure (mean luma), contrast (spread of the luma)."""

    sharpness: np.ndarray
    saturation: np.ndarray
    exposure: np.ndarray
    contrast: np.ndarray


def curves(pictures: np.ndarray) -> Curves:
    """The measures of every picture, float64 [F]."""
    colours = pictures.astype(np.float64) / 255
    luma = colours @ _LUMA
    edges = ndimage.laplace(luma, mode="nearest", axes=(1, 2))
    return Curves(
        edges.var((1, 2)),
        (colours.max(-1) - colours.min(-1)).mean((1, 2)),
        luma.mean((1, 2)),
        luma.std((1, 2)),
    )


def change(values: np.ndarray) -> float:
    """Mean of the last quarter of a curve over that of the first; 1: unchanged."""
    quarter = max(1, len(values) // 4)
    return float(values[-quarter:].mean() / max(values[:quarter].mean(), 1e-9))


def collapsed(found: Curves) -> bool:
    """Whether the pictures have become nearly plain."""
    return change(found.contrast) < COLLAPSED_CONTRAST


def border_jump(pictures: np.ndarray, chunk: int) -> float:
    """Change from picture to picture where chunks meet, over that within chunks; 1: borders cannot be seen.

    NaN for a video of one chunk, or one that stands still.
    """
    steps = np.abs(np.diff(pictures.astype(np.float64), axis=0)).mean((1, 2, 3))
    # The first chunk has 4 chunk - 3 pictures.
    borders = np.arange(4 * chunk - 4, len(steps), 4 * chunk)
    within = np.delete(steps, borders)
    if not len(borders) or within.mean() == 0:
        return float("nan")
    return float(steps[borders].mean() / within.mean())
