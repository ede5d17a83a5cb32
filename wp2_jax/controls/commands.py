"""Random action sequences for recording and for rollouts in training (spec sections 5, 7 and 8)."""

import dataclasses

import numpy as np

from wp2_jax.controls import actions
from wp2_jax.controls.actions import Command
from wp2_jax.controls.errors import ActionError
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, PICTURES_PER_SECOND


@dataclasses.dataclass(frozen=True)
class CommandConfig:
    """How random commands are drawn. Durations in seconds, speeds in degrees a latent frame.

    A command moves, turns, looks up or down, and jumps with these independent probabilities; one that does
    nothing is a rest. `max_pitch_deg` bounds the pitch added up since the start, so that the camera never
    ends at the sky.
    """

    min_seconds: float = 1.0
    max_seconds: float = 5.0
    pictures_per_second: int = PICTURES_PER_SECOND
    move_probability: float = 0.8
    turn_probability: float = 0.5
    look_probability: float = 0.15
    jump_probability: float = 0.05
    yaw_speed_deg: float = actions.DEFAULT_ROTATION_DEG
    pitch_speed_deg: float = actions.DEFAULT_ROTATION_DEG
    max_pitch_deg: float = 30.0

    def __post_init__(self):
        if not 0 < self.min_seconds <= self.max_seconds:
            raise ActionError(
                "bad_config",
                f"commands of {self.min_seconds} to {self.max_seconds} s: give 0 < min_seconds <= max_seconds.",
            )
        actions.rotation_speeds(
            yaw_rotation_speed_deg=self.yaw_speed_deg, pitch_rotation_speed_deg=self.pitch_speed_deg
        )

    @property
    def duration_range(self) -> tuple[int, int]:
        """Shortest and longest command in latent frames (4 and 20 for 1-5 s at 16 pictures a second)."""
        rate = self.pictures_per_second / PICTURES_PER_LATENT
        shortest = max(1, round(self.min_seconds * rate))
        return shortest, max(shortest, round(self.max_seconds * rate))


def random_commands(
    rng: np.random.Generator, latent_frames: int, config: CommandConfig, jumps: bool = True
) -> tuple[Command, ...]:
    """Random commands that together last exactly `latent_frames` (the last one may be cut short)."""
    shortest, longest = config.duration_range
    movements = list(actions.MOVEMENTS.values())
    commands: list[Command] = []
    left, pitch_sum = latent_frames, 0.0
    while left > 0:
        # Every draw happens in every turn, so that an option that is off does not shift the others.
        duration = min(left, int(rng.integers(shortest, longest, endpoint=True)))
        moves, turns, looks, leaps = rng.random(4) < (
            config.move_probability,
            config.turn_probability,
            config.look_probability,
            config.jump_probability,
        )
        forward, lateral = movements[int(rng.integers(len(movements)))]
        yaw, pitch = (int(sign) for sign in rng.choice((-1, 1), size=2))
        change = pitch * duration * config.pitch_speed_deg
        if abs(pitch_sum + change) > config.max_pitch_deg:
            pitch, change = -pitch, -change
        looks = bool(looks) and abs(pitch_sum + change) <= config.max_pitch_deg
        pitch_sum += change if looks else 0.0
        commands.append(
            Command(
                duration,
                forward=forward if moves else 0,
                lateral=lateral if moves else 0,
                pitch=pitch if looks else 0,
                yaw=yaw if turns else 0,
                jump=bool(leaps) and jumps,
            )
        )
        left -= duration
    return tuple(commands)


def random_rows(
    rng: np.random.Generator,
    latent_frames: int,
    perspective: str = "tps",
    config: CommandConfig | None = None,
    out_and_back: bool = False,
) -> np.ndarray:
    """Random rows float32 [latent_frames, 6]; row 0 at rest.

    out_and_back (RevisitBench, loop closures): row 0 at rest, n = (T-1)//2 random rows without jumps, then
    their n inverses in reverse order, so that latent frames k and 2n-k see the same view; an even T ends with
    one row at rest.
    """
    config = config or CommandConfig()
    speeds = (config.yaw_speed_deg, config.pitch_speed_deg)
    if latent_frames < 1:
        raise ActionError("bad_length", f"{latent_frames} latent frames: give at least 1.")
    if not out_and_back:
        return actions.rows_from_commands(random_commands(rng, latent_frames, config), perspective, *speeds)
    n = (latent_frames - 1) // 2
    rows = np.zeros((latent_frames, 6), np.float32)
    if n:
        # Drawn with one row more, because the first row of a command list is the rest.
        first = Command(1)
        drawn = actions.rows_from_commands((first, *random_commands(rng, n, config, jumps=False)), perspective, *speeds)
        rows[1 : n + 1] = drawn[1:]
        rows[n + 1 : 2 * n + 1] = actions.inverse_rows(drawn[1:])
    rows[:, actions.PERSPECTIVE] = actions.perspective_value(perspective)
    return rows


def mirrored_pairs(latent_frames: int) -> list[tuple[int, int]]:
    """Pairs (k, 2n-k), k < n, of latent frames with the same view in an out-and-back sequence of this length."""
    n = (latent_frames - 1) // 2
    return [(k, 2 * n - k) for k in range(n)]
