"""From checked inputs to videos: a world at a time, chunk by chunk through the streaming step."""

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from wp2_jax import rng
from wp2_jax.controls import actions
from wp2_jax.controls.captions import index_captions, parse_caption
from wp2_jax.controls.errors import CaptionError, GeometryError
from wp2_jax.controls.geometry import PICTURES_PER_SECOND, picture_range
from wp2_jax.controls.images import load_image
from wp2_jax.controls.inputs import MAX_SEED, InputItem, InputOptions
from wp2_jax.controls.timeline import timeline
from wp2_jax.controls.tokenizer import Tokenizer
from wp2_jax.inference import stream, video
from wp2_jax.inference.load import Loaded, Source
from wp2_jax.inference.spec import CAPACITIES, StreamSpec, capacity_for
from wp2_jax.inference.world import World

# y of [image, zeros, ...] no longer changes past the encoder's reach in time (28 latent frames for Wan2.1); so many
# chunks of it serve a world of any length, and worlds of one capacity share their shapes and compiled programs.
CONDITION_CHUNKS = 16
_SHEET_CELLS = 60
# Captions whose keys are kept: an event comes and goes, and at full size one takes hundreds of megabytes.
_KEPT_CAPTIONS = 4


def programs(compiler_options: dict[str, int] | None = None) -> tuple[Callable, Callable, Callable]:
    """(start, emit, absorb) of `stream`, compiled once a spec and `first`.

    They overwrite the state that is given: who wants to keep one (to fork a world, say) copies it before,
    `jax.tree.map(jnp.copy, state)`.
    """
    step = functools.partial(
        jax.jit, static_argnums=0, static_argnames=("first",), donate_argnums=2, compiler_options=compiler_options
    )
    start = jax.jit(stream.start, static_argnums=(0, 3), compiler_options=compiler_options)
    return start, step(stream.emit), step(stream.absorb)


class Programs(NamedTuple):
    """All that a world is made with, each compiled by itself."""

    start: Callable[..., Any]
    emit: Callable[..., Any]
    absorb: Callable[..., Any]
    caption: Callable[..., Any]
    encode_text: Callable[..., Any]


PROGRAMS = Programs(
    *programs(), jax.jit(stream.caption, static_argnums=0), jax.jit(World.encode_text, static_argnums=0)
)
start, emit, absorb, caption, encode_text = PROGRAMS


