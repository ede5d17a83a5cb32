"""The few parts of the WAD container that recording needs: writing a PWAD, flats, sprites, reading one lump."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_MAX_POST = 128


def pack(lumps: Sequence[tuple[str, bytes]]) -> bytes:
    """A PWAD of (name of at most 8 letters, content) lumps in order."""
    content, directory = b"", b""
    for name, data in lumps:
        directory += struct.pack("<ii8s", 12 + len(content), len(data), name.encode("ascii").ljust(8, b"\0"))
        content += data
    return struct.pack("<4sii", b"PWAD", len(lumps), 12 + len(content)) + content + directory


def read_lump(path: Path, name: str) -> bytes:
    """Content of the first lump called `name`; ValueError if the file is no WAD or has none."""
    data = Path(path).read_bytes()
    magic, count, offset = struct.unpack_from("<4sii", data)
    if magic not in (b"IWAD", b"PWAD"):
        raise ValueError(f"{path}: no WAD file (starts with {magic!r})")
    for index in range(count):
        start, size, lump = struct.unpack_from("<ii8s", data, offset + 16 * index)
        if lump.rstrip(b"\0") == name.encode("ascii"):
            return data[start : start + size]
    raise ValueError(f"{path}: no lump {name}")


def palette(path: Path) -> np.ndarray:
    """The first palette of a game WAD: uint8 [256, 3]."""
    return np.frombuffer(read_lump(path, "PLAYPAL")[:768], np.uint8).reshape(256, 3)


def nearest_index(colours: np.ndarray, rgb: tuple[int, int, int]) -> int:
    """Index of the palette colour [256, 3] nearest to `rgb`."""
    return int(((colours.astype(np.int64) - np.asarray(rgb)) ** 2).sum(1).argmin())


def patch(pixels: np.ndarray) -> bytes:
    """A sprite in the game's picture format from palette indices [h, w], -1 where transparent.

    It stands on its lowest row, centred.
    """
    height, width = pixels.shape
    columns = []
    for x in range(width):
        column, y = b"", 0
        while y < height:
            if pixels[y, x] < 0:
                y += 1
                continue
            end = y
            while end < height and pixels[end, x] >= 0 and end - y < _MAX_POST:
                end += 1
            column += bytes([y, end - y, 0]) + pixels[y:end, x].astype(np.uint8).tobytes() + b"\0"
            y = end
        columns.append(column + b"\xff")
    offsets, offset = [], 8 + 4 * width
    for column in columns:
        offsets.append(offset)
        offset += len(column)
    header = struct.pack("<hhhh", width, height, width // 2, height)
    return header + struct.pack(f"<{width}i", *offsets) + b"".join(columns)
