"""Sizes and lengths: the multiple a picture needs, 4n+1 pictures to n+1 latent frames, chunks, memory options.

The one place of the project that turns picture counts into latent counts and back (spec sections 1 and 4).
"""

import dataclasses
import numbers

from wp2_jax.controls.errors import GeometryError

PICTURES_PER_LATENT = 4
PICTURES_PER_SECOND = 16


@dataclasses.dataclass(frozen=True)
class Grid:
    """How the picture size is divided on its way to tokens.

    The low-resolution twin is the picture over `memory_scale`; it passes the same autoencoder and patch
    embedding, so height and width must divide by the product of the three.
    """

    vae_stride: int = 8
    patch: int = 2
    memory_scale: int = 4

    @property
    def multiple(self) -> int:
        """Height and width must be multiples of this many pixels."""
        return self.vae_stride * self.patch * self.memory_scale


def check_size(height: int, width: int, grid: Grid | None = None) -> None:
    """Raise unless height and width (pixels) are positive multiples of the grid.

    Errors: GeometryError of kind `size_not_integer`, `size_not_positive` or `size_not_multiple_of_<m>`.
    """
    grid = grid or Grid()
    m = grid.multiple
    rule = (
        f"height and width must be multiples of {m} = {grid.vae_stride} (autoencoder stride) "
        f"x {grid.patch} (patch) x {grid.memory_scale} (memory scale)"
    )
    given = f"picture size {height!r}x{width!r} (height x width)"
    for value in (height, width):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise GeometryError("size_not_integer", f"{given}: {value!r} is not a whole number; {rule}.")
    if height <= 0 or width <= 0:
        raise GeometryError("size_not_positive", f"{given} is not positive; {rule}.")
    if height % m or width % m:
        options = " or ".join(f"{h}x{w}" for h in nearest_multiples(height, m) for w in nearest_multiples(width, m))
        raise GeometryError(f"size_not_multiple_of_{m}", f"{given} does not fit; {rule}. Nearest: {options}.")


def nearest_multiples(value: int, multiple: int) -> tuple[int, ...]:
    """The positive multiples next to `value`: one if it is a multiple or below the first, else two."""
    below = value // multiple * multiple
    if below == value:
        return (value,)
    return (below, below + multiple) if below > 0 else (multiple,)


def picture_count(latent_frames: int) -> int:
    """Pictures of a clip of `latent_frames` latent frames, 4(T-1)+1. Error: GeometryError `length_not_positive`."""
    if latent_frames < 1:
        raise GeometryError("length_not_positive", f"{latent_frames} latent frames: give at least 1.")
    return PICTURES_PER_LATENT * (latent_frames - 1) + 1


@dataclasses.dataclass(frozen=True)
class LengthFit:
    """Result of `fit_pictures`: what of a clip is used. `note` is empty when nothing is trimmed."""

    latent_frames: int
    pictures: int
    trimmed: int
    note: str


def fit_pictures(pictures: int) -> LengthFit:
    """Largest 4n+1 within `pictures` (the autoencoder takes 4n+1 pictures and gives n+1 latent frames).

    The surplus at the end (0 to 3 pictures) is trimmed; `note` says so. Error: GeometryError
    `length_not_positive` for less than one picture.
    """
    if pictures < 1:
        raise GeometryError("length_not_positive", f"a video of {pictures} pictures: give at least 1 picture.")
    latent_frames = (pictures - 1) // PICTURES_PER_LATENT + 1
    used = picture_count(latent_frames)
    trimmed = pictures - used
    note = ""
    if trimmed:
        note = (
            f"{pictures} pictures is not 4n+1: the last {trimmed} are left out, {used} are used "
            f"({latent_frames} latent frames); the next length is {used + PICTURES_PER_LATENT}"
        )
    return LengthFit(latent_frames, used, trimmed, note)


def picture_range(first_latent: int, latent_frames: int) -> tuple[int, int]:
    """Pictures [first, end) of latent frames first_latent .. first_latent + latent_frames - 1."""
    start = 0 if first_latent == 0 else picture_count(first_latent)
    return start, picture_count(first_latent + latent_frames)


def chunk_pictures(index: int, chunk_length: int = 4) -> int:
    """Pictures of chunk `index`: 4c-3 for the first (13 at c = 4), 4c for later ones (16)."""
    start, end = picture_range(index * chunk_length, chunk_length)
    return end - start


def chunk_count(latent_frames: int, chunk_length: int) -> int:
    """Whole chunks in `latent_frames`. Error: GeometryError `length_not_multiple_of_chunk` (or not positive)."""
    if latent_frames < 1:
        raise GeometryError("length_not_positive", f"{latent_frames} latent frames: give at least {chunk_length}.")
    if latent_frames % chunk_length:
        valid = " or ".join(map(str, nearest_multiples(latent_frames, chunk_length)))
        raise GeometryError(
            "length_not_multiple_of_chunk",
            f"{latent_frames} latent frames do not fill whole chunks of {chunk_length}; "
            f"make the durations add up to {valid}.",
        )
    return latent_frames // chunk_length


def check_chunk_length(chunk_length: int) -> None:
    """Raise unless chunk_length is positive and even. Kinds `chunk_length_not_positive`, `chunk_length_odd`."""
    if chunk_length <= 0:
        raise GeometryError("chunk_length_not_positive", f"chunk_length {chunk_length}: give a positive even number.")
    if chunk_length % 2:
        raise GeometryError(
            "chunk_length_odd",
            f"chunk_length {chunk_length} is odd; the memory halves time, so it must be even: "
            f"{' or '.join(map(str, nearest_multiples(chunk_length, 2)))}.",
        )


def check_memory_options(
    chunk_length: int, sink_size: int, temporal_size: int, latent_frames: int | None = None
) -> None:
    """Raise unless 0 <= sink <= chunk, sink < length (when given) and 1 <= temporal <= chunk.

    All in latent frames (golden README 46). Kinds `sink_negative`, `sink_gt_chunk`, `sink_ge_length`,
    `temporal_out_of_range`, and those of `check_chunk_length`.
    """
    check_chunk_length(chunk_length)
    if sink_size < 0:
        raise GeometryError("sink_negative", f"sink_size {sink_size}: give 0 to {chunk_length} (the chunk length).")
    if sink_size > chunk_length:
        raise GeometryError(
            "sink_gt_chunk",
            f"sink_size {sink_size} is above chunk_length {chunk_length}: give 0 to {chunk_length}.",
        )
    if latent_frames is not None and sink_size >= latent_frames:
        raise GeometryError(
            "sink_ge_length",
            f"sink_size {sink_size} is not below the length of {latent_frames} latent frames: "
            f"give at most {min(chunk_length, latent_frames - 1)}, or make the world longer.",
        )
    if not 1 <= temporal_size <= chunk_length:
        raise GeometryError(
            "temporal_out_of_range",
            f"temporal_size {temporal_size}: give 1 to {chunk_length} (the chunk length).",
        )
