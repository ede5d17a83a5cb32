"""A client for programs: plays a world of `wp2 serve` and gets its pictures as NumPy arrays, without loss.

with Client("ws://127.0.0.1:8000/play") as client:
    client.start("red room", "fps", seed=0, paused=True)
    for _ in range(4):
        chunk, pictures = client.step(["w", "right"])  # uint8 [16, H, W, 3]
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from wp2_jax.serve import messages, protocol

_LEASE_MS = 10_000


class ServerError(RuntimeError):
    """What the server answered to something it did not do; `field` is the field that was wrong, if one was."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


class WorldEnded(RuntimeError):
    """The world is no more; `reason` as in `messages.End`, "closed" for a connection that ended."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Client:
    """One connection and its world. `hello` says what plays; `state` and `notices` are the latest that came.

    Methods that ask for something wait for the answer, at most `timeout` seconds (TimeoutError). Errors: ServerError,
    WorldEnded; OSError where there is no server.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(
            connect(url, additional_headers=headers, max_size=None, open_timeout=timeout, compression=None)
        )
        self._timeout, self._sequence = timeout, 0
        self.state: messages.State | None = None
        self.position = 0
        self.notices: list[str] = []
        self.hello: messages.Hello = self._answer(messages.Hello)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the connection; the world waits a while for `resume`."""
        self._open.close()

    def start(self, picture: str | os.PathLike[str] | bytes, perspective: str, **fields: Any) -> messages.State:
        """A new world, of a file or its bytes, or of the starting point of that name; `fields` as of `messages.Start`.

        Waits, perhaps in the queue, until it has a place.
        """
        name = picture if isinstance(picture, str) else messages.UPLOAD
        if not isinstance(picture, str):
            self._socket.send(picture if isinstance(picture, bytes) else Path(picture).read_bytes())
        self._send(messages.Start(picture=name, perspective=perspective, video="raw", **fields))
        return self._answer(messages.State, wait_in_queue=True)

    def resume(self, world: str) -> messages.State:
        """Goes on with a world that this or another connection had; `world` is its key (`State.world`)."""
        self._send(messages.Resume(world, "raw"))
        return self._answer(messages.State)

    def keys(self, keys: Iterable[str], event: str | None = None, lease_ms: int = _LEASE_MS) -> int:
        """Says which keys and event are held now; the number that the first chunk with them will name."""
        self._sequence += 1
        self._send(messages.Keys(self._sequence, tuple(keys), event, lease_ms))
        return self._sequence

    def caption(self, caption: str | None = None, **fields: str | None) -> messages.State:
        """Another caption, or scene, character and event, from the next chunk on."""
        return self._ask(messages.Caption(caption, **fields))

    def speeds(self, yaw: float, pitch: float) -> messages.State:
        """Degrees a latent frame (4 pictures)."""
        return self._ask(messages.Speeds(yaw, pitch))

    def pause(self, paused: bool = True) -> messages.State:
        return self._ask(messages.Pause(paused))

    def step(self, keys: Iterable[str] = (), event: str | None = None) -> tuple[messages.Chunk, np.ndarray]:
        """One chunk of a paused world under keys; see `chunk`."""
        self.keys(keys, event)
        self._send(messages.Step())
        return self.chunk()

    def chunk(self) -> tuple[messages.Chunk, np.ndarray]:
        """The next chunk and its pictures, uint8 [F, H, W, 3]."""
        chunk, data = self._answer(messages.Chunk)
        shape = (chunk.pictures, self.hello.height, self.hello.width, 3)
        return chunk, np.frombuffer(data, np.uint8).reshape(shape)

    def frames(self) -> Iterator[np.ndarray]:
        """Pictures uint8 [H, W, 3], one after the other, until the world ends or has its last chunk."""
        while True:
            try:
                _, pictures = self.chunk()
            except WorldEnded:
                return
            yield from pictures

    def snapshot(self) -> int:
        """The number of the newest chunk."""
        self._send(messages.Snapshot())
        return self._answer(messages.Point).chunk

    def fork(self, chunk: int) -> messages.State:
        """Goes on after the chunk of a number, 0 for the start."""
        return self._ask(messages.Fork(chunk))

    def reset(self) -> messages.State:
        return self._ask(messages.Reset())

    def save(self) -> bytes:
        """A zip of the input file for `wp2 generate` and the start picture."""
        self._send(messages.Save())
        return self._answer(messages.Saved)[1]

    def leave(self) -> None:
        """Ends the world."""
        self._send(messages.Leave())
        try:
            self._answer(messages.State)
        except WorldEnded as end:
            if end.reason != "left":
                raise

    def _send(self, message: Any) -> None:
        self._socket.send(protocol.dump(message))

    def _ask(self, message: Any) -> messages.State:
        self._send(message)
        return self._answer(messages.State)

    def _answer(self, kind: type, wait_in_queue: bool = False) -> Any:
        """The next message of a kind, with its binary part if it has one. What comes before it is kept or let go:
        chunks that nobody waits for are."""
        while True:
            try:
                message = protocol.parse(str(self._socket.recv(self._timeout)), messages.FROM_SERVER)
                with_data = isinstance(message, messages.Chunk | messages.Saved)
                data = self._socket.recv(self._timeout) if with_data else None
            except TimeoutError:
                if wait_in_queue and self.position:
                    continue
                raise
            except ConnectionClosed as error:
                raise WorldEnded("closed", f"the connection ended: {error}") from error
            if isinstance(message, messages.State):
                self.state, self.position = message, 0
            elif isinstance(message, messages.Queue):
                self.position = message.position
            elif isinstance(message, messages.Notice):
                self.notices.append(message.text)
            elif isinstance(message, messages.Error):
                raise ServerError(message.message, message.field)
            elif isinstance(message, messages.End):
                raise WorldEnded(message.reason, message.message)
            elif isinstance(message, messages.Full) and kind is messages.Chunk:
                raise WorldEnded("full", f"the world has its {message.chunks} chunks")
            if isinstance(message, kind):
                return (message, data) if with_data else message
