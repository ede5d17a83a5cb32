"""The server over a real socket: what clients of every kind get, and that no client harms another."""

import io
import json
import random
import socket
import threading
import time
import zipfile

import av
import numpy as np
import pytest
from serve_fake import Fake, served
from test_serve_protocol import mutated
from test_serve_session import png
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from wp2_jax.controls.captions import Caption
from wp2_jax.serve import fragments, messages
from wp2_jax.serve.client import ServerError, WorldEnded
from wp2_jax.serve.connection import ClientLimits
from wp2_jax.serve.pictures import MAX_BYTES, Place
from wp2_jax.serve.server import Access
from wp2_jax.serve.world import Limits

ROOM = Place("room", png(), "tps", Caption("a room", "a soldier"), ("fog",))


@pytest.fixture(scope="module")
def live():
    with served(gallery=(ROOM,), limits=Limits(worlds=50)) as found:
        yield found


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def send(opened, kind, **fields):
    opened.send(json.dumps({"type": kind} | fields))


def next_of(opened, kind, seconds=10):
    """The next message of a kind; binary ones on the way are dropped."""
    while True:
        received = opened.recv(seconds)
        if isinstance(received, str) and (message := json.loads(received))["type"] == kind:
            return message


def test_a_program_plays(live):
    with live.client() as client:
        assert client.hello.gallery[0].events == ("fog",) and client.hello.chunks == 6
        state = client.start("room", "tps", seed=3, paused=True)
        assert (state.seed, state.chunk, state.paused, state.yaw) == (3, 0, True, 3.0)
        assert state.caption == "The scene in the video is: a room. The character is: a soldier."
        chunk, pictures = client.step(["w"])
        assert pictures.shape == (16, 64, 64, 3) and (pictures == 20).all() and chunk.actions == "w"
        np.testing.assert_array_equal(chunk.rows, [[0.0] * 6] + [[0, 0, 1, 0, 0, 0]] * 3)
        chunk, pictures = client.step(["left"], "fog")
        assert (pictures == 40).all() and chunk.caption.endswith("The event is: fog.") and chunk.seq == 2
        assert client.snapshot() == 2
        # Speeds beyond what was trained are clipped, and it is said.
        assert client.speeds(90.0, 1.0).yaw == 5.625 and "90" in client.notices[-1]
        assert client.fork(1).chunk == 1
        chunk, pictures = client.step(["left"])
        assert (chunk.parent, chunk.index) == (1, 1) and (pictures == 40).all() and chunk.rows[0][1] == -5.625
        assert client.caption(scene="a hall", event="rain").caption.startswith("The scene in the video is: a hall.")
        with zipfile.ZipFile(io.BytesIO(client.save())) as archive:
            items = json.loads(archive.read("input.json"))
            assert archive.read("start.png") == png()
        assert [len(item["rows"]) for item in items] == [8, 8] and items[0]["seed"] == 3 and items[0]["capacity"] == 8
        assert client.reset().chunk == 0
        client.pause(False)
        frames = list(zip(range(40), client.frames(), strict=False))
        assert frames[39][1].shape == (64, 64, 3)
        client.leave()
        with pytest.raises(ServerError, match="there is no world"):
            client.pause()


def test_an_uploaded_picture(live):
    with live.client() as client, pytest.raises(ServerError, match="PNG, JPEG"):
        client.start(b"GIF89a no", "fps")
    with live.client() as client:
        state = client.start(png(), "fps", fit="crop", caption="", paused=True)
        assert state.caption == "" and 0 <= state.seed < 2**31
        client.step()
        # Another start ends the world before.
        assert client.start("room", "fps", paused=True).world != state.world
        assert client.state.caption == "The scene in the video is: a room."
        client.leave()
    until(lambda: live.engine.numbers().gauges["worlds_playing"] == 0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"picture": "../../etc/passwd"}, "picture"),
        ({"picture": "upload"}, "picture"),
        ({"caption": "x", "scene": "y"}, "caption"),
        ({"perspective": "fps", "character": "a knight", "scene": "y"}, "character"),
        ({"scene": "a The event is: b"}, "scene"),
        ({"seed": -1}, "seed"),
    ],
)
def test_starts_that_are_refused(live, fields, field):
    with live.socket() as opened:
        send(opened, "start", **({"picture": "room", "perspective": "tps"} | fields))
        error = next_of(opened, "error")
        assert error["about"] == "start" and error["field"] == field and error["message"]


