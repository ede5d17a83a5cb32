"""Samples for the networks that measure generated videos: what happens in recorded pictures, and the pictures."""

from __future__ import annotations

from typing import Any

import numpy as np

from data_pipelines import events, schema
from data_pipelines.loader import BadRecordError
from data_pipelines.tfds_builder import Records
from wp2_jax.controls.errors import ControlError
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, picture_range

# Of the pictures of a chunk every second one is shown: turns stay small from one to the next.
EVERY = 2
CHANGING = -1
"""Number of the class of movement of a chunk whose movement changes."""


def motion_pictures(chunk: int) -> int:
    """Pictures shown for the motion of a chunk."""
    return PICTURES_PER_LATENT * chunk // EVERY + 1


class Motion:
    """Samples of `windows` chunks of a clip, from any latent frame on.

    pictures uint8 [windows, P, H, W, 3] with P = motion_pictures(chunk); rotation float32 [windows, 2], degrees of
    pitch and yaw over the chunk; movement int32 [windows], 3 (forward + 1) + lateral + 1, CHANGING where it changes.
    """

    def __init__(self, records: Records, chunk: int, windows: int = 4):
        self._records, self._chunk, self._windows = records, chunk, windows

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        return self._records[index]["id"]

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        record = self._records[index]
        rows, chunk = record["actions"], self._chunk
        if len(rows) <= chunk:
            raise BadRecordError(f"the clip has {len(rows)} latent frames, more than {chunk} are needed")
        pictures, rotation, movement = [], [], []
        for first in rng.integers(1, len(rows) - chunk + 1, self._windows):
            begin = PICTURES_PER_LATENT * (int(first) - 1)
            pictures.append(record["pictures"][begin : begin + PICTURES_PER_LATENT * chunk + 1 : EVERY])
            part = rows[first : first + chunk]
            rotation.append(part[:, :2].sum(0))
            still = (part[:, 2:4] == part[0, 2:4]).all()
            movement.append(3 * (int(part[0, 2]) + 1) + int(part[0, 3]) + 1 if still else CHANGING)
        return {
            "pictures": np.stack(pictures),
            "rotation": np.stack(rotation).astype(np.float32),
            "movement": np.asarray(movement, np.int32),
            "key": record["id"],
        }


class Changes:
    """Samples of `windows` moments of a clip, half of them at the beginning of an event where the clip has one.

    pictures uint8 [windows, P, H, W, 3], those at `offsets` from the event's first picture, within the clip; kind int32
    [windows], an index of events.KINDS, 0 where no event begins.
    """

    def __init__(self, records: Records, offsets: tuple[int, ...], windows: int = 2):
        self._records, self._offsets, self._windows = records, np.asarray(offsets), windows

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        return self._records[index]["id"]

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        record = self._records[index]
        begins = event_begins(record)
        count = len(record["pictures"])
        quiet = [
            picture
            for picture in range(1, count)
            if all(picture + self._offsets[-1] < begin or begin + self._offsets[-1] < picture for begin in begins)
        ]
        pictures, kinds = [], []
        for window in range(self._windows):
            if begins and (window % 2 == 0 or not quiet):
                begin = list(begins)[int(rng.integers(len(begins)))]
                kinds.append(begins[begin])
            else:
                begin = quiet[int(rng.integers(len(quiet)))]
                kinds.append(0)
            pictures.append(record["pictures"][np.clip(begin + self._offsets, 0, count - 1)])
        return {"pictures": np.stack(pictures), "kind": np.asarray(kinds, np.int32), "key": record["id"]}


def event_begins(record: dict[str, Any]) -> dict[int, int]:
    """First picture of each event of a record -> the number of its kind. BadRecordError for an unknown event."""
    latents = len(record["actions"])
    try:
        caption = schema.read_caption(record)
        found = {}
        for interval in caption.dynamic_interactions:
            kind = events.KINDS.index(events.kind_of(interval.event))
            row = max(events.FIRST_ROW, round(interval.start_time * float(record["picture_rate"])) // 4)
            if kind and row < latents:
                found[picture_range(row, 1)[0]] = kind
        return found
    except (ControlError, ValueError) as error:
        raise BadRecordError(f"events: {error}") from error
