"""The networks that measure generated videos: trained once on a dataset's recordings, kept beside it, and applied.

Their accuracy on held-out recordings stands beside every result that rests on them.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from data_pipelines import events, judged
from data_pipelines.latents import fingerprint
from data_pipelines.loader import HeldOut, Loader, LoaderConfig
from data_pipelines.record import RecordConfig, record
from data_pipelines.tfds_builder import Records
from wp2_jax import rng, sharding
from wp2_jax.array_types import Params
from wp2_jax.checkpoints import trained
from wp2_jax.evaluation import events as event_measure
from wp2_jax.evaluation import navigation
from wp2_jax.models.judges import ChangeJudge, MotionJudge
from wp2_jax.objectives import judges as objectives
from wp2_jax.stages.context import progress_bar
from wp2_jax.train import loop, optim, step


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """How the networks are trained: on `clips` recordings of their own, on `maps` maps, for so many steps each."""

    clips: int = 2400
    maps: int = 200
    latents: int = 24
    event: float = 0.7
    motion_steps: int = 8000
    changes_steps: int = 3000
    seed: int = 20_000


_MOTION, _CHANGES = MotionJudge(2 + objectives.MOVEMENTS), ChangeJudge(len(events.KINDS))
_CLIPS, _RATE, _WARMUP, _DECAY = 8, 2e-3, 100, 0.99
_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Judges:
    """Both networks, ready. `accuracy` by name, on held-out recordings."""

    motion: Params
    changes: Params
    speed: tuple[float, float]
    chunk: int
    accuracy: dict[str, float]

    @property
    def identity(self) -> str:
        """Changes when the networks do."""
        return fingerprint({"motion": self.motion, "changes": self.changes}, {})

    def recover(self, pictures: np.ndarray) -> list[navigation.Recovered]:
        """The motion of every chunk but the first of a video uint8 [F, H, W, 3]."""
        latents = (len(pictures) - 1) // 4 + 1
        places = [navigation.pictures_of(i, self.chunk) for i in navigation.chunks_of(latents, self.chunk)]
        shown = np.stack([pictures[place][:: judged.EVERY] for place in places])
        out = _apply(objectives.motion, _MOTION, self.motion, shown)
        rotation = out[:, :2] * np.asarray(self.speed)
        return [
            navigation.Recovered((float(r[0]), float(r[1])), int(m))
            for r, m in zip(rotation, out[:, 2:].argmax(-1), strict=True)
        ]

    def changes_at(self, pictures: np.ndarray, begins: list[int]) -> list[int]:
        """Which of events.KINDS is seen to begin at each of these pictures of a video."""
        if not begins:
            return []
        shown = np.stack([pictures[event_measure.pictures_of(begin, len(pictures))] for begin in begins])
        return [int(kind) for kind in _apply(objectives.changes, _CHANGES, self.changes, shown).argmax(-1)]


_Look = Callable[[nn.Module, Params, jax.Array], jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(look: _Look, model: nn.Module, params: Params, pictures: jax.Array) -> jax.Array:
    return look(model, params, pictures.astype(np.float32) / 127.5 - 1)


def _apply(look: _Look, model: nn.Module, params: Params, pictures: np.ndarray) -> np.ndarray:
    """Any number of samples through one compiled shape."""
    results = []
    for first in range(0, len(pictures), _BATCH):
        part = pictures[first : first + _BATCH]
        padding = np.zeros((_BATCH - len(part), *part.shape[1:]), part.dtype)
        results.append(np.asarray(_forward(look, model, params, np.concatenate([part, padding])))[: len(part)])
    return np.concatenate(results)


def train(data: str | Path, folder: str | Path, config: JudgeConfig = JudgeConfig(), *, chunk: int = 4) -> Judges:
    """Train both networks in `folder` on recordings made for them as those of `data` were; what is there is used, what
    is unfinished goes on. Their accuracy is measured on the held-out recordings of `data`.

    Raises:
      ValueError: a dataset without held-out recordings, or of another kind than the networks in `folder` are for.
    """
    held_out = Records(data, "test")
    theirs = RecordConfig.from_dict(held_out.settings["config"])
    script = dataclasses.replace(theirs.script, latents=config.latents, event=config.event)
    script = dataclasses.replace(script, navigation=1 - config.event, loop_closure=0.0)
    own = dataclasses.replace(
        theirs, seed=theirs.seed + config.seed, clips=config.clips, maps=config.maps, test_maps=0, script=script
    )
    folder = Path(folder)
    seen = {"recordings": own.fingerprint, "held_out": held_out.settings["fingerprint"], "chunk": chunk}
    mark = folder / "data.json"
    if mark.exists() and json.loads(mark.read_text()) != seen:
        raise ValueError(f"{folder} holds networks for other recordings than {data}, or of another size: remove it")
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(seen))
    with progress_bar("recording for the measuring networks", "clip") as progress:
        records = {"train": Records(record(own, folder / "recordings", progress=progress), "train"), "test": held_out}
    speed = (chunk * script.motion.pitch_degrees, chunk * script.motion.yaw_degrees)
    steps = {"motion": config.motion_steps, "changes": config.changes_steps}
    sources = {
        "motion": (
            {split: judged.Motion(found, chunk) for split, found in records.items()},
            functools.partial(objectives.motion_loss, model=_MOTION, speed=speed),
            judged.motion_pictures(chunk),
        ),
        "changes": (
            {split: judged.Changes(found, event_measure.OFFSETS) for split, found in records.items()},
            functools.partial(objectives.change_loss, model=_CHANGES),
            len(event_measure.OFFSETS),
        ),
    }
    networks, accuracy = {}, {}
    for name, (source, loss, count) in sources.items():
        shape = (1, count, own.camera.height, own.camera.width, 3)
        program = _program(loss, shape, steps[name])
        settings = LoaderConfig(batch=_CLIPS)
        result = loop.run(
            program,
            Loader(source["train"], settings),
            folder / name,
            loop.LoopConfig(
                steps=steps[name], log_every=50, evaluate_every=500, sample_every=0, checkpoint_every=500, keep=1
            ),
            held_out=HeldOut(source["test"], settings),
            record=seen,
            name=f"judge of {name}",
        )
        if result.stopped:
            # The signal was meant for all of it, not for this network's training alone.
            raise KeyboardInterrupt
        networks[name] = trained.load_params(folder / name, "judge", ema=True)
        accuracy |= _accuracy(folder / name / "metrics.jsonl", name)
    return Judges(networks["motion"], networks["changes"], speed, chunk, accuracy)


def _program(loss: Any, shape: tuple[int, ...], steps: int) -> step.LossProgram:
    model = loss.keywords["model"]

    def init(key: jax.Array, given: dict) -> Params:
        return {"judge": model.init(rng.fold(key, "judge"), np.zeros(shape, np.float32))["params"]}

    config = optim.OptimConfig(learning_rate=_RATE, schedule="cosine", warmup=min(_WARMUP, steps // 2), steps=steps)
    return step.LossProgram(
        init_params=init,
        loss_fn=functools.partial(loss, train=True),
        eval_fn=functools.partial(loss, train=False),
        optimisers={"judge": optim.make(config)},
        mesh=sharding.make_mesh(sharding.MeshConfig()),
        ema_decay=_DECAY,
    )


def _accuracy(metrics: Path, name: str) -> dict[str, float]:
    """The last held-out measurement."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "eval/loss" in line][-1]
    return {f"{name}/{key.removeprefix('eval/')}": value for key, value in last.items() if key.startswith("eval/")}
