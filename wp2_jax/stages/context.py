"""What all stages share: the world's modules, the data, the tokenizer and the weights of earlier stages."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from data_pipelines import latents, loader, record, windows
from data_pipelines.tfds_builder import Records
from wp2_jax import sharding
from wp2_jax.array_types import Params
from wp2_jax.checkpoints import trained
from wp2_jax.controls.tokenizer import Tokenizer
from wp2_jax.inference import condition, generate, world
from wp2_jax.inference.load import TOKENIZER, text_stage
from wp2_jax.train import config as configs


class StageError(ValueError):
    """A stage cannot start: something it builds on is not there."""


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """One stage's surroundings. `config` is the resolved experiment; `workdir` holds one folder a stage."""

    config: Any
    workdir: Path

    @functools.cached_property
    def world(self) -> world.World:
        return world.from_config(self.config)

    @functools.cached_property
    def mesh(self) -> Mesh:
        mesh = sharding.make_mesh(configs.section(self.config.mesh, sharding.MeshConfig))
        train = self.config.train
        sharding.check(mesh, batch_size=train.batch, num_heads=self.world.dit.num_heads, accumulate=train.accumulate)
        return mesh

    def check(self) -> None:
        """Raises ValueError for sizes that do not fit together, before any heavy work."""
        assert self.world is not None and self.mesh is not None

    @property
    def stage(self) -> str:
        return self.config.stage

    def folder(self, stage: str) -> Path:
        return self.workdir / stage

    def weights(self, stage: str, role: str, *, ema: bool = False) -> Params:
        """One role of an earlier stage's newest checkpoint, as NumPy or device arrays.

        Raises StageError that names the command to run where the stage has not been trained.
        """
        folder = self.folder(stage)
        if not trained.steps(folder):
            raise StageError(
                f"stage {self.stage} starts from {stage}, which is not in {self.workdir}: train it first, "
                f"wp2 train --config experiments/NAME.py:{stage} --workdir {self.workdir}, or run wp2 curriculum"
            )
        return trained.load_params(folder, role, ema=ema)

    def place(self, tree: Params) -> Params:
        return sharding.place(tree, sharding.RULES, self.mesh)

    def records(self, split: str) -> Records:
        """The recorded dataset; recorded now where it is not there yet (as `config.data` says)."""
        data = self.config.data
        directory = Path(data.directory)
        directory = directory if directory.is_absolute() else self.workdir / directory
        settings = record.RecordConfig.from_dict(
            {
                "seed": data.seed,
                "clips": data.clips,
                "maps": data.maps,
                "test_maps": data.test_maps,
                "camera": {"width": self.config.world.width, "height": self.config.world.height},
                "script": {
                    "latents": data.latents,
                    "event": data.event,
                    "event_density": data.event_density,
                    "event_environment": data.event_environment,
                    "motion": {name: data[name] for name in ("yaw_degrees", "pitch_degrees", "step")},
                },
            }
        )
        with progress_bar("recording", "clip") as progress:
            return Records(record.record(settings, directory, progress=progress), split)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The captions' tokenizer, trained on the training split's captions the first time."""
        path, text_len = self.workdir / TOKENIZER, self.config.world.text_len
        if not path.exists():
            texts = loader.caption_texts(windows.each(self.records("train")))
            texts.append(self.config.world.negative_prompt)
            Tokenizer.train(texts, path, self.config.text.vocab_size, text_len)
        return Tokenizer.load(path, text_len)

    @functools.cached_property
    def encoder(self) -> latents.Encoder:
        """The frozen autoencoder as the latent cache wants it."""
        world_ = self.world
        return latents.Encoder(
            kind=world_.autoencoder_kind,
            config=world_.autoencoder_config,
            module=world_.autoencoder,
            params=self.weights("autoencoder", "autoencoder", ema=True),
            image_latents=condition.image_latents,
            chunk_low_res=condition.chunk_low_res,
            chunk=world_.config.chunk,
        )

    def latent_cache(self, split: str, window: int = 0) -> latents.LatentCache:
        """Latents of a split: whole clips, or each clip cut into worlds of `window` latent frames of their own."""
        records: Any = self.records(split)
        if window:
            records = windows.Windows(records, window)
        dataset = Path(self.config.data.directory).name  # a curriculum may have several
        folder = self.workdir / "latents" / dataset / (f"windows_{window}" if window else "clips")
        with progress_bar(f"encoding {split}", "clip") as progress:
            return latents.build(records, self.encoder, folder, progress=progress)

    def clips(self, split: str, frames: int, *, window: bool = False) -> loader.LatentClips:
        """Samples of `frames` latent frames from the start of each clip (or of each window of that length)."""
        return loader.LatentClips(self.latent_cache(split, frames if window else 0), self.tokenizer.encode, frames)

    def captions(self, clip: dict[str, Any], frames: int) -> list[str]:
        """The caption texts of a record's chunks."""
        return [caption.text for caption in loader.chunk_captions(clip, frames, self.config.world.chunk)]

    def loaders(self, source: Callable[[str], loader.Source]) -> tuple[loader.Loader, loader.HeldOut]:
        """The training loader and the held-out batches of a source by split."""
        train = self.config.train
        settings = loader.LoaderConfig(batch=train.batch, seed=self.config.seed)
        rows = sharding.process_rows(self.mesh, train.batch)
        held_out = loader.HeldOut(source("test"), settings, rows, limit=train.evaluate_batches)
        return loader.Loader(source("train"), settings, rows), held_out

    @functools.cached_property
    def null_ids(self) -> np.ndarray:
        """Token ids [1, S] of the negative prompt."""
        return self.tokenizer.encode([self.config.world.negative_prompt])

    @functools.cached_property
    def text_params(self) -> Params:
        """The encoder that this stage's captions are read by, trained in an earlier one."""
        return self.weights(text_stage(self.stage, self.config.stages), "text", ema=True)

    @functools.cached_property
    def null_context(self) -> jax.Array:
        """[1, S, text_dim] of the negative prompt, by the frozen text encoder."""
        return generate.encode_text(self.world, self.text_params, self.null_ids)


class progress_bar:
    """A progress bar that appears with the first report of unfinished work."""

    def __init__(self, what: str, unit: str):
        self._what, self._unit, self._tqdm = what, unit, None

    def __enter__(self) -> Callable[[int, int], None]:
        return self._report

    def _report(self, done: int, total: int) -> None:
        if self._tqdm is None:
            if done >= total:
                return
            self._tqdm = tqdm(total=total, unit=self._unit, desc=self._what, mininterval=1.0)
        self._tqdm.update(done - self._tqdm.n)

    def __exit__(self, *_: object) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
