"""Metrics of a run: JSON lines that a resumed run continues, TensorBoard where it is installed, progress."""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm


def mean(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the rows that have a finite value of it; NaN where none has."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(float(value))
    means = {}
    for name, values in columns.items():
        finite = [v for v in values if math.isfinite(v)]
        means[name] = sum(finite) / len(finite) if finite else math.nan
    return means


class Writer:
    """Appends {"step": n, "time": seconds since 1970, name: value, ...} to `metrics.jsonl` of the run.

    Values that are not finite are written as null. Lines past `step` (-1: all), from a run that went on
    after the checkpoint that is now resumed, are cut off first.
    """

    def __init__(self, workdir: Path, step: int):
        self.path = workdir / "metrics.jsonl"
        _cut_past(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(workdir)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        clean = {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **clean}) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.write_scalars(step, {name: v for name, v in clean.items() if v is not None})

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class Progress:
    """A bar on a terminal; elsewhere a line every `seconds`."""

    def __init__(self, name: str, step: int, steps: int, seconds: float = 30.0):
        self.name, self.step, self.steps, self.seconds = name, step, steps, seconds
        self._text, self._start, self._first = "", time.monotonic(), step
        self._next_line = self._start + seconds
        tty = sys.stderr.isatty()
        self._bar = tqdm(desc=name, initial=step, total=steps, dynamic_ncols=True) if tty else None

    def advance(self) -> None:
        self.step += 1
        if self._bar is not None:
            self._bar.update()
        elif time.monotonic() >= self._next_line:
            self._line()

    def show(self, values: Mapping[str, float]) -> None:
        self._text = " ".join(f"{name}={value:.4g}" for name, value in values.items())
        if self._bar is not None:
            self._bar.set_postfix_str(self._text, refresh=False)

    def say(self, text: str) -> None:
        """A line of its own, without tearing the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self.step > self._first:
            self._line()

    def _line(self) -> None:
        now = time.monotonic()
        self._next_line = now + self.seconds
        each = (now - self._start) / max(self.step - self._first, 1)
        left = f"{each:.3g} s a step, {each * (self.steps - self.step):.0f} s left"
        self.say(f"{self.name}: {self.step}/{self.steps}, {left}; {self._text}")


def _cut_past(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue  # the last line of a killed run, half written
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


_said_no_tensorboard = False


def _tensorboard(workdir: Path) -> Any:
    global _said_no_tensorboard
    if importlib.util.find_spec("tensorflow") is not None:
        from clu import metric_writers  # slow to import, and only with TensorFlow

        return metric_writers.SummaryWriter(str(workdir / "tensorboard"))
    if not _said_no_tensorboard:
        print("no TensorBoard (extra `tensorboard`): metrics go to metrics.jsonl only", file=sys.stderr)
        _said_no_tensorboard = True
    return None
