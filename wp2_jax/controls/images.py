"""Pictures: decoding, fitting to the model's size, and the low-resolution twin's (golden README 25, 38).

Fitting is bicubic with coefficient -0.75, half-pixel centres, taps clamped to the border, no antialias and no clamping
afterwards: separable and linear, so two small matrices.
"""

import functools
import io
import os

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from wp2_jax.controls.errors import ImageError
from wp2_jax.controls.geometry import Grid, check_size

FITS = ("stretch", "crop")
LOW_RES_SCALE = Grid().memory_scale
_CUBIC = -0.75


def _cubic_weights(fraction: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.75 at taps -1, 0, 1, 2 for positions `fraction` [n] past tap 0: [n, 4]."""
    distance = np.abs(fraction[:, None] - np.arange(-1, 3))
    a = _CUBIC
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * (distance**3 - 5 * distance**2 + 8 * distance - 4)
    return np.where(distance <= 1, near, far)


@functools.lru_cache(maxsize=64)
def _matrix(size: int, new_size: int) -> np.ndarray:
    """Interpolation matrix float32 [new_size, size] along one axis, computed in float64."""
    # The published implementation has its positions in float32, rounded once for the scale and once for the
    # position. Where size/new_size is no short binary fraction, exact positions would move pixels by 1e-4.
    scale = np.float64(np.float32(size) / np.float32(new_size))
    position = (scale * (np.arange(new_size) + 0.5) - 0.5).astype(np.float32).astype(np.float64)
    base = np.floor(position)
    fraction = position - base
    weights = _cubic_weights(fraction)
    matrix = np.zeros((new_size, size))
    rows = np.arange(new_size)
    for tap in range(weights.shape[1]):
        column = np.clip(base.astype(np.int64) - 1 + tap, 0, size - 1)
        np.add.at(matrix, (rows, column), weights[:, tap])
    matrix = matrix.astype(np.float32)
    matrix.flags.writeable = False
    return matrix


def resize_bicubic(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """[H, W, C] -> float32 [height, width, C], bicubic (may overshoot the range of the input)."""
    # In numpy: pictures come in many sizes, and each would be compiled anew.
    old_height, old_width, channels = picture.shape
    tall = _matrix(old_height, height) @ picture.reshape(old_height, -1).astype(np.float32)
    return _matrix(old_width, width) @ tall.reshape(height, old_width, channels)


def low_resolution(pictures: jax.Array) -> jax.Array:
    """[..., H, W, C] -> float32 [..., H/4, W/4, C]: pictures of the low-resolution twin (spec section 4).

    Bilinear without antialias: at this whole, even factor the mean of the four pixels in the middle of each block.
    """
    height, width, channels = pictures.shape[-3:]
    if height % LOW_RES_SCALE or width % LOW_RES_SCALE:
        raise ImageError("bad_size", f"pictures of {height}x{width} do not divide by {LOW_RES_SCALE}; see check_size.")
    scale, middle = LOW_RES_SCALE, slice(LOW_RES_SCALE // 2 - 1, LOW_RES_SCALE // 2 + 1)
    blocks = pictures.reshape(*pictures.shape[:-3], height // scale, scale, width // scale, scale, channels)
    return blocks[..., middle, :, middle, :].astype(jnp.float32).mean((-4, -2))


def decode_image(source: str | os.PathLike | bytes, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    """Picture file or its bytes -> float32 [h, w, 3] in [0, 1], upright, flattened on `background` (RGB, 0-255).

    EXIF rotation is applied, transparency flattened; CMYK, palette, grey of 8 and 16 bits become RGB; of an
    animation the first frame is taken. Error: ImageError `not_decodable` with the path.
    """
    name = f"picture of {len(source)} bytes" if isinstance(source, bytes) else f"picture {os.fspath(source)}"
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            opened.seek(0)
            opened.load()
            return _to_rgb(ImageOps.exif_transpose(opened), background)
    except UnidentifiedImageError as error:
        raise ImageError("not_decodable", f"{name} is not a picture in a known format.") from error
    except ImageError as error:
        raise ImageError(error.kind, f"{name}: {error}") from error
    # Broken files raise OSError, SyntaxError, struct.error, zlib.error and others, depending on the decoder.
    except Exception as error:
        raise ImageError(
            "not_decodable", f"{name} cannot be decoded ({error}); save it anew as PNG or JPEG."
        ) from error


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.float32)
        return np.repeat(np.clip(grey / 65535, 0, 1)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ImageError("not_decodable", "floating-point pictures have no fixed white; save it as PNG or JPEG")
    if image.has_transparency_data:
        rgba = np.asarray(image.convert("RGBA"), np.float32) / 255
        alpha = rgba[:, :, 3:]
        return rgba[:, :, :3] * alpha + np.asarray(background, np.float32) / 255 * (1 - alpha)
    return np.asarray(image.convert("RGB"), np.float32) / 255


def fit_picture(picture: np.ndarray, height: int, width: int, fit: str = "stretch") -> np.ndarray:
    """float32 [h, w, 3] in any range -> float32 [height, width, 3], bicubic.

    `stretch` changes the aspect ratio (the published behaviour), `crop` first cuts the middle part with the
    new aspect ratio. Error: ImageError `bad_fit`.
    """
    if fit not in FITS:
        raise ImageError("bad_fit", f"fit {fit!r}: give one of {', '.join(FITS)}.")
    if fit == "crop":
        old_height, old_width = picture.shape[:2]
        new_height = min(old_height, max(1, round(old_width * height / width)))
        new_width = min(old_width, max(1, round(old_height * width / height)))
        top, left = (old_height - new_height) // 2, (old_width - new_width) // 2
        picture = picture[top : top + new_height, left : left + new_width]
    return resize_bicubic(picture, height, width)


def load_image(
    source: str | os.PathLike | bytes,
    height: int,
    width: int,
    fit: str = "stretch",
    background: tuple[int, int, int] = (255, 255, 255),
) -> np.ndarray:
    """Picture file or its bytes -> float32 [height, width, 3], nominally in [-1, 1] (bicubic may overshoot).

    Errors: those of `check_size`, `decode_image` and `fit_picture`.
    """
    check_size(height, width)
    picture = decode_image(source, background)
    return fit_picture(picture * 2 - 1, height, width, fit)