def condition_frames(spec: StreamSpec) -> int:
    """Latent frames of y that a stream is started with."""
    return min(spec.capacity + 1, CONDITION_CHUNKS) * spec.chunk


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One world to make, checked whole by `prepare`.

    rows float32 [T, 6]; image float32 [H, W, 3] fitted to the world's size by `fit`, about [-1, 1]; captions and
    caption_names, a text and a prompt's name a chunk; caption_ids int32 [distinct, S] and caption_of_chunk, which of
    them; null_ids int32 [1, S] of the negative prompt. `seed` and `capacity` (chunks of memory) as the file says, or
    None.
    """

    name: str
    rows: np.ndarray
    image: np.ndarray
    fit: str
    captions: tuple[str, ...]
    caption_names: tuple[str, ...]
    caption_ids: np.ndarray
    caption_of_chunk: tuple[int, ...]
    null_ids: np.ndarray
    seed: int | None = None
    capacity: int | None = None

    @property
    def chunks(self) -> int:
        return len(self.captions)

    @property
    def timeline(self) -> str:
        """What was understood, chunk by chunk."""
        chunk = len(self.rows) // self.chunks
        return f"{self.name}: {timeline(self.rows, self.captions, chunk, self.caption_names, width=300)}"


def input_options(source: Source, yaw_degrees: float | None = None, pitch_degrees: float | None = None) -> InputOptions:
    """How input files are read for a world; rotations not given are those of its training data, else 3 degrees."""
    config = source.world.config
    trained = source.trained_rotation or (None, None)
    return InputOptions(
        chunk_length=config.chunk,
        sink_size=config.sink,
        temporal_size=config.temporal,
        yaw_rotation_speed_deg=trained[0] if yaw_degrees is None else yaw_degrees,
        pitch_rotation_speed_deg=trained[1] if pitch_degrees is None else pitch_degrees,
    )


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    items: Sequence[InputItem],
    *,
    fit: str = "stretch",
    negative_prompt: str = "",
) -> list[Request]:
    """Check every item of a file against the world, before anything is compiled.

    Rotations beyond what the world was trained on are clipped and captions that are too long cut, with a
    ControlWarning each. An empty negative prompt is replaced by the world's.

    Raises:
      GeometryError `world_too_long`: more latent frames than the model has positions for.
      ValueError: a capacity that there is not, or too small for the world.
      ControlError: those of `load_image` and `clip_rotation`.
    """
    world = source.world
    config = world.config
    longest = world.longest * config.chunk
    for item in items:
        if len(item.rows) > longest:
            raise GeometryError(
                "world_too_long",
                f"item {item.index} ({item.output_name}) lasts {len(item.rows)} latent frames; this model has "
                f"positions for at most {longest} ({longest // config.chunk} chunks): shorten action and prompt_event",
            )
        _capacity(len(item.rows) // config.chunk, item.capacity)
    null_ids = tokenizer.encode([negative_prompt.strip() or config.negative_prompt])
    requests = []
    for item in items:
        rows = actions.check_rows(item.rows)
        if source.trained_rotation is not None:
            yaw, pitch = source.trained_rotation
            rows = actions.clip_rotation(rows, max_pitch_deg=pitch, max_yaw_deg=yaw)
        texts, index = index_captions(item.chunk_captions, config.chunk)
        requests.append(
            Request(
                item.output_name,
                rows,
                load_image(item.image_path, config.height, config.width, item.fit or fit),
                item.fit or fit,
                item.chunk_captions,
                item.chunk_prompts,
                tokenizer.encode(texts),
                tuple(int(i) for i in index[:: config.chunk]),
                null_ids,
                item.seed,
                item.capacity,
            )
        )
    return requests


def _capacity(chunks: int, capacity: int | None) -> int:
    """Chunks of memory for a world of `chunks` chunks: those asked for, or the fewest. ValueError if they do not do."""
    least = capacity_for(chunks)
    if capacity is None:
        return least
    if capacity not in CAPACITIES or capacity < least:
        sizes = ", ".join(str(size) for size in CAPACITIES if size >= least)
        raise ValueError(f"capacity {capacity}: a world of {chunks} chunks takes one of {sizes}")
    return capacity


def idle_request(source: Source, chunks: int) -> Request:
    """A grey world of `chunks` chunks in which nothing happens: to compile with, or to measure.

    Raises ValueError for more chunks than the model has positions for, and below 1.
    """
    config = source.world.config
    if not 1 <= chunks <= source.world.longest:
        raise ValueError(f"chunks {chunks}: give 1 to {source.world.longest}")
    rows = np.zeros((chunks * config.chunk, 6), np.float32)
    image = np.zeros((config.height, config.width, 3), np.float32)
    ids = source.tokenizer().encode([config.negative_prompt])
    said = (config.negative_prompt,) * chunks
    return Request(f"{chunks} chunks", rows, image, "stretch", said, said, ids, (0,) * chunks, ids)


def stream_spec(source: Source, chunks: int, steps: int | None = None, *, capacity: int | None = None) -> StreamSpec:
    """The stream of a world of `chunks` chunks; `steps` replaces the sampler's, `capacity` the smallest that does.

    Raises:
      ValueError: a capacity that does not do, steps below 1, or given in few-step mode, which has its own.
    """
    changes = {}
    if steps is not None:
        if source.mode == "few_step":
            raise ValueError(f"steps={steps}: few_step mode has one pass a block of its schedule; leave steps out")
        if steps < 1:
            raise ValueError(f"steps={steps}: give at least 1")
        changes["steps"] = steps
    return source.world.stream(source.mode, _capacity(chunks, capacity), **changes)


def check_seed(seed: int) -> int:
    """The seed, 0 to 2^31 - 1. ValueError for another."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed {seed}: give a whole number from 0 to {MAX_SEED}")
    return seed


def generate(
    loaded: Loaded, request: Request, seed: int, *, steps: int | None = None, programs: Programs = PROGRAMS
) -> Iterator[np.ndarray]:
    """The pictures of each chunk in turn, float32 [F, H, W, 3] in [-1, 1]: 13 at first, then 16 (chunks of 4 latents).

    The same seed gives the same video whatever else was or will be generated. Pictures of a chunk are handed out while
    the devices take it into the memory; the last chunk is not taken in. Errors: `stream_spec`, `check_seed`, at once.
    """
    spec = stream_spec(loaded.source, request.chunks, steps, capacity=request.capacity)
    return _chunks(Player(loaded, spec, programs), request, check_seed(seed))


