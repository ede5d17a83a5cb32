"""Held-out cases of the evaluation and the worlds that a checkpoint makes of them."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data_pipelines.loader import chunk_captions
from data_pipelines.tfds_builder import Records
from wp2_jax.controls import actions
from wp2_jax.controls.geometry import picture_count
from wp2_jax.inference import generate, video
from wp2_jax.inference.load import Loaded
from wp2_jax.inference.spec import capacity_for
from wp2_jax.stages import samples

_BATCH = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One world to make: its start picture uint8 [H, W, 3], rows [T, 6] and a caption a chunk.

    `recorded`: what really happened, uint8 [F, H, W, 3], where the rows are those of the recording; `record` is it.
    """

    name: str
    image: np.ndarray
    rows: np.ndarray
    captions: tuple[str, ...]
    recorded: np.ndarray | None = None
    record: dict[str, Any] | None = None


def recorded(records: Records, kind: str, count: int, chunk: int, latents: int = 0) -> list[Case]:
    """The first `count` clips of a kind, cut to `latents` latent frames (0: whole)."""
    cases = []
    for index in range(len(records)):
        record = records[index]
        if len(cases) == count:
            break
        if record["kind"] != kind or len(record["actions"]) < latents:
            continue
        frames = latents or len(record["actions"]) // chunk * chunk
        cases.append(
            Case(
                record["id"],
                record["pictures"][0],
                record["actions"][:frames],
                _captions(record, frames, chunk),
                record["pictures"][: picture_count(frames)],
                record,
            )
        )
    return cases


def repeated(case: Case, latents: int, chunk: int) -> Case:
    """A walk out and back again and again, for `latents` latent frames: the way stays free, and what is right known.

    `case` is a loop closure without events: a rest, n rows, their n inverses, and perhaps a rest.
    """
    assert case.recorded is not None
    period = 2 * ((len(case.rows) - 1) // 2)
    index = 1 + np.arange(latents - 1) % period
    pictures = 1 + np.arange(4 * (latents - 1)) % (4 * period)
    return dataclasses.replace(
        case,
        rows=np.concatenate([case.rows[:1], case.rows[index]]),
        captions=(case.captions[0],) * (latents // chunk),
        recorded=np.concatenate([case.recorded[:1], case.recorded[pictures]]),
    )


COMMANDS = ("w", "s", "a", "d", "left", "right", "up", "down")


def commanded(case: Case, command: str, latents: int, chunk: int, speeds: tuple[float, float]) -> Case:
    """The start of `case` under one command of the action strings for `latents` latent frames, with its first caption.

    `speeds`: degrees of yaw and pitch a latent frame.
    """
    perspective = "fps" if case.rows[0, actions.PERSPECTIVE] else "tps"
    yaw, pitch = speeds
    rows = actions.parse_actions(
        f"{command}-{latents}", perspective, yaw_rotation_speed_deg=yaw, pitch_rotation_speed_deg=pitch
    )
    captions = (case.captions[0],) * (latents // chunk)
    return dataclasses.replace(case, rows=rows, captions=captions, recorded=None, record=None)


def _captions(record: dict[str, Any], frames: int, chunk: int) -> tuple[str, ...]:
    return tuple(caption.text for caption in chunk_captions(record, frames, chunk))


@functools.cache
def _programs():
    return generate.programs()


def make(loaded: Loaded, cases: Sequence[Case], seed: int, *, memory: bool = True) -> Iterator[np.ndarray]:
    """The worlds of cases of one length, a few at a time: uint8 [F, H, W, 3] each, in their order.

    `memory` False: only the newest latent frames are remembered (ar and few_step mode).
    """
    world = loaded.world
    chunks = len(cases[0].captions)
    changes = {} if memory else {"memory": False}
    spec = world.stream(loaded.mode, capacity_for(chunks), **changes)
    null = encode_captions(loaded, [[world.config.negative_prompt]])[:, 0]
    for first in range(0, len(cases), _BATCH):
        part = list(cases[first : first + _BATCH])
        # One shape, one compiled program.
        filled = part + [part[-1]] * (_BATCH - len(part))
        images = np.stack([case.image for case in filled]).astype(np.float32) / 127.5 - 1
        rows = np.stack([case.rows for case in filled])
        contexts = encode_captions(loaded, [list(case.captions) for case in filled])
        nulls = np.broadcast_to(null[:, None], (_BATCH, 1, *null.shape[1:]))
        made = samples.worlds(
            spec, loaded.params, images, rows, contexts, nulls, seed=seed * 1000 + first, programs=_programs()
        )
        pictures = np.concatenate([video.to_uint8(chunk) for chunk in made], axis=1)
        yield from pictures[: len(part)]


def encode_captions(loaded: Loaded, texts: list[list[str]]) -> np.ndarray:
    """Captions [B][chunks] -> contexts [B, chunks, S, D]; each distinct caption is encoded once."""
    distinct = sorted({text for row in texts for text in row})
    ids = np.stack([loaded.tokenizer.encode([text])[0] for text in distinct])
    encoded = np.asarray(generate.encode_text(loaded.world, loaded.text_params, ids[:, None]))[:, 0]
    place = {text: index for index, text in enumerate(distinct)}
    return np.stack([encoded[[place[text] for text in row]] for row in texts])
