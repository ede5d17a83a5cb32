"""Checks a file of published parser answers (golden/l_inputs.json or one like it) against `wp2_jax.controls`."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wp2_jax.controls.actions import load_action_sequence, parse_actions
from wp2_jax.controls.captions import parse_prompt_event
from wp2_jax.controls.errors import ControlError
from wp2_jax.controls.geometry import check_size
from wp2_jax.verify.core import Result, failed

ROW_TOLERANCE = 1e-6
_NOTES = 3


def check_inputs(path: str | os.PathLike) -> list[Result]:
    """Runs every entry of the file; one Result a section, failing if any entry fails.

    An entry gives its arguments and either the rows, lengths or prompts that are right, or the kind of error.
    Rows are compared row by row, relative to the row's largest magnitude (a row of zeros must be exact);
    everything else must be equal. A section that is missing, empty or unknown, and an entry that cannot be
    read, is a failure.
    """
    try:
        sections = json.loads(Path(path).read_text("utf-8"))
        if not isinstance(sections, dict):
            raise ValueError("the file is not an object of sections")
    except (OSError, ValueError) as error:
        return [failed("inputs", f"{os.fspath(path)}: {error}")]
    results = []
    for name, run in _SECTIONS.items():
        entries = sections.get(name)
        if not isinstance(entries, list) or not entries:
            results.append(failed(f"inputs/{name}", "the section is missing or empty"))
        else:
            results.append(_check_section(f"inputs/{name}", entries, run))
    for name in sorted(set(sections) - set(_SECTIONS) - {"what"}):
        results.append(failed(f"inputs/{name}", "unknown section"))
    return results


def _check_section(item: str, entries: list[Any], run: Callable[[dict[str, Any]], dict[str, Any]]) -> Result:
    max_abs = max_rel = 0.0
    notes = []
    for number, entry in enumerate(entries):
        try:
            absolute, relative, note = _check_entry(entry, run)
        # A malformed entry must be a failure of this entry, not the end of the check.
        except Exception as error:
            absolute, relative, note = math.inf, math.inf, f"cannot be checked: {error!r}"
        max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
        if note:
            notes.append(f"entry {number}: {note}")
    text = "; ".join(notes[:_NOTES]) + (f"; and {len(notes) - _NOTES} more" if len(notes) > _NOTES else "")
    return Result(item, max_abs, max_rel, ROW_TOLERANCE, not notes, text or f"{len(entries)} entries")


def _check_entry(entry: dict[str, Any], run: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[float, float, str]:
    """(largest absolute, largest relative difference, what is wrong or "")."""
    try:
        actual = run(entry)
    except ControlError as error:
        if error.kind == entry.get("error"):
            return 0.0, 0.0, ""
        return math.inf, math.inf, f"error {error.kind}, expected {entry.get('error', 'none')}"
    if "error" in entry:
        return math.inf, math.inf, f"no error, expected {entry['error']}"
    expected = {key: entry[key] for key in ("rows", "latent_frames", "chunk_prompts", "ok") if key in entry}
    # The schedules' latent_frames is an argument, not an answer.
    expected = {key: value for key, value in expected.items() if key in actual}
    if not expected:
        return math.inf, math.inf, "neither an answer nor an error is given"
    absolute = relative = 0.0
    for key, value in expected.items():
        if key == "rows":
            absolute, relative, note = _compare_rows(actual[key], value)
            if note:
                return absolute, relative, note
        elif actual[key] != value:
            return math.inf, math.inf, f"{key} {actual[key]!r}, expected {value!r}"
    return absolute, relative, ""


def _compare_rows(actual: np.ndarray, expected: Any) -> tuple[float, float, str]:
    expected = np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return math.inf, math.inf, f"rows of shape {actual.shape}, expected {expected.shape}"
    if not np.isfinite(expected).all():
        return math.inf, math.inf, "the expected rows hold non-finite numbers"
    difference = np.abs(actual.astype(np.float64) - expected).max(axis=1)
    scale = np.abs(expected).max(axis=1)
    relative = np.divide(difference, scale, out=np.where(difference > 0, np.inf, 0.0), where=scale > 0)
    worst = int(relative.argmax())
    note = ""
    if relative[worst] > ROW_TOLERANCE:
        note = f"row {worst} is {actual[worst].tolist()}, expected {expected[worst].tolist()}"
    return float(difference.max()), float(relative[worst]), note


def _run_actions(entry: dict[str, Any]) -> dict[str, Any]:
    # "nan" and "inf" stand for the floats, which JSON has no words for.
    args: dict[str, Any] = {
        key: float(value) if key.endswith("_deg") and isinstance(value, str) else value
        for key, value in entry["args"].items()
    }
    rows = parse_actions(entry["action"], **args)
    return {"rows": rows, "latent_frames": len(rows)}


def _run_load(entry: dict[str, Any]) -> dict[str, Any]:
    rows = load_action_sequence(entry["action"], **entry["args"])
    return {"rows": rows, "latent_frames": len(rows)}


def _run_prompt_event(entry: dict[str, Any]) -> dict[str, Any]:
    names = parse_prompt_event(entry["prompt_event"], entry["prompts"], entry["latent_frames"], entry["chunk_length"])
    return {"chunk_prompts": names}


def _run_geometry(entry: dict[str, Any]) -> dict[str, Any]:
    check_size(entry["height"], entry["width"])
    return {"ok": True}


_SECTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "actions": _run_actions,
    "actions_options": _run_actions,
    "load_action_sequence": _run_load,
    "prompt_event": _run_prompt_event,
    "validate_geometry": _run_geometry,
}
