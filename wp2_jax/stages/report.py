"""report.html of a workdir: curves and sample pictures of every stage, in one file without outside requests."""

import base64
import html
import json
from pathlib import Path

from wp2_jax.checkpoints import trained
from wp2_jax.train import plots

TITLES = {
    "autoencoder": "Autoencoder: held-out windows above their reconstructions",
    "base": "1. Base video model: image and caption to video",
    "action": "2. Actions",
    "events": "2b. Events",
    "memory_1": "3a. Memory, phase 1: the compressor on drawn frames",
    "memory_2": "3b. Memory, phase 2: the bidirectional teacher",
    "teacher_forcing": "4. Causal student by teacher forcing",
    "pdd": "5. Few-step initialisation (parallel decoding distillation)",
    "stable_forcing": "6. Stable Forcing",
}
EXTRA = {"autoencoder": ("psnr", "latent_std"), "stable_forcing": ("score_gradient",)}
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1b1f;background:#fff}
img{max-width:100%;image-rendering:pixelated;border-radius:4px}img.curve{image-rendering:auto}
section{border-top:1px solid #ddd;padding:1rem 0}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right}
th:first-child,td:first-child{text-align:left}video{width:384px;max-width:100%;image-rendering:pixelated}.note{color:#555}
@media(prefers-color-scheme:dark){body{color:#eee;background:#16161a}section{border-color:#333}.note{color:#aaa}}
"""


def write(workdir: Path, stages: list[str]) -> Path:
    """Writes workdir/report.html from what the stages have left so far; returns its path."""
    parts = [_summary(workdir, stages), *_videos(workdir)]
    parts += [_section(workdir / stage, stage) for stage in stages if (workdir / stage / "metrics.jsonl").exists()]
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>wp2_jax report</title><style>{STYLE}</style><h1>WorldPlay2 curriculum</h1>{''.join(parts)}</html>"
    )
    path = workdir / "report.html"
    temporary = path.with_suffix(".part")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def _summary(workdir: Path, stages: list[str]) -> str:
    rows = []
    for stage in stages:
        metrics = workdir / stage / "metrics.jsonl"
        if not metrics.exists():
            continue
        curves = plots.read(metrics)
        steps = max(steps[-1] for steps, _ in curves.values())
        seconds = _seconds(metrics)
        name = "eval/loss" if "eval/loss" in curves else "train/loss"
        values = curves.get(name, ([], []))[1]
        change = f"{values[0]:.4g} &rarr; {values[-1]:.4g}" if values else "&ndash;"
        rows.append(
            f"<tr><td><a href='#{stage}'>{html.escape(stage)}</a><td>{steps}<td>{seconds:.0f}<td>{change}"
            f"<td>{'held out' if name == 'eval/loss' else 'training'}"
        )
    return (
        "<table><tr><th>stage<th>steps<th>seconds<th>loss, first &rarr; last<th>measured on"
        + "".join(rows)
        + "</table><p class='note'>Sample sheets: a recorded held-out clip in the upper row of each pair, below it "
        "what the model makes of the clip's first picture, captions and commands.</p>"
    )


def _seconds(metrics: Path) -> float:
    times = [json.loads(line)["time"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    return times[-1] - times[0]


def _videos(workdir: Path) -> list[str]:
    """Generated videos anywhere in workdir/generated, shown from beside the page, and their contact sheets."""
    parts, folder = [], workdir / "generated"
    for path in sorted(folder.rglob("*.mp4")):
        source = html.escape(path.relative_to(workdir).as_posix())
        name = html.escape(path.relative_to(folder).with_suffix("").as_posix())
        sheet = path.with_suffix(".png")
        shown = _picture(sheet.read_bytes(), f"contact sheet of {name}") if sheet.exists() else ""
        parts.append(f"<section><h2>{name}</h2><video controls loop muted src='{source}'></video>{shown}</section>")
    return parts


def _section(folder: Path, stage: str) -> str:
    parts = [f"<section id='{stage}'><h2>{html.escape(TITLES.get(stage, stage))}</h2>"]
    parts.append(
        _picture(plots.stage(folder / "metrics.jsonl", stage, EXTRA.get(stage, ())), f"curves of {stage}", "curve")
    )
    for path in _newest_samples(folder / "samples"):
        parts.append(f"<p class='note'>{html.escape(path.stem)}</p>{_picture(path.read_bytes(), path.stem)}")
    if trained.steps(folder):
        made = trained.load_metadata(folder).get("provenance", {})
        parts.append(f"<p class='note'>commit {html.escape(str(made.get('commit')))}, {made.get('devices')}</p>")
    return "".join([*parts, "</section>"])


def _newest_samples(folder: Path) -> list[Path]:
    """The last sheet of every name; files are STEP_NAME.png."""
    newest = {path.stem.partition("_")[2]: path for path in sorted(folder.glob("*.png"))}
    return list(newest.values())


def _picture(png: bytes, text: str, kind: str = "sheet") -> str:
    data = base64.b64encode(png).decode()
    return f"<p><img class='{kind}' alt='{html.escape(text)}' src='data:image/png;base64,{data}'></p>"