def test_malformed_messages_close_nothing(live):
    with live.socket() as opened:
        send(opened, "start", picture="room", perspective="tps", video="raw", paused=True)
        next_of(opened, "state")
        for text in ("", "{", "[]", '{"type": "fly"}', '{"type": "keys", "seq": -1, "keys": []}', "x" * 40_000):
            opened.send(text)
            assert next_of(opened, "error")["message"]
        opened.send(b"\x00" * (MAX_BYTES + 1))
        assert str(MAX_BYTES) in next_of(opened, "error")["message"]
        opened.send(b"not a picture")
        assert "PNG" in next_of(opened, "error")["message"]
        # Late and doubled key states are dropped without a word.
        for seq in (5, 3, 5, 4):
            send(opened, "keys", seq=seq, keys=["w"] if seq == 5 else ["s"], lease_ms=10_000)
        send(opened, "step")
        chunk = next_of(opened, "chunk")
        assert chunk["seq"] == 5 and chunk["actions"] == "w"
        send(opened, "keys", seq=6, keys=["w"], event="The event is: x")
        assert "label" in next_of(opened, "error")["message"]


def test_held_keys_end_with_their_lease(live):
    with live.socket() as opened:
        send(opened, "start", picture="room", perspective="tps", video="raw", paused=True)
        send(opened, "keys", seq=1, keys=["w"], event="fog", lease_ms=100)
        time.sleep(0.3)
        send(opened, "step")
        chunk = next_of(opened, "chunk")
        assert chunk["actions"] == "none" and "fog" not in chunk["caption"] and chunk["seq"] == 1


def test_a_lost_player_comes_back_and_another_takes_over(live):
    with live.socket() as first, live.socket() as second, live.socket() as third:
        _come_back(first, second, third)


def _come_back(first, second, third):
    send(first, "start", picture="room", perspective="tps", video="raw", paused=True)
    key = next_of(first, "state")["world"]
    send(first, "keys", seq=50, keys=["w"], lease_ms=10_000)
    send(first, "step")
    next_of(first, "chunk")
    # Gone without a word: the socket is cut, not closed.
    first.socket.shutdown(socket.SHUT_RDWR)
    send(second, "resume", world=key, video="raw")
    assert next_of(second, "state")["chunk"] == 1
    send(second, "step")
    assert next_of(second, "chunk")["actions"] == "none"
    send(third, "resume", world=key)
    next_of(third, "state")
    assert next_of(second, "end")["reason"] == "taken"
    send(third, "resume", world="no such key")
    assert "no world of this key" in next_of(third, "error")["message"]
    send(third, "leave")
    assert next_of(third, "end")["reason"] == "left"


def test_two_players_and_one_who_vanishes(live):
    with live.client() as one, live.client() as other:
        one.start("room", "tps", caption="one", paused=True)
        other.start("room", "fps", caption="other", paused=True)
        assert one.step(["w"])[0].caption == "one" and other.step(["s"])[0].caption == "other"
        one._socket.socket.shutdown(socket.SHUT_RDWR)
        chunk, _ = other.step(["d"])
        assert chunk.index == 1 and chunk.actions == "d"


def test_a_queue():
    with served(gallery=(ROOM,), limits=Limits(worlds=1, queue=1)) as live, live.socket() as first:
        send(first, "start", picture="room", perspective="tps", paused=True)
        next_of(first, "state")
        with live.socket() as second, live.client() as third:
            send(second, "start", picture="room", perspective="tps", paused=True)
            assert next_of(second, "queue")["position"] == 1
            with pytest.raises(ServerError, match="try again later"):
                third.start("room", "tps")
            send(first, "leave")
            assert next_of(second, "state")["chunk"] == 0


