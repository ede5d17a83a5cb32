"""What people look at: mp4 files and contact sheets, each there whole or not at all."""

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
import av.container
import numpy as np
from av.video.reformatter import Colorspace
from PIL import Image, ImageDraw, ImageFont

from wp2_jax.controls.geometry import PICTURES_PER_SECOND

# Smaller pictures are enlarged for viewing.
_VIEW_SIDE = 256
_MARGIN, _FONT_SIZE = 8, 13
_BT709 = 1  # of ITU-T H.273, for primaries, transfer and matrix alike


def to_uint8(pictures: np.ndarray) -> np.ndarray:
    """Float pictures in [-1, 1] -> uint8, to the nearest of 256 equal steps; what is beyond is clamped."""
    return np.clip(np.rint((np.asarray(pictures, np.float32) + 1) * 127.5), 0, 255).astype(np.uint8)


def view_scale(height: int, width: int) -> int:
    """Whole factor by which pictures are enlarged for viewing: the shorter side gets 256 pixels or a little less."""
    return max(1, _VIEW_SIDE // min(height, width))


def enlarge(pictures: np.ndarray, scale: int) -> np.ndarray:
    """uint8 [..., H, W, 3] -> [..., scale H, scale W, 3], each pixel repeated."""
    return pictures.repeat(scale, axis=-3).repeat(scale, axis=-2)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends and goes when it fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Mp4:
    """An open H.264 file; make it with `mp4`."""

    def __init__(self, container: av.container.OutputContainer, height: int, width: int, scale: int, rate: int):
        self._container, self._size, self._scale, self._count = container, (height, width), scale, 0
        self._stream = container.add_stream("libx264", rate=rate, options={"crf": "16", "preset": "medium"})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width * scale, height * scale, "yuv420p"
        self._tick = Fraction(1, rate)  # the stream's own time base changes when the header is written
        codec = self._stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = _BT709

    def write(self, pictures: np.ndarray) -> None:
        """Append pictures [F, H, W, 3], uint8 or float in [-1, 1]."""
        if pictures.ndim != 4 or pictures.shape[1:] != (*self._size, 3):
            raise ValueError(f"pictures of shape {pictures.shape}: this video takes [F, {self._size}, 3]")
        pictures = pictures if pictures.dtype == np.uint8 else to_uint8(pictures)
        for picture in enlarge(pictures, self._scale):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
            frame.pts, frame.time_base = self._count, self._tick
            self._container.mux(self._stream.encode(frame))
            self._count += 1

    def finish(self) -> None:
        self._container.mux(self._stream.encode())


@contextlib.contextmanager
def mp4(
    path: str | os.PathLike[str], height: int, width: int, *, scale: int | None = None, rate: int = PICTURES_PER_SECOND
) -> Iterator[Mp4]:
    """Write an mp4 (H.264, yuv420p) of pictures `height` x `width`, enlarged by `scale` (default: `view_scale`).

    The file appears when the block ends; a block that fails leaves what was there before.

    Raises:
      ValueError: for a size that yuv420p cannot hold (odd after scaling).
    """
    scale = view_scale(height, width) if scale is None else scale
    if height * scale % 2 or width * scale % 2:
        raise ValueError(f"a video of {height}x{width} scaled by {scale} has an odd side: yuv420p needs even ones")
    with (
        replacing(path) as partial,
        av.open(str(partial), "w", format="mp4", options={"movflags": "faststart"}) as container,
    ):
        video = Mp4(container, height, width, scale, rate)
        yield video
        video.finish()


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One picture of a contact sheet, uint8 [H, W, 3], and the lines of text under it."""

    picture: np.ndarray
    lines: tuple[str, ...]


def contact_sheet(path: str | os.PathLike[str], title: str, cells: Sequence[Cell], columns: int = 5) -> None:
    """Write a PNG: a grid of pictures of one size, enlarged like a video, each over its text, wrapped.

    Raises:
      ValueError: if there are no cells.
    """
    if not cells:
        raise ValueError("a contact sheet needs at least one picture")
    font = ImageFont.load_default(_FONT_SIZE)
    height, width = cells[0].picture.shape[:2]
    scale = view_scale(height, width)
    height, width = height * scale, width * scale
    texts = [[part for line in cell.lines for part in _wrap(line, width, font)] for cell in cells]
    columns = min(columns, len(cells))
    rows = [range(start, min(start + columns, len(cells))) for start in range(0, len(cells), columns)]
    line_height = _FONT_SIZE + 4
    row_heights = [height + line_height * max(len(texts[i]) for i in row) + 2 * _MARGIN for row in rows]
    sheet_width = columns * (width + _MARGIN) + _MARGIN
    head = _wrap(title, sheet_width - 2 * _MARGIN, font)
    top = line_height * len(head) + 2 * _MARGIN
    sheet = Image.new("RGB", (sheet_width, top + sum(row_heights)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(head):
        draw.text((_MARGIN, _MARGIN + number * line_height), line, fill="black", font=font)
    for row, row_height in zip(rows, row_heights, strict=True):
        for column, index in enumerate(row):
            left = _MARGIN + column * (width + _MARGIN)
            sheet.paste(Image.fromarray(enlarge(cells[index].picture, scale)), (left, top))
            for number, line in enumerate(texts[index]):
                draw.text((left, top + height + 2 + number * line_height), line, fill="black", font=font)
        top += row_height
    with replacing(path) as partial:
        sheet.save(partial, format="PNG")


def _wrap(text: str, width: int, font) -> list[str]:
    """Lines of `text` no wider than `width` pixels; a word that is wider has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
