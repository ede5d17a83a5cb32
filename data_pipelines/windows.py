"""Cutting recorded clips into shorter worlds: a training clip starts a world (spec section 4).

A window of n latent frames from latent frame k of a clip starts with picture 4k alone, so its first row is at rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from data_pipelines import schema
from data_pipelines.tfds_builder import Records
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, picture_count


def each(records: Records) -> Iterator[dict[str, Any]]:
    """The records in order."""
    return (records[index] for index in range(len(records)))


def cut(record: dict[str, Any], first: int, frames: int) -> dict[str, Any]:
    """The world of `frames` latent frames that starts at latent frame `first` of a record, as a record."""
    pictures = slice(PICTURES_PER_LATENT * first, PICTURES_PER_LATENT * first + picture_count(frames))
    actions = record["actions"][first : first + frames].copy()
    actions[0, [0, 1, 2, 3, 5]] = 0.0
    seconds = PICTURES_PER_LATENT * first / float(record["picture_rate"])
    caption = schema.read_caption(record).to_json()
    caption["dynamic_interactions"] = [
        {**event, "start_time": max(event["start_time"] - seconds, 0.0), "end_time": event["end_time"] - seconds}
        for event in caption["dynamic_interactions"]
        if event["end_time"] > seconds
    ]
    return {
        **record,
        "id": f"{record['id']}@{first}",
        "pictures": record["pictures"][pictures],
        "camera_to_world": record["camera_to_world"][pictures],
        "depth": record["depth"][first : first + frames],
        "actions": actions,
        "caption": json.dumps(caption),
    }


class Windows:
    """One split of a dataset as worlds of `frames` latent frames, cut without overlap; like `Records`.

    Raises ValueError where the clips are shorter than a window.
    """

    def __init__(self, records: Records, frames: int):
        self._records, self._frames = records, frames
        self._a_clip = len(records[0]["actions"]) // frames
        if not self._a_clip:
            raise ValueError(f"{records.directory}: clips of {len(records[0]['actions'])} latent frames, not {frames}")
        self._last: tuple[int, dict[str, Any]] | None = None
        self.directory, self.split, self.settings = records.directory, records.split, records.settings

    def __len__(self) -> int:
        return self._a_clip * len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        clip, part = divmod(index, self._a_clip)
        if self._last is None or self._last[0] != clip:
            self._last = (clip, self._records[clip])
        return cut(self._last[1], part * self._frames, self._frames)
