"""One client on its WebSocket: what it says goes to the engine, what its world tells goes back.

Nothing is buffered without bound: what waits for a client is counted, and a client that does not read is dropped. Its
world waits a while for it to come back.
"""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from wp2_jax.controls import actions
from wp2_jax.controls.errors import ControlError
from wp2_jax.serve import messages, protocol, session, world
from wp2_jax.serve.engine import EngineError
from wp2_jax.serve.fragments import Fragments
from wp2_jax.serve.game import Game, caption_of
from wp2_jax.serve.pictures import MAX_BYTES, kind_of
from wp2_jax.serve.protocol import ProtocolError
from wp2_jax.serve.world import World

log = logging.getLogger(__name__)
TOO_SLOW, POLICY = 1013, 1008


@dataclasses.dataclass(frozen=True)
class ClientLimits:
    """`rate` messages a second, `burst` at once; those beyond are dropped, and a client with `patience` more of
    them than are taken is too. `outbox` messages, more than a burst, may wait for a client; one may take
    `send_seconds`."""

    rate: float = 60.0
    burst: float = 120.0
    patience: int = 3000
    outbox: int = 256
    send_seconds: float = 10.0


class Bucket:
    """So many messages at once, and so many a second."""

    def __init__(self, rate: float, burst: float):
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Connection:
    """Runs a client until it leaves; see the module. `decoding` is shared: one picture at a time is decoded."""

    def __init__(self, game: Game, socket: WebSocket, limits: ClientLimits, decoding: asyncio.Semaphore):
        self._game, self._socket, self._limits, self._decoding = game, socket, limits, decoding
        self._engine = game.engine
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[Any] = asyncio.Queue(limits.outbox)
        self._world: World | None = None
        self._heard = 0  # which of the worlds that this client had
        self._ears = 0
        self._upload: bytes | None = None
        self._fragments: Fragments | None = None
        self._number = secrets.token_hex(4)
        self._dropped: int | None = None  # the code of closing, once it is decided

    async def run(self) -> None:
        await self._socket.accept()
        log.info("connected", extra={"connection": self._number})
        self._put(self._game.hello())
        tasks = [asyncio.create_task(self._send_all()), asyncio.create_task(self._receive_all())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if self._world is not None:
                self._engine.detach(self._world)
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                # How connections end; anything else is a mistake of ours.
                if isinstance(error, Exception) and not isinstance(error, WebSocketDisconnect | RuntimeError | OSError):
                    log.error("a connection failed", exc_info=error, extra={"connection": self._number})
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1.0):
                    await self._socket.close(self._dropped or 1000)
            log.info("disconnected", extra={"connection": self._number, "code": self._dropped})

    # To the client.

    def _put(self, item: Any) -> None:
        """A message, or a chunk, to be sent in its turn. Too many waiting: the client does not read."""
        if item is None:
            return
        try:
            self._outbox.put_nowait(item)
        except asyncio.QueueFull:
            self._drop(TOO_SLOW)

    def _drop(self, code: int) -> None:
        """Gives the client up: the sender ends, and `run` closes."""
        self._dropped = self._dropped or code
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._outbox.put_nowait(None)

    async def _send_all(self) -> None:
        while (item := await self._outbox.get()) is not None:
            try:
                async with asyncio.timeout(self._limits.send_seconds):
                    await self._send(item)
            except TimeoutError:
                self._dropped = TOO_SLOW
                return

    async def _send(self, item: Any) -> None:
        if not isinstance(item, tuple):
            await self._socket.send_text(protocol.dump(item))
        elif isinstance(item[0], World):
            if item[0] is self._world:  # and not one that this client had before
                await self._send_chunk(item[1])
            self._engine.sent(item[0])
        else:
            message, data = item
            await self._socket.send_text(protocol.dump(message))
            await self._socket.send_bytes(data)

    async def _send_chunk(self, made: world.Made) -> None:
        node, parent = made.node, made.node.parent
        assert parent is not None
        chunk = messages.Chunk(
            chunk=node.number,
            parent=parent.number,
            index=node.index,
            rows=tuple(tuple(row) for row in node.rows.tolist()),
            actions=actions.describe_row(node.rows[-1]),
            caption=node.caption,
            seq=made.sequence,
            seconds=round(made.seconds, 4),
            pictures=len(made.pictures),
        )
        if self._fragments is None:
            data = made.pictures.tobytes()
        else:
            data = await asyncio.to_thread(self._fragments.encode, made.pictures)
        await self._socket.send_text(protocol.dump(chunk))
        await self._socket.send_bytes(data)

    def _ear(self) -> tuple[int, world.Sink]:
        """What a world tells its events to, in any thread; they are heard while its number is `_heard`."""
        self._ears += 1
        number = self._ears

        def hear(told: world.Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._told, number, told)

        return number, hear

    def _told(self, number: int, told: world.Event) -> None:
        if number != self._heard:
            return
        if isinstance(told, world.Made):
            self._put((self._world, told))
        elif isinstance(told, world.Queued):
            self._put(messages.Queue(told.position) if told.position else self._state())
        elif isinstance(told, world.Notice):
            self._put(messages.Notice(told.text))
        elif isinstance(told, world.Full):
            self._put(messages.Full(told.chunks))
        elif isinstance(told, world.Ended):
            self._world = None
            self._put(messages.End(told.reason, told.message))

    def _state(self) -> messages.State | None:
        playing = self._world
        if playing is None:
            return None
        controls, tip = playing.controls, playing.history.tip
        return messages.State(
            world=playing.key,
            chunk=tip.number,
            index=tip.index,
            paused=playing.paused,
            seed=playing.start.seed,
            perspective=controls.perspective,
            caption=world.told(controls.caption, None),
            yaw=controls.yaw,
            pitch=controls.pitch,
        )

    def _answer(self, *items: Any) -> None:
        """After what the engine has told already, and is on its way."""
        for item in items:
            self._loop.call_soon(self._put, item)

    # From the client.

    async def _receive_all(self) -> None:
        bucket = Bucket(self._limits.rate, self._limits.burst)
        refused = 0
        while True:
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                return
            if not bucket.take():
                refused += 1
                if refused == 1:
                    self._refuse(None, None, f"more than {self._limits.rate:g} messages a second: some are dropped")
                if refused > self._limits.patience:
                    self._dropped = POLICY
                    return
                continue
            refused = max(0, refused - 1)
            await self._receive(received)

    async def _receive(self, received: Any) -> None:
        text, data = received.get("text"), received.get("bytes")
        about = None
        try:
            if text is None:
                # Also one that is not taken: `start` says then why.
                self._upload = data if len(data) <= MAX_BYTES else None
                kind_of(data)
                return
            if len(text) > messages.MAX_TEXT_BYTES:
                raise ProtocolError(
                    None, f"{len(text)} characters: a text message has at most {messages.MAX_TEXT_BYTES}"
                )
            about = protocol.type_in(text)
            message = protocol.parse(text)
            await self._obey(message)
        except ProtocolError as error:
            self._refuse(about, error.field, str(error))
        except (ControlError, EngineError, ValueError) as error:
            self._refuse(about, None, str(error))

    def _refuse(self, about: str | None, field: str | None, what: str) -> None:
        self._answer(messages.Error(about, field, what))

    async def _obey(self, message: Any) -> None:
        if isinstance(message, messages.Start):
            return await self._begin(message)
        if isinstance(message, messages.Resume):
            return self._resume(message)
        playing = self._world
        if playing is None:
            raise ProtocolError(
                "type", f"{protocol.name_of(type(message))}: there is no world; send start or resume first"
            )
        engine = self._engine
        match message:
            case messages.Keys():
                engine.hold(playing, message.seq, message.keys, message.event, message.lease_ms / 1000)
                return None
            case messages.Caption():
                caption = caption_of(message, playing.start.perspective)
                if caption is None:
                    raise ProtocolError(None, "caption: give caption, or scene, character, event")
                engine.describe(playing, caption)
                self._notice(self._game.cut(world.told(caption, None)))
            case messages.Speeds():
                yaw, pitch, said = self._game.within(message.yaw, message.pitch)
                engine.speeds(playing, yaw, pitch)
                self._notice(said)
            case messages.Pause():
                engine.pause(playing, message.paused)
            case messages.Step():
                engine.step(playing)
                return None
            case messages.Snapshot():
                return self._answer(messages.Point(playing.history.tip.number))
            case messages.Fork():
                engine.goto(playing, message.chunk)
            case messages.Reset():
                engine.reset(playing)
            case messages.Save():
                name = f"world-{playing.start.seed}.zip"
                items = engine.read(playing, self._game.items)
                data = await asyncio.to_thread(session.pack, items, playing.start.picture)
                return self._answer((messages.Saved(name), data))
            case messages.Leave():
                engine.leave(playing)
                return None
        self._answer(self._state())

    def _notice(self, text: str) -> None:
        if text:
            self._answer(messages.Notice(text))

    async def _begin(self, message: messages.Start) -> None:
        async with self._decoding:
            start, controls, notices = await asyncio.to_thread(self._game.begin, message, self._upload)
        self._upload = None
        self._set_aside()
        self._fragments = Fragments(self._game.scale) if message.video == "h264" else None
        paced = message.pace == "play"
        number, ear = self._ear()
        self._world = self._engine.join(start, controls, ear, paced=paced, paused=message.paused)
        self._heard = number
        for text in notices:
            self._notice(text)

    def _resume(self, message: messages.Resume) -> None:
        number, ear = self._ear()
        found = self._engine.attach(message.world, ear)
        if self._world is not found:
            self._set_aside()
        self._heard = number
        self._fragments = Fragments(self._game.scale) if message.video == "h264" else None
        self._world = found
        self._answer(self._state())

    def _set_aside(self) -> None:
        """Ends the world that this client had, without a word: it asked for another."""
        if self._world is not None:
            self._world.sink = None
            self._engine.leave(self._world)
            self._world = None
