"""report.json and report.html of an evaluation."""

import base64
import dataclasses
import html
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from wp2_jax.evaluation.statistics import Estimate
from wp2_jax.inference import video
from wp2_jax.stages.evaluation_results import RECORDED, Results
from wp2_jax.stages.report import STYLE

# What each number is, and whether more of it is better ("+"), less ("-"), or nearer to one ("1").
MEANINGS: dict[str, dict[str, tuple[str, str]]] = {
    "reconstruction": {
        "psnr": ("PSNR of held-out pictures through the autoencoder and back, dB", "+"),
        "ssim": ("SSIM", "+"),
        "lpips": ("LPIPS (AlexNet)", "-"),
    },
    "navigation": {
        "sign": ("turns that go the commanded way, share", "+"),
        "rotation_error": ("|recovered - commanded| / commanded a turn", "-"),
        "translation": ("chunks with the right one of nine movements, share", "+"),
        "axes": ("right of forward and lateral, share (half of a diagonal counts half)", "+"),
        "walking": ("as translation, of the chunks that are told to move", "+"),
        "drift": ("degrees turned in a chunk about an axis that was to rest", "-"),
    },
    "revisit": {
        "psnr": ("PSNR between the way out and the way back, dB", "+"),
        "ssim": ("SSIM between them", "+"),
        "lpips": ("LPIPS between them", "-"),
        "consistency": ("PSNR between views of one place, warped by true depth and pose, dB", "+"),
        "truth_psnr": ("PSNR against the recording, dB", "+"),
    },
    "memory": {
        "own": ("flow loss of the last chunk of a loop closure under its own history", "-"),
        "other": ("the same under another clip's history", ""),
        "gain": ("1 - own / other", "+"),
    },
    "events": {"all": ("events whose change is seen, share", "+")},
    "drift": {
        "sharpness": ("last quarter of the video over its first", "1"),
        "saturation": ("the same", "1"),
        "exposure": ("the same", "1"),
        "contrast": ("the same", "1"),
        "collapsed": ("worlds that have become plain, share", "-"),
        "border jump": ("change where chunks meet over change within them", "1"),
        "truth_psnr": ("PSNR of the last quarter against the recording, dB", "+"),
    },
}
_ARROWS = {"+": "&uarr;", "-": "&darr;", "1": "&rarr; 1", "": ""}


def write(results: Results, accuracy: Mapping[str, float], about: Mapping[str, Any], output: Path) -> Path:
    """Writes output/report.json, output/report.html, the sheets as PNG and the videos as MP4; returns the page's path.

    `accuracy` of the measuring networks; `about`: what was evaluated, JSON.
    """
    output.mkdir(parents=True, exist_ok=True)
    values = {
        measure: {name: {column: _plain(value) for column, value in columns.items()} for name, columns in names.items()}
        for measure, names in results.values.items()
    }
    document = {"about": dict(about), "judges": dict(accuracy), "seconds": results.seconds, "measures": values}
    _replace(output / "report.json", json.dumps(document, indent=1, sort_keys=True))
    parts = [f"<h1>Evaluation</h1><p class='note'>{html.escape(_sentence(about))}</p>"]
    if accuracy:
        rows = "".join(f"<tr><td>{html.escape(name)}<td>{value:.4g}" for name, value in sorted(accuracy.items()))
        parts.append(
            "<section><h2>Measuring networks</h2><p class='note'>On held-out recordings: what stands below rests on "
            f"them.</p><table>{rows}</table></section>"
        )
    for measure, names in results.values.items():
        parts.append(f"<section id='{measure}'><h2>{measure}</h2>{_table(measure, names)}")
        for number, (title, sheet) in enumerate(results.sheets.items()):
            if title.startswith(f"{measure}: "):
                file = io.BytesIO()
                Image.fromarray(sheet).save(file, "PNG")
                (output / f"{_file_name(title, number)}.png").write_bytes(file.getvalue())
                data = base64.b64encode(file.getvalue()).decode()
                parts.append(
                    f"<p class='note'>{html.escape(title)}</p>"
                    f"<p><img alt='{html.escape(title)}' src='data:image/png;base64,{data}'></p>"
                )
        for number, (title, pictures) in enumerate(results.videos.items()):
            if title.startswith(f"{measure}: "):
                name = f"{_file_name(title, number)}.mp4"
                with video.mp4(output / name, *pictures.shape[1:3]) as file:
                    file.write(pictures)
                parts.append(f"<p class='note'>{html.escape(title)}</p><p><video controls src='{name}'></video></p>")
        parts.append("</section>")
    path = output / "report.html"
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>wp2_jax evaluation</title><style>{STYLE}</style>{''.join(parts)}</html>"
    )
    _replace(path, page)
    return path


def text(results: Results) -> str:
    """The tables as text, a line a number and column."""
    lines = []
    for measure, names in results.values.items():
        for name, columns in names.items():
            lines += [f"{measure}/{name:16} {column:28} {value} (n={value.count})" for column, value in columns.items()]
    return "\n".join(lines)


def _file_name(title: str, number: int) -> str:
    """What comes before the title's note, without what a path or an address would take for its own; `number` tells
    apart titles that are then the same."""
    kept = title.rpartition(" (")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in kept) + f"_{number}"


def _plain(value: Estimate) -> dict[str, float | int | None]:
    """JSON has no NaN: what was not measured is null."""
    return {name: number if value.count else None for name, number in dataclasses.asdict(value).items()}


def _table(measure: str, names: Mapping[str, Mapping[str, Estimate]]) -> str:
    columns = list(dict.fromkeys(column for found in names.values() for column in found))
    columns.sort(key=lambda column: column != RECORDED)
    head = "".join(f"<th>{html.escape(column)}" for column in columns)
    rows = []
    for name, found in names.items():
        meaning, better = MEANINGS[measure].get(name, ("share of these events whose change is seen", "+"))
        cells = "".join(f"<td>{found[column]}" if column in found else "<td>" for column in columns)
        count = max(value.count for value in found.values())
        rows.append(f"<tr><td title='{html.escape(meaning)}'>{name} {_ARROWS[better]}{cells}<td>{count}<td>{meaning}")
    return f"<table><tr><th>{head}<th>cases<th>meaning{''.join(rows)}</table>"


def _sentence(about: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in about.items()) + ". Mean and 95% interval over cases."


def _replace(path: Path, content: str) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)
