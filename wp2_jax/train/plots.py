"""Curves of a run from its metrics.jsonl, as PNG bytes for reports."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

Curves = dict[str, tuple[list[int], list[float]]]


def read(path: str | Path) -> Curves:
    """{name: (steps, values)} of a metrics.jsonl; values that were not finite (null) are left out."""
    curves: Curves = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name not in ("step", "time") and value is not None:
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    return curves


def stage(path: str | Path, title: str, extra: Sequence[str] = ()) -> bytes:
    """One stage: training and held-out loss, gradient norms, and a panel for every further loss and `extra` metric."""
    curves = read(path)
    panels = [["train/loss", "eval/loss"], [name for name in curves if name.startswith("train/grad_norm")]]
    further = [name for name in curves if name.endswith("_loss")]
    for metric in dict.fromkeys(name.partition("/")[2] for name in further):
        panels.append([name for name in further if name.partition("/")[2] == metric])
    panels += [[f"{part}/{metric}" for part in ("train", "eval")] for metric in extra]
    return plot(curves, panels, title)


def plot(curves: Curves, panels: Sequence[Sequence[str]], title: str) -> bytes:
    """Panels side by side, each with the named curves that exist; panels without any are left out.

    Raises:
      ValueError: if no panel has a curve.
    """
    filled = [[name for name in panel if name in curves] for panel in panels]
    filled = [panel for panel in filled if panel]
    if not filled:
        raise ValueError(f"{title}: none of {[list(panel) for panel in panels]}; there are {sorted(curves)}")
    figure = Figure(figsize=(4.5 * len(filled), 3.2))
    axes = figure.subplots(1, len(filled), squeeze=False)
    for axis, panel in zip(axes[0], filled, strict=True):
        for name in panel:
            steps, values = curves[name]
            axis.plot(steps, values, marker="o" if len(steps) < 20 else "", markersize=3, label=name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
