"""Records as a TFDS dataset in ArrayRecord, and back.

A dataset is written under a temporary name and renamed when it is whole, so a folder that looks whole is whole.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from data_pipelines import schema

Splits = Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]]
# Of a folder whose writing has not ended.
INCOMPLETE = "incomplete."
_CLIPS_A_SHARD = 64


def write(
    directory: Path,
    name: str,
    splits: Splits,
    height: int,
    width: int,
    settings: Mapping[str, Any],
    about: str,
) -> Path:
    """Write `splits` (name -> function that iterates over records, in order) as dataset `name` below `directory`.

    Records go to disk as they come, so that a dataset may be larger than memory. Every record is validated;
    RecordError stops the writing and leaves no dataset. `settings` are kept with the dataset. Returns the dataset's
    folder, directory/name/VERSION.
    """
    target = directory / name / schema.VERSION
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=INCOMPLETE, dir=target.parent, ignore_cleanup_errors=True) as folder:
        info = tfds.core.DatasetInfo(
            builder=tfds.core.DatasetIdentity(name, tfds.core.Version(schema.VERSION), folder, __name__),
            description=about,
            features=schema.features(height, width),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(settings=json.dumps(settings, sort_keys=True)),
        )
        writer = tfds.core.SequentialWriter(info, _CLIPS_A_SHARD, file_format="array_record")
        writer.initialize_splits(list(splits))
        for split, records in splits.items():
            for record in records():
                schema.validate(record)
                writer.add_examples({split: [dict(record)]})
        writer.close_all()
        # A temporary folder is its owner's alone; a dataset is as open as the folder that it is written to.
        os.chmod(folder, target.parent.stat().st_mode & 0o777)
        os.rename(folder, target)
    return target


def locate(directory: str | Path) -> Path:
    """The dataset at or below `directory` (the folder with dataset_info.json).

    Errors: ValueError when there is none, or more than one.
    """
    directory = Path(directory)
    if (directory / "dataset_info.json").is_file():
        return directory
    found = sorted(path.parent for path in directory.glob("*/*/dataset_info.json"))
    found = [path for path in found if not path.name.startswith(INCOMPLETE)]
    found = found or sorted(path.parent for path in directory.glob("*/dataset_info.json"))
    if len(found) != 1:
        what = "no dataset" if not found else f"{len(found)} datasets ({', '.join(map(str, found))})"
        raise ValueError(f"{directory}: {what} here; give the folder of one, or record one with `wp2 data record`")
    return found[0]


class Records:
    """One split of a recorded dataset, random access: `len`, `[i]` gives a record (text fields as str)."""

    def __init__(self, directory: str | Path, split: str = "train"):
        self.directory = locate(directory)
        builder = tfds.builder_from_directory(str(self.directory))
        schema.check_version(str(builder.version))
        splits = builder.info.splits or {}
        if split not in splits:
            raise ValueError(f"{self.directory}: no split {split!r}; there are {sorted(splits)}")
        metadata = builder.info.metadata or {}
        self.settings: dict[str, Any] = json.loads(metadata["settings"]) if "settings" in metadata else {}
        self.split = split
        self.num_bytes = sum(info.num_bytes for info in splits.values())
        self.splits = {name: info.num_examples for name, info in splits.items()}
        self._source = builder.as_data_source(split)  # pyright: ignore[reportCallIssue]

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._source[int(index)]
        return {
            name: example[name].decode() if field.dtype == "str" else np.asarray(example[name], field.dtype)
            for name, field in schema.FIELDS.items()
        }
