"""Videos and contact sheets: rounding, frame counts, colours, whole files or none."""

from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from wp2_jax.inference import video


def read(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return stream, pictures


def test_rounding():
    values = np.arange(256)
    assert (video.to_uint8(values / 127.5 - 1) == values).all()
    # Nearest: half a step below 1/255 of the range goes down, above it up; outside is clamped.
    inputs = np.asarray([-1.5, -1.0, -1 + 0.9 / 255, -1 + 1.1 / 255, 0.0, 1.0, 1.2], np.float32)
    assert video.to_uint8(inputs).tolist() == [0, 0, 0, 1, 128, 255, 255]
    assert video.to_uint8(inputs).dtype == np.uint8


@pytest.mark.parametrize(
    ("height", "width", "scale"), [(64, 64, 4), (64, 128, 4), (96, 96, 2), (256, 256, 1), (448, 832, 1)]
)
def test_view_scale(height, width, scale):
    assert video.view_scale(height, width) == scale


def test_enlarging_repeats_pixels():
    pictures = np.arange(2 * 2 * 3 * 3, dtype=np.uint8).reshape(2, 2, 3, 3)
    large = video.enlarge(pictures, 4)
    assert large.shape == (2, 8, 12, 3)
    for y in range(8):
        for x in range(12):
            assert (large[:, y, x] == pictures[:, y // 4, x // 4]).all()


def test_mp4(tmp_path):
    colours = np.asarray([[230, 30, 30], [30, 200, 40], [40, 60, 220]], np.uint8)
    path = tmp_path / "new" / "v.mp4"
    with video.mp4(path, 64, 96) as file:
        for count, colour in zip((13, 16, 16), colours, strict=True):
            pictures = np.broadcast_to(colour, (count, 64, 96, 3))
            # uint8 and float pictures are the same to a video.
            file.write(pictures if count == 13 else pictures / np.float32(127.5) - 1)
        assert not path.exists()
    stream, pictures = read(path)
    assert len(pictures) == 13 + 2 * 16
    assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
    assert stream.average_rate == 16
    assert stream.duration and stream.time_base and stream.duration * stream.time_base == Fraction(45, 16)
    for index, colour in ((0, 0), (12, 0), (13, 1), (28, 1), (29, 2), (44, 2)):
        assert pictures[index].shape == (256, 384, 3)
        off = pictures[index].astype(int) - colours[colour]
        # Colour planes are halved and the file is compressed: a few steps, not a wrong matrix (tens of steps).
        assert np.abs(off).max() <= 6, (index, off.reshape(-1, 3).mean(0))


def test_mp4_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "v.mp4"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError, match="stopped"), video.mp4(path, 64, 64) as file:
        file.write(np.zeros((13, 64, 64, 3), np.float32))
        raise RuntimeError("stopped")
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["v.mp4"]


def test_mp4_errors(tmp_path):
    with pytest.raises(ValueError, match="63x64 scaled by 1"), video.mp4(tmp_path / "v.mp4", 63, 64, scale=1):
        pass
    with pytest.raises(ValueError, match=r"\(13, 32, 64, 3\)"), video.mp4(tmp_path / "v.mp4", 64, 64) as file:
        file.write(np.zeros((13, 32, 64, 3), np.float32))
    assert not list(tmp_path.iterdir())


def test_contact_sheet(tmp_path):
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (3, 64, 64, 3), np.uint8)
    lines = [("start",), ("chunk 0", "w x4"), ("chunk 1", "thick white fog fills " * 8)]
    cells = [video.Cell(picture, text) for picture, text in zip(pictures, lines, strict=True)]
    path = tmp_path / "sheet.png"
    video.contact_sheet(path, "a world", cells, columns=2)
    sheet = np.asarray(Image.open(path))
    found = []
    for picture in pictures:
        large = video.enlarge(picture, 4)
        # Two corners find it; then all of it must be there.
        places = np.argwhere(
            (sheet[:-255, :-255] == large[0, 0]).all(-1) & (sheet[255:, 255:] == large[-1, -1]).all(-1)
        )
        hits = [(y, x) for y, x in places if (sheet[y : y + 256, x : x + 256] == large).all()]
        assert len(hits) == 1
        found += hits
    (y0, x0), (y1, x1), (y2, x2) = found
    assert y0 == y1 < y2 and x0 == x2 < x1
    # Text under each picture: one line, two, and the long one wrapped to more.
    ink = [np.any(sheet[y + 257 :, x : x + 256].max(-1) < 128, axis=1) for y, x in found]
    lines_of_ink = [[block.any() for block in np.split(rows[:85], 5)] for rows in ink]
    assert lines_of_ink[0][0] and lines_of_ink[1][:2] == [True, True] and lines_of_ink[2][:4] == [True] * 4
    assert np.any(sheet[: y0 - 1].max(-1) < 128)


def test_contact_sheet_needs_pictures(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        video.contact_sheet(tmp_path / "sheet.png", "nothing", [])
    assert not list(tmp_path.iterdir())
