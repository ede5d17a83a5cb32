"""One world as the server keeps it: how it started, what it is told now, and the tree of chunks that were made.

No devices here: a state is whatever the stepper made of it. Chunks form a tree, for a world can be gone on with from
any of them; a path from the root down is what an input file says (`serve.session`).
"""

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from wp2_jax.controls import actions
from wp2_jax.controls.captions import Caption

MAX_CHUNKS = 4096
"""Chunks that a tree may have; what is known of one is small, but a player could fork for ever."""


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """What a world begins with. `picture` is the file as it was given, `image` float32 [H, W, 3] what the model sees of
    it under `fit`; `perspective` fps or tps; `seed` 0 to 2^31 - 1."""

    picture: bytes
    image: np.ndarray
    fit: str
    perspective: str
    seed: int


@dataclasses.dataclass(eq=False)
class Node:
    """A chunk that was made: `index` in its world (-1: the root, before the first), rows float32 [C, 6], the caption's
    text. `snapshot` is a state after it, where one is kept."""

    number: int
    parent: "Node | None"
    index: int
    rows: np.ndarray
    caption: str
    snapshot: Any = None

    def path(self) -> list["Node"]:
        """The chunks from the world's first to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def within(rotation: tuple[float, float] | None, yaw: float, pitch: float) -> tuple[float, float, str]:
    """Speeds inside what a model was trained on (yaw, pitch; None: not known), and what was changed, "" for nothing."""
    changed = []
    speeds = {"yaw": yaw, "pitch": pitch}
    for (name, speed), limit in zip(speeds.items(), rotation or (yaw, pitch), strict=True):
        if speed > limit:
            speeds[name] = limit
            changed.append(
                f"{name} of {speed:g} is beyond the trained {limit:g} degrees a latent frame, which it is set to"
            )
    return speeds["yaw"], speeds["pitch"], "; ".join(changed)


def told(caption: Caption | str, event: str | None) -> str:
    """The text of a caption while an event is held: it takes the place of the caption's own.

    CaptionError `label_in_field` for an event that holds one of the caption's labels.
    """
    if event is None:
        return caption.text if isinstance(caption, Caption) else caption.strip()
    if isinstance(caption, Caption):
        return caption.with_event(event).text
    return f"{caption.strip()} {Caption(event=event).text}".strip()


@dataclasses.dataclass(eq=False)
class Controls:
    """What a player does now: the newest whole state counts, older ones that come late do not.

    `yaw` and `pitch` are degrees a latent frame. Held keys and the held event end with their lease (seconds of a
    monotonic clock), however the word of their release got lost.
    """

    caption: Caption | str
    perspective: str
    yaw: float
    pitch: float
    keys: frozenset[str] = frozenset()
    event: str | None = None
    sequence: int = -1
    lease_ends: float = 0.0

    def hold(self, sequence: int, keys: Iterable[str], event: str | None, lease_ends: float) -> bool:
        """Takes a key state unless it is older than the one there is; says whether it did. ActionError, CaptionError:
        an unknown key, or an event that no caption can hold; nothing is changed then."""
        keys = frozenset(keys)
        actions.row_from_keys(keys)
        told(self.caption, event)
        if sequence <= self.sequence:
            return False
        self.sequence, self.keys, self.event, self.lease_ends = sequence, keys, event, lease_ends
        return True

    def release(self) -> None:
        """Lets go of every key and event."""
        self.keys, self.event = frozenset(), None

    def rows(self, length: int, first: bool, now: float) -> np.ndarray:
        """float32 [length, 6] of the next chunk; a world's very first latent frame is at rest."""
        if now >= self.lease_ends:
            self.release()
        row = actions.row_from_keys(self.keys, self.perspective, self.yaw, self.pitch)
        rows = np.tile(row, (length, 1))
        if first:
            rows[0] = 0.0
            rows[0, actions.PERSPECTIVE] = row[actions.PERSPECTIVE]
        return rows

    def text(self) -> str:
        """The caption of the next chunk."""
        return told(self.caption, self.event)


