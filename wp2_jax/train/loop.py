"""The host's loop: resume, update, log, evaluate, sample, save, stop when asked to."""

import contextlib
import dataclasses
import importlib.metadata
import platform
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from PIL import Image

from wp2_jax import rng, sharding
from wp2_jax.array_types import Batch
from wp2_jax.checkpoints.orbax_io import Checkpoints
from wp2_jax.train import metrics, step
from wp2_jax.train.config import diff
from wp2_jax.train.state import TrainState


class NonFiniteError(ValueError):
    """Too many updates in a row had a loss or gradient that was not finite."""


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long, and what how often. Counts are in steps; 0 means never (save for `steps`)."""

    steps: int
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 200
    sample_every: int = 500
    checkpoint_every: int = 200
    keep: int = 2  # newest checkpoints kept
    max_skipped_in_row: int = 10


class Loader(Protocol):
    """An endless iterator of batches with a position.

    A batch is a dict of numpy arrays whose first axis is the batch; anything else (`key`: the records' names)
    stays on the host. With several processes each yields the rows that its devices hold (`sharding.process_rows`).
    """

    def __next__(self) -> Batch: ...

    def get_state(self) -> bytes | dict[str, Any]:
        """The position after the last batch yielded, the same on every process: bytes, or a dict for JSON."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Go on from what `get_state` gave."""
        ...


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended. `stopped`: a signal ended it before `config.steps`."""

    state: TrainState
    stopped: bool


def run(
    program: step.Program,
    loader: Loader,
    workdir: str | Path,
    config: LoopConfig,
    *,
    held_out: Iterable[Batch] = (),
    record: Mapping[str, Any] | None = None,
    name: str = "train",
) -> Result:
    """Train until `config.steps`, from the newest checkpoint in `workdir/checkpoints` if there is one.

    Writes `metrics.jsonl` ("train/..." means since the last line, "eval/..." means over `held_out`, which is gone
    through again each time), `samples/STEP_NAME.png` and `checkpoints/STEP`, whose metadata hold `record` (the
    resolved config, say), the loader's position and where the run was made. SIGTERM and SIGINT end it with a
    checkpoint after the present step; a second signal kills.

    Raises:
      NonFiniteError: after `max_skipped_in_row` updates in a row were skipped; the last checkpoint stays.
      tree.TreeMismatchError: if the checkpoint is of another model.
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    record = dict(record or {})
    key = rng.base_key(config.seed)
    with Checkpoints(workdir / "checkpoints", config.keep) as checkpoints:
        state = _start(program, loader, key, checkpoints, record)
        now = int(state.step)
        if now >= config.steps:
            return Result(state, stopped=False)
        first = jax.process_index() == 0
        writer = metrics.Writer(workdir, -1 if checkpoints.latest() is None else now) if first else None
        progress = metrics.Progress(name, now, config.steps)
        pending = _Pending(config.max_skipped_in_row, progress)
        made_by = provenance()
        position: Any = None  # of the loader, after the batch of the last update

        def log(prefix: str, values: Mapping[str, float]) -> None:
            if writer is not None and values:
                writer.write(now, {f"{prefix}/{metric}": value for metric, value in values.items()})

        def evaluate() -> None:
            rows = []
            for batch in held_out:
                arrays, _ = sharding.put_batch(batch, program.mesh)
                rows.append(program.evaluate(state, arrays, program.frozen))
            log("eval", metrics.mean(jax.device_get(rows)))

        def sample() -> None:
            for picture, pixels in program.sample(state).items():
                if first:
                    path = workdir / "samples" / f"{now:07d}_{picture}.png"
                    path.parent.mkdir(exist_ok=True)
                    Image.fromarray(pixels).save(path)

        def save() -> None:
            metadata = {**record, "step": now, "loader": position, "provenance": made_by}
            checkpoints.save(now, state, metadata)

        try:
            with _Stop() as stop:
                if now == 0 and config.evaluate_every:
                    evaluate()
                batches = _batches(loader, program.mesh)
                batch, host, position_after = next(batches)
                while now < config.steps:
                    state, values = program.update(state, batch, program.frozen)
                    now, position = now + 1, position_after
                    pending.add(now, values, host)
                    progress.advance()
                    last = now == config.steps
                    stopping = stop.asked(now)
                    if not (last or stopping):
                        # The devices are at work on the update; meanwhile the next batch gets ready.
                        batch, host, position_after = next(batches)
                    saving = last or stopping or _due(now, config.checkpoint_every, last)
                    # Before a checkpoint too: none of a run that is to end with an error, and a resumed run
                    # averages over the same steps as one that never stopped.
                    if saving or _due(now, config.log_every, last):
                        log("train", pending.flush())
                    if _due(now, config.evaluate_every, last):
                        evaluate()
                    if _due(now, config.sample_every, last):
                        sample()
                    if saving:
                        save()
                    if stopping:
                        progress.say(f"{name}: asked to stop; saved at step {now} of {config.steps}")
                        break
                checkpoints.wait()
        finally:
            progress.close()
            if writer is not None:
                writer.close()
    return Result(state, stopped=now < config.steps)


def provenance() -> dict[str, Any]:
    """The code's git commit (None outside a repository), versions and devices."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "commit": _git_commit(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }


def _start(
    program: step.Program, loader: Loader, key: jax.Array, checkpoints: Checkpoints, record: Mapping[str, Any]
) -> TrainState:
    if checkpoints.latest() is None:
        return step.jit_init(program.init, key, program.given(), program.mesh, program.rules)
    shapes = jax.eval_shape(lambda key: program.init(key, {}), key)
    state, metadata = checkpoints.restore(sharding.abstract(shapes, program.rules, program.mesh))
    loader.set_state(metadata["loader"])
    changes = diff(record.get("config", {}), metadata.get("config", {})) if jax.process_index() == 0 else {}
    for name, change in changes.items():
        print(f"the config differs from the checkpoint's: {name} was {change['from']}, is {change['to']}")
    return state


def _batches(loader: Loader, mesh: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
    """Batches on the devices, what stays on the host with the names of bad records, and the loader's position."""
    while True:
        try:
            batch = next(loader)
        except StopIteration:
            raise ValueError("loader: it ended before loop.steps; make it repeat without end") from None
        arrays, host = sharding.put_batch(batch, mesh)
        yield arrays, {"key": host.get("key"), "bad": _bad_rows(batch)}, loader.get_state()


def _bad_rows(batch: Batch) -> list[int]:
    floats = [x for x in batch.values() if isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)]
    bad = {int(row) for x in floats for row in np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))}
    return sorted(bad)


