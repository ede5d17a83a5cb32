"""Action rows: strings, keys and inverses. Spec section 2, golden README 33-35.

A row is 6 floats a latent frame: [pitch deg, yaw deg, forward, lateral, perspective, jump]; up is +pitch,
right is +yaw, forward is `w`, right is `d`; perspective 0 third person, 1 first person. Row 0 of a world is
at rest.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence

import numpy as np

from wp2_jax.controls.errors import ActionError, ControlWarning
from wp2_jax.controls.geometry import check_chunk_length, check_memory_options, chunk_count

PITCH, YAW, FORWARD, LATERAL, PERSPECTIVE, JUMP = range(6)
PERSPECTIVES = {"tps": 0.0, "fps": 1.0}
DEFAULT_ROTATION_DEG = 3.0
# A mistyped duration must not become an allocation of gigabytes; this is 69 hours of video.
MAX_LATENT_FRAMES = 1_000_000

MOVEMENTS = {
    "w": (1, 0),
    "s": (-1, 0),
    "a": (0, -1),
    "d": (0, 1),
    "wa": (1, -1),
    "wd": (1, 1),
    "sa": (-1, -1),
    "sd": (-1, 1),
}
PITCHES = {"up": 1, "down": -1}
YAWS = {"left": -1, "right": 1}
_MOVEMENT_NAMES = {value: name for name, value in MOVEMENTS.items()}
_PITCH_NAMES = {value: name for name, value in PITCHES.items()}
_YAW_NAMES = {value: name for name, value in YAWS.items()}
ALLOWED = (
    "a command is tokens-duration, such as w+right-8: at most one movement of "
    f"{' '.join(MOVEMENTS)}, one of up down, one of left right, and space, joined by +, or none alone; "
    "the duration is a whole number of latent frames from 1, written plainly (8, not 08, +8 or 8.0)"
)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command held for `duration` latent frames; directions are signs, see the module text."""

    duration: int
    forward: int = 0
    lateral: int = 0
    pitch: int = 0
    yaw: int = 0
    jump: bool = False

    @property
    def tokens(self) -> str:
        """The tokens joined by +, `none` at rest."""
        names = (
            _MOVEMENT_NAMES.get((self.forward, self.lateral)),
            _PITCH_NAMES.get(self.pitch),
            _YAW_NAMES.get(self.yaw),
            "space" if self.jump else None,
        )
        return "+".join(name for name in names if name) or "none"

    def __str__(self) -> str:
        return f"{self.tokens}-{self.duration}"


@dataclasses.dataclass(frozen=True)
class ActionString:
    """A published action string with its settings; the fields are the keywords of `parse_actions`."""

    action: str
    perspective: str = "tps"
    yaw_rotation_speed_deg: float = DEFAULT_ROTATION_DEG
    pitch_rotation_speed_deg: float = DEFAULT_ROTATION_DEG


def perspective_value(perspective: str) -> float:
    """`tps` -> 0, `fps` -> 1. Error: ActionError `bad_perspective`."""
    if not isinstance(perspective, str) or perspective not in PERSPECTIVES:
        raise ActionError(
            "bad_perspective",
            f"perspective {perspective!r}: give 'fps' (first person) or 'tps' (third person).",
        )
    return PERSPECTIVES[perspective]


def parse_duration(text: str) -> int | None:
    """A whole number from 1 that prints back as `text` (no sign, zeros in front or other digits), else None."""
    if not (text.isascii() and text.isdigit()) or text.startswith("0") or len(text) > 18:
        return None
    return int(text)


def parse_commands(action: str) -> tuple[Command, ...]:
    """Published action string -> commands. Case and blanks are forgiven, empty commands between commas skipped.

    Errors: ActionError of kind empty_string, no_commands, no_action_or_no_dash, bad_duration, empty_token,
    none_combined, unknown_token, two_movements, two_pitch, two_yaw, two_space, too_long.
    """
    if not action.strip():
        raise ActionError("empty_string", f"action {action!r} is empty; {ALLOWED}. To stand still write none-4.")
    pieces = [piece.strip() for piece in action.split(",")]
    commands = tuple(_parse_command(piece) for piece in pieces if piece)
    if not commands:
        raise ActionError("no_commands", f"action {action!r} holds no command; {ALLOWED}.")
    total = sum(command.duration for command in commands)
    if total > MAX_LATENT_FRAMES:
        raise ActionError(
            "too_long",
            f"action {action!r} lasts {total} latent frames; at most {MAX_LATENT_FRAMES} are allowed.",
        )
    return commands


