"""The engine: worlds taking turns at one stepper, in a thread of its own.

Methods may be called from any thread; they change what a world is told and return at once. All work of the devices is
done by the thread, chunk by chunk. A world that is gone on with from an earlier chunk, or whose state was lost, is made
again from the nearest state that was kept, under the rows and captions of its time: the pictures are the same.
"""

import collections
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from wp2_jax.controls.captions import Caption
from wp2_jax.controls.geometry import PICTURES_PER_SECOND
from wp2_jax.serve.stepper import Stepper
from wp2_jax.serve.world import Controls, Ended, Full, History, Limits, Made, Node, Notice, Queued, Sink, Start, World

log = logging.getLogger(__name__)
_MARGIN = 0.05
_RETRY_SECONDS = (0.0, 1.0, 5.0, 30.0)


class EngineError(RuntimeError):
    """What a player asks for cannot be done now; the message says why."""


class Numbers(NamedTuple):
    """Of this moment: gauges, counts since the start, seconds of the latest chunks and of all together."""

    gauges: dict[str, float]
    counts: collections.Counter[str]
    seconds: tuple[float, ...]
    seconds_total: float


class Engine:
    """See the module. `make_stepper` is called in the thread, at the start and after a failure of the devices."""

    def __init__(self, make_stepper: Callable[[], Stepper], limits: Limits | None = None):
        self.limits = limits or Limits()
        self._make_stepper = make_stepper
        self._lock = threading.Condition(threading.RLock())
        self._playing: list[World] = []
        self._waiting: list[World] = []
        self._stepper: Stepper | None = None
        self._stop = False
        self._turn_seconds = 0.5
        self._busy_since: float | None = None
        self.status = "starting"  # then ready, restarting, failed or stopped
        self.counts = collections.Counter[str]()
        self._seconds: collections.deque[float] = collections.deque(maxlen=1024)
        self._seconds_total = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # What the server calls.

    def start(self) -> "Engine":
        self._thread.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Ends every world and the thread, after the chunk it is at."""
        with self._lock:
            self._stop = True
            for world in [*self._playing, *self._waiting]:
                self._end(world, "shutdown", "the server is shutting down")
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.status = "stopped"

    def join(self, start: Start, controls: Controls, sink: Sink, *, paced: bool = True, paused: bool = False) -> World:
        """A new world; it plays at once or waits its turn, which the sink is told.

        `paced`: a chunk is made when the one before has been shown at 16 pictures a second, else as soon as it can.
        EngineError: the queue is full, or there is no engine.
        """
        with self._lock:
            if self._stop or self.status in ("failed", "stopped"):
                raise EngineError(f"no worlds can be started: the engine is {self.status}")
            if len(self._playing) >= self.limits.worlds and len(self._waiting) >= self.limits.queue:
                raise EngineError(
                    f"{len(self._playing)} worlds play and {len(self._waiting)} wait, which is the most this server "
                    "takes: try again later"
                )
            world = World(start, controls, History(self.limits.snapshot_bytes), sink, paced, paused=paused)
            world.seen = time.monotonic()
            self._waiting.append(world)
            self.counts["worlds"] += 1
            self._admit()
            if world in self._waiting:
                world.tell(Queued(len(self._waiting)))
            return world

    def hold(self, world: World, sequence: int, keys: Iterable[str], event: str | None, lease: float) -> bool:
        """A key state, see `Controls.hold`; `lease` seconds from now."""
        with self._touch(world) as now:
            return world.controls.hold(sequence, keys, event, now + lease)

    def describe(self, world: World, caption: Caption | str) -> None:
        """Another caption, from the next chunk on."""
        with self._touch(world):
            world.controls.caption = caption

    def speeds(self, world: World, yaw: float, pitch: float) -> None:
        """Degrees a latent frame, from the next chunk on."""
        with self._touch(world):
            world.controls.yaw, world.controls.pitch = yaw, pitch

    def pause(self, world: World, paused: bool) -> None:
        with self._touch(world):
            world.paused, world.asked = paused, []

    def step(self, world: World) -> None:
        """One chunk of a paused world, under the keys of now. EngineError: it is not paused."""
        with self._touch(world) as now:
            if not world.paused:
                raise EngineError("step: the world is not paused; send pause first")
            world.asked = [*world.asked, now][: self.limits.unsent]

    def goto(self, world: World, number: int) -> Node:
        """Goes on from an earlier chunk, 0 for the start. ValueError: see `History.goto`."""
        with self._touch(world):
            node = world.history.goto(number)
            world.due, world.shown_until, world.asked = 0.0, 0.0, []
            return node

    def reset(self, world: World) -> None:
        """Back to the start; what was made is forgotten."""
        with self._touch(world):
            world.history.clear()
            world.controls.release()
            world.due, world.shown_until, world.asked = 0.0, 0.0, []

    def read(self, world: World, function: Callable[[World], Any]) -> Any:
        """A function of a world, while the engine does not change it."""
        with self._touch(world):
            return function(world)

    def sent(self, world: World) -> None:
        """A chunk has gone to the client."""
        with self._touch(world, alive=False):
            world.unsent = max(0, world.unsent - 1)

    def detach(self, world: World) -> None:
        """The player is lost: keys are let go, and the world waits to be found again."""
        with self._lock:
            world.controls.release()
            world.sink, world.lost, world.unsent = None, time.monotonic(), 0
            if world in self._waiting:
                self._end(world, "lost", "the player left the queue")
            self._lock.notify_all()

    def attach(self, key: str, sink: Sink) -> World:
        """The world of a key, for a player who came back; whoever else has it is told and loses it.

        EngineError: there is no such world (any more).
        """
        with self._lock:
            for world in self._playing:
                if secrets.compare_digest(world.key, key):
                    world.tell(Ended("taken", "the world was taken over by another connection"))
                    # Sequence numbers begin anew with every connection.
                    world.controls.release()
                    world.controls.sequence = -1
                    world.sink, world.lost, world.unsent, world.seen = sink, None, 0, time.monotonic()
                    world.due = world.shown_until = 0.0
                    self._lock.notify_all()
                    return world
        raise EngineError("resume: there is no world of this key (any more); start a new one")

    def leave(self, world: World) -> None:
        """The player is done with the world."""
        with self._lock:
            self._end(world, "left", "the player left")

    def numbers(self) -> Numbers:
        """How it goes."""
        with self._lock:
            busy = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
            gauges = {
                "worlds_playing": len(self._playing),
                "worlds_waiting": len(self._waiting),
                "snapshot_bytes": sum(world.history.kept_bytes for world in self._playing),
                "turn_busy_seconds": busy,
                "ready": int(self.status == "ready"),
            }
            return Numbers(gauges, self.counts.copy(), tuple(self._seconds), self._seconds_total)

    # Inside.

    def _touch(self, world: World, alive: bool = True) -> "_Touch":
        return _Touch(self._lock, world, alive)

    def _admit(self) -> None:
        """Gives free places to those who waited longest, and tells the others where they stand."""
        before = len(self._waiting)
        while self._waiting and len(self._playing) < self.limits.worlds:
            world = self._waiting.pop(0)
            self._playing.append(world)
            world.tell(Queued(0))
        if len(self._waiting) != before:
            self._tell_positions()
        self._lock.notify_all()

    def _tell_positions(self) -> None:
        for position, world in enumerate(self._waiting, 1):
            world.tell(Queued(position))

    def _end(self, world: World, reason: str, message: str) -> None:
        if world.ended:
            return
        world.ended = True
        world.state, world.at = None, None
        world.history.forget_states()
        self.counts[f"ended_{reason}"] += 1
        log.info("world ended", extra={"reason": reason, "chunks": world.history.length})
        if world in self._waiting:
            self._waiting.remove(world)
            self._tell_positions()
        if world in self._playing:
            self._playing.remove(world)
        world.tell(Ended(reason, message))
        self._admit()

    def _run(self) -> None:
        self._begin_stepper("starting")
        while True:
            with self._lock:
                if self._stop:
                    return
                now = time.monotonic()
                self._sweep(now)
                world, wait = self._next(now)
                if world is None:
                    self._lock.wait(wait)
                    continue
                world.served, self._busy_since = now, now
            try:
                self._turn(world)
            except Exception as error:
                self._failed(world, error)
            finally:
                self._busy_since = None

    def _begin_stepper(self, status: str) -> None:
        """Makes a stepper and tries it, again and again until it works or the engine stops."""
        self.status, self._stepper = status, None
        attempt = 0
        while not self._stop:
            try:
                stepper = self._make_stepper()
                stepper.check()
            except Exception as error:
                log.exception("engine does not start", extra={"attempt": attempt})
                attempt += 1
                if attempt >= 3:
                    with self._lock:
                        self.status = "failed"
                        for world in [*self._waiting, *self._playing]:
                            self._end(world, "engine", f"the engine does not start: {error}")
                with self._lock:
                    self._lock.wait(_RETRY_SECONDS[min(attempt, 3)])
            else:
                with self._lock:
                    self._stepper, self.status = stepper, "ready"
                return

    def _sweep(self, now: float) -> None:
        """Ends worlds that nobody plays any more."""
        for world in [*self._waiting, *self._playing]:
            if world.lost is not None and now - world.lost > self.limits.keep_seconds:
                self._end(world, "lost", "the player did not come back")
            elif now - world.seen > self.limits.idle_seconds:
                self._end(world, "idle", f"nothing was heard from the player for {self.limits.idle_seconds:g} seconds")

    def _next(self, now: float) -> tuple[World | None, float]:
        """The world whose turn it is, of those that are due the one that waited longest; or how long none will be."""
        assert self._stepper is not None
        ready, wait = None, 1.0
        for world in self._playing:
            wants = world.sink is not None and (not world.paused or bool(world.asked))
            if not wants or world.unsent >= self.limits.unsent or world.history.length >= self._stepper.longest:
                continue
            if world.due > now:
                wait = min(wait, world.due - now)
            elif ready is None or world.served < ready.served:
                ready = world
        return ready, wait

    def _turn(self, world: World) -> None:
        """One chunk of a world: one that was made before, where its state has to get there, or a new one."""
        stepper = self._stepper
        assert stepper is not None
        with self._lock:
            tip, path = world.history.tip, world.history.tip.path()
            state, at = world.state, world.at
            world.state = world.at = None  # used up by this turn, whatever becomes of it
        if state is None or at is None or (at.parent is not None and at not in path):
            state, at = self._restored(world, path)
        before = at.index + 1
        new = before == len(path)
        with self._lock:
            if world.ended:
                return
            if new:
                now = world.asked[0] if world.asked else time.monotonic()
                rows, caption = world.controls.rows(stepper.chunk, before == 0, now), world.controls.text()
                sequence = world.controls.sequence
            else:
                rows, caption, sequence = path[before].rows, path[before].caption, -1
        began = time.monotonic()
        state, pictures = stepper.make(state, rows, caption, before == 0)
        seconds = time.monotonic() - began
        self._turn_seconds += 0.2 * (seconds - self._turn_seconds)
        with self._lock:
            if world.ended:
                return
            if world.history.tip is not tip:
                return  # the player went elsewhere meanwhile
            node = world.history.add(rows, caption) if new else path[before]
            world.state, world.at = state, node
            size = stepper.size(state)
            if world.history.wants_state(node, size):
                world.history.keep(node, stepper.copy(state), size)
            if new:
                self._deliver(world, Made(node, pictures, sequence, seconds))

    def _restored(self, world: World, path: list[Node]) -> tuple[Any, Node]:
        """The last state that was kept on a path, to be used up, and the chunk after which it is."""
        assert self._stepper is not None
        for node in reversed(path):
            if node.snapshot is not None:
                return self._stepper.copy(node.snapshot), node
        return self._stepper.begin(world.start), world.history.nodes[0]

    def _deliver(self, world: World, made: Made) -> None:
        assert self._stepper is not None
        now = time.monotonic()
        self.counts["chunks"] += 1
        self.counts["pictures"] += len(made.pictures)
        self._seconds.append(made.seconds)
        self._seconds_total += made.seconds
        world.unsent += 1
        del world.asked[:1]
        if world.paced:
            world.shown_until = max(now, world.shown_until) + len(made.pictures) / PICTURES_PER_SECOND
            world.due = world.shown_until - self._turn_seconds * max(1, len(self._playing)) - _MARGIN
        world.tell(made)
        if world.history.length >= self._stepper.longest:
            world.tell(Full(self._stepper.longest))

    def _failed(self, world: World, error: Exception) -> None:
        """Ends the world whose turn failed; unless it is the engine that failed, which begins anew then."""
        log.error("a turn failed", exc_info=error)
        try:
            assert self._stepper is not None
            self._stepper.check()
        except Exception:
            self.counts["restarts"] += 1
            log.exception("the engine failed and is started again")
            with self._lock:
                for other in self._playing:
                    other.state = other.at = None
                    other.history.forget_states()
                    other.tell(Notice("the engine failed and is being restarted; the world goes on after that"))
            self._begin_stepper("restarting")
        else:
            with self._lock:
                self._end(world, "failed", f"this world failed: {type(error).__name__}: {error}")


class _Touch:
    """The engine's lock, held for a change to a world by its player, after which the engine looks again.

    EngineError: the world has ended (unless not `alive`).
    """

    def __init__(self, lock: threading.Condition, world: World, alive: bool):
        self._lock, self._world, self._alive = lock, world, alive

    def __enter__(self) -> float:
        self._lock.acquire()
        if self._alive and self._world.ended:
            self._lock.release()
            raise EngineError("this world has ended; start a new one")
        now = time.monotonic()
        if self._alive:
            self._world.seen = now
        return now

    def __exit__(self, *_: object) -> None:
        self._lock.notify_all()
        self._lock.release()