class _Pending:
    """Metrics still on the devices, so that no step waits for them; looked at when a line is written."""

    def __init__(self, max_in_row: int, progress: metrics.Progress):
        self.max_in_row, self.progress = max_in_row, progress
        self.rows: list[tuple[int, Mapping[str, Any], Mapping[str, Any]]] = []

    def add(self, now: int, values: Mapping[str, Any], host: Mapping[str, Any]) -> None:
        self.rows.append((now, values, host))
        if len(self.rows) > 1:
            # At most two updates are under way: the devices stay busy and batches do not pile up on them.
            jax.block_until_ready(self.rows[-2][1])

    def flush(self) -> dict[str, float]:
        """The means since the last call; `skipped` is a sum.

        Raises:
          NonFiniteError: if too many steps in a row were skipped.
        """
        rows = [(now, jax.device_get(dict(values)), host) for now, values, host in self.rows]
        self.rows = []
        for now, values, host in rows:
            if values.get("skipped"):
                self.progress.say(f"step {now}: loss or gradient not finite, update skipped; {_blame(host)}")
            if self.max_in_row and values.get("skipped_in_row", 0) >= self.max_in_row:
                raise NonFiniteError(
                    f"loop.max_skipped_in_row: {self.max_in_row} updates in a row up to step {now} were not "
                    f"finite; {_blame(host)}. The last good checkpoint is kept: look at the data, or resume "
                    "with a lower learning rate"
                )
        if not rows:
            return {}
        # A skipped step's loss says nothing about the weights.
        means = metrics.mean(values for _, values, _ in rows if not values.get("skipped"))
        means.pop("skipped_in_row", None)
        if any("skipped" in values for _, values, _ in rows):
            means["skipped"] = float(sum(values.get("skipped", 0) for _, values, _ in rows))
        self.progress.show({k: v for k, v in means.items() if k == "loss" or k.endswith("_loss")})
        return means


def _blame(host: Mapping[str, Any]) -> str:
    keys, bad = host["key"], host["bad"]
    if bad:
        return f"not finite in the data: {', '.join(str(keys[i]) if keys is not None else f'row {i}' for i in bad)}"
    return f"the data are finite; the batch was {', '.join(map(str, keys)) if keys is not None else 'unnamed'}"


class _Stop(contextlib.AbstractContextManager["_Stop"]):
    """Notes SIGTERM and SIGINT, so that the loop can end between steps. A second signal acts as usual."""

    def __init__(self) -> None:
        self._asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "_Stop":
        # With several processes jax's preemption service takes the signal and agrees on a step.
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def asked(self, now: int) -> bool:
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(now)
        return self._asked

    def _note(self, *_: object) -> None:
        self._asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}


def _due(now: int, every: int, end: bool) -> bool:
    return every > 0 and (end or now % every == 0)


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