def _parse_command(text: str) -> Command:
    def error(kind: str, what: str) -> ActionError:
        return ActionError(kind, f"command {text!r}: {what}; {ALLOWED}.")

    head, dash, tail = text.rpartition("-")
    head, tail = head.strip().lower(), tail.strip()
    if not dash or not head:
        raise error("no_action_or_no_dash", "tokens before a '-' and a duration after it are needed")
    duration = parse_duration(tail)
    if duration is None:
        raise error("bad_duration", f"duration {tail!r} is not a whole number from 1")
    tokens = [token.strip() for token in head.split("+")]
    if not all(tokens):
        raise error("empty_token", "nothing stands before or after a '+'")
    if "none" in tokens and len(tokens) > 1:
        raise error("none_combined", "none stands alone")

    fields: dict[str, tuple[int, int] | int | bool] = {}
    for token in tokens:
        if token == "none":
            continue
        if token in MOVEMENTS:
            field, value, kind, fix = (
                "movement",
                MOVEMENTS[token],
                "two_movements",
                "keep one (wd is w and d)",
            )
        elif token in PITCHES:
            field, value, kind, fix = "pitch", PITCHES[token], "two_pitch", "keep up or down"
        elif token in YAWS:
            field, value, kind, fix = "yaw", YAWS[token], "two_yaw", "keep left or right"
        elif token == "space":
            field, value, kind, fix = "jump", True, "two_space", "keep one space"
        else:
            raise error("unknown_token", f"unknown token {token!r}")
        if field in fields:
            raise error(kind, f"second {field} {token!r}, {fix}")
        fields[field] = value
    forward, lateral = fields.pop("movement", (0, 0))  # type: ignore[misc]
    return Command(duration, forward, lateral, **fields)  # type: ignore[arg-type]


def rotation_speeds(
    rotation_speed_deg: float = DEFAULT_ROTATION_DEG,
    yaw_rotation_speed_deg: float | None = None,
    pitch_rotation_speed_deg: float | None = None,
) -> tuple[float, float]:
    """(yaw, pitch) degrees a latent frame; an axis without its own speed takes the common one.

    Error: ActionError `speed_not_positive_finite`; yaw is looked at first.
    """
    speeds = []
    for name, own in (("yaw", yaw_rotation_speed_deg), ("pitch", pitch_rotation_speed_deg)):
        speed = rotation_speed_deg if own is None else own
        if not (math.isfinite(speed) and speed > 0):
            raise ActionError(
                "speed_not_positive_finite",
                f"{name} rotation speed {speed!r} degrees a latent frame: give a finite number above 0, such as 3.",
            )
        speeds.append(float(speed))
    return speeds[0], speeds[1]


def rows_from_commands(
    commands: Sequence[Command], perspective: str, yaw_speed_deg: float, pitch_speed_deg: float
) -> np.ndarray:
    """Commands -> float32 rows [T, 6], T the sum of durations; row 0 is at rest and counts in the first command."""
    rows = np.zeros((sum(command.duration for command in commands), 6), np.float32)
    start = 0
    for c in commands:
        rows[start : start + c.duration] = (
            c.pitch * pitch_speed_deg,
            c.yaw * yaw_speed_deg,
            c.forward,
            c.lateral,
            0.0,
            float(c.jump),
        )
        start += c.duration
    rows[0] = 0.0
    rows[:, PERSPECTIVE] = perspective_value(perspective)
    return rows


