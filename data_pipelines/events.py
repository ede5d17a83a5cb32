"""Events of a clip: what happens, in which 5-s interval, where the walker stands to see it, and the engine orders.

Environment events (fog, light) happen anywhere. Events at a thing or the door are watched: until the last one, the
walker leaves its place only to come back along the same way.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from data_pipelines.doom import CIRCLE
from data_pipelines.kinematics import Walker, World
from data_pipelines.maps import CELL, LIGHT, Map, Thing
from wp2_jax.controls.actions import Command
from wp2_jax.controls.geometry import picture_range

if TYPE_CHECKING:
    from data_pipelines.script import Path

# category of the evaluation -> kinds of event
CATEGORIES = {
    "environment": ("fog", "dark", "tint"),
    "object": ("appear", "vanish"),
    "interaction": ("door", "pickup", "blast"),
}
NOTHING_HAPPENS = "nothing"
# What a sentence of an event says -> the kind of change that is seen.
_SAID = {
    "thick white fog": "white fog",
    "thick blue fog": "blue fog",
    "thick green fog": "green fog",
    "the fog clears": "fog clears",
    "the lights go out": "dark",
    "the lights come back on": "bright",
    "the light turns red": "red light",
    "the light turns blue": "blue light",
    "the light turns green": "green light",
    "the light turns white": "white light",
    " appears": "appear",
    " disappears": "vanish",
    "the door opens": "door opens",
    "the door closes": "door closes",
    "picks up": "pickup",
    "a hand takes": "pickup",
    "explodes": "blast",
}
# Kinds of change by category of the evaluation (spec section 7); KINDS numbers them, 0 is that nothing happens.
KINDS_OF = {
    "environment": tuple(_SAID.values())[:10],
    "object": ("appear", "vanish"),
    "interaction": ("door opens", "door closes", "pickup", "blast"),
}
KINDS = (NOTHING_HAPPENS, *(kind for kinds in KINDS_OF.values() for kind in kinds))
FOG = {"white": "e0e0e0", "blue": "4060ff", "green": "40c040"}
TINT = {"red": "ff8080", "blue": "8080ff", "green": "80ff80"}
_STEP_HEADING = CIRCLE // 128
# The first event of a world comes after its second latent frame: the first picture is still without it.
FIRST_ROW = 2
_WATCH_ROWS = 4
_PICK_UP_DISTANCE = 48

Orders = tuple[tuple[int, str], ...]


def kind_of(sentence: str | None) -> str:
    """The kind of change, one of KINDS, that an event's sentence asks for; ValueError for a sentence of no kind."""
    if not sentence:
        return NOTHING_HAPPENS
    found = [kind for said, kind in _SAID.items() if said in sentence]
    if len(found) != 1:
        raise ValueError(f"event {sentence!r} is of no known kind; known sentences hold {', '.join(_SAID)}")
    return found[0]


@dataclasses.dataclass(frozen=True)
class Step:
    """One event: its interval, its sentence, and orders at picture offsets from the interval's first picture."""

    interval: int
    sentence: str
    orders: Orders


