"""The messages between a client and the server, a class each; `protocol` checks and writes them.

A text message is a JSON object with `type`, the name of a class below in small letters, and that class's fields.
Binary messages: from a client, the file of a start picture, before `start` with picture "upload"; to a client, the
pictures of the `chunk` message before it, or the file of the `saved` message before it.
"""

import dataclasses
import functools
from typing import Any

VERSION = 1
KEYS = ("w", "a", "s", "d", "up", "down", "left", "right", "space")
LONGEST_TEXT = 2000
MAX_TEXT_BYTES = 32 * 2**10
"""Of a client's text message."""
MAX_SEED = 2**31 - 1
UPLOAD = "upload"


def rule(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """A field and its limits, as JSON schema words: minimum, maximum, exclusiveMinimum, maxLength, enum, maxItems."""
    return dataclasses.field(default=default, metadata=limits)


_text = functools.partial(rule, maxLength=LONGEST_TEXT)
_number = functools.partial(rule, minimum=0, maximum=2**53)


# From a client.


@dataclasses.dataclass(frozen=True)
class Start:
    """Begin a world. `picture` is the name of a starting point of `hello`, or "upload" for the binary message before.

    Either `caption`, or `scene` with perhaps `character` (third person only) and `event`; with none of them a starting
    point has its own. No seed: one is drawn. `yaw`, `pitch`: degrees a latent frame (4 pictures); none: as trained.
    `video`: "h264", fragmented mp4, or "raw", uint8 [pictures, height, width, 3]. `pace`: "play", 16 pictures a second,
    or "free", as fast as they come.
    """

    picture: str = _text()
    perspective: str = rule(enum=("fps", "tps"))
    caption: str | None = _text(None)
    scene: str | None = _text(None)
    character: str | None = _text(None)
    event: str | None = _text(None)
    seed: int | None = rule(None, minimum=0, maximum=MAX_SEED)
    fit: str = rule("stretch", enum=("stretch", "crop"))
    yaw: float | None = rule(None, exclusiveMinimum=0, maximum=180)
    pitch: float | None = rule(None, exclusiveMinimum=0, maximum=90)
    video: str = rule("h264", enum=("h264", "raw"))
    pace: str = rule("play", enum=("play", "free"))
    paused: bool = rule(False)


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go on with a world after a lost connection; `world` is its key, from `state`."""

    world: str = rule(maxLength=100)
    video: str = rule("h264", enum=("h264", "raw"))


@dataclasses.dataclass(frozen=True)
class Keys:
    """All keys that are held now, and the event whose button is. A state with a `seq` not above the last one is
    dropped. What is held ends `lease_ms` after the message came unless another one renews it."""

    seq: int = _number()
    keys: tuple[str, ...] = rule(enum=KEYS, maxItems=len(KEYS))
    event: str | None = _text(None)
    lease_ms: int = rule(1500, minimum=100, maximum=10_000)


@dataclasses.dataclass(frozen=True)
class Caption:
    """Another caption from the next chunk on: `caption`, or `scene` with perhaps `character` and `event`."""

    caption: str | None = _text(None)
    scene: str | None = _text(None)
    character: str | None = _text(None)
    event: str | None = _text(None)


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Degrees a latent frame from the next chunk on."""

    yaw: float = rule(exclusiveMinimum=0, maximum=180)
    pitch: float = rule(exclusiveMinimum=0, maximum=90)


@dataclasses.dataclass(frozen=True)
class Pause:
    """Stop making chunks, or go on."""

    paused: bool = rule()


@dataclasses.dataclass(frozen=True)
class Step:
    """One chunk of a paused world."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Ask for the number of the newest chunk, to `fork` from later."""


@dataclasses.dataclass(frozen=True)
class Fork:
    """Go on after the chunk of this number; 0 is the start. The other branches stay."""

    chunk: int = _number()


@dataclasses.dataclass(frozen=True)
class Reset:
    """Back to the start; every chunk is forgotten."""


@dataclasses.dataclass(frozen=True)
class Save:
    """Ask for a zip of the input file that `wp2 generate` makes the same pictures of, and the start picture."""


@dataclasses.dataclass(frozen=True)
class Leave:
    """End the world."""


# To a client.


@dataclasses.dataclass(frozen=True)
class Place:
    """A starting point: `thumbnail` is a data URL, `events` are sentences to try."""

    name: str = rule()
    perspective: str = rule(enum=("fps", "tps"))
    caption: str = rule()
    scene: str | None = rule()
    character: str | None = rule()
    events: tuple[str, ...] = rule()
    thumbnail: str = rule()


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message. `weights` says what plays, `expect` what to expect of it; `yaw` and `pitch` are the speeds
    worlds start with, and if `trained` the largest too; `chunks` is the most that a world can have, of `chunk` latent
    frames each. Video comes `scale` times as large as pictures are, as the media type `mime`."""

    version: int = rule()
    weights: str = rule()
    expect: str = rule()
    mime: str = rule()
    height: int = rule()
    width: int = rule()
    scale: int = rule()
    rate: int = rule()
    chunk: int = rule()
    chunks: int = rule()
    yaw: float = rule()
    pitch: float = rule()
    trained: bool = rule()
    max_bytes: int = rule()
    max_pixels: int = rule()
    gallery: tuple[Place, ...] = rule()


@dataclasses.dataclass(frozen=True)
class Queue:
    """Waiting; `position` 1 is next."""

    position: int = rule(minimum=1)


@dataclasses.dataclass(frozen=True)
class State:
    """How a world stands, after each change: its key, the chunk it goes on after, and what the next one is told."""

    world: str = rule()
    chunk: int = rule()
    index: int = rule()
    paused: bool = rule()
    seed: int = rule()
    perspective: str = rule()
    caption: str = rule()
    yaw: float = rule()
    pitch: float = rule()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk was made; its pictures follow as a binary message.

    `chunk` is its number in the world's tree and `parent` that before it, `index` how many chunks lead to it; `rows`
    are its actions, `actions` them in words, `seq` the newest key state that it knew (-1: none), `seconds` what it
    took.
    """

    chunk: int = rule()
    parent: int = rule()
    index: int = rule()
    rows: tuple[tuple[float, ...], ...] = rule()
    actions: str = rule()
    caption: str = rule()
    seq: int = rule()
    seconds: float = rule()
    pictures: int = rule()


@dataclasses.dataclass(frozen=True)
class Point:
    """Answer to `snapshot`."""

    chunk: int = rule()


@dataclasses.dataclass(frozen=True)
class Saved:
    """Answer to `save`; the file follows as a binary message."""

    name: str = rule()


@dataclasses.dataclass(frozen=True)
class Notice:
    """Something that a player should know."""

    text: str = rule()


@dataclasses.dataclass(frozen=True)
class Full:
    """The world has all the chunks it can have: fork from an earlier one, or reset."""

    chunks: int = rule()


@dataclasses.dataclass(frozen=True)
class End:
    """The world is no more: `reason` left, idle, lost, taken, failed, engine or shutdown."""

    reason: str = rule()
    message: str = rule()


@dataclasses.dataclass(frozen=True)
class Error:
    """A message that was not obeyed, and why: `about` is its type, `field` what of it was wrong. Nothing changed."""

    about: str | None = rule()
    field: str | None = rule()
    message: str = rule()


FROM_CLIENT = (Start, Resume, Keys, Caption, Speeds, Pause, Step, Snapshot, Fork, Reset, Save, Leave)
FROM_SERVER = (Hello, Queue, State, Chunk, Point, Saved, Notice, Full, End, Error)