def parse_actions(
    action: str,
    perspective: str = "tps",
    rotation_speed_deg: float = DEFAULT_ROTATION_DEG,
    yaw_rotation_speed_deg: float | None = None,
    pitch_rotation_speed_deg: float | None = None,
) -> np.ndarray:
    """Published action string -> float32 rows [T, 6], T the sum of the durations (latent frames).

    Speeds in degrees a latent frame. Errors: ActionError, see `perspective_value`, `rotation_speeds` and
    `parse_commands`, in this order. Source: golden README 33-35.
    """
    perspective_value(perspective)
    yaw, pitch = rotation_speeds(rotation_speed_deg, yaw_rotation_speed_deg, pitch_rotation_speed_deg)
    return rows_from_commands(parse_commands(action), perspective, yaw, pitch)


def load_action_sequence(
    action: str,
    perspective: str = "tps",
    chunk_length: int = 4,
    sink_size: int = 1,
    temporal_size: int = 1,
    rotation_speed_deg: float = DEFAULT_ROTATION_DEG,
    yaw_rotation_speed_deg: float | None = None,
    pitch_rotation_speed_deg: float | None = None,
) -> np.ndarray:
    """`parse_actions` for a model: the length must fill whole chunks and suit the memory options.

    Errors: ActionError of the parser, GeometryError of `geometry.chunk_count` and `check_memory_options`
    (golden README 46).
    """
    check_chunk_length(chunk_length)
    rows = parse_actions(action, perspective, rotation_speed_deg, yaw_rotation_speed_deg, pitch_rotation_speed_deg)
    chunk_count(len(rows), chunk_length)
    check_memory_options(chunk_length, sink_size, temporal_size, len(rows))
    return rows


def check_rows(rows: np.ndarray) -> np.ndarray:
    """float32 rows [T, 6] after a check that they are actions.

    Errors: ActionError `bad_shape`, `not_finite` (NaN or infinite), `bad_discrete` (forward and lateral are
    -1, 0, 1; perspective and jump 0, 1), naming the latent frame.
    """
    rows = np.asarray(rows, np.float32)
    if rows.ndim != 2 or rows.shape[1] != 6 or len(rows) == 0:
        raise ActionError("bad_shape", f"action rows of shape {rows.shape}: [T, 6] with T from 1 is needed.")
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise ActionError(
            "not_finite", f"action row {bad[0]} is {rows[bad[0]].tolist()}: rotations must be finite degrees."
        )
    ternary, binary = rows[:, [FORWARD, LATERAL]], rows[:, [PERSPECTIVE, JUMP]]
    ok = np.isin(ternary, (-1, 0, 1)).all(axis=1) & np.isin(binary, (0, 1)).all(axis=1)
    bad = np.flatnonzero(~ok)
    if bad.size:
        raise ActionError(
            "bad_discrete",
            f"action row {bad[0]} is {rows[bad[0]].tolist()}: forward and lateral must be -1, 0 or 1, "
            "perspective and jump 0 or 1.",
        )
    return rows


def clip_rotation(rows: np.ndarray, max_pitch_deg: float, max_yaw_deg: float) -> np.ndarray:
    """Checked rows [T, 6] with pitch and yaw inside what a model was trained on (degrees a latent frame).

    Warns (ControlWarning) with the range and the first row changed; NaN and infinite are errors
    (`check_rows`).
    """
    rows = check_rows(rows)
    out = rows.copy()
    for axis, name, limit in ((PITCH, "pitch", max_pitch_deg), (YAW, "yaw", max_yaw_deg)):
        bound = np.float32(limit)
        bad = np.flatnonzero(np.abs(rows[:, axis]) > bound)
        if bad.size:
            out[:, axis] = np.clip(rows[:, axis], -bound, bound)
            warnings.warn(
                f"{name} of {len(bad)} action rows (first: row {bad[0]}, {rows[bad[0], axis]:g} degrees) is outside "
                f"the trained range of {-limit:g} to {limit:g} degrees a latent frame and was clipped to it",
                ControlWarning,
                stacklevel=2,
            )
    return out