@dataclasses.dataclass(frozen=True)
class Plan:
    """The events of a clip. `watched`: they need the walker at `start`; `approach`: it walks on to this thing."""

    steps: tuple[Step, ...] = ()
    setup: tuple[str, ...] = ()
    start: Walker | None = None
    watched: bool = False
    approach: Thing | None = None
    gone: int = 0
    opens_door: bool = False

    def sentence(self, interval: int) -> str | None:
        """The event of an interval, None where nothing happens."""
        return next((step.sentence for step in self.steps if step.interval == interval), None)

    def world_after(self, world: Map) -> World:
        """What is in the way once everything has happened."""
        return World(world, self.opens_door, self.gone)

    def perform(self, path: Path, world: Map, interval_rows: int) -> dict[int, tuple[str, ...]]:
        """Walk the watched part of the clip on `path`; the orders by picture."""
        orders: dict[int, tuple[str, ...]] = {}

        def add(picture: int, order: str) -> None:
            orders[picture] = (*orders.get(picture, ()), order)

        for step in self.steps:
            row = max(FIRST_ROW, step.interval * interval_rows)
            picture = picture_range(row, 1)[0]
            if self.watched:
                path.out_and_back(row - path.length, World(world))
            if self.approach is not None:
                add(self._pick_up(path, world, self.approach), f"give Hide{self.approach.slot}")
            elif self.watched:
                path.rest(min(_WATCH_ROWS, path.config.latents - path.length))
            for offset, order in step.orders:
                add(picture + offset, order)
        return orders

    def _pick_up(self, path: Path, world: Map, thing: Thing) -> int:
        """Walk straight at `thing`; the picture at which it is taken."""
        first = path.next_picture
        pose = path.poses[-1]
        reach = math.hypot(thing.x - pose.x, thing.y - pose.y) - _PICK_UP_DISTANCE
        rows = math.ceil(reach / (4 * path.config.motion.step))
        path.do(
            Command(max(1, min(rows, path.config.latents - path.length)), forward=1), World(world, ignore=thing.slot)
        )
        for picture in range(first, path.next_picture):
            pose = path.poses[picture]
            if math.hypot(thing.x - pose.x, thing.y - pose.y) <= _PICK_UP_DISTANCE:
                return picture
        return path.next_picture - 1


NOTHING = Plan()


def draw(
    rng: np.random.Generator,
    world: Map,
    perspective: str,
    intervals: int,
    density: float = 0.0,
    environment: float = 0.0,
) -> Plan:
    """A random plan for a clip of `intervals` intervals: a theme, its first interval, and what follows from it.

    With a `density` every interval of the clip holds an event of the theme with that chance. `environment`: the share
    of the category environment; 0: all categories are as likely.
    """
    others = (1 - environment) / (len(CATEGORIES) - 1)
    shares = [environment if name == "environment" else others for name in CATEGORIES] if environment else None
    category = str(rng.choice(list(CATEGORIES), p=shares))
    theme = str(rng.choice(CATEGORIES[category]))
    when = [int(rng.integers(intervals))]
    while when[-1] + 1 < intervals and rng.random() < 0.6:
        when.append(when[-1] + 1)
    if density:
        when = [k for k in range(intervals) if rng.random() < density] or when
    if theme in FOG_AND_LIGHT:
        return Plan(FOG_AND_LIGHT[theme](rng, when))
    if theme == "door":
        return _door(rng, world, perspective, when)
    view = _view_of_thing(rng, world, perspective, straight=theme == "pickup")
    if view is None:
        return Plan(_dark(rng, when))
    thing, start = view
    if theme == "pickup":
        who = "the soldier picks up" if perspective == "tps" else "a hand takes"
        step = Step(when[0], f"{who} the {thing.name}", ())
        return Plan((step,), start=start, watched=True, approach=thing, gone=thing.slot)
    if theme == "blast":
        orders = ((0, f"give Blast{thing.slot}"), (3, f"give Hide{thing.slot}"))
        step = Step(when[0], f"the {thing.name} explodes and is gone", orders)
        return Plan((step,), start=start, watched=True, gone=thing.slot)
    return _appear(thing, start, when, hidden=theme == "appear")


def _alternate(when: list[int], there: tuple[str, Orders], back: tuple[str, Orders]) -> tuple[Step, ...]:
    return tuple(Step(interval, *(back if i % 2 else there)) for i, interval in enumerate(when))


def _ramp(setting: str, values: tuple) -> Orders:
    """A setting that changes once a latent frame."""
    return tuple((4 * i, f"{setting} {value}") for i, value in enumerate(values))


