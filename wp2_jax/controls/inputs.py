"""The published JSON input file -> checked items (spec section 2).

A file is a list of objects with image_path, perspective (fps or tps), action, prompt_event, one or more
prompt* (prompt, prompt1, ...) and optionally output_name. Image paths are relative to the file.

Our additions, all optional, for worlds that were played and are made again: `rows` (a list of lists of six numbers, one
a latent frame; an action beside them must say the same), `seed`, `capacity` (chunks that the memory is laid out for;
another layout gives the same pictures only to rounding) and `fit` (of the picture, see `images.FITS`).
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from wp2_jax.controls import actions
from wp2_jax.controls.captions import parse_prompt_event
from wp2_jax.controls.errors import ControlError
from wp2_jax.controls.geometry import check_memory_options, chunk_count
from wp2_jax.controls.images import FITS

REQUIRED = ("image_path", "perspective", "action", "prompt_event")
OPTIONAL = ("output_name", "fit")
NUMBERS = ("rows", "seed", "capacity")
MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """What of a model and of the command line decides how a file is read. Lengths in latent frames."""

    chunk_length: int = 4
    sink_size: int = 1
    temporal_size: int = 1
    rotation_speed_deg: float = actions.DEFAULT_ROTATION_DEG
    yaw_rotation_speed_deg: float | None = None
    pitch_rotation_speed_deg: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class InputItem:
    """One world to generate.

    `rows` are float32 [T, 6]; `chunk_prompts` (names) and `chunk_captions` (texts) have an entry a chunk;
    `output_name` has no .mp4 at its end and is unique in the file. `action` is empty where the file gives rows only;
    `seed`, `capacity` and `fit` are None where it does not say.
    """

    index: int
    image_path: Path
    perspective: str
    action: str
    prompt_event: str
    prompts: dict[str, str]
    output_name: str
    rows: np.ndarray
    chunk_prompts: tuple[str, ...]
    seed: int | None = None
    capacity: int | None = None
    fit: str | None = None

    @property
    def chunk_captions(self) -> tuple[str, ...]:
        """The caption text of every chunk."""
        return tuple(self.prompts[name] for name in self.chunk_prompts)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One mistake of a file: the item's place in the list (None: the file itself), the field, kind and message."""

    index: int | None
    field: str
    kind: str
    message: str

    def __str__(self) -> str:
        where = "file" if self.index is None else f"item {self.index}"
        return f"{where}, {self.field}: {self.message}" if self.field else f"{where}: {self.message}"


class InputFileError(ControlError):
    """An input file with mistakes; `problems` lists all of them."""

    def __init__(self, path: str | os.PathLike, problems: tuple[Problem, ...]):
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(problems[0].kind, f"input file {os.fspath(path)}: {len(problems)} problem(s)\n{lines}")
        self.path = path
        self.problems = problems

    def __reduce__(self):
        return type(self), (self.path, self.problems)


def load_inputs(path: str | os.PathLike, options: InputOptions | None = None) -> list[InputItem]:
    """Reads and checks an input file. Error: InputFileError with every problem, by item and field.

    Prompts are stripped of blanks at their ends; an empty prompt is allowed. Pictures are looked for, not
    decoded.
    """
    options = options or InputOptions()
    check_memory_options(options.chunk_length, options.sink_size, options.temporal_size)
    try:
        data = json.loads(Path(path).read_text("utf-8-sig"), object_pairs_hook=_Pairs)
    except OSError as error:
        raise InputFileError(path, (Problem(None, "", "not_readable", f"cannot be read: {error}"),)) from error
    except (ValueError, RecursionError) as error:
        raise InputFileError(path, (Problem(None, "", "not_json", f"is not JSON: {error}"),)) from error
    if not isinstance(data, list) or isinstance(data, _Pairs) or not data:
        what = "must be a list with at least one object: [{...}, ...]"
        raise InputFileError(path, (Problem(None, "", "not_a_list", what),))
    items, problems = [], []
    for index, entry in enumerate(data):
        checker = _ItemChecker(index, Path(path).parent, options)
        item = checker.check(entry)
        problems += checker.problems
        if item is not None:
            items.append(item)
    seen: dict[str, int] = {}
    for item in items:
        # Names that differ by case only are one file on some disks.
        key = item.output_name.lower()
        if key in seen:
            message = f"{item.output_name!r} is also the name of item {seen[key]}; give another."
            problems.append(Problem(item.index, "output_name", "duplicate_output_name", message))
        seen.setdefault(key, item.index)
    if problems:
        raise InputFileError(path, tuple(problems))
    return items


