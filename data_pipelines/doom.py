"""The game engine as a camera: poses in, pictures and depth out, bit-identical for the same poses and orders.

A picture costs two tics: the first teleports the walker and turns the view, the second lifts it for a jump and
draws (the view height is wrong on the tic of a teleport). Turns are sent as differences in 1/65536 of a circle.

The engine draws pitch by shearing: a pixel's ray is that of a level camera with its centre moved by fy tan(pitch), and
depth is along the level forward axis. The recorded rotation holds the pitch that was commanded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data_pipelines import maps

CIRCLE = 65536
UNITS_PER_METRE = 32.0
# Turns in the first tics after a start are lost.
_SETTLE_TICS = 14
# Angles are read back with a rounding of 1e-8 degrees; one step of the engine's is 5e-3.
_EXACT = 1e-3
# Depth buffer value -> map units, fitted on walls at known distances (error below one step); 127 is all beyond.
_DEPTH_STEP, _DEPTH_OFFSET, _DEPTH_FAR = 7.14, 10.0, 127
# A pixel of the engine's 4:3 picture is seen under 1.2 times the vertical focal length.
_ASPECT = 1.2
EYE_HEIGHT = 41
# The third-person camera hangs this high above the feet and this far behind; walls and ceilings pull it nearer.
CHASE_DISTANCE, CHASE_HEIGHT, _CHASE_CLEARANCE = 110, 56, 5
_BODY_HEIGHT = 56
# The light tables after a tint are not those of the start, even when the light is white again: every clip has had one.
_RESET = ("r_visibility 8", "testfade 000000", "testcolor ff8080 0", "testcolor ffffff 0")


@dataclasses.dataclass(frozen=True)
class CameraConfig:
    """Size of the stored pictures and of the engine's (4:3), which are cropped to their shape and averaged down."""

    width: int = 64
    height: int = 64
    engine_width: int = 320
    engine_height: int = 240

    def __post_init__(self):
        if (self.engine_width, self.engine_height) not in ((160, 120), (320, 240), (640, 480), (800, 600)):
            raise ValueError(
                f"engine picture {self.engine_width}x{self.engine_height}: use 160x120, 320x240, 640x480 or 800x600"
            )
        if not 0 < self.width <= self.engine_width or not 0 < self.height <= self.engine_height:
            raise ValueError(
                f"pictures of {self.width}x{self.height} from an engine picture of "
                f"{self.engine_width}x{self.engine_height}: use a larger engine picture"
            )

    @property
    def crop(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom of the largest centred part with the shape of the stored pictures."""
        scale = min(self.engine_width / self.width, self.engine_height / self.height)
        width, height = round(self.width * scale), round(self.height * scale)
        left, top = (self.engine_width - width) // 2, (self.engine_height - height) // 2
        return left, top, left + width, top + height

    @property
    def intrinsics(self) -> np.ndarray:
        """fx, fy, cx, cy of the stored pictures in pixels, float32 [4] (the engine sees 90 degrees across)."""
        left, top, right, bottom = self.crop
        focal = self.engine_width / 2
        across, down = self.width / (right - left), self.height / (bottom - top)
        centre = ((self.engine_width / 2 - left) * across, (self.engine_height / 2 - top) * down)
        return np.asarray([focal * across, focal * _ASPECT * down, *centre], np.float32)


@dataclasses.dataclass(frozen=True)
class Pose:
    """Where the walker stands: whole map units, angles in 1/65536 of a circle (heading counter-clockwise)."""

    x: int
    y: int
    heading: int
    pitch: int = 0
    lift: int = 0


@dataclasses.dataclass(frozen=True)
class Shot:
    """A picture uint8 [H, W, 3], its depth uint16 [H, W] (millimetres, 0 unknown) or None, and the camera's pose."""

    picture: np.ndarray
    depth: np.ndarray | None
    camera_to_world: np.ndarray


class EngineError(RuntimeError):
    """The engine did not do what was asked; a clip shot so would not be exact."""


def camera_matrix(x: float, y: float, z: float, heading: float, pitch: float) -> np.ndarray:
    """Camera-to-world float32 [4, 4] in metres from map units and degrees (pitch up positive)."""
    a, b = np.radians(heading), np.radians(pitch)
    ca, sa, cb, sb = np.cos(a), np.sin(a), np.cos(b), np.sin(b)
    matrix = np.eye(4)
    matrix[:3, 0] = (sa, -ca, 0)
    matrix[:3, 1] = (sb * ca, sb * sa, -cb)
    matrix[:3, 2] = (cb * ca, cb * sa, sb)
    matrix[:3, 3] = np.asarray((x, y, z)) / UNITS_PER_METRE
    return matrix.astype(np.float32)


def camera_pose(world: maps.Map, pose: Pose, third_person: bool, door_open: bool = False) -> np.ndarray:
    """Camera-to-world [4, 4] of the camera that watches a walker: its eyes, or the chasing camera behind it."""
    heading, pitch = pose.heading * 360 / CIRCLE, pose.pitch * 360 / CIRCLE
    if not third_person:
        return camera_matrix(pose.x, pose.y, pose.lift + EYE_HEIGHT, heading, pitch)
    matrix = camera_matrix(0, 0, 0, heading, pitch)
    head = np.asarray((pose.x, pose.y, pose.lift + CHASE_HEIGHT), np.float64)
    back = -matrix[:3, 2].astype(np.float64)
    reach = world.sight(head, back, CHASE_DISTANCE, door_open)
    if reach < CHASE_DISTANCE:
        reach = max(0.0, reach - _CHASE_CLEARANCE)
    matrix[:3, 3] = (head + reach * back) / UNITS_PER_METRE
    return matrix


def game_wad() -> Path:
    """The freely licensed game data that ship with the engine's package."""
    import vizdoom

    return Path(os.path.dirname(vizdoom.__file__)) / "freedoom2.wad"


class Engine:
    """One running game over a file of maps; a context manager."""

    def __init__(self, worlds: Sequence[maps.Map], folder: Path, config: CameraConfig | None = None):
        import vizdoom as vzd

        self.config = config or CameraConfig()
        self._worlds = list(worlds)
        folder = Path(folder).resolve()
        path = folder / "worlds.wad"
        maps.write_wad(path, self._worlds, game_wad())
        game = vzd.DoomGame()
        game.set_doom_game_path(str(game_wad()))
        game.set_doom_scenario_path(str(path))
        game.set_doom_config_path(str(folder / "engine.ini"))
        game.set_doom_map("MAP01")
        size = f"RES_{self.config.engine_width}X{self.config.engine_height}"
        game.set_screen_resolution(getattr(vzd.ScreenResolution, size))
        game.set_screen_format(vzd.ScreenFormat.RGB24)
        game.set_depth_buffer_enabled(True)
        for part in ("hud", "crosshair", "weapon", "decals", "particles", "messages", "corpses"):
            getattr(game, f"set_render_{part}")(False)
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(vzd.Mode.PLAYER)
        game.set_episode_timeout(0)
        game.set_available_buttons([vzd.Button.TURN_LEFT_RIGHT_DELTA, vzd.Button.LOOK_UP_DOWN_DELTA])
        names = ("POSITION_X", "POSITION_Y", "POSITION_Z", "ANGLE", "PITCH")
        game.set_available_game_variables([getattr(vzd.GameVariable, name) for name in names])
        game.add_game_args(f"+sv_cheats 1 +chase_dist {CHASE_DISTANCE} +chase_height {CHASE_HEIGHT - _BODY_HEIGHT}")
        game.set_seed(1)
        # The engine leaves an empty folder where it starts.
        with contextlib.chdir(folder):
            game.init()
        self._game = game
        self._pose = Pose(0, 0, 0)
        self._third_person = False
        self._door_open = False
        self._world = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """End the game."""
        self._game.close()

    def start(self, world: int, pose: Pose, third_person: bool, orders: Sequence[str] = ()) -> None:
        """Load map number `world` afresh and stand at `pose`; `orders` are console commands carried out before."""
        game = self._game
        game.set_doom_map(f"MAP{world + 1:02d}")
        game.set_seed(1)
        game.new_episode()
        game.set_action([0.0, 0.0])
        game.advance_action(_SETTLE_TICS, True)
        for order in (*_RESET, *orders):
            game.send_game_command(order)
        if third_person != self._third_person:
            # A switch that outlives the map.
            game.send_game_command("chase")
            self._third_person = third_person
        self._pose = Pose(pose.x, pose.y, 0)
        self._world, self._door_open = world, False
        # Thirty tics: the engine fades light over them.
        game.advance_action(30, True)
        self._move(pose)

    def _move(self, pose: Pose) -> None:
        game = self._game
        if self._pose.lift:
            # A teleport of a falling walker wraps its height around.
            game.send_game_command("give Still")
        game.send_game_command(f"warp {pose.x} {pose.y}")
        turn = (self._pose.heading - pose.heading + CIRCLE // 2) % CIRCLE - CIRCLE // 2
        look = self._pose.pitch - pose.pitch
        game.set_action([turn * 360 / CIRCLE, look * 360 / CIRCLE])
        game.advance_action(1, False)
        if pose.lift:
            game.send_game_command(f"give Lift{pose.lift}")
        game.set_action([0.0, 0.0])
        game.advance_action(1, True)
        self._pose = pose

    def shoot(self, pose: Pose, orders: Sequence[str] = (), depth: bool = False) -> Shot:
        """Carry out `orders`, stand at `pose` and take a picture. EngineError if the engine stands elsewhere."""
        for order in orders:
            self._game.send_game_command(order)
            if order in ("give OpenDoor", "give CloseDoor"):
                self._door_open = order == "give OpenDoor"
        self._move(pose)
        state = self._game.get_state()
        if state is None:
            raise EngineError(f"the game ended at {pose}")
        there = np.asarray(state.game_variables, np.float64)
        wanted = np.asarray((pose.x, pose.y, pose.lift, *(np.asarray((pose.heading, pose.pitch)) * 360 / CIRCLE)))
        off = there - wanted
        off[3] = (off[3] + 180) % 360 - 180
        if np.abs(off).max() > _EXACT:
            raise EngineError(f"asked for x, y, lift, heading, pitch {wanted}, the engine is at {there}")
        crop, size = self.config.crop, (self.config.width, self.config.height)
        picture = Image.fromarray(state.screen_buffer).resize(size, Image.Resampling.BOX, box=crop)
        camera = camera_pose(self._worlds[self._world], pose, self._third_person, self._door_open)
        return Shot(np.asarray(picture), self._depth(np.asarray(state.depth_buffer)) if depth else None, camera)

    def _depth(self, buffer: np.ndarray) -> np.ndarray:
        left, top, right, bottom = self.config.crop
        rows = top + ((np.arange(self.config.height) + 0.5) * (bottom - top) / self.config.height).astype(int)
        columns = left + ((np.arange(self.config.width) + 0.5) * (right - left) / self.config.width).astype(int)
        value = buffer[np.ix_(rows, columns)].astype(np.float64)
        millimetres = (value * _DEPTH_STEP + _DEPTH_OFFSET) * 1000 / UNITS_PER_METRE
        return np.where(value >= _DEPTH_FAR, 0, np.round(millimetres)).astype(np.uint16)
