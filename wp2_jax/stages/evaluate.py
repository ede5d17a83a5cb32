"""The evaluation: checkpoints side by side on held-out cases, the recordings themselves as the ceiling (spec 7)."""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from data_pipelines import events as recorded_events
from data_pipelines import latents
from data_pipelines.judged import event_begins
from data_pipelines.record import RecordConfig
from data_pipelines.tfds_builder import Records
from wp2_jax.evaluation import drift, events, navigation, quality, revisit
from wp2_jax.inference import load as checkpoints_load
from wp2_jax.inference import video
from wp2_jax.inference.load import Loaded
from wp2_jax.inference.spec import MODES
from wp2_jax.stages import cases, evaluation_results, judges, memory_use, samples
from wp2_jax.stages.evaluation_results import RECORDED, Results

MEASURES = ("reconstruction", "navigation", "revisit", "memory", "events", "drift")
_JUDGED = ("navigation", "events")
# Of the measures: another number, and what was found under the last one is measured again.
_VERSION = 1
_SHEET_ROWS = 6
_COMMANDED_LATENTS = 8
_Video = tuple[int, cases.Case, Any]
"""Number of the case, the case, its pictures uint8 [F, H, W, 3]."""
_Gather = Callable[[Iterable[_Video]], dict[str, list]]
"""Videos -> numbers of each case, by name."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is measured: so many held-out clips a measure, each with `seeds` worlds. Lengths in latent frames.

    `sheet`: start pictures whose worlds under each command are shown together.
    """

    measures: tuple[str, ...] = MEASURES
    cases: int = 32
    seeds: int = 1
    sheet: int = 16
    drift_cases: int = 20
    drift_latents: int = 320
    chunk: int = 4

    def __post_init__(self):
        unknown = sorted(set(self.measures) - set(MEASURES))
        if unknown:
            raise ValueError(f"measures {', '.join(unknown)}: choose from {', '.join(MEASURES)}")
        for name in ("cases", "seeds", "sheet", "drift_cases", "drift_latents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use 1 or more")
        if self.drift_latents % self.chunk:
            raise ValueError(f"drift_latents={self.drift_latents}: worlds are whole chunks of {self.chunk}")


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """What a measure is given: the checkpoints of some columns, none for that of the recordings. `judge()` trains the
    measuring networks when they are first needed."""

    checkpoints: dict[str, Loaded]
    records: Records
    settings: Settings
    judge: Callable[[], judges.Judges]
    results: Results

    def found(self, kind: str, count: int = 0) -> list[cases.Case]:
        count = count or self.settings.cases
        found = cases.recorded(self.records, kind, count, self.settings.chunk)
        if not found:
            raise ValueError(f"{self.records.directory}: no held-out clip of kind {kind}; record more with test_maps")
        return found

    def made(
        self, column: str, loaded: Loaded, of: Sequence[cases.Case], what: str, **options: bool
    ) -> Iterator[_Video]:
        """The worlds of every case and seed."""
        total = self.settings.seeds * len(of)
        with tqdm(total=total, desc=f"{what}: {column}", unit="world", mininterval=1.0) as bar:
            for seed in range(self.settings.seeds):
                worlds = cases.make(loaded, of, seed, **options)
                for index, pictures in enumerate(worlds):
                    bar.update()
                    yield index, of[index], pictures

    def measure(
        self,
        name: str,
        of: Sequence[cases.Case],
        gather: Callable[[Iterable[_Video]], dict[str, list]],
        film: bool = False,
    ) -> None:
        """`gather` over what each checkpoint makes of the cases, with a sheet; without one, over what was recorded.

        With `film` the first case's video is kept, the recording on its left.
        """
        if not self.checkpoints:
            self.results.add(name, RECORDED, gather((i, case, case.recorded) for i, case in enumerate(of)))
        for column, loaded in self.checkpoints.items():
            kept: list[np.ndarray] = []
            self.results.add(name, column, gather(_keep(self.made(column, loaded, of, name), kept, _SHEET_ROWS)))
            self.results.sheets[f"{name}: {column} (recordings above)"] = _sheet(of, kept)
            if film:
                assert of[0].recorded is not None
                both = np.concatenate([of[0].recorded, kept[0]], axis=2)
                self.results.videos[f"{name}: {column} (recording on the left)"] = both


