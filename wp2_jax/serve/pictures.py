"""Start pictures: of the gallery, and uploads, which are looked at before they are decoded."""

import base64
import dataclasses
import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

from wp2_jax.controls.captions import Caption, parse_caption
from wp2_jax.controls.errors import CaptionError, ImageError
from wp2_jax.controls.images import load_image
from wp2_jax.controls.inputs import InputOptions, load_inputs

MAX_BYTES = 8 * 2**20
MAX_PIXELS = 16 * 2**20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_THUMBNAIL = 128


def kind_of(data: bytes) -> str:
    """The format of a picture file, in small letters, after a check of what it would take to decode it.

    ImageError `too_large` or `not_decodable`, with what is allowed.
    """
    if len(data) > MAX_BYTES:
        raise ImageError(
            "too_large", f"picture of {len(data)} bytes: at most {MAX_BYTES} are taken; save it smaller or as JPEG"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            (width, height), kind = opened.size, opened.format
    except Image.DecompressionBombError as error:
        raise ImageError(
            "too_large", f"{error}; at most {MAX_PIXELS} pixels are taken: make the picture smaller"
        ) from error
    # Headers of broken files raise what the decoders raise, see `images.decode_image`.
    except Exception as error:
        raise ImageError(
            "not_decodable", f"the {len(data)} bytes are no picture that is taken: give one of {', '.join(FORMATS)}"
        ) from error
    if width * height > MAX_PIXELS:
        raise ImageError(
            "too_large", f"picture of {width}x{height} pixels: at most {MAX_PIXELS} pixels are taken; make it smaller"
        )
    return (kind or FORMATS[0]).lower()


def fitted(data: bytes, height: int, width: int, fit: str) -> np.ndarray:
    """An uploaded file -> float32 [height, width, 3], about [-1, 1]. ImageError: `kind_of` and `load_image`."""
    kind_of(data)
    return load_image(data, height, width, fit)


@dataclasses.dataclass(frozen=True)
class Place:
    """A starting point of the gallery: its picture's file, caption, and sentences of events to try."""

    name: str
    picture: bytes
    perspective: str
    caption: Caption | str
    events: tuple[str, ...]

    def thumbnail(self) -> str:
        """A data URL of the picture, small."""
        with Image.open(io.BytesIO(self.picture)) as opened:
            small = opened.convert("RGB")
        small.thumbnail((_THUMBNAIL, _THUMBNAIL))
        out = io.BytesIO()
        small.save(out, format="PNG")
        return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def read_gallery(path: str | os.PathLike[str], options: InputOptions) -> tuple[Place, ...]:
    """The worlds of an input file as starting points. Errors: InputFileError, and ImageError of a picture."""
    places = []
    for item in load_inputs(path, options):
        picture = Path(item.image_path).read_bytes()
        kind_of(picture)
        captions = [structured(text) for text in item.prompts.values()]
        events = [caption.event for caption in captions if isinstance(caption, Caption) and caption.event]
        name = item.image_path.stem.replace("_", " ")
        places.append(Place(name, picture, item.perspective, captions[0], tuple(dict.fromkeys(events))))
    return tuple(places)


def structured(text: str) -> Caption | str:
    """A caption's three fields where it has them, else the text without blanks at its ends."""
    try:
        return parse_caption(text)
    except CaptionError:
        return text.strip()
