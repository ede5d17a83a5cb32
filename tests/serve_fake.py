"""An engine without weights, and a player who remembers what a world told."""

import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from websockets.sync.client import connect

from wp2_jax.controls.inputs import InputOptions
from wp2_jax.serve import server
from wp2_jax.serve.client import Client
from wp2_jax.serve.engine import Engine
from wp2_jax.serve.game import Game
from wp2_jax.serve.world import Controls, Limits, Made, Start

START = Start(b"", np.zeros((4, 4, 3), np.float32), "stretch", "fps", 0)


class Fake:
    """A world's state is the list of what was done in it, of which pictures show the length. `gate` holds turns back;
    a caption "fail" fails, and while `broken` everything does."""

    chunk, longest = 4, 6

    def __init__(self, size: int = 2):
        self.size_of_pictures = size
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.made: list[str] = []

    def begin(self, start):
        self.check()
        return [start.seed]

    def make(self, state, rows, caption, first):
        self.gate.wait(10)
        self.check()
        assert first == (len(state) == 1)
        if caption == "fail":
            raise RuntimeError("these words break the world")
        state.append((rows.tobytes(), caption))  # the old state is used up
        self.made.append(caption)
        size = self.size_of_pictures
        return state, np.full((16, size, size, 3), 20 * (len(state) - 1) % 256, np.uint8)

    def copy(self, state):
        return list(state)

    def size(self, state):
        return 100

    def check(self):
        if self.broken:
            raise RuntimeError("the device is gone")


class Player:
    """Collects what a world tells; `wait` waits until it has told so much."""

    def __init__(self):
        self.heard = []
        self._changed = threading.Condition()

    def __call__(self, event):
        with self._changed:
            self.heard.append(event)
            self._changed.notify_all()

    def of(self, kind):
        return [event for event in self.heard if isinstance(event, kind)]

    def wait(self, kind, count=1, seconds=10.0):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= count, seconds), (kind, self.heard)
        return self.of(kind)[count - 1]


@contextmanager
def engine_of(stepper, **limits):
    engine = Engine(lambda: stepper, Limits(**limits)).start()
    try:
        yield engine
    finally:
        if hasattr(stepper, "gate"):
            stepper.gate.set()
        engine.stop()


@contextmanager
def served(stepper=None, *, limits=None, client_limits=None, access=None, gallery=(), **game):
    """A server at a free port in a thread; yields what tests want to know of it."""
    stepper = stepper or Fake(64)
    engine = Engine(lambda: stepper, limits or Limits()).start()
    fields: dict[str, Any] = dict(weights="none", expect="", height=64, width=64, chunk=4, chunks=6, capacity=8)
    fields |= dict(options=InputOptions(), rotation=(5.625, 2.8125), gallery=gallery) | game
    app = server.application(Game(engine, **fields), access, client_limits)
    bound = socket.create_server(("127.0.0.1", 0))
    running = server.server(app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield Served(f"127.0.0.1:{bound.getsockname()[1]}", engine, stepper)
    finally:
        if isinstance(stepper, Fake):
            stepper.gate.set()
        running.should_exit = True
        thread.join(20)
        bound.close()
        assert not thread.is_alive()


class Served(NamedTuple):
    address: str
    engine: Engine
    stepper: Any

    def client(self, **options) -> Client:
        return Client(f"ws://{self.address}/play", timeout=10, **options)

    @contextmanager
    def socket(self, **options):
        """A bare connection, its greeting read."""
        with connect(f"ws://{self.address}/play", compression=None, max_size=None, **options) as opened:
            assert json.loads(opened.recv(10))["type"] == "hello"
            yield opened

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{self.address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def controls(caption="a", **changes):
    return Controls(caption, "fps", 3.0, 1.0, **changes)


def join(engine, caption="a", *, player=None, paused=True):
    """A world that makes chunks when it is told to, and as fast as it can."""
    player = player or Player()
    return engine.join(START, controls(caption), player, paced=False, paused=paused), player


def step(engine, world, player):
    """One chunk, read by the client at once."""
    count = len(player.of(Made))
    engine.step(world)
    made = player.wait(Made, count + 1)
    engine.sent(world)
    return made
