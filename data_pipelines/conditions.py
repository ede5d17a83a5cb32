"""Where a Stable Forcing rollout starts: pictures and captions from data, actions drawn by the command generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_pipelines.loader import Tokenize, chunk_captions
from data_pipelines.tfds_builder import Records
from wp2_jax.controls.commands import CommandConfig, random_rows


class Conditions:
    """Samples for rollouts of `chunks` chunks (spec section 5).

    image float32 [H, W, 3] in [-1, 1], the record's first picture; caption_ids int32 [chunks, text_len], its captions
    chunk by chunk, the last one going on where the record is shorter; actions float32 [chunks * chunk, 6], random
    commands, out and back in half of the samples.
    """

    def __init__(self, records: Records, tokenize: Tokenize, chunks: int, commands: CommandConfig, chunk: int = 4):
        self._records, self._tokenize = records, tokenize
        self._chunks, self._chunk, self._commands = chunks, chunk, commands

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        return self._records[index]["id"]

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        record = self._records[index]
        out_and_back = bool(rng.random() < 0.5)
        frames = self._chunks * self._chunk
        return {
            "image": record["pictures"][0].astype(np.float32) / 127.5 - 1.0,
            "actions": random_rows(rng, frames, record["perspective"], self._commands, out_and_back),
            "caption_ids": np.asarray(self._tokenize(self._captions(record)), np.int32),
            "key": record["id"],
        }

    def _captions(self, record: dict[str, Any]) -> Sequence[str]:
        frames = len(record["actions"]) // self._chunk * self._chunk
        texts = [caption.text for caption in chunk_captions(record, frames, self._chunk)]
        return (texts + texts[-1:] * self._chunks)[: self._chunks]
