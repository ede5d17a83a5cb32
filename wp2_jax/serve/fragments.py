"""Chunks as fragmented H.264, each on its own and all of them together one file."""

import io
import struct
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
from av.video.reformatter import Colorspace

from wp2_jax.controls.geometry import PICTURES_PER_SECOND
from wp2_jax.inference.video import enlarge

# Of a fragment as of a file by itself: no index, no list of edits, times that go on where the last fragment ended.
_OPTIONS = {
    "movflags": "empty_moov+default_base_moof+frag_keyframe+frag_discont",
    "use_editlist": "0",
    "avoid_negative_ts": "disabled",
}


class Fragments:
    """Encodes chunks of pictures one after the other: the bytes of all calls in a row are one fragmented mp4.

    Pictures are enlarged by `scale`, each begins with a key frame.
    """

    def __init__(self, scale: int, rate: int = PICTURES_PER_SECOND):
        self._scale, self._rate, self._count = scale, rate, 0

    def encode(self, pictures: np.ndarray) -> bytes:
        """uint8 [F, H, W, 3], F from 1 -> a fragment, with the file's head before the first."""
        data = self._file(enlarge(pictures, self._scale))
        wanted = (b"moof", b"mdat") if self._count else (b"ftyp", b"moov", b"moof", b"mdat")
        self._count += len(pictures)
        return b"".join(box for name, box in boxes(data) if name in wanted)

    def _file(self, pictures: np.ndarray) -> bytes:
        out, tick = io.BytesIO(), Fraction(1, self._rate)
        with av.open(out, "w", format="mp4", options=_OPTIONS) as container:
            options = {"crf": "18", "preset": "superfast", "tune": "zerolatency"}
            stream = container.add_stream("libx264", rate=self._rate, options=options)
            stream.height, stream.width = pictures.shape[1:3]
            stream.pix_fmt = "yuv420p"
            for number, picture in enumerate(pictures):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
                frame.pts, frame.time_base = self._count + number, tick
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return out.getvalue()


def boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The outer boxes of an mp4: (name, whole box)."""
    at = 0
    while at < len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        yield name, data[at : at + size]
        at += size


def mime(height: int, width: int, scale: int) -> str:
    """The media type of what `Fragments` makes of pictures of a size, with its profile and level."""
    data = Fragments(scale).encode(np.zeros((1, height, width, 3), np.uint8))
    at = data.index(b"avcC") + 5
    return f'video/mp4; codecs="avc1.{data[at : at + 3].hex()}"'
