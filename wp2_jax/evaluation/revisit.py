"""RevisitBench: a walk out and back along the same way; what is seen again shall look the same (spec section 7).

Latent 0 rests, n random rows follow, then their inverses in reverse order: latents k and 2n - k are at one pose.
"""

import dataclasses

import numpy as np
from scipy import ndimage

from wp2_jax.evaluation import quality

# Nearer than this share of its depth a point counts as the same surface, seen from two places.
_SAME_DEPTH = 0.1
_NEAREST = 0.05  # metres


def pairs(latents: int) -> list[tuple[int, int]]:
    """Latent frames (k, 2n - k) of a walk of 2n + 1 latent frames; one more is a rest at its end. The turning point is
    not compared with itself, nor are its neighbours, which lie within a chunk of it."""
    n = (latents - 1) // 2
    return [(k, 2 * n - k) for k in range(max(0, n - 3))]


def picture_pairs(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pictures [N, H, W, 3] on the way out and those on the way back that face them; video of 4 (T - 1) + 1."""
    found = pairs((len(pictures) - 1) // 4 + 1)
    first, second = (np.asarray([4 * pair[side] for pair in found], int) for side in (0, 1))
    return pictures[first], pictures[second]


@dataclasses.dataclass(frozen=True)
class Score:
    """Of each pair of one video: PSNR (dB), SSIM, LPIPS, each [N]."""

    psnr: np.ndarray
    ssim: np.ndarray
    lpips: np.ndarray


def score(pictures: np.ndarray) -> Score:
    """Score a video uint8 [F, H, W, 3] of a walk out and back."""
    out, back = picture_pairs(pictures)
    return Score(quality.psnr(out, back), quality.ssim(out, back), quality.lpips(out, back))


@dataclasses.dataclass(frozen=True)
class View:
    """A camera of a recording: depth [H, W] in metres along the level forward axis (0: unknown), camera_to_world
    [4, 4], intrinsics fx, fy, cx, cy. `sheared`: pitch moves the centre of a level camera, as the game engine draws."""

    depth: np.ndarray
    camera_to_world: np.ndarray
    intrinsics: np.ndarray
    sheared: bool = True


def correspondence(source: View, target: View) -> tuple[np.ndarray, np.ndarray]:
    """Where the pixels of `target` lie in `source`: coordinates (row, column) float64 [2, H, W], and bool [H, W],
    whether the same surface is seen there."""
    height, width = target.depth.shape
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float64)
    rotation, centre, (fx, fy, cx, cy) = _level(target)
    depth = target.depth.astype(np.float64)
    rays = np.stack([(columns + 0.5 - cx) / fx, (rows + 0.5 - cy) / fy, np.ones_like(rows)], -1)
    points = (rays * depth[..., None]) @ rotation.T + centre
    rotation, centre, (fx, fy, cx, cy) = _level(source)
    local = (points - centre) @ rotation
    ahead = np.maximum(local[..., 2], _NEAREST)
    places = np.stack([local[..., 1] / ahead * fy + cy - 0.5, local[..., 0] / ahead * fx + cx - 0.5])
    inside = (places >= 0).all(0) & (places[0] <= height - 1) & (places[1] <= width - 1)
    nearest = np.clip(np.rint(places).astype(int), 0, np.asarray([height - 1, width - 1])[:, None, None])
    there = source.depth[nearest[0], nearest[1]].astype(np.float64)
    same = np.abs(there - local[..., 2]) < _SAME_DEPTH * local[..., 2]
    return places, inside & (depth > 0) & (there > 0) & (local[..., 2] > _NEAREST) & same


def consistency(picture: np.ndarray, other: np.ndarray, source: View, target: View) -> tuple[float, float]:
    """(PSNR in dB over the pixels of `other`, seen from `target`, that `picture`, seen from `source`, shows too;
    their share). NaN where fewer than 1% are seen in both."""
    places, visible = correspondence(source, target)
    share = float(visible.mean())
    if share < 0.01:
        return float("nan"), share
    warped = np.stack(
        [
            ndimage.map_coordinates(picture[..., c].astype(np.float64), places, order=1, mode="nearest")
            for c in range(3)
        ],
        -1,
    )
    error = np.square(warped - other.astype(np.float64))[visible].mean()
    return float(min(10 * np.log10(255.0**2 / max(error, 1e-12)), quality.EQUAL_PSNR)), share


def _level(view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotation [3, 3], centre [3] and intrinsics with which depth is along the forward axis."""
    rotation = view.camera_to_world[:3, :3].astype(np.float64)
    fx, fy, cx, cy = view.intrinsics.astype(np.float64)
    if view.sheared:
        forward = rotation[:, 2]
        level = np.asarray([forward[0], forward[1], 0.0]) / np.hypot(forward[0], forward[1])
        cy = cy + fy * forward[2] / np.hypot(forward[0], forward[1])
        rotation = np.stack([rotation[:, 0], np.asarray([0.0, 0.0, -1.0]), level], 1)
    return rotation, view.camera_to_world[:3, 3].astype(np.float64), np.asarray([fx, fy, cx, cy])