def inverse_rows(rows: np.ndarray) -> np.ndarray:
    """The rows [n, 6] that undo `rows`: reversed order, rotation and movement negated, perspective kept.

    They retrace exactly where the motion within a latent frame is symmetric in time (turning and walking
    together at constant speed). Error: ActionError `jump_has_no_inverse`.
    """
    rows = check_rows(rows)
    bad = np.flatnonzero(rows[:, JUMP])
    if bad.size:
        raise ActionError("jump_has_no_inverse", f"action row {bad[0]} jumps; leave jumps out of a retraced path.")
    out = rows[::-1].copy()
    # 0 - x and not -x: a minus zero would print as -0.
    out[:, :PERSPECTIVE] = 0.0 - out[:, :PERSPECTIVE]
    return out


def render_actions(rows: np.ndarray) -> ActionString:
    """Rows [T, 6] of a world -> the shortest published string; `parse_actions(**asdict(result))` gives them back.

    Error: ActionError `not_expressible`: row 0 not at rest, more than one speed on an axis, or a perspective
    that changes; and those of `check_rows`.
    """
    rows = check_rows(rows)
    if rows[0, [PITCH, YAW, FORWARD, LATERAL, JUMP]].any():
        raise ActionError("not_expressible", f"row 0 is {rows[0].tolist()}: a world starts at rest.")
    if (rows[:, PERSPECTIVE] != rows[0, PERSPECTIVE]).any():
        raise ActionError("not_expressible", "the perspective changes; an action string has one perspective.")
    speeds = {}
    for axis, name in ((YAW, "yaw"), (PITCH, "pitch")):
        values = np.unique(np.abs(rows[:, axis][rows[:, axis] != 0]))
        if len(values) > 1:
            raise ActionError(
                "not_expressible",
                f"{name} has the speeds {values.tolist()}: an action string has one speed an axis.",
            )
        speeds[name] = float(values[0]) if len(values) else DEFAULT_ROTATION_DEG
    # Row 0 belongs to the first command, whatever that is.
    held = [describe_row(row) for row in (rows[1:] if len(rows) > 1 else rows)]
    runs = [(tokens, len(list(group))) for tokens, group in itertools.groupby(held)]
    if len(rows) > 1:
        runs[0] = (runs[0][0], runs[0][1] + 1)
    text = ",".join(f"{tokens}-{duration}" for tokens, duration in runs)
    perspective = "fps" if rows[0, PERSPECTIVE] else "tps"
    return ActionString(text, perspective, speeds["yaw"], speeds["pitch"])


def describe_row(row: np.ndarray) -> str:
    """Tokens of one row [6], such as `w+right`; `none` at rest. Amounts of rotation are left out."""
    return Command(
        1,
        forward=int(row[FORWARD]),
        lateral=int(row[LATERAL]),
        pitch=int(np.sign(row[PITCH])),
        yaw=int(np.sign(row[YAW])),
        jump=bool(row[JUMP]),
    ).tokens


def row_from_keys(
    keys: Iterable[str],
    perspective: str = "tps",
    yaw_speed_deg: float = DEFAULT_ROTATION_DEG,
    pitch_speed_deg: float = DEFAULT_ROTATION_DEG,
) -> np.ndarray:
    """Held keys (w a s d up down left right space, any case) -> row [6]; opposite keys cancel.

    Errors: ActionError `unknown_key`, `bad_perspective`, `speed_not_positive_finite`.
    """
    yaw, pitch = rotation_speeds(yaw_rotation_speed_deg=yaw_speed_deg, pitch_rotation_speed_deg=pitch_speed_deg)
    held = {key.strip().lower() or key for key in keys}
    known = ("w", "a", "s", "d", *PITCHES, *YAWS, "space")
    unknown = sorted(held.difference(known))
    if unknown:
        raise ActionError("unknown_key", f"key {unknown[0]!r}: the keys are {' '.join(known)}.")

    def axis(plus: str, minus: str) -> int:
        return (plus in held) - (minus in held)

    row = (
        axis("up", "down") * pitch,
        axis("right", "left") * yaw,
        axis("w", "s"),
        axis("d", "a"),
        perspective_value(perspective),
        float("space" in held),
    )
    return np.array(row, np.float32)
