"""What an evaluation found, in memory and, part by part, on disk: one that was stopped goes on where it was."""

import dataclasses
import json
import os
import zipfile
from pathlib import Path

import numpy as np

from wp2_jax.evaluation.statistics import Estimate, estimate

RECORDED = "recorded"
"""Name of the column of the recordings themselves."""


@dataclasses.dataclass
class Results:
    """values[measure][name][column] with a column a checkpoint and RECORDED. To look at, by a name that begins with the
    measure and a colon: sheets (a picture each) and videos, uint8. Seconds by measure."""

    values: dict[str, dict[str, dict[str, Estimate]]] = dataclasses.field(default_factory=dict)
    sheets: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    videos: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, measure: str, column: str, numbers: dict[str, list]) -> None:
        """One column of a measure: name -> numbers of its cases."""
        for name, values in numbers.items():
            self.values.setdefault(measure, {}).setdefault(name, {})[column] = estimate(values)

    def merge(self, part: "Results") -> None:
        """Take over what `part` found."""
        for measure, names in part.values.items():
            for name, columns in names.items():
                self.values.setdefault(measure, {}).setdefault(name, {}).update(columns)
        self.sheets.update(part.sheets)
        self.videos.update(part.videos)
        for measure, seconds in part.seconds.items():
            self.seconds[measure] = self.seconds.get(measure, 0.0) + seconds


def save(part: Results, path: Path) -> None:
    """One file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"values": dataclasses.asdict(part)["values"], "seconds": part.seconds}
    arrays = {f"{kind}/{name}": found for kind in ("sheets", "videos") for name, found in getattr(part, kind).items()}
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        np.savez_compressed(file, document=np.asarray(json.dumps(document)), **arrays)
    os.replace(temporary, path)


def load(path: Path) -> Results | None:
    """What `save` wrote; None where there is no such file, or one that cannot be read (it is then measured again)."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as stored:
            document = json.loads(str(stored["document"]))
            found = {name: stored[name] for name in stored.files if name != "document"}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    values = {
        measure: {
            name: {column: Estimate(**value) for column, value in columns.items()} for name, columns in names.items()
        }
        for measure, names in document["values"].items()
    }
    kept: dict[str, dict[str, np.ndarray]] = {"sheets": {}, "videos": {}}
    for name, array in found.items():
        kind, _, title = name.partition("/")
        kept[kind][title] = array
    return Results(values, **kept, seconds=document["seconds"])
