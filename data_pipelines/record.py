"""Record a dataset from the game engine: clips in parallel, each whole or not there, continued where it stopped.

Clips lie one a file in a staging folder until all are there; then they become one TFDS dataset and the staging folder
goes. The dataset depends on the settings alone, not on the number of processes or on interruptions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np

from data_pipelines import maps, schema, script, tfds_builder
from data_pipelines.doom import CameraConfig, Engine
from data_pipelines.kinematics import MotionConfig
from data_pipelines.shoot import SOURCE, shoot
from wp2_jax.controls.geometry import check_size

_MAPS_A_FILE = 99


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """What to record: `clips` clips on `maps` maps, the last `test_maps` of which are the split `test`.

    The name of the dataset is `vizdoom`. `seed` decides everything; 0 is a seed.
    """

    seed: int = 0
    clips: int = 160
    maps: int = 40
    test_maps: int = 4
    camera: CameraConfig = dataclasses.field(default_factory=CameraConfig)
    script: script.ScriptConfig = dataclasses.field(default_factory=script.ScriptConfig)

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: use 0 or more")
        if not 1 <= self.maps <= self.clips:
            raise ValueError(f"maps={self.maps}, clips={self.clips}: use 1 to clips maps, each gets a clip or more")
        if not 0 <= self.test_maps < self.maps:
            raise ValueError(f"test_maps={self.test_maps} of maps={self.maps}: use 0 to {self.maps - 1}")
        check_size(self.camera.height, self.camera.width)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RecordConfig:
        """The config of nested plain dictionaries, as `dataclasses.asdict` gives; an unknown key is an error."""
        values = dict(values)
        camera = CameraConfig(**values.pop("camera", {}))
        clip = dict(values.pop("script", {}))
        motion = MotionConfig(**clip.pop("motion", {}))
        return cls(**values, camera=camera, script=script.ScriptConfig(**clip, motion=motion))

    @property
    def fingerprint(self) -> str:
        text = json.dumps({"schema": schema.VERSION, **dataclasses.asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def map_of(self, clip: int) -> int:
        return clip * self.maps // self.clips

    def map_seed(self, index: int) -> int:
        return int(np.random.SeedSequence((self.seed, index)).generate_state(1)[0])

    def clips_of(self, split: str) -> list[int]:
        """Clip numbers of `train` or `test`."""
        first_test = self.maps - self.test_maps
        return [clip for clip in range(self.clips) if (self.map_of(clip) >= first_test) == (split == "test")]


def record(
    config: RecordConfig,
    directory: str | Path,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Record `config` into directory/vizdoom/<schema version> and return that folder.

    A dataset of the same settings is left as it is; one of other settings is a ValueError. `progress(done, total)`
    is called as clips come in. `workers` processes (default: all processors).
    """
    directory = Path(directory)
    target = directory / SOURCE / schema.VERSION
    if target.exists():
        found = tfds_builder.Records(target, "train").settings.get("fingerprint")
        if found != config.fingerprint:
            raise ValueError(f"{target} holds a dataset of other settings: remove it or choose another directory")
        progress(config.clips, config.clips)
        return target
    staging = directory / f".{SOURCE}-{config.fingerprint}"
    staging.mkdir(parents=True, exist_ok=True)
    missing = [clip for clip in range(config.clips) if not _clip_path(staging, clip).exists()]
    done = config.clips - len(missing)
    progress(done, config.clips)
    if missing:
        for _ in _shoot_all(config, staging, missing, workers or os.cpu_count() or 1):
            done += 1
            progress(done, config.clips)
    _remove_leftovers(directory)
    splits = {
        split: functools.partial(_staged, staging, config.clips_of(split))
        for split in ("train", "test")
        if config.clips_of(split)
    }
    settings = {"fingerprint": config.fingerprint, "config": dataclasses.asdict(config)}
    camera = config.camera
    tfds_builder.write(
        directory, SOURCE, splits, camera.height, camera.width, settings, "ViZDoom on maps made from seeds"
    )
    shutil.rmtree(staging)
    return target


def _remove_leftovers(directory: Path) -> None:
    """Folders of a writing that was interrupted."""
    for path in (directory / SOURCE).glob(f"{tfds_builder.INCOMPLETE}*"):
        shutil.rmtree(path)


def _clip_path(staging: Path, clip: int) -> Path:
    return staging / f"{clip:07d}.npz"


def _staged(staging: Path, clips: list[int]) -> Iterator[dict[str, Any]]:
    for clip in clips:
        with np.load(_clip_path(staging, clip)) as stored:
            yield {
                name: str(stored[name]) if field.dtype == "str" else stored[name][()]
                for name, field in schema.FIELDS.items()
            }


def _shoot_all(config: RecordConfig, staging: Path, clips: list[int], workers: int) -> Iterator[int]:
    """Shoot `clips` into `staging`; their numbers as they come in."""
    by_file: dict[int, list[int]] = {}
    for clip in clips:
        by_file.setdefault(config.map_of(clip) // _MAPS_A_FILE, []).append(clip)
    # Neighbouring clips share a map; small tasks keep the progress bar moving and the processes evenly busy.
    tasks = [(config, staging, group[i : i + 2]) for group in by_file.values() for i in range(0, len(group), 2)]
    if workers == 1:
        for task in tasks:
            yield from _shoot_task(task)
        _close_engine()
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(workers, len(tasks)), maxtasksperchild=None) as pool:
        for finished in pool.imap_unordered(_shoot_task, tasks):
            yield from finished
        pool.close()
        pool.join()


@dataclasses.dataclass
class _Running:
    """The engine of this process and the maps it was started with."""

    key: tuple[str, int]
    engine: Engine
    worlds: list[maps.Map]
    folder: tempfile.TemporaryDirectory


_running: _Running | None = None


def _engine_for(config: RecordConfig, file: int) -> _Running:
    global _running
    key = (config.fingerprint, file)
    if _running is None or _running.key != key:
        _close_engine()
        first = file * _MAPS_A_FILE
        count = min(_MAPS_A_FILE, config.maps - first)
        worlds = [maps.generate(config.map_seed(first + index)) for index in range(count)]
        folder = tempfile.TemporaryDirectory()
        if _running is None:
            # The engine must end before its folder goes, also in worker processes, which run no atexit.
            util.Finalize(None, _close_engine, exitpriority=10)
        _running = _Running(key, Engine(worlds, Path(folder.name), config.camera), worlds, folder)
    return _running


def _close_engine() -> None:
    global _running
    if _running is not None:
        _running.engine.close()
        _running.folder.cleanup()
        _running = None


def _shoot_task(task: tuple[RecordConfig, Path, list[int]]) -> list[int]:
    config, staging, clips = task
    for clip in clips:
        index = config.map_of(clip)
        running = _engine_for(config, index // _MAPS_A_FILE)
        number = index % _MAPS_A_FILE
        written = script.write(running.worlds[number], config.script, config.seed, clip)
        name, place = f"{SOURCE}-{config.seed}-{clip:07d}", f"{SOURCE}/{config.map_seed(index)}"
        result = shoot(running.engine, number, written, name, place, config.seed)
        path = _clip_path(staging, clip)
        # A clip is there whole or not at all: written beside, then renamed.
        with tempfile.NamedTemporaryFile(dir=staging, suffix=".part", delete=False) as file:
            np.savez(file, **result)
        os.replace(file.name, path)
    return clips
