"""Colours, patterns and shapes of the generated maps: large and plain, so that a small model can draw them.

Walls, floors and ceilings are 256 x 256 flats named by colour and pattern; things are sprites of one shape and one
colour. `lumps` and `decorate` give what a PWAD needs to show them.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from data_pipelines import wad

# name -> (main colour, second colour of patterns). The two are near: of patterns twice as strong the tiny autoencoder
# gave back chequered walls 3 dB worse than plain ones.
COLOURS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "red": ((215, 40, 40), (168, 20, 20)),
    "green": ((70, 190, 60), (45, 140, 40)),
    "blue": ((60, 70, 235), (30, 35, 178)),
    "yellow": ((240, 210, 60), (195, 160, 40)),
    "purple": ((190, 40, 190), (140, 20, 140)),
    "white": ((230, 230, 230), (180, 180, 180)),
    "orange": ((235, 130, 40), (182, 95, 25)),
    "brown": ((140, 100, 60), (105, 72, 42)),
    "grey": ((120, 120, 120), (95, 95, 95)),
    "dark": ((60, 60, 60), (45, 45, 45)),
}
PATTERNS = ("plain", "striped", "barred", "chequered", "diagonal", "framed")
SHAPES = ("pillar", "ball", "crate", "cone", "gem", "barrel")
THING_COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
FLAT_SIZE = 256
FIRST_THING = 20000
BLAST_THING = FIRST_THING + 99
MAX_SLOTS = 16
BLAST_OFFSET = 50
MAX_HEIGHT = 40


def flat_name(colour: str, pattern: str) -> str:
    """Lump name of a wall or floor."""
    return f"W{list(COLOURS).index(colour):02d}P{PATTERNS.index(pattern)}"


def thing_type(shape: str, colour: str) -> int:
    """Editor number of a thing."""
    return FIRST_THING + SHAPES.index(shape) * len(THING_COLOURS) + THING_COLOURS.index(colour)


def _sprite_name(shape: str, colour: str) -> str:
    return f"O{SHAPES.index(shape)}{THING_COLOURS.index(colour)}X"


def _pattern(pattern: str) -> np.ndarray:
    """bool [FLAT_SIZE, FLAT_SIZE], True where the second colour is."""
    y, x = np.mgrid[0:FLAT_SIZE, 0:FLAT_SIZE]
    half, last, frame = FLAT_SIZE // 2, FLAT_SIZE - 1, FLAT_SIZE // 8
    return {
        "plain": np.zeros_like(x, bool),
        "striped": x < half,
        "barred": y < half,
        "chequered": (x // half + y // half) % 2 == 0,
        "diagonal": (x + y) % FLAT_SIZE < half,
        "framed": (np.minimum(x, last - x) < frame) | (np.minimum(y, last - y) < frame),
    }[pattern]


def _shape(shape: str) -> np.ndarray:
    """int [h, w]: -1 transparent, 0 main colour, 1 second colour."""
    y, x = np.mgrid[0:64, 0:48]
    across = np.abs(x - 23.5)
    if shape == "pillar":
        y, x = np.mgrid[0:112, 0:36]
        return np.where(y % 28 < 6, 1, 0)
    if shape == "ball":
        y, x = np.mgrid[0:56, 0:56]
        radius = np.hypot(y - 27.5, x - 27.5)
        return np.where(radius > 28, -1, np.where(np.hypot(y - 18, x - 18) < 8, 1, 0))
    if shape == "crate":
        y, x = np.mgrid[0:52, 0:52]
        edge = np.minimum(np.minimum(x, 51 - x), np.minimum(y, 51 - y))
        return np.where((edge < 6) | (np.abs(x - y) < 4), 1, 0)
    if shape == "cone":
        return np.where(across > (y + 1) * 24 / 64, -1, np.where(y % 24 < 8, 1, 0))
    if shape == "gem":
        y, x = np.mgrid[0:48, 0:40]
        inside = np.abs(y - 23.5) / 24 + np.abs(x - 19.5) / 20 <= 1
        return np.where(inside, np.where(x < 20, 0, 1), -1)
    return np.where(across > 22 - np.abs(y - 31.5) / 12, -1, np.where((y - 8) % 20 < 5, 1, 0))


def _blast(size: int) -> np.ndarray:
    y, x = np.mgrid[0:96, 0:96]
    radius = np.hypot(y - 47.5, x - 47.5)
    wave = size * (0.85 + 0.15 * np.cos(8 * np.arctan2(y - 47.5, x - 47.5)))
    return np.where(radius > wave, -1, np.where(radius < 0.55 * wave, 1, 0))


def lumps(game_wad: Path) -> list[tuple[str, bytes]]:
    """DECORATE, flats and sprites for a PWAD, in the palette of the game WAD."""
    index = functools.partial(wad.nearest_index, wad.palette(game_wad))
    out = [("DECORATE", decorate().encode("ascii")), ("F_START", b"")]
    for colour, (main, second) in COLOURS.items():
        for pattern in PATTERNS:
            pixels = np.where(_pattern(pattern), index(second), index(main)).astype(np.uint8)
            out.append((flat_name(colour, pattern), pixels.tobytes()))
    out += [("F_END", b""), ("S_START", b"")]
    for shape in SHAPES:
        form = _shape(shape)
        for colour in THING_COLOURS:
            main, second = (index(rgb) for rgb in COLOURS[colour])
            pixels = np.where(form < 0, -1, np.where(form == 1, second, main))
            out.append((_sprite_name(shape, colour) + "A0", wad.patch(pixels)))
    for frame, size in zip("ABCD", (20, 36, 46, 30), strict=True):
        form = _blast(size)
        pixels = np.where(form < 0, -1, np.where(form == 1, index((255, 255, 120)), index((255, 120, 20))))
        out.append((f"OBLA{frame}0", wad.patch(pixels)))
    return [*out, ("S_END", b"")]


def _actor(head: str, flags: str, states: list[tuple[str, list[str]]]) -> str:
    # One statement a line: the engine's reader crashes on states written in one line.
    lines = [f"ACTOR {head}", "{", *flags.split(";"), "States", "{"]
    for label, frames in states:
        lines += [f"{label}:", *frames, "Stop"]
    return "\n".join([*lines, "}", "}", ""])


def _order(name: str, call: str) -> str:
    """An item that acts once when given: how a console command reaches a line special."""
    return _actor(f"{name} : CustomInventory", "+INVENTORY.AUTOACTIVATE", [("Pickup", [f"TNT1 A 0 {call}"])])


def decorate() -> str:
    """Definitions of the things and of the orders `give` can carry out:

    Show<slot>, Hide<slot>, Blast<slot>, OpenDoor, CloseDoor, Still (no speed), Lift<z> (height above the floor,
    1..40) and Light<level> (fades all sectors, 0..255 in steps of 16).
    """
    text = ""
    solid = "+NOGRAVITY;Radius 8;Height 16"
    for shape in SHAPES:
        for colour in THING_COLOURS:
            sprite = _sprite_name(shape, colour)
            states = [("Spawn", [f"{sprite} A -1"]), ("Active", [f"{sprite} A -1"]), ("Inactive", ["TNT1 A -1"])]
            text += _actor(f"{sprite}T : SwitchableDecoration {thing_type(shape, colour)}", solid, states)
    blast = [f"OBLA {frame} 6 Bright" for frame in "ABCD"] + ["TNT1 A -1"]
    states = [("Spawn", ["TNT1 A -1"]), ("Active", blast), ("Inactive", ["TNT1 A -1"])]
    text += _actor(f"BlastT : SwitchableDecoration {BLAST_THING}", solid, states)
    for slot in range(1, MAX_SLOTS + 1):
        text += _order(f"Show{slot}", f"Thing_Activate({slot})")
        text += _order(f"Hide{slot}", f"Thing_Deactivate({slot})")
        text += _order(f"Blast{slot}", f"Thing_Activate({slot + BLAST_OFFSET})")
    text += _order("OpenDoor", "Door_Open(1,64)") + _order("CloseDoor", "Door_Close(1,64)")
    text += _order("Still", "A_ChangeVelocity(0,0,0,CVF_REPLACE)")
    for height in range(1, MAX_HEIGHT + 1):
        text += _order(f"Lift{height}", f"A_Warp(AAPTR_DEFAULT,0,0,{height},0,WARPF_NOCHECKPOSITION)")
    for level in range(0, 256, 16):
        text += _order(f"Light{level}", f"Light_Fade(2,{level},24)")
    return text