def load(names: Sequence[str]) -> dict[str, Loaded]:
    """Checkpoints of texts "DIR:MODE", all located before the first is read.

    Raises ValueError for a text of another form or one that is given twice, and CheckpointError as `load.locate`.
    """
    sources = {}
    for name in names:
        directory, colon, mode = name.rpartition(":")
        if not colon or mode not in MODES:
            raise ValueError(f"checkpoint {name!r}: write DIR:MODE with a mode of {', '.join(MODES)}")
        if name in sources:
            raise ValueError(f"checkpoint {name!r} is given twice")
        sources[name] = checkpoints_load.locate(directory, mode)
    return {name: checkpoints_load.load(source) for name, source in sources.items()}


def run(
    checkpoints: dict[str, Loaded],
    data: str | Path,
    folder: str | Path,
    settings: Settings,
    *,
    parts: str | Path | None = None,
    judge: judges.JudgeConfig | None = None,
) -> tuple[Results, dict[str, float]]:
    """Measure `checkpoints` by name on the held-out clips of a dataset; `folder` keeps the measuring networks.

    `parts`: folder that keeps what is found, a file for each measure of a checkpoint, until the weights, the data or
    the settings change; what is there is not measured again.

    Returns the results and the accuracy of the measuring networks (empty where no measure needs them).

    Raises MissingPackageError, before anything else, where a measure needs a package that is not there.
    """
    if {"reconstruction", "revisit"} & set(settings.measures):
        quality.require_lpips()
    train = functools.cache(lambda: judges.train(data, folder, judge or judges.JudgeConfig(), chunk=settings.chunk))
    records = Records(data, "test")
    results = Results()
    identities = {} if parts is None else {column: _identity(loaded) for column, loaded in checkpoints.items()}
    for measure in settings.measures:
        judged = train().identity if measure in _JUDGED else None
        for column in (RECORDED, *checkpoints):
            of = {} if column == RECORDED else {column: checkpoints[column]}
            key = (_VERSION, measure, column, identities.get(column), judged, records.settings["fingerprint"])
            path = None if parts is None else Path(parts) / f"{_digest(key, _relevant(settings, measure))}.npz"
            part = None if path is None else evaluation_results.load(path)
            if part is None:
                part = Results()
                began = time.monotonic()
                _MEASURES[measure](Evaluation(of, records, settings, train, part))
                part.seconds[measure] = time.monotonic() - began
                if path is not None:
                    evaluation_results.save(part, path)
            results.merge(part)
    return results, train().accuracy if set(_JUDGED) & set(settings.measures) else {}


def _identity(loaded: Loaded) -> str:
    source = loaded.source
    about = {"config": source.config, "mode": source.mode, "precision": repr(source.precision)}
    return latents.fingerprint({"params": loaded.params, "text": loaded.text_params}, about)


def _relevant(settings: Settings, measure: str) -> dict[str, int]:
    """The settings that change what a measure finds."""
    own = {"drift": ("drift_cases", "drift_latents"), "navigation": ("cases", "sheet")}.get(measure, ("cases",))
    return {name: getattr(settings, name) for name in ("seeds", "chunk", *own)}


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _reconstruction(ev: Evaluation) -> None:
    """Pictures through the autoencoder and back."""
    clips = ev.found("navigation")
    for column, loaded in ev.checkpoints.items():
        numbers: dict[str, list] = {"psnr": [], "ssim": [], "lpips": []}
        for clip in clips:
            assert clip.recorded is not None
            shown = jnp.asarray(clip.recorded[None].astype(np.float32) / 127.5 - 1)
            decoded = samples.reconstruct(loaded.world, loaded.params["autoencoder"], shown)
            decoded = video.to_uint8(np.asarray(decoded)[0])
            # Neighbouring pictures are nearly the same.
            a, b = decoded[::8], clip.recorded[::8]
            for name, measure in (("psnr", quality.psnr), ("ssim", quality.ssim), ("lpips", quality.lpips)):
                numbers[name].append(measure(a, b))
        ev.results.add("reconstruction", column, numbers)


