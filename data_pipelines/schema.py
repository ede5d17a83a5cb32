"""The record: one clip of any source, versioned, as a TFDS feature dictionary.

A record is a plain dictionary with the fields of `FIELDS`. A clip of T latent frames has F = 4 (T - 1) + 1
pictures: latent frame 0 covers picture 0, latent frame t covers pictures 4t-3 .. 4t. Row t of `actions` turns
the camera by pose(picture 4t) relative to pose(picture 4(t-1)).

Camera axes are right, down, forward (the columns of the rotation in `camera_to_world`); world axes are right
handed with z up, in metres; `depth` is along the forward axis in millimetres (of ViZDoom: the level one, see doom.py).
Third-person poses are those of the camera, not of the character.

`VERSION` changes in its last number when a field is documented better, in the middle one when a field is
added, in the first when a field changes its meaning; a reader accepts its own first number only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from wp2_jax.controls.captions import ClipCaption, parse_clip_caption
from wp2_jax.controls.errors import ControlError
from wp2_jax.controls.geometry import picture_count
from wp2_jax.controls.poses import rows_from_poses

VERSION = "1.0.0"
INTERVAL_SECONDS = 5.0
KINDS = ("navigation", "loop_closure", "event", "footage")
PERSPECTIVES = ("tps", "fps")  # index = value of the perspective entry of an action row


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of the record. `shape` uses letters: F pictures, T latent frames, H, W picture size."""

    dtype: str
    shape: tuple[str | int, ...]
    about: str


FIELDS: dict[str, Field] = {
    "id": Field("str", (), "unique name of the clip"),
    "source": Field("str", (), "where it comes from, such as vizdoom"),
    "world": Field("str", (), "name of the place; the splits never share one"),
    "kind": Field("str", (), f"one of {', '.join(KINDS)}"),
    "seed": Field("int64", (), "seed the clip was made from, -1 where there is none"),
    "perspective": Field("str", (), "tps or fps, as in the first action row"),
    "caption": Field(
        "str", (), "JSON: scene, character, UI, dynamic_interactions (wp2_jax.controls.captions.ClipCaption)"
    ),
    "picture_rate": Field("float32", (), "pictures a second"),
    "pictures": Field("uint8", ("F", "H", "W", 3), "RGB"),
    "actions": Field("float32", ("T", 6), "pitch deg, yaw deg, forward, lateral, perspective, jump a latent frame"),
    "camera_to_world": Field("float32", ("F", 4, 4), "pose of every picture, metres"),
    "intrinsics": Field("float32", (4,), "fx, fy, cx, cy in pixels of the stored pictures"),
    "depth": Field("uint16", ("T", "H", "W"), "millimetres at picture 4t, 0 where unknown"),
}


class RecordError(ValueError):
    """A record that breaks the schema; the message names the record, every field at fault and the reason."""


def features(height: int, width: int):
    """The record as `tfds.features.FeaturesDict` for pictures of height x width."""
    import tensorflow_datasets as tfds

    sizes = {"F": None, "T": None, "H": height, "W": width}
    table: dict[str, Any] = {}
    for name, field in FIELDS.items():
        if field.dtype == "str":
            table[name] = tfds.features.Text()
        elif not field.shape:
            table[name] = np.dtype(field.dtype)
        else:
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in field.shape)
            # Raw bytes: the default writes one varint an element, six times slower to read back.
            table[name] = tfds.features.Tensor(
                shape=shape, dtype=np.dtype(field.dtype), encoding=tfds.features.Encoding.BYTES
            )
    return tfds.features.FeaturesDict(table)


def check_version(version: str) -> None:
    """Raise ValueError unless this code can read records of `version`."""
    if version.split(".")[0] != VERSION.split(".")[0]:
        raise ValueError(f"record schema version {version} cannot be read by {VERSION}: record the data again")


def faults(record: Mapping[str, Any]) -> list[str]:
    """Every reason why `record` breaks the schema; empty for a good one. Nothing is raised."""
    missing = [name for name in FIELDS if name not in record]
    extra = [name for name in record if name not in FIELDS]
    if missing or extra:
        return [f"missing fields {missing}"] * bool(missing) + [f"unknown fields {extra}"] * bool(extra)
    reasons = _shape_faults(record)
    if reasons:
        return reasons
    reasons += _action_faults(np.asarray(record["actions"]), str(record["perspective"]))
    return [*reasons, *([] if reasons else _pose_faults(record)), *_caption_faults(record)]


