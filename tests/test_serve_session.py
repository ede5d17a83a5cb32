"""What was played is made again by `wp2 generate`, picture for picture; uploads are looked at first."""

import io
import json
import struct
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import random_workdir
from PIL import Image
from serve_fake import Player, step

from wp2_jax.controls.captions import Caption
from wp2_jax.controls.errors import ImageError
from wp2_jax.controls.inputs import InputOptions, load_inputs
from wp2_jax.inference import generate, load, video
from wp2_jax.serve import pictures, session
from wp2_jax.serve.engine import Engine
from wp2_jax.serve.stepper import Weights
from wp2_jax.serve.world import Controls, History, Limits, Start, told

EXAMPLE = Path(__file__).parents[1] / "launch" / "example"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> load.Loaded:
    return load.load(random_workdir.write(tmp_path_factory.mktemp("run"), ("base", "stable_forcing")), "few_step")


def png(height=50, width=70) -> bytes:
    x = np.linspace(0, 255, width, dtype=np.uint8)
    picture = np.stack(np.broadcast_arrays(x[None, :], np.linspace(255, 0, height, dtype=np.uint8)[:, None], 90), -1)
    out = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def test_a_played_world_is_generated_again(loaded, tmp_path):
    """With a fork, turning at a speed of its own, an event, a crop: all branches, to the last bit."""
    options = generate.input_options(loaded.source)
    data = png()
    start = Start(data, pictures.fitted(data, 64, 64, "crop"), "crop", "tps", 11)
    controls = Controls(Caption("a room with red walls", "a soldier"), "tps", 11.25, 2.8125)
    engine = Engine(lambda: Weights(loaded, 8), Limits(snapshot_bytes=0)).start()
    player = Player()
    world = engine.join(start, controls, player, paced=False, paused=True)
    played: dict[int, np.ndarray] = {}

    def play(keys, event=None):
        engine.hold(world, controls.sequence + 1, keys, event, 600)
        made = step(engine, world, player)
        played[made.node.number] = made.pictures

    deadline = time.monotonic() + 300
    while engine.status == "starting" and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        play(["w"])
        play(["right", "w"])
        play(["right"], "thick white fog fills the rooms")
        engine.goto(world, 1)
        engine.speeds(world, 4.1, 1.3)
        play(["left", "up", "space"])
        play([])
    finally:
        engine.stop()
    history = world.history
    packed = session.pack(session.items(start, history, 8, options), data)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.namelist() == ["input.json", "start.png"]
        archive.extractall(tmp_path)
    items = load_inputs(tmp_path / "input.json", options)
    # The first branch is one that a published string can say; the speeds of the other are not the file's.
    assert [item.action for item in items] == ["w-4,w+right-4,right-4", ""]
    assert (
        items[0].prompt_event == "prompt1-8,prompt2-4"
        and (items[1].rows[5] == np.array([1.3, -4.1, 0, 0, 0, 1], np.float32)).all()
    )
    requests = generate.prepare(loaded.source, loaded.tokenizer, items)
    for request, leaf in zip(requests, history.leaves(), strict=True):
        assert (request.seed, request.capacity, request.fit) == (11, 8, "crop")
        again = [video.to_uint8(chunk) for chunk in generate.generate(loaded, request, 11)]
        for chunk, node in zip(again, leaf.path(), strict=True):
            np.testing.assert_array_equal(chunk, played[node.number])
    # Pictures of the two branches differ, or the above would say little.
    assert (played[2] != played[4]).mean() > 0.1


def test_nothing_to_save():
    start = Start(png(), np.zeros((64, 64, 3), np.float32), "stretch", "fps", 0)
    with pytest.raises(ValueError, match="no chunk"):
        session.items(start, History(0), 8, InputOptions())


def test_the_last_chunk_of_a_world_fits_its_memory(loaded):
    assert Weights(loaded, 4).longest == 4 and Weights(loaded, 512).longest == 20
    with pytest.raises(ValueError, match="capacity 5"):
        Weights(loaded, 5)


def huge_png() -> bytes:
    """A header that promises 100,000 x 100,000 pixels."""

    def part(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"", "not_decodable", "PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not_decodable", "PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not_decodable", "PNG, JPEG"),
        (png()[:100], "not_decodable", "decoded"),
        (huge_png(), "too_large", str(pictures.MAX_PIXELS)),
        (bytes(pictures.MAX_BYTES + 1), "too_large", str(pictures.MAX_BYTES)),
    ],
    ids=["empty", "svg", "eps", "cut", "bomb", "large"],
)
def test_uploads_that_are_not_taken(data, kind, said):
    with pytest.raises(ImageError, match=said) as caught:
        pictures.fitted(data, 64, 64, "stretch")
    assert caught.value.kind == kind


def test_gallery():
    room, red = pictures.read_gallery(EXAMPLE / "input.json", InputOptions())
    assert (room.name, room.perspective, red.perspective) == ("orange room", "tps", "fps")
    assert (
        isinstance(room.caption, Caption)
        and room.caption.character == "a soldier in red armour, seen from behind"
        and room.caption.event is None
    )
    assert room.events == ("thick white fog fills the rooms",) and red.events == ()
    assert room.thumbnail().startswith("data:image/png;base64,iVBOR")
    for text in json.loads((EXAMPLE / "input.json").read_text()):
        assert told(pictures.structured(text["prompt"]), None) == text["prompt"]
    assert pictures.structured("  a plain text ") == "a plain text"