class _Pairs(list):
    """A JSON object as its (key, value) pairs, so that a key given twice is seen."""


class _ItemChecker:
    """Checks one entry of the list and collects its problems."""

    def __init__(self, index: int, folder: Path, options: InputOptions):
        self.index, self.folder, self.options = index, folder, options
        self.problems: list[Problem] = []

    def problem(self, field: str, kind: str, message: str) -> None:
        self.problems.append(Problem(self.index, field, kind, message))

    def check(self, entry: Any) -> InputItem | None:
        """The item, or None with `problems` filled."""
        if not isinstance(entry, _Pairs):
            self.problem("", "not_an_object", f"must be an object with {', '.join(REQUIRED)} and prompts.")
            return None
        fields = self._strings(entry)
        numbers = {key: value for key, value in entry if key in NUMBERS}
        seed = self._whole(numbers, "seed", 0, MAX_SEED)
        capacity = self._whole(numbers, "capacity", 1, actions.MAX_LATENT_FRAMES)
        prompts = {key: value.strip() for key, value in fields.items() if _is_prompt(key)}
        if not any(_is_prompt(key) for key, _ in entry):
            self.problem("prompt", "missing_field", 'no prompt is given; add "prompt": "...".')
        image = self._image(fields.get("image_path"))
        perspective = self._perspective(fields)
        said = self._rows(fields, perspective)
        rows = self._given_rows(numbers["rows"], perspective, said) if "rows" in numbers else said
        schedule = self._schedule(fields.get("prompt_event"), [k for k, _ in entry if _is_prompt(k)], rows)
        name = self._output_name(fields.get("output_name"), image)
        if "fit" in fields and fields["fit"] not in FITS:
            self.problem("fit", "bad_fit", f"{fields['fit']!r}: give one of {', '.join(FITS)}.")
        if self.problems or image is None or rows is None or schedule is None or name is None:
            return None
        return InputItem(
            self.index,
            image,
            fields["perspective"],
            fields.get("action", ""),
            fields["prompt_event"],
            prompts,
            name,
            rows,
            tuple(schedule),
            seed,
            capacity,
            fields.get("fit"),
        )

    def _strings(self, entry: _Pairs) -> dict[str, str]:
        """The known fields that are texts; everything else becomes a problem."""
        allowed = f"allowed are {', '.join((*REQUIRED, *OPTIONAL, *NUMBERS))} and prompt*"
        fields: dict[str, str] = {}
        seen: set[str] = set()
        for key, value in entry:
            if key in seen:
                self.problem(key, "duplicate_field", "is given twice; keep one.")
            elif key in NUMBERS:
                pass  # they have their own checks
            elif key not in (*REQUIRED, *OPTIONAL) and not _is_prompt(key):
                self.problem(key, "unknown_field", f"unknown field; {allowed}.")
            elif not isinstance(value, str):
                shown = dict(value) if isinstance(value, _Pairs) else value
                self.problem(key, "not_a_text", f"{shown!r} must be a text in double quotes.")
            else:
                fields[key] = value
            seen.add(key)
        for key in REQUIRED:
            if key not in seen and not (key == "action" and "rows" in seen):
                self.problem(key, "missing_field", "is missing.")
        return fields

    def _image(self, text: str | None) -> Path | None:
        if text is None:
            return None
        path = self.folder / text
        if not text.strip() or "\0" in text or not os.path.isfile(path):
            self.problem(
                "image_path",
                "image_not_found",
                f"{text!r}: there is no file {path} (paths start at the input file).",
            )
            return None
        return path

    def _whole(self, numbers: dict[str, Any], key: str, least: int, most: int) -> int | None:
        """A whole number within its bounds, None where there is none or it is wrong."""
        if key not in numbers:
            return None
        value = numbers[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            shown = dict(value) if isinstance(value, _Pairs) else value
            self.problem(key, f"bad_{key}", f"{shown!r} must be a whole number from {least} to {most}.")
            return None
        return value

    def _perspective(self, fields: dict[str, str]) -> str | None:
        perspective = fields.get("perspective")
        if perspective is None:
            return None
        try:
            actions.perspective_value(perspective)
        except ControlError as error:
            self.problem("perspective", error.kind, str(error))
            return None
        return perspective

    def _given_rows(self, value: Any, perspective: str | None, said: np.ndarray | None) -> np.ndarray | None:
        """Rows of the file, exact: they must be actions, start at rest, fill chunks, have the item's perspective and
        be those of the action string (`said`) if there is one."""
        plain = isinstance(value, list) and not isinstance(value, _Pairs)
        if not plain or not all(_is_row(row) for row in value):
            self.problem("rows", "bad_rows", "must be a list of lists of six numbers, one a latent frame.")
            return None
        o = self.options
        try:
            rows = actions.check_rows(np.array(value, np.float32).reshape(-1, 6))
            chunk_count(len(rows), o.chunk_length)
            check_memory_options(o.chunk_length, o.sink_size, o.temporal_size, len(rows))
        except ControlError as error:
            self.problem("rows", error.kind, str(error))
            return None
        if np.delete(rows[0], actions.PERSPECTIVE).any():
            self.problem("rows", "not_at_rest", f"row 0 is {rows[0].tolist()}: a world starts at rest.")
            return None
        if perspective and (rows[:, actions.PERSPECTIVE] != actions.perspective_value(perspective)).any():
            self.problem("rows", "other_perspective", f"not all rows have the perspective {perspective!r} of the item.")
            return None
        if said is not None and not np.array_equal(rows, said):
            self.problem("rows", "rows_and_action", "rows and action say different things; keep one of the two.")
            return None
        return rows

    def _rows(self, fields: dict[str, str], perspective: str | None) -> np.ndarray | None:
        o = self.options
        if "action" not in fields:
            return None
        try:
            # A wrong perspective has its own line; the action is still looked at.
            return actions.load_action_sequence(fields["action"], perspective or "tps", **dataclasses.asdict(o))
        except ControlError as error:
            self.problem("action", error.kind, str(error))
            return None

    def _schedule(self, text: str | None, names: list[str], rows: np.ndarray | None) -> list[str] | None:
        # Without actions the length is not known, and every complaint about it would be noise.
        if text is None or rows is None:
            return None
        try:
            return parse_prompt_event(text, names, len(rows), self.options.chunk_length)
        except ControlError as error:
            self.problem("prompt_event", error.kind, str(error))
            return None

    def _output_name(self, text: str | None, image: Path | None) -> str | None:
        if text is None:
            return None if image is None else f"{self.index:03d}_{image.stem}"
        name = text.strip().removesuffix(".mp4")
        if name in ("", ".", "..") or any(c in '/\\:*?"<>|' or ord(c) < 32 for c in name):
            self.problem("output_name", "bad_output_name", f"{text!r} is not a plain file name.")
            return None
        return name


def _is_prompt(key: str) -> bool:
    return key.startswith("prompt") and key != "prompt_event"


def _is_row(value: Any) -> bool:
    """Six numbers; a float32 has no room for larger ones than these."""
    if not isinstance(value, list) or isinstance(value, _Pairs) or len(value) != 6:
        return False
    return all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= 3e38 for x in value)