def validate(record: Mapping[str, Any]) -> None:
    """Raise RecordError with all faults of `record`."""
    reasons = faults(record)
    if reasons:
        raise RecordError(f"record {record.get('id', '(no id)')}: " + "; ".join(reasons))


def _shape_faults(record: Mapping[str, Any]) -> list[str]:
    reasons = []
    sizes: dict[str, int] = {}
    for name, field in FIELDS.items():
        value = record[name]
        if field.dtype == "str":
            if not isinstance(value, str):
                reasons.append(f"{name}: text expected, got {type(value).__name__}")
            continue
        value = np.asarray(value)
        if value.dtype != np.dtype(field.dtype):
            reasons.append(f"{name}: dtype {field.dtype} expected, got {value.dtype}")
        if value.ndim != len(field.shape):
            reasons.append(f"{name}: shape {field.shape} expected, got {value.shape}")
            continue
        for letter, size in zip(field.shape, value.shape, strict=True):
            expected = sizes.setdefault(letter, size) if isinstance(letter, str) else letter
            if size != expected:
                reasons.append(f"{name}: {letter} is {size}, {expected} expected")
    if reasons:
        return reasons
    if sizes["T"] < 1 or sizes["F"] != picture_count(sizes["T"]):
        reasons.append(f"pictures: {sizes['F']} pictures and {sizes['T']} action rows; 4(T-1)+1 pictures expected")
    if record["kind"] not in KINDS:
        reasons.append(f"kind: {record['kind']!r} is none of {KINDS}")
    if record["perspective"] not in PERSPECTIVES:
        reasons.append(f"perspective: {record['perspective']!r} is none of {PERSPECTIVES}")
    if not float(record["picture_rate"]) > 0:
        reasons.append(f"picture_rate: {record['picture_rate']} is not positive")
    return reasons


def _action_faults(actions: np.ndarray, perspective: str) -> list[str]:
    if not np.isfinite(actions).all():
        return [f"actions: row {int(np.argmin(np.isfinite(actions).all(1)))} holds NaN or infinity"]
    reasons = []
    allowed = (
        (2, (-1, 0, 1), "forward"),
        (3, (-1, 0, 1), "lateral"),
        (4, (0, 1), "perspective"),
        (5, (0, 1), "jump"),
    )
    for column, values, name in allowed:
        wrong = ~np.isin(actions[:, column], values)
        if wrong.any():
            row = int(np.argmax(wrong))
            reasons.append(f"actions: {name} of row {row} is {actions[row, column]}, one of {values} expected")
    if actions[0, [0, 1, 2, 3, 5]].any():
        reasons.append("actions: the first row is not at rest")
    if perspective in PERSPECTIVES and actions[0, 4] != PERSPECTIVES.index(perspective):
        reasons.append(f"actions: perspective of row 0 is {actions[0, 4]}, but the record says {perspective}")
    return reasons


def _pose_faults(record: Mapping[str, Any], tolerance: float = 0.1) -> list[str]:
    actions, focal = np.asarray(record["actions"]), np.asarray(record["intrinsics"])[:2]
    reasons = []
    if not (np.isfinite(record["intrinsics"]).all() and (focal > 0).all()):
        reasons.append(f"intrinsics: {record['intrinsics']} holds no positive focal lengths")
    try:
        turned = rows_from_poses(record["camera_to_world"], record["perspective"], np.inf, np.asarray((0, 0, 1)))
    except ControlError as error:
        return [*reasons, f"camera_to_world: {error}"]
    off = np.abs(turned[:, :2] - actions[:, :2]).max(1)
    if off.max() > tolerance:
        row = int(off.argmax())
        reasons.append(
            f"actions: row {row} says pitch, yaw {actions[row, :2].tolist()}, its poses turned by "
            f"{np.round(turned[row, :2], 3).tolist()} degrees"
        )
    return reasons


def _caption_faults(record: Mapping[str, Any]) -> list[str]:
    try:
        caption = read_caption(record)
    except (ControlError, json.JSONDecodeError) as error:
        return [f"caption: {error}"]
    ends = [interval.end_time for interval in caption.dynamic_interactions]
    seconds = (len(record["pictures"]) - 1) / float(record["picture_rate"])
    if ends and max(ends) < seconds:
        return [f"caption: the intervals end at {max(ends)} s, before the clip ({seconds} s)"]
    return []


def read_caption(record: Mapping[str, Any]) -> ClipCaption:
    """The caption of a record; CaptionError if a field is missing or wrong (in third person: no character)."""
    return parse_clip_caption(json.loads(record["caption"]), record["perspective"])
