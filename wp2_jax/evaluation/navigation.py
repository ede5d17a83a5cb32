"""Whether a video moves as commanded (spec section 7): rotation error a turn, class of translation a chunk.

Motion is measured a chunk at a time, from the pictures between the ends of the chunk before and of this one. A chunk
counts for what its command keeps the same over all of its latent frames.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

PITCH, YAW, FORWARD, LATERAL = range(4)
AXES = ("pitch", "yaw")
CLASSES = tuple(
    (forward, lateral) for forward in (-1, 0, 1) for lateral in (-1, 0, 1)
)  # index = 3 (forward + 1) + lateral + 1


@dataclasses.dataclass(frozen=True)
class Commanded:
    """What a chunk was told: `rotation` (pitch, yaw) degrees over all of it, `movement` an index of CLASSES.

    None where the command changes within the chunk.
    """

    rotation: tuple[float | None, float | None]
    movement: int | None


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What the pictures of a chunk show: (pitch, yaw) degrees over all of it, and the index of the likeliest class."""

    rotation: tuple[float, float]
    movement: int


def chunks_of(latents: int, chunk: int) -> list[int]:
    """The chunks whose motion is measured: all but the first, which has no chunk before it."""
    return list(range(1, latents // chunk))


def pictures_of(index: int, chunk: int) -> slice:
    """The pictures of chunk `index` and the last one before it: 4 chunk + 1."""
    return slice(4 * (chunk * index - 1), 4 * (chunk * (index + 1) - 1) + 1)


def commanded(rows: np.ndarray) -> Commanded:
    """The command of one chunk from its rows [chunk, 6]."""
    constant = (rows[:, :4] == rows[0, :4]).all(0)
    total = rows[:, :2].sum(0)
    movement = 3 * (int(rows[0, FORWARD]) + 1) + int(rows[0, LATERAL]) + 1
    return Commanded(
        (float(total[0]) if constant[PITCH] else None, float(total[1]) if constant[YAW] else None),
        movement if constant[FORWARD] and constant[LATERAL] else None,
    )


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one video. Lists with an entry a turn (`sign`, `rotation_error`) or a chunk (the others).

    sign: 1 where the turn went the commanded way; rotation_error = |recovered - commanded| / commanded;
    translation: 1 where the right one of the nine classes was seen; axes: share of forward and lateral that is right,
    so that half of a diagonal counts half; walking: as `translation`, of the chunks that are told to move.
    drift: degrees an axis turned in a chunk that was not to turn about it.
    """

    sign: list[float]
    rotation_error: list[float]
    translation: list[float]
    axes: list[float]
    walking: list[float]
    drift: list[float]


def score(told: Sequence[Commanded], seen: Sequence[Recovered]) -> Score:
    """Score the chunks of one video, in order. A turn is a run of chunks that turn about one axis at one speed."""
    result = Score([], [], [], [], [], [])
    for command, motion in zip(told, seen, strict=True):
        if command.movement is not None:
            right = float(command.movement == motion.movement)
            result.translation.append(right)
            wanted, got = CLASSES[command.movement], CLASSES[motion.movement]
            result.axes.append(float(np.mean([a == b for a, b in zip(wanted, got, strict=True)])))
            if any(wanted):
                result.walking.append(right)
    for axis in range(len(AXES)):
        wanted = [command.rotation[axis] for command in told]
        got = [motion.rotation[axis] for motion in seen]
        result.drift.extend(abs(g) for w, g in zip(wanted, got, strict=True) if w == 0)
        for begin, end in _turns(wanted):
            total = float(np.sum(np.asarray(wanted[begin:end], np.float64)))
            found = float(np.sum(got[begin:end]))
            result.sign.append(float(np.sign(found) == np.sign(total)))
            result.rotation_error.append(abs(found - total) / abs(total))
    return result


def _turns(wanted: Sequence[float | None]) -> list[tuple[int, int]]:
    """Begin and end of the runs of equal rotation other than none."""
    runs, begin = [], 0
    for index in range(1, len(wanted) + 1):
        if index == len(wanted) or wanted[index] != wanted[begin]:
            if wanted[begin]:
                runs.append((begin, index))
            begin = index
    return runs
