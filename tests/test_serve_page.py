"""The page in a real browser, desktop and phone, on the weights that ship. Screenshots go to $WP2_SCREENSHOTS if set.

Skipped, with the reason, where there is no playwright or no Chromium (Debian: apt-get install chromium).
"""

import base64
import contextlib
import os
import shutil
import socket
import threading
import time
import zipfile
from pathlib import Path

import av
import numpy as np
import pytest
from motion import shift
from serve_fake import served
from test_serve_session import png

from wp2_jax.controls.inputs import load_inputs
from wp2_jax.inference import generate, load, video
from wp2_jax.serve import pictures
from wp2_jax.serve.stepper import Weights
from wp2_jax.serve.world import Limits

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page's tests need playwright (pip install playwright)"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("the page's tests need Chromium: apt-get install chromium", allow_module_level=True)

EXAMPLE = Path(__file__).parents[1] / "launch" / "example"
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
SIZES = {
    "desktop": {"viewport": {"width": 1200, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}


@pytest.fixture(scope="module")
def loaded():
    return load.load(load.shipped(), "few_step")


@pytest.fixture(scope="module")
def live(loaded):
    options = generate.input_options(loaded.source)
    gallery = pictures.read_gallery(EXAMPLE / "input.json", options)
    game = dict(weights="tiny weights", expect="expect little", options=options, capacity=64, chunks=64)
    stepper = Weights(loaded, 64)
    with served(stepper, limits=Limits(worlds=2, queue=2), gallery=gallery, **game) as found:
        until(lambda: found.engine.status == "ready", 300)
        yield found


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield opened
        opened.close()


class Page:
    """A page of the server, its errors and the requests it made."""

    def __init__(self, browser, address, size):
        self.address = address
        self.context = browser.new_context(accept_downloads=True, **SIZES[size])
        self.page, self.size = self.context.new_page(), size
        self.errors, self.requests = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"http://{address}/")
        self.page.wait_for_selector("#start:not([disabled])", timeout=20_000)

    def start(self, place: str, seed: int = 0):
        self.page.get_by_role("radio", name=place).check()
        self.page.fill("#seed", str(seed))
        self.page.click("#start")
        self.chunks(2)

    def chunks(self, count: int):
        """Waits until the timeline has so many chunks."""
        self.page.wait_for_selector(f"#timeline li:nth-child({count + 1})", timeout=60_000)

    @property
    def count(self) -> int:
        return self.page.locator("#timeline li").count() - 1

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def look(self) -> np.ndarray:
        """What the video shows, uint8 [256, 256, 3]."""
        script = """() => {
          const canvas = document.createElement('canvas'), video = document.getElementById('video');
          canvas.width = canvas.height = 256;
          canvas.getContext('2d').drawImage(video, 0, 0, 256, 256);
          return canvas.toDataURL('image/png').split(',')[1]; }"""
        data = base64.b64decode(self.page.evaluate(script))
        return np.rint(pictures.fitted(data, 256, 256, "stretch") * 127.5 + 127.5)

    def shot(self, name: str):
        folder = os.environ.get("WP2_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=Path(folder) / f"{self.size}_{name}.png", full_page=True)

    def close(self):
        self.page.evaluate("sessionStorage.clear()")
        if self.page.is_enabled("#leave"):
            self.page.click("#leave")
            self.page.wait_for_selector("#leave[disabled]", timeout=20_000)
        self.context.close()


def until(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)


@pytest.fixture
def open_page(browser, live):
    """Opens pages, of `live` or at another address, and closes them; none may have had an error."""
    pages = []

    def opened(size: str, address: str | None = None) -> Page:
        pages.append(Page(browser, address or live.address, size))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()
    for page in pages:
        assert not page.errors
        # Nothing is asked of anybody else.
        assert all(url.startswith((f"http://{page.address}/", "blob:", "data:")) for url in page.requests)


@pytest.fixture(params=SIZES)
def page(request, open_page):
    return open_page(request.param)


def turned(page: Page, hold, let_go) -> float:
    """Mean shift of the picture, in pixels of the world, over a quarter of a second of a held turn."""
    hold()
    before = page.count
    page.chunks(before + 3)
    moved = []
    for _ in range(8):
        pair = [page.look()]
        page.page.wait_for_timeout(250)
        pair.append(page.look())
        small = [picture.reshape(64, 4, 64, 4, 3).mean((1, 3)) / 127.5 - 1 for picture in pair]
        moved.append(shift(np.float32(small[0]), np.float32(small[1])))
    let_go()
    return float(np.mean(moved))


def test_turning_moves_the_picture(page):
    page.shot("start")
    page.start("red room")
    if page.size == "phone":
        pad = page.page.locator("[data-key=right]")
        right = turned(
            page,
            lambda: pad.dispatch_event("pointerdown", {"pointerId": 1}),
            lambda: pad.dispatch_event("pointerup", {"pointerId": 1}),
        )
    else:
        right = turned(page, lambda: page.page.keyboard.down("ArrowRight"), lambda: page.page.keyboard.up("ArrowRight"))
    assert page.text("#told-keys") == "right"
    page.shot("right")
    page.page.click("#reset")
    until(lambda: page.count < 3)
    left = turned(page, lambda: page.page.keyboard.down("ArrowLeft"), lambda: page.page.keyboard.up("ArrowLeft"))
    # Turning right moves what is seen to the left.
    assert right <= -0.3 and left >= 0.3, (right, left)


def test_readouts_events_and_captions(page):
    page.start("orange room")
    button = page.page.get_by_role("button", name="thick white fog")
    button.dispatch_event("pointerdown", {"pointerId": 1})
    until(lambda: "The event is: thick white fog" in page.text("#told-caption"))
    assert "held" in button.get_attribute("class")
    page.shot("event")
    button.dispatch_event("pointerup", {"pointerId": 1})
    until(lambda: "event" not in page.text("#told-caption"))
    page.page.fill("#event-text", "it starts to rain.")
    page.page.click("text=Add event")
    page.page.click("#stage", position={"x": 5, "y": 5})
    page.page.keyboard.press("2")  # a tap counts for a chunk
    until(lambda: "it starts to rain" in page.text("#told-caption"))
    page.page.fill("#scene", "a snowy field")
    page.page.click("#apply")
    until(lambda: "a snowy field" in page.text("#told-caption"))
    assert "tiny weights" in page.text("#weights") and float(page.text("#rate")) > 3
    page.page.keyboard.press("Control+Enter")
    page.page.click("#help-open")
    assert page.page.get_by_role("dialog").is_visible()
    page.shot("help")
    page.page.keyboard.press("Escape")
    # Nothing is wider than the window.
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_key_to_picture(open_page):
    """At worst two chunk times and 100 ms, in the middle 1.5; a chunk lasts a second here, or what it takes to make."""
    page = open_page("desktop")
    page.start("red room")
    page.chunks(4)
    measured = []
    for number in range(6):
        page.page.evaluate("document.getElementById('latency').textContent = ''")
        page.page.keyboard.press("wd"[number % 2])
        until(lambda: page.text("#latency"))
        measured.append(float(page.text("#latency").split()[0]))
        page.page.wait_for_timeout(370 * number)
    chunk = 1000 * max(1.0, float(page.text("#seconds")))
    assert max(measured) <= 2 * chunk + 100 and np.median(measured) <= 1.5 * chunk + 100, measured


def test_fork_record_and_save(page, loaded, tmp_path):
    page.start("red room", seed=5)
    page.page.click("#record")
    page.page.keyboard.down("w")
    page.chunks(4)
    page.page.keyboard.up("w")
    with page.page.expect_download() as recorded:
        page.page.click("#record")
    with av.open(str(recorded.value.path()), "r") as container:
        frames = list(container.decode(video=0))
    assert len(frames) >= 16 and frames[0].time == 0 and (frames[0].height, frames[0].width) == (256, 256)
    assert [round(16 * frame.time) for frame in frames] == list(range(len(frames)))
    page.page.click("#timeline li:nth-child(2) button")
    until(lambda: page.page.locator("#timeline button.off").count() >= 2)
    before = page.count
    page.page.keyboard.down("ArrowLeft")
    page.chunks(before + 3)
    page.page.keyboard.up("ArrowLeft")
    page.page.click("#pause")
    page.page.wait_for_selector("#pause[aria-pressed=true]")
    page.shot("fork")
    with page.page.expect_download() as saved:
        page.page.click("#save")
    zipfile.ZipFile(saved.value.path()).extractall(tmp_path)
    items = load_inputs(tmp_path / "input.json", generate.input_options(loaded.source))
    assert len(items) == 2 and {item.seed for item in items} == {5}
    np.testing.assert_array_equal(items[0].rows[:4], items[1].rows[:4])
    assert (items[1].rows[-1] == [0, -5.625, 0, 0, 1, 0]).all() or (items[1].rows[:, 1] < 0).any()
    # The last picture of the branch that was played, as made by `wp2 generate` and as the page shows it.
    (request,) = generate.prepare(loaded.source, loaded.tokenizer, items[1:])
    made = list(generate.generate(loaded, request, 5))
    last = video.enlarge(video.to_uint8(made[-1][-1:]), 4)[0].astype(np.float32)
    page.page.wait_for_timeout(1500)
    error = np.abs(page.look() - last).mean()
    assert error < 12, error


def test_an_uploaded_picture_and_bad_ones(page, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "mine.png").write_bytes(png(300, 200))
    page.page.set_input_files("#file", tmp_path / "text.png")
    page.page.click("#start")
    until(lambda: "PNG" in page.text("#message"))
    page.page.set_input_files("#file", tmp_path / "mine.png")
    page.page.select_option("#fit", "crop")
    page.page.fill("#scene", "a meadow 🙂")
    page.page.click("#start")
    page.chunks(1)
    until(lambda: "a meadow 🙂" in page.text("#told-caption"))
    page.shot("upload")
    # Pasted and dropped ones are taken too.
    page.page.evaluate(
        """() => { const data = new DataTransfer(); data.items.add(new File(['x'], 'pasted.png', {type: 'image/png'}));
        document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true})); }"""
    )
    until(lambda: "pasted.png" in page.text("#message"))


class Proxy:
    """Hands connections on to a server, until they are cut."""

    def __init__(self, address: str):
        self.target = address.split(":")
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listening.accept()
                far = socket.create_connection((self.target[0], int(self.target[1])))
                self.open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            end.close()

    def cut(self):
        for end in self.open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.open.clear()


def test_a_lost_connection_comes_back(open_page, live):
    proxy = Proxy(live.address)
    page = open_page("desktop", proxy.address)
    page.start("red room")
    page.page.keyboard.down("w")
    until(lambda: page.text("#told-keys") == "w")
    (world,) = live.engine._playing
    before = world.sink
    proxy.cut()
    until(lambda: world.sink is not None and world.sink is not before)
    # Keys were let go when the connection went.
    before = page.count
    page.chunks(before + 2)
    assert live.engine._playing == [world] and page.text("#told-keys") == "none"
    page.page.keyboard.up("w")
    # Reloaded, the page finds its world again.
    page.page.reload()
    page.chunks(1)
    assert live.engine._playing == [world]


def test_a_second_and_a_third_player(open_page):
    first, second = open_page("desktop"), open_page("phone")
    first.start("red room")
    second.start("orange room")
    second.page.keyboard.down("d")
    until(lambda: second.text("#told-keys") == "d")
    assert first.text("#told-keys") == "none"
    third = open_page("desktop")
    third.page.click("#start")
    until(lambda: "position 1" in third.text("#message"))
    third.shot("queue")
    second.page.click("#leave")
    third.chunks(2)