def test_a_flood_is_thinned_and_a_long_one_ends_its_client():
    limits = ClientLimits(rate=50, burst=100, patience=2000)
    with served(gallery=(ROOM,), client_limits=limits) as live, live.client() as calm, live.socket() as opened:
        calm.start("room", "tps", paused=True)
        for seq in range(300):
            send(opened, "keys", seq=seq, keys=[])
        assert "there is no world" in next_of(opened, "error")["message"]
        with pytest.raises(ConnectionClosed) as closed:
            for _ in range(20_000):
                opened.send("{")
            while True:
                opened.recv(10)
        assert closed.value.rcvd is None or closed.value.rcvd.code in (1008, 1013)
        assert calm.step(["w"])[0].index == 0


def test_a_client_that_does_not_read_is_dropped():
    limits = ClientLimits(send_seconds=0.5)
    stepper = Fake(512)  # 12 MB a chunk: more than the kernel holds
    stepper.longest = 10_000
    shape = dict(height=512, width=512)
    with served(stepper, gallery=(ROOM,), client_limits=limits, **shape) as live, live.socket(max_queue=1) as opened:
        send(opened, "start", picture="room", perspective="tps", video="raw", pace="free")
        next_of(opened, "state")
        until(lambda: any(w.lost is not None for w in live.engine._playing), 30)
        made = len(live.stepper.made)
        time.sleep(0.3)
        assert len(live.stepper.made) == made <= 8
        with live.client() as other:
            other.start("room", "tps", paused=True)
            assert other.step()[0].index == 0
        opened.socket.shutdown(socket.SHUT_RDWR)


def test_fragments_are_one_file(live):
    with live.socket() as opened:
        send(opened, "start", picture="room", perspective="tps", pace="free")
        parts = []
        while len(parts) < 3:
            received = opened.recv(10)
            if isinstance(received, bytes):
                parts.append(received)
    names = [[name for name, _ in fragments.boxes(part)] for part in parts]
    assert names == [[b"ftyp", b"moov", b"moof", b"mdat"]] + [[b"moof", b"mdat"]] * 2
    with av.open(io.BytesIO(b"".join(parts)), "r") as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 48 and (frames[0].height, frames[0].width) == (256, 256)
    assert [round(16 * frame.time) for frame in frames] == list(range(48))
    # The fake's chunk n is grey of 20 n.
    grey = [frames[16 * n + 8].to_ndarray(format="rgb24").mean() for n in range(3)]
    np.testing.assert_allclose(grey, [20, 40, 60], atol=3)
    assert fragments.mime(64, 64, 4).startswith('video/mp4; codecs="avc1.64')


def test_who_may_connect(live):
    url = f"ws://{live.address}/play"

    def reason(**headers):
        with connect(url, additional_headers={k.title(): v for k, v in headers.items()}) as opened:
            return json.loads(opened.recv(10))

    assert reason(origin="http://evil.example")["message"].startswith("origin 'http://evil.example'")
    assert reason(origin=f"http://{live.address}")["type"] == "hello"
    # A name of another site that leads here (DNS rebinding).
    assert live.get("/", Host="evil.example")[0] == 403
    assert live.get("/", Host="localhost:1")[0] == 200
    with pytest.raises(InvalidStatus):
        connect(f"ws://{live.address}/other")


def test_a_token():
    with served(access=Access("0.0.0.0", "secret", ("https://far.example",))) as live:
        with pytest.raises(ServerError, match="token"):
            live.client()
        with pytest.raises(ServerError, match="token"):
            live.client(token="other")
        live.client(token="secret").close()
        for query, kind in (("?token=secret", "hello"), ("?token=", "error")):
            with connect(
                f"ws://{live.address}/play{query}", additional_headers={"Origin": "https://far.example"}
            ) as opened:
                assert json.loads(opened.recv(10))["type"] == kind
        assert live.get("/metrics")[0] == 403 and live.get("/metrics?token=secret")[0] == 200
        assert live.get("/health")[0] == 200 and live.get("/", Host="any.example")[0] == 200


