"""Grain loaders: records or cached latents -> endless batches with an exact position.

The order is a shuffle of each epoch by the seed, cut into global batches; a process assembles the rows of every global
batch that its devices hold. So the global batches do not depend on the processes or the mesh, and the position is one
number.
A bad record (numbers that are not finite, a broken schema) is named, counted and replaced by the next good one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from data_pipelines import schema
from data_pipelines.faults import Faults
from data_pipelines.latents import ARRAYS, LatentCache
from data_pipelines.tfds_builder import Records
from wp2_jax.controls.captions import Caption
from wp2_jax.controls.errors import ControlError
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, chunk_count, fit_pictures

# Without end for any purpose; Grain's own endless repeat has a length that overflows in batches of one.
_EPOCHS = 2**31

Tokenize = Callable[[Sequence[str]], np.ndarray]
"""Captions -> int32 [N, text_len], 0 past the end."""


class BadRecordError(ValueError):
    """A record that cannot become a sample; the loader sets it aside."""


class Source(Protocol):
    """Samples by number. `sample` raises BadRecordError for one that cannot be used."""

    def __len__(self) -> int: ...

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        """Arrays without batch axis, and `key`, the record's name."""
        ...

    def name(self, index: int) -> str: ...


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """`batch` samples a global batch; `threads` read ahead `ahead` batches (0: none) within the process."""

    batch: int
    seed: int = 0
    shuffle: bool = True
    fault_budget: int = 16
    threads: int = 1
    ahead: int = 2

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: use 1 or more")


class Loader:
    """An endless iterator of batches (dicts of numpy arrays [rows, ...] and `key`, a list of names).

    `rows` are those of the global batch that this process holds, ascending (`sharding.process_rows`); all without it.
    `get_state()` is the position after the last batch yielded, the same on every process, fit for JSON;
    `set_state` goes on from it exactly, also on another number of processes. `faults.reasons` names the records set
    aside so far; FaultBudgetError once they are more than `config.fault_budget`.
    """

    def __init__(self, source: Source, config: LoaderConfig, rows: Sequence[int] | None = None):
        if len(source) == 0:
            raise ValueError("the loader's source holds no records")
        self._rows = range(config.batch) if rows is None else rows
        if not self._rows or min(self._rows) < 0 or max(self._rows) >= config.batch:
            raise ValueError(f"rows={list(self._rows)} are not rows of a batch of {config.batch}")
        self.config = config
        self.faults = Faults(config.fault_budget)
        self._source = source
        order = grain.MapDataset.range(len(source)).seed(config.seed)
        if config.shuffle:
            order = order.shuffle()
        batches = order.repeat(_EPOCHS).batch(config.batch).map_with_index(self._assemble)
        reading = grain.ReadOptions(
            num_threads=config.threads if config.ahead else 0, prefetch_buffer_size=config.ahead
        )
        self._iterator = iter(batches.to_iter_dataset(reading))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        batch, faults = next(self._iterator)
        for name, reason in faults:
            self.faults.add(name, reason)
        return batch

    def get_state(self) -> dict[str, Any]:
        return {**self._about(), "reader": self._iterator.get_state(), "set_aside": dict(self.faults.reasons)}

    def set_state(self, state: dict[str, Any], /) -> None:
        """Errors: ValueError if the position belongs to another seed, batch size or number of records."""
        other = {name: (state[name], value) for name, value in self._about().items() if state[name] != value}
        if other:
            what = ", ".join(f"{name} was {was}, is {now}" for name, (was, now) in other.items())
            raise ValueError(f"this loader position cannot be continued: {what}")
        self._iterator.set_state(state["reader"])
        self.faults.restore(state["set_aside"])

    def _about(self) -> dict[str, Any]:
        config = self.config
        return {"seed": config.seed, "batch": config.batch, "shuffle": config.shuffle, "records": len(self._source)}

    def _assemble(self, number: int, indices: np.ndarray) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        faults: list[tuple[str, str]] = []
        samples = [self._good(int(indices[row]), (self.config.seed, number, row), faults) for row in self._rows]
        return stack(samples), faults

    def _good(self, index: int, key: tuple[int, ...], faults: list[tuple[str, str]]) -> dict[str, Any]:
        """Sample `index`, or the next good one after it: the same choice on any number of processes."""
        for _ in range(len(self._source)):
            try:
                sample = self._source.sample(index, np.random.default_rng(key))
                check_finite(sample)
                return sample
            except BadRecordError as error:
                faults.append((self._source.name(index), str(error)))
                index = (index + 1) % len(self._source)
        raise BadRecordError(f"none of the {len(self._source)} records can be used; the last: {faults[-1]}")


def check_finite(sample: dict[str, Any]) -> None:
    """BadRecordError naming the arrays of a sample that hold NaN or infinity, and the first place of one."""
    for name, value in sample.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
            raise BadRecordError(f"{name} is not finite at {place}")


