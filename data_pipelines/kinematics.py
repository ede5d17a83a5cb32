"""Action rows -> the walker's poses, four a latent frame, on our own kinematics and collision.

Per picture: half the turn, a step, half the turn, so that the inverse row walks the same points backwards. Turns are
whole 1/65536 parts of a circle and positions whole map units, because the engine floors both.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from data_pipelines.doom import CIRCLE, Pose
from data_pipelines.maps import Map
from wp2_jax.controls import actions
from wp2_jax.controls.geometry import PICTURES_PER_LATENT

# Height of a jump at its pictures as a share of the top: a parabola over two latent frames.
JUMP_ROWS = 2
_JUMP = tuple(1 - ((i - 4) / 4) ** 2 for i in range(1, 1 + JUMP_ROWS * PICTURES_PER_LATENT))


@dataclasses.dataclass(frozen=True)
class MotionConfig:
    """Speeds: degrees a latent frame, map units a picture, map units of height. Pitch stays within +-max_pitch."""

    yaw_degrees: float = 5.625
    pitch_degrees: float = 2.8125
    step: float = 4.0
    jump_height: int = 32
    max_pitch_degrees: float = 22.5

    def __post_init__(self):
        for name in ("yaw_degrees", "pitch_degrees", "max_pitch_degrees"):
            value = getattr(self, name)
            parts = value * CIRCLE / 360 / PICTURES_PER_LATENT
            if not value > 0 or parts != int(parts):
                unit = PICTURES_PER_LATENT * 360 / CIRCLE
                raise ValueError(
                    f"{name}={value}: turns are whole multiples of {unit} degrees a latent frame, "
                    f"such as {max(1, round(value / unit)) * unit}"
                )
        if not 0 < self.step <= 40:
            raise ValueError(f"step={self.step}: use more than 0 and at most 40 map units a picture")
        if not 0 < self.jump_height <= 40:
            raise ValueError(f"jump_height={self.jump_height}: use 1 to 40 map units")

    def rows(self, commands, perspective: str) -> np.ndarray:
        """Rows float32 [T, 6] of commands; row 0 is at rest and counts in the first command."""
        return actions.rows_from_commands(commands, perspective, self.yaw_degrees, self.pitch_degrees)


@dataclasses.dataclass(frozen=True)
class Walker:
    """Where the walker is between two latent frames; x and y are exact, `airborne` counts rows left of a jump."""

    x: float
    y: float
    heading: int
    pitch: int = 0
    airborne: int = 0

    def pose(self, lift: int = 0) -> Pose:
        return Pose(round(self.x), round(self.y), self.heading % CIRCLE, self.pitch, lift)


@dataclasses.dataclass(frozen=True)
class World:
    """What is in the way: the map, whether its door is open, and the slot of a thing that is not."""

    map: Map
    door_open: bool = False
    ignore: int = 0

    def free(self, x: float, y: float) -> bool:
        return self.map.free(x, y, self.door_open, self.ignore)


def advance(walker: Walker, row: np.ndarray, config: MotionConfig) -> tuple[Walker, list[Pose]]:
    """One latent frame: the walker after it and its four poses. Nothing is checked against walls."""
    parts = [float(angle) * CIRCLE / 360 / PICTURES_PER_LATENT for angle in row[:2]]
    if any(abs(part - round(part)) > 1e-3 for part in parts):
        raise ValueError(f"action row {row.tolist()}: its turns are no whole 1/{CIRCLE} of a circle a picture")
    look, turn = (round(part) for part in parts)
    forward, lateral = (float(v) for v in row[2:4])
    length = math.hypot(forward, lateral)
    airborne = walker.airborne or (JUMP_ROWS if row[actions.JUMP] else 0)
    poses = []
    for picture in range(PICTURES_PER_LATENT):
        # Right is positive in a row, counter-clockwise in the world.
        middle = (walker.heading - turn / 2) * 2 * math.pi / CIRCLE
        x, y = walker.x, walker.y
        if length:
            c, s = math.cos(middle), math.sin(middle)
            x += config.step * (forward * c + lateral * s) / length
            y += config.step * (forward * s - lateral * c) / length
        walker = dataclasses.replace(
            walker, x=x, y=y, heading=walker.heading - turn, pitch=walker.pitch + look, airborne=airborne
        )
        lift = 0
        if airborne:
            lift = round(config.jump_height * _JUMP[(JUMP_ROWS - airborne) * PICTURES_PER_LATENT + picture])
        poses.append(walker.pose(lift))
    return dataclasses.replace(walker, airborne=max(0, airborne - 1)), poses


def walk(walker: Walker, rows: np.ndarray, world: World, config: MotionConfig) -> tuple[Walker, list[Pose], int]:
    """Walk `rows` [n, 6] as far as nothing is in the way: the walker, its poses (4 a row), the rows that went well.

    A row is walked whole or not at all, so that commanded motion is performed motion.
    """
    poses: list[Pose] = []
    limit = round(config.max_pitch_degrees * CIRCLE / 360)
    for index, row in enumerate(rows):
        after, new = advance(walker, row, config)
        if any(not world.free(pose.x, pose.y) or abs(pose.pitch) > limit for pose in new):
            return walker, poses, index
        walker = after
        poses += new
    return walker, poses, len(rows)


def retrace(poses: list[Pose]) -> list[Pose]:
    """The poses of the way back: `poses` are those of picture 0 .. 4n; the result are the 4n that follow."""
    return poses[-2::-1]