def _fog(rng: np.random.Generator, when: list[int]) -> tuple[Step, ...]:
    colour = str(rng.choice(list(FOG)))
    rise = ((0, f"testfade {FOG[colour]}"), (0, "give Light160"), *_ramp("r_visibility", (4, 2, 1)))
    fall = ((0, f"give Light{LIGHT}"), *_ramp("r_visibility", (2, 4, 8)), (12, "testfade 000000"))
    return _alternate(when, (f"thick {colour} fog fills the rooms", rise), ("the fog clears", fall))


def _dark(rng: np.random.Generator, when: list[int]) -> tuple[Step, ...]:
    off, on = ((0, "give Light144"),), ((0, f"give Light{LIGHT}"),)
    return _alternate(when, ("the lights go out", off), ("the lights come back on", on))


def _tint(rng: np.random.Generator, when: list[int]) -> tuple[Step, ...]:
    colour = str(rng.choice(list(TINT)))
    there = (f"the light turns {colour}", ((0, f"testcolor {TINT[colour]} 0"),))
    return _alternate(when, there, ("the light turns white again", ((0, "testcolor ffffff 0"),)))


FOG_AND_LIGHT = {"fog": _fog, "dark": _dark, "tint": _tint}


def _appear(thing: Thing, start: Walker, when: list[int], hidden: bool) -> Plan:
    there = (f"a {thing.name} appears", ((0, f"give Show{thing.slot}"),))
    away = (f"the {thing.name} disappears", ((0, f"give Hide{thing.slot}"),))
    steps = _alternate(when, *((there, away) if hidden else (away, there)))
    visible = hidden == (len(steps) % 2 == 1)
    setup = (f"give Hide{thing.slot}",) if hidden else ()
    return Plan(steps, setup, start, watched=True, gone=0 if visible else thing.slot)


def _door(rng: np.random.Generator, world: Map, perspective: str, when: list[int]) -> Plan:
    """The door opens before the walker, and closes in the next interval if there is one."""
    steps = _alternate(when, ("the door opens", ((0, "give OpenDoor"),)), ("the door closes", ((0, "give CloseDoor"),)))
    door = world.door
    places = []
    for sign in (1, -1):
        direction = (sign, 0) if door.axis == 0 else (0, sign)
        for distance in range(110, 230, 10):
            x, y = door.x - distance * direction[0], door.y - distance * direction[1]
            if world.free(x, y):
                heading = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}[direction] * CIRCLE // 4
                places.append(Walker(x, y, heading))
    if not places:
        return Plan(_dark(rng, when))
    start = places[int(rng.integers(len(places)))]
    return Plan(steps, start=_aside(rng, start, perspective), watched=True, opens_door=len(steps) % 2 == 1)


def _aside(rng: np.random.Generator, walker: Walker, perspective: str) -> Walker:
    """In third person the character would cover what is straight ahead: look past it."""
    turn = int(rng.choice((-1, 1))) * int(rng.integers(3, 6)) * _STEP_HEADING
    return dataclasses.replace(walker, heading=walker.heading + turn) if perspective == "tps" else walker


def _view_of_thing(
    rng: np.random.Generator, world: Map, perspective: str, straight: bool
) -> tuple[Thing, Walker] | None:
    """A thing and a place in its room from which it is well seen; None if no place was found."""
    for _ in range(64):
        thing = world.things[int(rng.integers(len(world.things)))]
        heading = int(rng.integers(128)) * _STEP_HEADING
        distance = float(rng.integers(130, 220))
        angle = heading * 2 * math.pi / CIRCLE
        x, y = round(thing.x - distance * math.cos(angle)), round(thing.y - distance * math.sin(angle))
        x0, y0, x1, y1 = world.rooms[thing.room]
        inside = x0 * CELL < x < x1 * CELL and y0 * CELL < y < y1 * CELL
        if inside and world.free(x, y):
            walker = Walker(x, y, heading)
            return thing, walker if straight else _aside(rng, walker, perspective)
    return None
