"""The parsed controls as a table for people, a line a chunk, shown before generation starts."""

import itertools
from collections.abc import Sequence

import numpy as np

from wp2_jax.controls import actions
from wp2_jax.controls.errors import CaptionError
from wp2_jax.controls.geometry import PICTURES_PER_SECOND, chunk_count, picture_range


def timeline(
    rows: np.ndarray,
    chunk_captions: Sequence[str],
    chunk_length: int = 4,
    chunk_names: Sequence[str] | None = None,
    width: int = 100,
) -> str:
    """Action rows [T, 6] and the caption of every chunk -> text, one line a chunk, plus one where a caption starts.

    `chunk_names` are the prompts' names, if they have any; captions are cut to `width` characters. Errors:
    GeometryError `length_not_multiple_of_chunk`; CaptionError `total_mismatch` with both lengths.
    """
    rows = actions.check_rows(rows)
    chunks = chunk_count(len(rows), chunk_length)
    for name, given in (("captions", chunk_captions), ("caption names", chunk_names)):
        if given is not None and len(given) != chunks:
            raise CaptionError(
                "total_mismatch",
                f"{len(given)} {name} for {chunks} chunks ({len(rows)} latent frames of actions); "
                f"give {chunks} {name}, or actions of {len(given) * chunk_length} latent frames.",
            )
    seconds = picture_range(0, len(rows))[1] / PICTURES_PER_SECOND
    perspective = "first person" if rows[0, actions.PERSPECTIVE] else "third person"
    lines = [f"{chunks} chunks, {len(rows)} latent frames, {seconds:.2f} s, {perspective}"]
    before = None
    for chunk in range(chunks):
        first = chunk * chunk_length
        caption = (chunk_names[chunk] if chunk_names else None, chunk_captions[chunk])
        if caption != before:
            name = f"{caption[0]}: " if caption[0] else ""
            text = " ".join(caption[1].split()) or "(empty)"
            lines.append(f"  caption {name}{text if len(text) <= width else text[: width - 3] + '...'}")
            before = caption
        start, end = picture_range(first, chunk_length)
        held = [_describe(row) for row in rows[first : first + chunk_length]]
        if chunk == 0:
            held[0] = "start at rest"
        runs = ((text, len(list(group))) for text, group in itertools.groupby(held))
        doing = ", ".join(f"{text} x{count}" if count > 1 else text for text, count in runs)
        lines.append(
            f"  chunk {chunk:3d}  latents {first}-{first + chunk_length - 1}  pictures {start}-{end - 1}  "
            f"{start / PICTURES_PER_SECOND:.2f}-{end / PICTURES_PER_SECOND:.2f} s  {doing}"
        )
    return "\n".join(lines)


def _describe(row: np.ndarray) -> str:
    """Tokens of a row with the amounts of rotation in degrees, such as `w+right (yaw 3)`."""
    amounts = [f"{name} {row[axis]:g}" for name, axis in (("pitch", actions.PITCH), ("yaw", actions.YAW)) if row[axis]]
    return actions.describe_row(row) + (f" ({', '.join(amounts)})" if amounts else "")