def _navigation(ev: Evaluation) -> None:
    """Commands of held-out walks, and the motion that is seen."""
    judge, of = ev.judge(), ev.found("navigation")
    names = [field.name for field in dataclasses.fields(navigation.Score)]

    def gather(videos: Iterable[_Video]) -> dict[str, list]:
        scores: dict[str, list[list[float]]] = {name: [[] for _ in of] for name in names}
        for index, case, pictures in videos:
            chunk = ev.settings.chunk
            told = [
                navigation.commanded(case.rows[i * chunk : (i + 1) * chunk])
                for i in navigation.chunks_of(len(case.rows), chunk)
            ]
            score = navigation.score(told, judge.recover(pictures))
            for name in names:
                scores[name][index] += getattr(score, name)
        return dict(scores)

    ev.measure("navigation", of, gather)
    for column, loaded in ev.checkpoints.items():
        name = f"navigation: commands: {column} (start, then the end of {', '.join(cases.COMMANDS)})"
        ev.results.sheets[name] = _commands(ev, loaded, of[: ev.settings.sheet])


def _commands(ev: Evaluation, loaded: Loaded, starts: Sequence[cases.Case]) -> np.ndarray:
    """A row a start picture: it, and the last picture under each command."""
    motion = RecordConfig.from_dict(ev.records.settings["config"]).script.motion
    speeds = (motion.yaw_degrees, motion.pitch_degrees)
    told = [
        cases.commanded(case, command, _COMMANDED_LATENTS, ev.settings.chunk, speeds)
        for case in starts
        for command in cases.COMMANDS
    ]
    last = np.stack([pictures[-1] for pictures in cases.make(loaded, told, 0)])
    rows = last.reshape(len(starts), len(cases.COMMANDS), *last.shape[1:])
    return np.concatenate([np.concatenate([case.image, *row], 1) for case, row in zip(starts, rows, strict=True)])


def _revisit(ev: Evaluation) -> None:
    """Out and back: what is seen again looks the same; and what two views of a place share agrees."""
    of = ev.found("loop_closure")

    def gather(videos: Iterable[_Video]) -> dict[str, list]:
        numbers: dict[str, list[list]] = {
            name: [[] for _ in of] for name in ("psnr", "ssim", "lpips", "consistency", "truth_psnr")
        }
        for index, case, pictures in videos:
            score = revisit.score(pictures)
            for name in ("psnr", "ssim", "lpips"):
                numbers[name][index] += list(getattr(score, name))
            numbers["consistency"][index] += _consistency(case, pictures)
            assert case.recorded is not None
            numbers["truth_psnr"][index] += list(quality.psnr(pictures[4::8], case.recorded[4::8]))
        return dict(numbers)

    ev.measure("revisit", of, gather)
    for column, loaded in ev.checkpoints.items():
        if loaded.mode != "bi":
            emptied = ev.made(column, loaded, of, "revisit without memory", memory=False)
            ev.results.add("revisit", f"{column}, memory emptied", gather(emptied))


