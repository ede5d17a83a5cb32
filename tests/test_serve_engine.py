"""The engine around a fake stepper, whose pictures say which rows and captions led to them, and around real weights."""

import time

import numpy as np
import pytest
from serve_fake import START, Fake, Player, controls, engine_of, join, step

from wp2_jax.controls.captions import Caption
from wp2_jax.controls.errors import ActionError
from wp2_jax.serve import world as worlds
from wp2_jax.serve.engine import Engine, EngineError
from wp2_jax.serve.world import Ended, Full, History, Made, Notice, Queued


def test_keys_become_rows():
    held = controls()
    assert held.hold(5, ["w", "right"], None, lease_ends=10.0)
    # An older or the same state comes late and is dropped.
    assert not held.hold(4, ["s"], "fog", 99.0) and not held.hold(5, [], None, 99.0)
    np.testing.assert_array_equal(held.rows(4, True, 9.0), [[0, 0, 0, 0, 1, 0]] + [[0, 3, 1, 0, 1, 0]] * 3)
    np.testing.assert_array_equal(held.rows(4, False, 9.9), [[0, 3, 1, 0, 1, 0]] * 4)
    # The lease is over: nothing is held any more, the event neither.
    held.hold(6, ["w"], "fog", lease_ends=10.0)
    assert "fog" in held.text()
    np.testing.assert_array_equal(held.rows(4, False, 10.0), [[0, 0, 0, 0, 1, 0]] * 4)
    assert held.text() == "a"
    with pytest.raises(ActionError, match=r"jump.*the keys are"):
        held.hold(7, ["jump"], None, 99.0)
    assert held.sequence == 6


def test_a_held_event_takes_the_captions_place():
    whole = Caption("a room", None, "it rains")
    assert worlds.told(whole, None) == "The scene in the video is: a room. The event is: it rains."
    assert worlds.told(whole, "fog") == "The scene in the video is: a room. The event is: fog."
    assert worlds.told(" a maze ", "fog") == "a maze The event is: fog."
    assert worlds.told("", "fog") == "The event is: fog."


def test_speeds_stay_inside_what_was_trained():
    assert worlds.within(None, 20.0, 3.0) == (20.0, 3.0, "")
    yaw, pitch, said = worlds.within((5.625, 2.8125), 20.0, 1.0)
    assert (yaw, pitch) == (5.625, 1.0) and "yaw of 20" in said and "5.625" in said and "pitch" not in said


def test_kept_states_thin_out():
    history = History(budget=350)
    for _ in range(12):
        node = history.add(np.zeros((4, 6), np.float32), "a")
        if history.wants_state(node, 100):
            history.keep(node, "state", 100)
    kept = [node.index for node in history.nodes.values() if node.snapshot is not None]
    assert kept == [3, 7, 11] and history.kept_bytes == 300
    assert not History(99).wants_state(history.tip, 100)


def test_chunks_follow_the_newest_controls():
    with engine_of(Fake()) as engine:
        world, player = join(engine, "one")
        assert player.wait(Queued).position == 0
        engine.hold(world, 1, ["w"], None, 60)
        first = step(engine, world, player)
        assert (first.node.index, first.sequence, first.node.caption) == (0, 1, "one")
        for sequence in range(2, 102):
            engine.hold(world, sequence, ["a"] if sequence % 2 else ["d"], None, 60)
        engine.describe(world, "two")
        second = step(engine, world, player)
        assert (second.node.index, second.sequence, second.node.caption) == (1, 101, "two")
        np.testing.assert_array_equal(second.node.rows, [[0, 0, 0, -1, 1, 0]] * 4)
        assert second.pictures.max() == 40 and second.seconds >= 0
        engine.pause(world, False)
        with pytest.raises(EngineError, match="not paused"):
            engine.step(world)


def test_a_single_chunk_has_the_keys_of_when_it_was_asked_for():
    """However long its turn takes to come: a lease is for keys whose release got lost."""
    stepper = Fake()
    with engine_of(stepper) as engine:
        world, player = join(engine)
        stepper.gate.clear()
        engine.hold(world, 1, ["w"], None, 0.2)
        engine.step(world)
        engine.step(world)
        time.sleep(0.3)
        stepper.gate.set()
        # The second is begun when the lease is over.
        assert player.wait(Made, 2).node.rows[-1].tolist() == [0, 0, 1, 0, 1, 0]
        engine.sent(world)
        assert step(engine, world, player).node.rows[-1].tolist() == [0, 0, 0, 0, 1, 0]


def test_fork_and_reset_make_the_same_states_again():
    stepper = Fake()
    with engine_of(stepper, snapshot_bytes=150) as engine:
        world, player = join(engine)
        for number in range(4):
            engine.describe(world, f"c{number}")
            step(engine, world, player)
        engine.goto(world, 2)
        engine.describe(world, "other")
        made = step(engine, world, player)
        # One state of 100 bytes fits, that after the fourth chunk: the others were made again.
        assert stepper.made == ["c0", "c1", "c2", "c3", "c0", "c1", "other"]
        assert [node.caption for node in made.node.path()] == ["c0", "c1", "other"]
        assert [caption for _, caption in world.state[1:]] == ["c0", "c1", "other"]
        assert [leaf.caption for leaf in world.history.leaves()] == ["c3", "other"]
        # The first branch, from the state that was kept.
        engine.goto(world, 4)
        step(engine, world, player)
        assert stepper.made[7:] == ["other"] and [c for _, c in world.state[1:]] == ["c0", "c1", "c2", "c3", "other"]
        with pytest.raises(ValueError, match="chunk 77"):
            engine.goto(world, 77)
        engine.reset(world)
        assert step(engine, world, player).node.index == 0 and len(world.history.nodes) == 2