class History:
    """The tree of a world's chunks, where in it the player is (`tip`), and the states kept in it.

    At most `budget` bytes of states are kept: when they get more, every second goes.
    """

    def __init__(self, budget: int):
        self.budget, self.kept_bytes = budget, 0
        self.clear()

    def clear(self) -> None:
        """Forgets every chunk: the player stands before the first."""
        root = Node(0, None, -1, np.zeros((0, 6), np.float32), "")
        self.nodes, self.tip = {0: root}, root
        self._next, self._every, self._sizes = 1, 1, dict[int, int]()
        self.kept_bytes = 0

    @property
    def length(self) -> int:
        """Chunks from the first to where the player is."""
        return self.tip.index + 1

    def add(self, rows: np.ndarray, caption: str) -> Node:
        """A new chunk after the tip, which it becomes."""
        node = Node(self._next, self.tip, self.tip.index + 1, rows, caption)
        self.nodes[node.number] = self.tip = node
        self._next += 1
        return node

    def goto(self, number: int) -> Node:
        """Makes a chunk the tip. ValueError: there is none of that number, or the tree is full."""
        if number not in self.nodes:
            raise ValueError(f"chunk {number}: this world has chunks 0 (its start) to {self._next - 1}")
        if len(self.nodes) > MAX_CHUNKS:
            raise ValueError(f"chunk {number}: this world has {MAX_CHUNKS} chunks, no more branches; reset it")
        self.tip = self.nodes[number]
        return self.tip

    def leaves(self) -> Iterator[Node]:
        """The last chunk of every branch, in the order in which they were made."""
        inner = {node.parent.number for node in self.nodes.values() if node.parent is not None}
        return (node for node in self.nodes.values() if node.number not in inner and node.index >= 0)

    def wants_state(self, node: Node, size: int) -> bool:
        """Whether a state of `size` bytes after a chunk shall be kept."""
        return node.snapshot is None and size <= self.budget and (node.index + 1) % self._every == 0

    def keep(self, node: Node, state: Any, size: int) -> None:
        """Keeps a state after a chunk."""
        node.snapshot, self._sizes[node.number] = state, size
        while sum(self._sizes.values()) > self.budget:
            self._every *= 2
            for number in [n for n in self._sizes if (self.nodes[n].index + 1) % self._every]:
                self.nodes[number].snapshot = None
                del self._sizes[number]
            if self._every > MAX_CHUNKS:
                self.forget_states()
        self.kept_bytes = sum(self._sizes.values())

    def forget_states(self) -> None:
        """Drops all states: chunks are made again where they are needed."""
        for node in self.nodes.values():
            node.snapshot = None
        self._sizes.clear()
        self.kept_bytes = 0


@dataclasses.dataclass(frozen=True)
class Limits:
    """`worlds` play at a time, `queue` more wait. A world without a word from its player for `idle_seconds` ends, one
    whose player is lost after `keep_seconds`. `unsent` chunks may wait for a client; `snapshot_bytes` of states are
    kept for each world."""

    worlds: int = 4
    queue: int = 16
    idle_seconds: float = 600.0
    keep_seconds: float = 60.0
    unsent: int = 2
    snapshot_bytes: int = 256 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A chunk: its place in the tree, pictures uint8 [F, H, W, 3], the newest key state it knew, seconds it took."""

    node: Node
    pictures: np.ndarray
    sequence: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Queued:
    """Waiting for a turn, `position` 1 is next; 0: the world plays."""

    position: int


@dataclasses.dataclass(frozen=True)
class Notice:
    """Something a player should know."""

    text: str


@dataclasses.dataclass(frozen=True)
class Full:
    """The world has its last chunk; it can be gone on with from an earlier one."""

    chunks: int


@dataclasses.dataclass(frozen=True)
class Ended:
    """The world is no more: `reason` left, idle, lost, failed, engine or shutdown."""

    reason: str
    message: str


Event = Made | Queued | Notice | Full | Ended
Sink = Callable[[Event], None]


@dataclasses.dataclass(eq=False)
class World:
    """A world and what the engine has to know about it. `key` finds it again, and is known to its player alone."""

    start: Start
    controls: Controls
    history: History
    sink: Sink | None
    paced: bool
    key: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(18))
    paused: bool = False
    asked: list[float] = dataclasses.field(default_factory=list)  # when single chunks were, while paused
    ended: bool = False
    state: Any = None
    at: Node | None = None  # after which chunk `state` is
    unsent: int = 0
    seen: float = 0.0
    lost: float | None = None
    due: float = 0.0
    shown_until: float = 0.0
    served: float = 0.0

    def tell(self, event: Event) -> None:
        if self.sink is not None:
            self.sink(event)
