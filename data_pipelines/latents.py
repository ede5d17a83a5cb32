"""The latent cache: what the frozen autoencoder makes of every clip, encoded with the functions inference uses.

Per clip of T latent frames (spec sections 3 and 4):
  latents     [T, h, w, 16]      the clip, by the streaming encoder
  y           [T, h, w, 16]      [first picture, zeros, ...]; the loader adds the four mask channels
  lr_latents  [T/2, h/4, w/4, 16]  the low-resolution twin, chunk by chunk from the real pictures
  lr_y        [T/2, h/4, w/4, 16]  y of the twin
with the actions, the caption and the name of the record. Stored as ArrayRecord, float32, one folder a split.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from jax.tree_util import keystr, tree_leaves_with_path

from data_pipelines import schema
from data_pipelines.faults import Faults
from data_pipelines.tfds_builder import Records
from wp2_jax.array_types import Params
from wp2_jax.controls.geometry import chunk_count, picture_range
from wp2_jax.controls.images import low_resolution

ARRAYS = ("latents", "y", "lr_latents", "lr_y", "actions")
_INFO, _CLIPS = "cache.json", "clips.array_record"


class CacheError(ValueError):
    """A latent cache that does not fit: of another autoencoder, of other data, or not whole."""


def fingerprint(params: Params, config: Mapping[str, Any]) -> str:
    """Identity of a network: a hash of its config and of every weight with its name, shape and dtype."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for path, leaf in sorted(((keystr(path), leaf) for path, leaf in tree_leaves_with_path(params))):
        value = np.asarray(leaf)
        digest.update(f"{path} {value.shape} {value.dtype}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()[:24]


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen autoencoder and the functions of inference that go with it.

    kind, config: as for `models.autoencoder.build`; module, params: what that built.
    image_latents(module, params, image [B, H, W, 3], frames) -> [B, frames, h, w, 16] and
    chunk_low_res(video [B, F, H, W, 3]) -> [B, ceil(F/2), H/4, W/4, 3] are `inference.condition`'s.
    """

    kind: str
    config: Mapping[str, Any]
    module: Any
    params: Params
    image_latents: Callable[..., jax.Array]
    chunk_low_res: Callable[[jax.Array], jax.Array]
    chunk: int = 4

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What a cache is stamped with and compared by."""
        config = json.loads(json.dumps(dict(self.config), default=str))
        return {
            "kind": self.kind,
            "config": config,
            "fingerprint": fingerprint(self.params, config),
            "chunk": self.chunk,
        }

    @functools.cached_property
    def _encode(self) -> Callable[[Params, jax.Array], dict[str, jax.Array]]:
        return jax.jit(functools.partial(_encode, self))

    def encode(self, pictures: np.ndarray) -> dict[str, np.ndarray]:
        """uint8 pictures [B, F, H, W, 3] of whole chunks -> the four arrays above, float32 with a batch axis."""
        return jax.device_get(self._encode(self.params, jnp.asarray(pictures)))


def _encode(encoder: Encoder, params: Params, pictures: jax.Array) -> dict[str, jax.Array]:
    video = pictures.astype(jnp.float32) / 127.5 - 1.0
    batch, _, height, width, _ = video.shape
    frames = (video.shape[1] - 1) // 4 + 1
    chunks, first = chunk_count(frames, encoder.chunk), picture_range(0, encoder.chunk)[1]

    def call(method: str, *args: Any) -> Any:
        return encoder.module.apply({"params": params}, *args, method=method)

    def encode_chunk(states: tuple, part: jax.Array, is_first: bool) -> tuple[tuple, tuple]:
        full, latents = call("encode_chunk", states[0], part, is_first)
        half, lr_latents = call("encode_chunk", states[1], encoder.chunk_low_res(part), is_first)
        return (full, half), (latents, lr_latents)

    states = tuple(call("init_encode_state", batch, height // scale, width // scale) for scale in (1, 4))
    states, head = encode_chunk(states, video[:, :first], True)
    parts = video[:, first:].reshape(batch, chunks - 1, 4 * encoder.chunk, *video.shape[2:])
    _, tail = jax.lax.scan(lambda s, part: encode_chunk(s, part, False), states, jnp.moveaxis(parts, 1, 0))

    def joined(head: jax.Array, tail: jax.Array) -> jax.Array:
        return jnp.concatenate([head, jnp.moveaxis(tail, 0, 1).reshape(batch, -1, *head.shape[2:])], axis=1)

    latents, lr_latents = (joined(*pair) for pair in zip(head, tail, strict=True))
    image = video[:, 0]
    return {
        "latents": latents,
        "y": encoder.image_latents(encoder.module, params, image, frames),
        "lr_latents": lr_latents,
        "lr_y": encoder.image_latents(encoder.module, params, low_resolution(image), frames // 2),
    }


def build(
    records: Records,
    encoder: Encoder,
    directory: str | Path,
    batch: int = 4,
    fault_budget: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatentCache:
    """Encode one split into directory/<split>, which must not hold a cache of another autoencoder or dataset.

    A cache that fits is used as it is. Records that break the schema or give latents that are not finite are set
    aside, named in `cache.json`; more of them than `fault_budget` are a FaultBudgetError. The folder appears when it
    is whole.
    """
    target = Path(directory) / records.split
    dataset = records.settings.get("fingerprint", str(records.directory))
    if target.exists():
        return LatentCache(target, encoder.identity, dataset)
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    faults, moments, count = Faults(fault_budget), _Moments(), 0
    writer = array_record_module.ArrayRecordWriter(str(partial / _CLIPS), "group_size:1")
    for read, group in _groups(records, batch, faults):
        pictures = [record["pictures"] for record in group]
        # A short last group is filled up: another batch size would compile again.
        arrays = encoder.encode(np.stack(pictures + pictures[-1:] * (batch - len(group))))
        for row, record in enumerate(group):
            clip = {name: value[row] for name, value in arrays.items()}
            bad = [name for name, value in clip.items() if not np.isfinite(value).all()]
            if bad:
                faults.add(record["id"], f"{', '.join(bad)} not finite")
                continue
            moments.add(clip["latents"])
            text = {name: record[name] for name in ("id", "caption", "perspective", "kind")}
            writer.write(_pack({**clip, "actions": record["actions"], **text}))
            count += 1
        progress(read, len(records))
    writer.close()
    if not count:
        raise CacheError(f"{records.directory}, split {records.split}: no clip could be encoded")
    info = {
        "autoencoder": encoder.identity,
        "dataset": dataset,
        "schema": schema.VERSION,
        "clips": count,
        "statistics": moments.result(),
        "set_aside": faults.reasons,
    }
    (partial / _INFO).write_text(json.dumps(info, indent=1))
    partial.rename(target)
    return LatentCache(target, encoder.identity, dataset)


def _groups(records: Records, batch: int, faults: Faults) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Good records in groups of at most `batch` of one shape, with how many records have been read."""
    group: list[dict[str, Any]] = []
    for index in range(len(records)):
        record = records[index]
        reasons = schema.faults(record)
        if reasons:
            faults.add(record["id"], "; ".join(reasons))
            continue
        if group and group[0]["pictures"].shape != record["pictures"].shape:
            yield index, group
            group = []
        group.append(record)
        if len(group) == batch:
            yield index + 1, group
            group = []
    if group:
        yield len(records), group


class _Moments:
    """Mean and standard deviation of every latent channel, added up clip by clip in float64."""

    def __init__(self):
        self._sums: np.ndarray = np.zeros((2, 16))
        self._count = 0

    def add(self, latents: np.ndarray) -> None:
        values = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
        self._sums += np.stack([values.sum(0), np.square(values).sum(0)])
        self._count += len(values)

    def result(self) -> dict[str, list[float]]:
        mean, square = self._sums / self._count
        return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(square - mean**2, 0)).tolist()}


def _pack(clip: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **clip)
    return buffer.getvalue()


class LatentCache:
    """A cache folder, random access: `[i]` gives latents, y, lr_latents, lr_y, actions and the text fields.

    `identity` (an Encoder's) and `dataset` (a fingerprint) are compared with what the cache was made from; CacheError
    if they differ. `statistics` holds mean and std [16] of the latents.
    """

    def __init__(self, directory: str | Path, identity: Mapping[str, Any] | None = None, dataset: str | None = None):
        self.directory = Path(directory)
        try:
            self.info: dict[str, Any] = json.loads((self.directory / _INFO).read_text())
        except FileNotFoundError as error:
            raise CacheError(f"{self.directory}: no latent cache here (no {_INFO})") from error
        schema.check_version(self.info["schema"])
        made_by = self.info["autoencoder"]
        if identity is not None and dict(identity) != made_by:
            differ = [name for name in made_by if made_by[name] != identity.get(name)]
            raise CacheError(
                f"{self.directory} was encoded with another autoencoder ({made_by['kind']} {made_by['fingerprint']}, "
                f"now {identity['kind']} {identity['fingerprint']}; different: {', '.join(differ)}): encode it again"
            )
        if dataset is not None and dataset != self.info["dataset"]:
            raise CacheError(f"{self.directory} holds latents of dataset {self.info['dataset']}, not {dataset}")
        self.statistics: dict[str, list[float]] = self.info["statistics"]
        self._reader = array_record_module.ArrayRecordReader(str(self.directory / _CLIPS), "readahead_buffer_size:0")
        if self._reader.num_records() != self.info["clips"]:
            raise CacheError(f"{self.directory}: {self._reader.num_records()} clips, {self.info['clips']} expected")

    def __len__(self) -> int:
        return self.info["clips"]

    def __getitem__(self, index: int) -> dict[str, Any]:
        [raw] = self._reader.read([int(index)])
        with np.load(io.BytesIO(raw)) as stored:
            return {name: stored[name] if name in ARRAYS else str(stored[name]) for name in stored.files}
