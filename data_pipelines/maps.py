"""Maps from seeds: four rooms in a ring, corridors, one door, a few things; as a UDMF lump and as a grid to walk on.

All sizes are in map units (32 to a metre). The grid is what collision is decided on: the engine's own is not used.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from data_pipelines import art, wad

CELL = 64
BLOCK = 12  # cells a room's quarter of the map is wide
SIZE = 2 * BLOCK
MARGIN = 40  # the walker stays this far from walls
THING_RADIUS = 20
SOLID = -1
LIGHT = 208
_LIGHT_TAG, _DOOR_TAG = 2, 1
# At scale 1 the engine draws a flat over 64 units; a pattern then repeats every 128 units of a wall, 256 of a floor.
_WALL_SCALE, _FLOOR_SCALE = 0.5, 0.25


@dataclasses.dataclass(frozen=True)
class Region:
    """One sector: where it is is in `Map.cells`, this is how it looks."""

    name: str
    wall: tuple[str, str]
    floor: tuple[str, str]
    ceiling: tuple[str, str]
    height: int


@dataclasses.dataclass(frozen=True)
class Thing:
    """A thing on the floor; `slot` is its number for the orders of art.decorate."""

    slot: int
    shape: str
    colour: str
    x: int
    y: int
    room: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Door:
    """The door: centre, the direction of the corridor (0 along x, 1 along y) and its region."""

    x: int
    y: int
    axis: int
    region: int


@dataclasses.dataclass(frozen=True, eq=False)
class Map:
    """cells: int [SIZE, SIZE] (row = y), region or SOLID; rooms: cell rectangles x0, y0, x1, y1 (regions 0-3)."""

    seed: int
    cells: np.ndarray
    regions: tuple[Region, ...]
    rooms: tuple[tuple[int, int, int, int], ...]
    things: tuple[Thing, ...]
    door: Door

    def region_at(self, x: float, y: float) -> int:
        column, row = int(x // CELL), int(y // CELL)
        if not (0 <= column < SIZE and 0 <= row < SIZE):
            return SOLID
        return int(self.cells[row, column])

    def free(self, x: float, y: float, door_open: bool = False, ignore: int = 0) -> bool:
        """Whether the walker can stand at (x, y); `ignore` is the slot of a thing that is not in the way."""
        # The middles too: a door is thinner than two margins.
        for dx in (-MARGIN, 0, MARGIN):
            for dy in (-MARGIN, 0, MARGIN):
                region = self.region_at(x + dx, y + dy)
                if region == SOLID or (region == self.door.region and not door_open):
                    return False
        reach = MARGIN + THING_RADIUS
        return all(t.slot == ignore or np.hypot(t.x - x, t.y - y) >= reach for t in self.things)

    def sight(self, start: np.ndarray, direction: np.ndarray, distance: float, door_open: bool = False) -> float:
        """How far one sees from `start` [3] along the unit vector `direction`, at most `distance`; to one unit."""
        steps = np.arange(1.0, distance + 1)
        points = start + steps[:, None] * direction
        heights = np.asarray([region.height for region in self.regions])
        if door_open:
            heights[self.door.region] = self.open_height
        column, row = (points[:, :2] // CELL).astype(int).T
        region = self.cells[row.clip(0, SIZE - 1), column.clip(0, SIZE - 1)]
        blocked = (region == SOLID) | (points[:, 2] <= 0) | (points[:, 2] >= heights[region])
        return float(steps[np.argmax(blocked)]) if blocked.any() else float(distance)

    @property
    def open_height(self) -> int:
        """Height of the open door: the engine stops it below the lower of its neighbours."""
        return self.regions[self.door.region - 1].height - 4


def generate(seed: int) -> Map:
    """The map of a seed; equal seeds give equal maps."""
    rng = np.random.default_rng((seed, 0x6D6170))
    cells = np.full((SIZE, SIZE), SOLID, np.int64)
    rooms = []
    for room in range(4):
        width, height = (int(v) for v in rng.integers(6, 10, 2))
        x0 = room % 2 * BLOCK + int(rng.integers(1, 12 - width))
        y0 = room // 2 * BLOCK + int(rng.integers(1, 12 - height))
        rooms.append((x0, y0, x0 + width, y0 + height))
        cells[y0 : y0 + height, x0 : x0 + width] = room
    colours = rng.permutation([c for c in art.COLOURS if c not in ("grey", "dark", "brown")])
    floors = rng.permutation(["brown", "grey", "blue", "green", "dark"])
    regions = []
    for room in range(4):
        wall = (str(colours[room]), str(rng.choice(art.PATTERNS)))
        floor = (str(floors[room]), str(rng.choice(["plain", "chequered"])))
        if floor[0] == wall[0]:
            floor = (str(floors[4]), floor[1])
        ceiling = (str(rng.choice(["white", "grey"])), "plain")
        regions.append(Region(f"room {room}", wall, floor, ceiling, int(rng.choice([128, 160, 192]))))
    corridor = Region("corridor", ("grey", "barred"), ("dark", "plain"), ("grey", "plain"), 128)
    leaf = Region("door", (str(colours[4]), "framed"), ("dark", "plain"), ("dark", "plain"), 0)
    regions += [corridor, leaf]
    spans = [_corridor(rng, rooms, a, b) for a, b in ((0, 1), (2, 3), (0, 2), (1, 3))]
    for x0, y0, x1, y1, _ in spans:
        cells[y0:y1, x0:x1] = 4
    door = _door(rng, spans, cells)
    return Map(seed, cells, tuple(regions), tuple(rooms), _things(rng, rooms, regions, cells), door)


def _corridor(rng: np.random.Generator, rooms: list, a: int, b: int) -> tuple[int, int, int, int, int]:
    """A straight corridor two cells wide between neighbours a < b: x0, y0, x1, y1, axis."""
    axis = 0 if b == a + 1 else 1
    low = max(rooms[a][1 - axis], rooms[b][1 - axis])
    high = min(rooms[a][3 - axis], rooms[b][3 - axis])
    across = int(rng.integers(low, high - 1))
    start, end = rooms[a][2 + axis], rooms[b][axis]
    return (start, across, end, across + 2, 0) if axis == 0 else (across, start, across + 2, end, 1)


def _door(rng: np.random.Generator, spans: list, cells: np.ndarray) -> Door:
    """Put the door, one cell thick, into the middle of one corridor; writes region 5 into `cells`."""
    x0, y0, x1, y1, axis = spans[int(rng.integers(len(spans)))]
    if axis == 0:
        x0 = (x0 + x1) // 2
        x1 = x0 + 1
    else:
        y0 = (y0 + y1) // 2
        y1 = y0 + 1
    cells[y0:y1, x0:x1] = 5
    return Door((x0 + x1) * CELL // 2, (y0 + y1) * CELL // 2, axis, 5)


def _things(rng: np.random.Generator, rooms: list, regions: list[Region], cells: np.ndarray) -> tuple[Thing, ...]:
    """Up to two things a room, a cell and a half from its walls, not before a corridor's mouth, all different."""
    kinds = [(shape, colour) for shape in art.SHAPES for colour in art.THING_COLOURS]
    left = [kinds[int(index)] for index in rng.permutation(len(kinds))]
    things: list[Thing] = []
    for room, (x0, y0, x1, y1) in enumerate(rooms):
        spots = []
        for cx, cy in ((x0 + 1, y0 + 1), (x1 - 2, y0 + 1), (x0 + 1, y1 - 2), (x1 - 2, y1 - 2)):
            ring = cells[cy - 2 : cy + 3, cx - 2 : cx + 3]
            if not np.isin(ring, (4, 5)).any():
                spots.append((cx, cy))
        order = rng.permutation(len(spots))[:2] if spots else []
        for spot in order:
            cx, cy = spots[spot]
            hidden_by = (regions[room].wall[0], regions[room].floor[0])
            kind = next(kind for kind in left if kind[1] not in hidden_by)
            left.remove(kind)
            x, y = cx * CELL + CELL // 2, cy * CELL + CELL // 2
            things.append(Thing(len(things) + 1, *kind, x, y, room))
    return tuple(things)


