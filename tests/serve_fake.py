"""An engine without weights, and a player who remembers what a world told."""

import threading
from contextlib import contextmanager

import numpy as np

from wp2_jax.serve.engine import Engine
from wp2_jax.serve.world import Controls, Limits, Made, Start

START = Start(b"", np.zeros((4, 4, 3), np.float32), "stretch", "fps", 0)


class Fake:
    """A world's state is the list of what was done in it; a picture shows its length and last yaw. `gate` holds turns
    back; a caption "fail" fails, and while `broken` everything does."""

    chunk, longest = 4, 6

    def __init__(self):
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
        return state, np.full((16, 2, 2, 3), len(state) - 1, np.uint8)

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