class Player:
    """Makes worlds of one spec chunk by chunk. Several can be made in turns: all that a world knows is its state.

    Captions are read once and kept, the latest `kept_captions` of them. Every method runs on the devices of `loaded`.
    """

    def __init__(
        self,
        loaded: Loaded,
        spec: StreamSpec,
        programs: Programs = PROGRAMS,
        kept_captions: int = _KEPT_CAPTIONS,
    ):
        self.loaded, self.spec, self._programs = loaded, spec, programs
        self._read = functools.lru_cache(kept_captions)(self._read_caption)

    def _read_caption(self, ids: bytes) -> stream.Caption:
        programs, loaded = self._programs, self.loaded
        context = programs.encode_text(
            loaded.world, loaded.text_params, jnp.asarray(np.frombuffer(ids, np.int32)[None, None])
        )
        return programs.caption(self.spec, loaded.params, context)

    def caption(self, ids: np.ndarray) -> stream.Caption:
        """A caption of token ids int32 [S], as `emit` takes it."""
        with self.loaded.on_mesh():
            return self._read(ids.tobytes())

    def start(self, image: np.ndarray, null_ids: np.ndarray, seed: int) -> stream.StreamState:
        """A new world from its picture [H, W, 3], about [-1, 1]; null_ids int32 [1, S]. ValueError: `check_seed`."""
        key = rng.base_key(check_seed(seed))
        null = self.caption(null_ids[0]) if self.spec.guided else None
        with self.loaded.on_mesh():
            frames = condition_frames(self.spec)
            return self._programs.start(self.spec, self.loaded.params, jnp.asarray(image[None]), frames, null, key)

    def emit(
        self, state: stream.StreamState, rows: np.ndarray, caption: stream.Caption, *, first: bool
    ) -> tuple[stream.StreamState, stream.Chunk]:
        """The next chunk under rows [C, 6]. The state that is given is used up (`programs`)."""
        with self.loaded.on_mesh():
            return self._programs.emit(
                self.spec, self.loaded.params, state, jnp.asarray(rows[None]), caption, first=first
            )

    def absorb(self, state: stream.StreamState, made: stream.Chunk, *, first: bool) -> stream.StreamState:
        """Takes a chunk into the memory. The state that is given is used up."""
        with self.loaded.on_mesh():
            return self._programs.absorb(self.spec, self.loaded.params, state, made, first=first)[0]


def _chunks(player: Player, request: Request, seed: int) -> Iterator[np.ndarray]:
    length = player.spec.chunk
    state = player.start(request.image, request.null_ids, seed)
    for index in range(request.chunks):
        rows = request.rows[index * length : (index + 1) * length]
        told = player.caption(request.caption_ids[request.caption_of_chunk[index]])
        state, made = player.emit(state, rows, told, first=index == 0)
        if index < request.chunks - 1:
            state = player.absorb(state, made, first=index == 0)
        yield np.asarray(made.video)[0]


@dataclasses.dataclass(frozen=True)
class Written:
    """The files of one world, and the median of its chunks' seconds (the first two compile and do not count)."""

    video: Path
    sheet: Path
    seconds_a_chunk: float


def write(
    loaded: Loaded,
    request: Request,
    seed: int,
    output: str | os.PathLike[str],
    *,
    steps: int | None = None,
    programs: Programs = PROGRAMS,
) -> Written:
    """Generate a world into `output`: NAME.mp4, and NAME.png with the start picture and the end of every chunk."""
    config = loaded.world.config
    output = Path(output)
    paths = output / f"{request.name}.mp4", output / f"{request.name}.png"
    chunks = generate(loaded, request, seed, steps=steps, programs=programs)
    cells = [video.Cell(video.to_uint8(request.image), ("start picture", f"fit: {request.fit}"))]
    every = -(-request.chunks // _SHEET_CELLS)
    seconds: list[float] = []
    with (
        video.mp4(paths[0], config.height, config.width) as file,
        tqdm(total=request.chunks, desc=request.name, unit="chunk", mininterval=1.0) as bar,
    ):
        before = time.monotonic()
        for index, pictures in enumerate(chunks):
            pixels = video.to_uint8(pictures)
            file.write(pixels)
            if (index + 1) % every == 0 or index == request.chunks - 1:
                cells.append(video.Cell(pixels[-1], _describe(request, index)))
            now = time.monotonic()
            seconds.append(now - before)
            before = now
            bar.set_postfix_str(f"{seconds[-1]:.2f} s a chunk", refresh=False)
            bar.update()
    title = f"{request.name}: mode {loaded.mode}, stage {loaded.source.stage} step {loaded.source.step}, seed {seed}"
    video.contact_sheet(paths[1], title, cells)
    return Written(*paths, float(np.median(seconds[2:] or seconds)))


def _describe(request: Request, index: int) -> tuple[str, ...]:
    """What stands under the last picture of a chunk: its number and time, its commands, its event or caption."""
    length = len(request.rows) // request.chunks
    end = picture_range(index * length, length)[1] / PICTURES_PER_SECOND
    held = [actions.describe_row(row) for row in request.rows[index * length : (index + 1) * length]]
    runs = ((tokens, len(list(group))) for tokens, group in itertools.groupby(held))
    commands = ", ".join(f"{tokens} x{count}" if count > 1 else tokens for tokens, count in runs)
    return f"chunk {index}, to {end:.2f} s", commands, _event(request.captions[index])


def _event(caption: str) -> str:
    """The event of a structured caption, "no event" where it has none; any other caption as it is, cut."""
    try:
        return parse_caption(caption).event or "no event"
    except CaptionError:
        text = " ".join(caption.split())
        return text if len(text) <= 80 else f"{text[:77]}..."