def textmap(world: Map) -> str:
    """The map in UDMF (namespace zdoom)."""
    vertices: dict[tuple[int, int], int] = {}
    lines, sides = [], []
    wall_scale = "".join(f"scale{axis}_{part}={_WALL_SCALE};" for part in ("mid", "top") for axis in "xy")

    def vertex(point: tuple[int, int]) -> int:
        return vertices.setdefault(point, len(vertices))

    def side(region: int, other: int, offset: int) -> int:
        own = art.flat_name(*world.regions[region].wall)
        # The lintel above a lower neighbour; above the door it is the door itself.
        top = art.flat_name(*world.regions[other if other == world.door.region else region].wall)
        middle = own if other == SOLID else "-"
        sides.append(
            f'sidedef{{sector={region};texturemiddle="{middle}";texturetop="{top}";texturebottom="{own}";'
            f"offsetx={offset % art.FLAT_SIZE};{wall_scale}}}"
        )
        return len(sides) - 1

    for row, column in zip(*np.nonzero(world.cells != SOLID), strict=True):
        region = int(world.cells[row, column])
        x0, y0 = int(column) * CELL, int(row) * CELL
        x1, y1 = x0 + CELL, y0 + CELL
        # Each edge runs so that this cell is on its right; the offset keeps the pattern continuous.
        edges = (
            (0, 1, (x0, y1), (x1, y1), x0),
            (1, 0, (x1, y1), (x1, y0), -y1),
            (0, -1, (x1, y0), (x0, y0), -x1),
            (-1, 0, (x0, y0), (x0, y1), y0),
        )
        for dx, dy, start, end, offset in edges:
            other = world.region_at(x0 + CELL // 2 + dx * CELL, y0 + CELL // 2 + dy * CELL)
            if other == region or (other != SOLID and other < region):
                continue
            text = f"linedef{{v1={vertex(start)};v2={vertex(end)};sidefront={side(region, other, offset)};"
            if other == SOLID:
                lines.append(text + "blocking=true;}")
            else:
                lines.append(text + f"sideback={side(other, region, -offset)};twosided=true;}}")
    sectors = []
    for index, region in enumerate(world.regions):
        tag = _DOOR_TAG if index == world.door.region else _LIGHT_TAG
        sectors.append(
            f'sector{{heightfloor=0;heightceiling={region.height};texturefloor="{art.flat_name(*region.floor)}";'
            f'textureceiling="{art.flat_name(*region.ceiling)}";lightlevel={LIGHT};id={tag};'
            f"xscalefloor={_FLOOR_SCALE};yscalefloor={_FLOOR_SCALE};}}"
        )
    points = [f"vertex{{x={x};y={y};}}" for x, y in vertices]
    return "\n".join(['namespace="zdoom";', *points, *lines, *sides, *sectors, *_thing_text(world), ""])


def _thing_text(world: Map) -> list[str]:
    when = "".join(f"skill{n}=true;" for n in range(1, 6)) + "single=true;dm=true;coop=true;class1=true;"
    x0, y0, x1, y1 = world.rooms[0]
    centre = ((x0 + x1) * CELL // 2, (y0 + y1) * CELL // 2)
    out = [f"thing{{x={centre[0]};y={centre[1]};angle=0;type=1;{when}}}"]
    for thing in world.things:
        number = art.thing_type(thing.shape, thing.colour)
        at = f"x={thing.x};y={thing.y};angle=0;{when}"
        out.append(f"thing{{{at}type={number};id={thing.slot};}}")
        out.append(f"thing{{{at}type={art.BLAST_THING};id={thing.slot + art.BLAST_OFFSET};}}")
    return out


def write_wad(path: Path, worlds: list[Map], game_wad: Path) -> None:
    """Write `worlds` as MAP01, MAP02, ... (at most 99) with their flats, sprites and orders."""
    if not 0 < len(worlds) <= 99:
        raise ValueError(f"worlds: {len(worlds)} maps in one file; 1 to 99 fit")
    lumps = art.lumps(game_wad)
    for index, world in enumerate(worlds):
        lumps += [(f"MAP{index + 1:02d}", b""), ("TEXTMAP", textmap(world).encode("ascii")), ("ENDMAP", b"")]
    Path(path).write_bytes(wad.pack(lumps))