def stack(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Samples -> a batch: arrays get a leading axis, everything else becomes a list."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {name: np.stack(values) if isinstance(values[0], np.ndarray) else values for name, values in columns.items()}


class HeldOut:
    """The batches of a test split, in order, the same every time it is gone through.

    Whole batches only, but at least one: a split smaller than a batch is repeated to fill it. `limit`: at most so many,
    of samples spread evenly over the split.
    """

    def __init__(self, source: Source, config: LoaderConfig, rows: Sequence[int] | None = None, limit: int = 0):
        self._count = max(1, len(source) // config.batch)
        if limit and limit < self._count:
            self._count = limit
            source = _Spread(source, limit * config.batch)
        self._arguments = (source, dataclasses.replace(config, shuffle=False), rows)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader = Loader(*self._arguments)
        return (next(loader) for _ in range(self._count))


class _Spread:
    """`count` samples of a source, evenly spread over it."""

    def __init__(self, source: Source, count: int):
        self._source, self._index = source, np.linspace(0, len(source) - 1, count).round().astype(int)

    def __len__(self) -> int:
        return len(self._index)

    def name(self, index: int) -> str:
        return self._source.name(int(self._index[index]))

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        return self._source.sample(int(self._index[index]), rng)


class LatentClips:
    """Samples of a latent cache: the first `frames` latent frames (0: all) of each clip.

    latents [S, h, w, 16], y [S, h, w, 20], lr_latents [S/2, h/4, w/4, 16], lr_y [.., 20] and actions [S, 6], all
    float32; caption_ids int32 [S/4, text_len], one caption a chunk.
    """

    def __init__(self, cache: LatentCache, tokenize: Tokenize, frames: int = 0):
        self._cache, self._tokenize, self._frames = cache, tokenize, frames
        self._ids: dict[str, np.ndarray] = {}
        if frames:
            chunk_count(frames, cache.info["autoencoder"]["chunk"])

    def __len__(self) -> int:
        return len(self._cache)

    def name(self, index: int) -> str:
        return self._cache[index]["id"]

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        clip = self._cache[index]
        there = len(clip["latents"])
        frames, chunk = self._frames or there, self._cache.info["autoencoder"]["chunk"]
        if there < frames:
            raise BadRecordError(f"the clip has {there} latent frames, {frames} are needed")
        sample = {name: clip[name][: frames // 2 if name.startswith("lr_") else frames] for name in ARRAYS}
        sample["y"], sample["lr_y"] = with_mask(sample["y"]), with_mask(sample["lr_y"])
        sample["caption_ids"] = self._captions(clip, frames, chunk)
        return {**sample, "key": clip["id"]}

    def _captions(self, clip: dict[str, Any], frames: int, chunk: int) -> np.ndarray:
        texts = [caption.text for caption in chunk_captions(clip, frames, chunk)]
        for text in texts:
            if text not in self._ids:
                self._ids[text] = np.asarray(self._tokenize([text]), np.int32)[0]
        return np.stack([self._ids[text] for text in texts])


class PictureWindows:
    """Samples of recorded pictures: `video` float32 [F, H, W, 3] in [-1, 1], a random window of F = 4n+1 pictures."""

    def __init__(self, records: Records, frames: int):
        fit = fit_pictures(frames)
        if fit.trimmed:
            nearest = f"{fit.pictures} or {fit.pictures + PICTURES_PER_LATENT}"
            raise ValueError(f"frames={frames}: a window has 4n+1 pictures; use {nearest}")
        self._records, self._frames = records, frames

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        return self._records[index]["id"]

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        record = self._records[index]
        pictures = record["pictures"]
        if len(pictures) < self._frames:
            raise BadRecordError(f"the clip has {len(pictures)} pictures, {self._frames} are needed")
        start = int(rng.integers(len(pictures) - self._frames + 1))
        video = pictures[start : start + self._frames].astype(np.float32) / 127.5 - 1.0
        return {"video": video, "key": record["id"]}


def with_mask(image_latents: np.ndarray) -> np.ndarray:
    """y [T, h, w, 20]: four mask channels (1 at latent frame 0) before the image latents [T, h, w, 16]."""
    mask = np.zeros((*image_latents.shape[:-1], 4), image_latents.dtype)
    mask[0] = 1
    return np.concatenate([mask, image_latents], -1)


def chunk_captions(record: dict[str, Any], frames: int, chunk: int) -> list[Caption]:
    """The captions of a record's chunks. Raises BadRecordError where they cannot be read."""
    try:
        return schema.read_caption(record).at_chunks(frames, chunk)
    except (ControlError, ValueError) as error:
        raise BadRecordError(f"caption: {error}") from error


def caption_texts(records: Iterable[dict[str, Any]], chunk: int = 4) -> list[str]:
    """The distinct captions of records, in order of first use: what a tokenizer is trained on."""
    texts: dict[str, None] = {}
    for record in records:
        for caption in chunk_captions(record, len(record["actions"]), chunk):
            texts.setdefault(caption.text, None)
    return list(texts)
