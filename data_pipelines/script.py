"""What happens in a clip: start, action rows, poses, orders to the engine and caption, all from (seed, index)."""

from __future__ import annotations

import dataclasses

import numpy as np

from data_pipelines import events
from data_pipelines.doom import CIRCLE, Pose
from data_pipelines.kinematics import JUMP_ROWS, MotionConfig, Walker, World, advance, retrace, walk
from data_pipelines.maps import CELL, Map
from data_pipelines.schema import INTERVAL_SECONDS
from wp2_jax.controls import actions
from wp2_jax.controls.captions import ClipCaption, Interaction
from wp2_jax.controls.commands import CommandConfig, random_commands
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, PICTURES_PER_SECOND, picture_count

# Latent frames in one interval of the caption.
INTERVAL_ROWS = round(INTERVAL_SECONDS * PICTURES_PER_SECOND / PICTURES_PER_LATENT)
_HEADING_STEP = CIRCLE // 128
_TRIES = 12
ARMOUR = {"green": "20 c0 20", "red": "e0 20 20", "blue": "30 40 f0", "yellow": "f0 e0 20", "white": "f0 f0 f0"}


@dataclasses.dataclass(frozen=True)
class ScriptConfig:
    """Length of a clip in latent frames, the shares of its kinds and of first person, and how commands are drawn.

    The shares of the kinds need not add up to 1. `event_density`: chance of an event in each interval of a clip of kind
    event; 0: one event, often with others in the intervals right after it. `event_environment`: the share of fog and
    light among the clips of kind event, 0 for a third, as the other categories have.
    """

    latents: int = 40
    navigation: float = 0.4
    loop_closure: float = 0.3
    event: float = 0.3
    event_density: float = 0.0
    event_environment: float = 0.0
    first_person: float = 0.5
    jump_probability: float = 0.08
    min_seconds: float = 1.0
    max_seconds: float = 5.0
    motion: MotionConfig = dataclasses.field(default_factory=MotionConfig)

    def __post_init__(self):
        if self.latents < 4 or self.latents % 4:
            raise ValueError(f"latents={self.latents}: clips fill whole chunks of 4 latent frames")
        shares = (self.navigation, self.loop_closure, self.event)
        if min(shares) < 0 or sum(shares) <= 0:
            raise ValueError(f"navigation, loop_closure, event = {shares}: shares of at least 0, not all 0")
        for name in ("first_person", "event_density", "event_environment"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to 1")

    @property
    def commands(self) -> CommandConfig:
        return CommandConfig(
            min_seconds=self.min_seconds,
            max_seconds=self.max_seconds,
            jump_probability=self.jump_probability,
            yaw_speed_deg=self.motion.yaw_degrees,
            pitch_speed_deg=self.motion.pitch_degrees,
            max_pitch_deg=self.motion.max_pitch_degrees,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Script:
    """A clip to be shot. `setup` are orders before it starts, `orders` those at a picture."""

    kind: str
    perspective: str
    rows: np.ndarray
    poses: tuple[Pose, ...]
    setup: tuple[str, ...]
    orders: dict[int, tuple[str, ...]]
    caption: ClipCaption


class Path:
    """A walk under construction: rows and poses so far and the walker at their end. Starts with the row at rest."""

    def __init__(self, walker: Walker, perspective: str, config: ScriptConfig, rng: np.random.Generator):
        self.walker, self.config, self._rng, self._perspective = walker, config, rng, perspective
        self.rows = [config.motion.rows([actions.Command(1)], perspective)]
        self.poses = [walker.pose()]

    @property
    def length(self) -> int:
        return sum(len(rows) for rows in self.rows)

    @property
    def next_picture(self) -> int:
        return len(self.poses)

    def _command_rows(self, command: actions.Command) -> np.ndarray:
        # One row more, because the first of a command list is the world's rest.
        return self.config.motion.rows([actions.Command(1), command], self._perspective)[1:]

    def do(self, command: actions.Command, world: World) -> int:
        """Carry out `command` as far as nothing is in the way; the rows that were walked are added and counted."""
        rows = self._command_rows(command)
        after, poses, done = walk(self.walker, rows, world, self.config.motion)
        if command.jump and done % JUMP_ROWS:
            done -= done % JUMP_ROWS
            after, poses, done = walk(self.walker, rows[:done], world, self.config.motion)
        self.walker = after
        self.rows.append(rows[:done])
        self.poses += poses
        return done

    def rest(self, rows: int) -> None:
        """Stand still for `rows` latent frames."""
        if rows:
            command_rows = self._command_rows(actions.Command(rows))
            for row in command_rows:
                self.walker, poses = advance(self.walker, row, self.config.motion)
                self.poses += poses
            self.rows.append(command_rows)

    def wander(self, rows: int, world: World, jumps: bool = True) -> None:
        """Random commands for `rows` latent frames, each at least a second long and performed in full."""
        left, shortest = rows, self.config.commands.duration_range[0]
        while left:
            for _ in range(_TRIES):
                command = random_commands(self._rng, left, self.config.commands, jumps)[0]
                if command.jump and command.duration < JUMP_ROWS:
                    command = dataclasses.replace(command, jump=False)
                if command.tokens == "none":
                    # Rests are kept short: a clip at rest shows nothing.
                    command = actions.Command(min(left, shortest))
                # A wall may cut a command short, to a second at least.
                enough = min(left, shortest)
                before = (self.walker, len(self.rows), len(self.poses))
                done = self.do(command, world)
                if done >= enough - (command.jump and enough % JUMP_ROWS) and done:
                    left -= done
                    break
                self.walker = before[0]
                del self.rows[before[1] :], self.poses[before[2] :]
            else:
                self.rest(min(left, shortest))
                left -= min(left, shortest)

    def out_and_back(self, rows: int, world: World) -> None:
        """rows // 2 random rows without jumps, their inverses along the same poses, and a rest if `rows` is odd."""
        half = rows // 2
        start, first_row, first_pose = self.walker, len(self.rows), len(self.poses)
        self.wander(half, world, jumps=False)
        if half:
            out = np.concatenate(self.rows[first_row:])
            self.rows.append(actions.inverse_rows(out))
            self.poses += retrace(self.poses[first_pose - 1 :])
            self.walker = start
        self.rest(rows % 2)

    def finish(self) -> tuple[np.ndarray, tuple[Pose, ...]]:
        return np.concatenate(self.rows), tuple(self.poses)


def write(world: Map, config: ScriptConfig, seed: int, index: int) -> Script:
    """The script of clip `index`; the same arguments give the same script."""
    rng = np.random.default_rng((seed, 1, index))
    shares = np.asarray([config.navigation, config.loop_closure, config.event], np.float64)
    kind = ("navigation", "loop_closure", "event")[int(rng.choice(3, p=shares / shares.sum()))]
    perspective = "fps" if rng.random() < config.first_person else "tps"
    armour = str(rng.choice(list(ARMOUR)))
    character = None if perspective == "fps" else f"a soldier in {armour} armour, seen from behind"
    plan = events.NOTHING
    if kind == "event":
        plan = events.draw(
            rng, world, perspective, _intervals(config.latents), config.event_density, config.event_environment
        )
    walker = plan.start or _start(rng, world)
    path = Path(walker, perspective, config, rng)
    orders: dict[int, tuple[str, ...]] = {}
    if kind == "loop_closure":
        path.out_and_back(config.latents - 1, World(world))
    else:
        orders = plan.perform(path, world, INTERVAL_ROWS)
        path.wander(config.latents - path.length, plan.world_after(world))
    rows, poses = path.finish()
    assert len(rows) == config.latents and len(poses) == picture_count(config.latents)
    intervals = tuple(
        Interaction(k * INTERVAL_SECONDS, (k + 1) * INTERVAL_SECONDS, plan.sentence(k))
        for k in range(_intervals(config.latents))
    )
    caption = ClipCaption(_scene(world, poses[0]), character, None, intervals)
    setup = (f'color "{ARMOUR[armour]}"', *plan.setup)
    return Script(kind, perspective, rows, poses, setup, orders, caption)


def _intervals(latents: int) -> int:
    return -(-latents // INTERVAL_ROWS)


def _start(rng: np.random.Generator, world: Map) -> Walker:
    """A free place in a room, looking along one of 128 directions."""
    while True:
        x0, y0, x1, y1 = world.rooms[int(rng.integers(len(world.rooms)))]
        x, y = int(rng.integers(x0 * CELL, x1 * CELL)), int(rng.integers(y0 * CELL, y1 * CELL))
        heading = int(rng.integers(128)) * _HEADING_STEP
        if world.free(x, y):
            return Walker(x, y, heading)


def _scene(world: Map, pose: Pose) -> str:
    region = world.regions[world.region_at(pose.x, pose.y)]

    def looks(what: tuple[str, str]) -> str:
        colour, pattern = what
        return colour if pattern == "plain" else f"{pattern} {colour}"

    return (
        f"an indoor maze, a room with {looks(region.wall)} walls, a {looks(region.floor)} floor "
        f"and a {looks(region.ceiling)} ceiling"
    )