def _consistency(case: cases.Case, pictures: np.ndarray, gap: int = 4) -> list[float]:
    """PSNR between views `gap` latent frames apart on the way out, through the recording's true depth and poses."""
    record = case.record
    assert record is not None

    def view(latent: int) -> revisit.View:
        depth = record["depth"][latent].astype(np.float32) / 1000
        return revisit.View(depth, record["camera_to_world"][4 * latent], record["intrinsics"])

    values = []
    for latent in range(0, (len(case.rows) - 1) // 2 - gap + 1, gap):
        pair = (pictures[4 * latent], pictures[4 * (latent + gap)])
        values.append(revisit.consistency(*pair, view(latent), view(latent + gap))[0])
    return values


def _memory(ev: Evaluation) -> None:
    """Flow loss of the last chunk of loop closures under its own history, and under another clip's."""
    for column, loaded in ev.checkpoints.items():
        if loaded.mode != "bi":
            continue
        found = memory_use.compare(loaded, ev.found("loop_closure"), ev.settings.seeds)
        ev.results.add("memory", column, found)


def _events(ev: Evaluation) -> None:
    """The events of held-out clips: is the right change seen where it was asked for?"""
    judge, of = ev.judge(), ev.found("event")
    begins = [event_begins({**(case.record or {}), "actions": case.rows}) for case in of]
    of, begins = zip(*[(case, begin) for case, begin in zip(of, begins, strict=True) if begin], strict=True)
    kinds = recorded_events.KINDS

    def gather(videos: Iterable[_Video]) -> dict[str, list]:
        right: dict[str, list[list[float]]] = {
            name: [[] for _ in of] for name in ("all", *recorded_events.KINDS_OF, *kinds[1:])
        }
        for index, _, pictures in videos:
            seen = judge.changes_at(pictures, list(begins[index]))
            score = events.score(list(begins[index].values()), seen, kinds)
            groups = {"all": score.right, **score.by_kind, **events.categories(score.by_kind, recorded_events.KINDS_OF)}
            for name, values in groups.items():
                right[name][index] += values
        return {name: values for name, values in right.items() if any(values)}

    ev.measure("events", of, gather)


def _drift(ev: Evaluation) -> None:
    """Long walks out and back, again and again: what the last quarter of the video is like beside the first."""
    settings = ev.settings
    of = [
        cases.repeated(case, settings.drift_latents, settings.chunk)
        for case in ev.found("loop_closure", settings.drift_cases)
    ]

    def gather(videos: Iterable[_Video]) -> dict[str, list]:
        names = ("sharpness", "saturation", "exposure", "contrast")
        numbers: dict[str, list[list[float]]] = {
            name: [[] for _ in of] for name in (*names, "collapsed", "border jump", "truth_psnr")
        }
        for index, case, pictures in videos:
            curves = drift.curves(pictures)
            for name in names:
                numbers[name][index].append(drift.change(getattr(curves, name)))
            numbers["collapsed"][index].append(float(drift.collapsed(curves)))
            numbers["border jump"][index].append(drift.border_jump(pictures, settings.chunk))
            last = slice(-len(pictures) // 4, None, 8)
            assert case.recorded is not None
            numbers["truth_psnr"][index] += list(quality.psnr(pictures[last], case.recorded[last]))
        return dict(numbers)

    ev.measure("drift", of, gather, film=True)


_MEASURES: dict[str, Callable[[Evaluation], None]] = {
    "reconstruction": _reconstruction,
    "navigation": _navigation,
    "revisit": _revisit,
    "memory": _memory,
    "events": _events,
    "drift": _drift,
}


def _keep(videos: Iterable[_Video], kept: list[np.ndarray], count: int) -> Iterator[_Video]:
    """Hands videos on and keeps the first few for the sheet."""
    for item in videos:
        if len(kept) < count:
            kept.append(item[-1])
        yield item


def _sheet(of: Sequence[cases.Case], made: Sequence[np.ndarray]) -> np.ndarray:
    """Recordings above what was made of their first pictures."""
    pairs = [video for case, pictures in zip(of, made, strict=False) for video in (case.recorded, pictures)]
    return samples.rows_of([video.astype(np.float32) / 127.5 - 1 for video in pairs if video is not None])