def test_a_world_has_a_last_chunk():
    with engine_of(Fake()) as engine:
        world, player = join(engine, paused=False)
        for count in range(1, 7):
            player.wait(Made, count)
            engine.sent(world)
        assert player.wait(Full).chunks == 6
        engine.goto(world, 5)
        player.wait(Made, 7)
        assert player.of(Made)[-1].node.index == 5


def test_a_client_that_does_not_read_gets_no_more():
    stepper = Fake()
    with engine_of(stepper, unsent=2) as engine:
        world, player = join(engine, paused=False)
        player.wait(Made, 2)
        time.sleep(0.2)
        assert len(player.of(Made)) == 2
        engine.sent(world)
        player.wait(Made, 3)


def test_turns_are_fair():
    stepper = Fake()
    stepper.longest = 1000
    with engine_of(stepper) as engine:
        stepper.gate.clear()
        pairs = []
        for name in "xyz":
            player = Player()
            world = engine.join(START, controls(name), player, paced=False)
            pairs.append((world, player))
        stepper.gate.set()
        deadline = time.monotonic() + 10
        while len(stepper.made) < 60 and time.monotonic() < deadline:
            for world, _ in pairs:
                engine.sent(world)
            time.sleep(0.001)
        counts = [stepper.made[:60].count(name) for name in "xyz"]
        assert max(counts) - min(counts) <= 4, counts


def test_a_paced_world_keeps_real_time():
    with engine_of(Fake(), unsent=99) as engine:
        player = Player()
        engine.join(START, controls(), player)
        player.wait(Made)
        time.sleep(0.5)
        # A second of pictures each: no world runs away from who watches it.
        assert len(player.of(Made)) <= 2


def test_limit_queue_and_positions():
    with engine_of(Fake(), worlds=1, queue=2) as engine:
        first, _ = join(engine)
        second, waits = join(engine)
        _, last = join(engine)
        assert waits.wait(Queued).position == 1 and last.wait(Queued).position == 2
        with pytest.raises(EngineError, match="1 worlds play and 2 wait"):
            join(engine)
        engine.leave(second)
        assert waits.wait(Ended).reason == "left" and last.wait(Queued, 2).position == 1
        engine.leave(first)
        assert last.wait(Queued, 3).position == 0
        with pytest.raises(EngineError, match="has ended"):
            engine.pause(first, True)


def test_a_lost_player_comes_back():
    with engine_of(Fake(), keep_seconds=0.3) as engine:
        world, player = join(engine)
        engine.hold(world, 9, ["w"], "fog", 60)
        step(engine, world, player)
        engine.detach(world)
        assert world.controls.keys == frozenset() and world.controls.event is None
        again = Player()
        assert engine.attach(world.key, again) is world
        # Of a new connection numbers begin anew.
        assert engine.hold(world, 0, ["s"], None, 60)
        assert step(engine, world, again).node.index == 1 and len(player.of(Made)) == 1
        third = Player()
        engine.attach(world.key, third)
        assert again.wait(Ended).reason == "taken"
        engine.detach(world)
        deadline = time.monotonic() + 10
        while not world.ended and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(EngineError, match="no world of this key"):
            engine.attach(world.key, third)
        assert engine.counts["ended_lost"] == 1


def test_an_idle_world_ends():
    with engine_of(Fake(), idle_seconds=0.2) as engine:
        _, player = join(engine)
        assert player.wait(Ended).reason == "idle"


def test_a_world_that_fails_ends_alone():
    with engine_of(Fake()) as engine:
        bad, sorry = join(engine, "fail")
        good, player = join(engine, "fine")
        engine.step(bad)
        assert "these words break the world" in sorry.wait(Ended).message and sorry.of(Ended)[0].reason == "failed"
        step(engine, good, player)
        assert engine.status == "ready" and engine.counts["restarts"] == 0


def test_a_failed_engine_is_started_again():
    steppers = []

    def make():
        steppers.append(Fake())
        return steppers[-1]

    engine = Engine(make).start()
    world, player = join(engine, "one")
    step(engine, world, player)
    engine.describe(world, "two")
    step(engine, world, player)
    steppers[0].broken = True
    engine.describe(world, "three")
    made = step(engine, world, player)
    # On the new stepper the world was made again up to where it was.
    assert player.wait(Notice).text.startswith("the engine failed")
    assert steppers[1].made == ["one", "two", "three"] and made.node.index == 2
    assert engine.counts["restarts"] == 1 and engine.status == "ready"
    engine.stop()
    assert player.wait(Ended).reason == "shutdown" and engine.status == "stopped"
    with pytest.raises(EngineError, match="stopped"):
        join(engine)


def test_an_engine_that_does_not_start_says_so(monkeypatch):
    monkeypatch.setattr("wp2_jax.serve.engine._RETRY_SECONDS", (0.0, 0.01, 0.01, 0.01))

    def never():
        raise RuntimeError("no weights")

    engine = Engine(never)
    _, player = join(engine)
    engine.start()
    assert "no weights" in player.wait(Ended).message
    with pytest.raises(EngineError, match="failed"):
        join(engine)
    engine.stop()