def test_files_and_paths(live):
    status, body = live.get("/")
    assert status == 200 and "<!doctype html>" in body
    assert json.loads(live.get("/schema.json")[1])["$defs"]["client"]
    for path in ("/../server.py", "/%2e%2e/server.py", "/web/index.html", "//etc/passwd", "/etc/passwd"):
        assert live.get(path)[0] == 404


def test_health_and_metrics(live):
    until(lambda: live.engine.status == "ready")
    status, body = live.get("/health")
    assert status == 200 and json.loads(body)["status"] == "ready"
    values = {}
    for line in live.get("/metrics")[1].splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    assert values["wp2_pictures_total"] == 16 * values["wp2_chunk_seconds_count"] > 0
    assert values["wp2_resident_bytes"] > 1e7 and values["wp2_ready"] == 1
    assert values['wp2_chunk_seconds{quantile="0.5"}'] <= values['wp2_chunk_seconds{quantile="0.99"}']


def test_a_failed_engine_shows():
    stepper = Fake(64)
    with served(stepper, gallery=(ROOM,)) as live, live.client() as client:
        client.start("room", "tps", paused=True)
        client.step()
        stepper.broken = True
        client._send(messages.Step())
        until(lambda: live.engine.status == "restarting")
        assert live.get("/health")[0] == 503
        stepper.broken = False
        chunk, pictures = client.chunk()
        assert chunk.index == 1 and (pictures == 40).all() and "being restarted" in client.notices[-1]


def test_the_end_of_the_server_is_told():
    with served(gallery=(ROOM,)) as live:
        client = live.client()
        client.start("room", "tps")
    with pytest.raises(WorldEnded):
        while True:
            client.chunk()
    assert live.engine.status == "stopped"


def test_five_thousand_messages_of_any_kind():
    """Wild messages from several clients, while one plays: nothing is lost and nothing leaks."""
    limits = ClientLimits(rate=1e6, burst=1e6, outbox=20_000)
    stepper = Fake(64)
    stepper.longest = 10_000
    with served(stepper, gallery=(ROOM,), limits=Limits(worlds=8, snapshot_bytes=10_000), client_limits=limits) as live:
        threads_before = threading.active_count()

        def wild(seed):
            random_ = random.Random(seed)
            with live.socket() as opened:
                drain = threading.Thread(target=lambda: [None for _ in opened], daemon=True)
                drain.start()
                for number in range(1250):
                    draw = random_.random()
                    if draw < 0.02:
                        opened.send(random_.choice([png(), png()[:80], random_.randbytes(50)]))
                    elif draw < 0.05:
                        opened.send("".join(chr(random_.randrange(32, 0xD000)) for _ in range(30)))
                    elif draw < 0.08:
                        send(opened, "start", picture="room", perspective="tps", pace="free", video="raw")
                    else:
                        opened.send(json.dumps(mutated(random_)))
                    if number % 250 == 249:
                        time.sleep(0.05)
                opened.ping().wait(20)

        with live.client() as calm:
            calm.start("room", "tps", paused=True, caption="calm")
            wilds = [threading.Thread(target=wild, args=(seed,)) for seed in range(4)]
            for thread in wilds:
                thread.start()
            index = 0
            while index < 5 or any(thread.is_alive() for thread in wilds):
                chunk, _ = calm.step(["w"])
                assert chunk.index == index and chunk.actions == "w" and chunk.caption == "calm"
                index += 1
            calm.leave()
        for thread in wilds:
            thread.join()
        until(lambda: all(w.lost is not None for w in live.engine._playing))
        for world in list(live.engine._playing):
            live.engine.leave(world)
        numbers = live.engine.numbers()
        assert numbers.gauges["worlds_playing"] == numbers.gauges["worlds_waiting"] == 0
        assert numbers.gauges["snapshot_bytes"] == 0 and numbers.counts["ended_failed"] == 0
        ended = sum(count for name, count in numbers.counts.items() if name.startswith("ended_"))
        assert ended == numbers.counts["worlds"]
        until(lambda: "wp2_connections 0" in live.get("/metrics")[1])
        until(lambda: threading.active_count() <= threads_before + 40)
        assert live.engine.status == "ready"
