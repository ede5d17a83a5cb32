"""What all connections share: the engine, the kind of world, the starting points; and how messages become worlds."""

import dataclasses
import secrets
from typing import Any

from wp2_jax.controls import actions
from wp2_jax.controls.captions import Caption
from wp2_jax.controls.errors import CaptionError
from wp2_jax.controls.geometry import PICTURES_PER_SECOND
from wp2_jax.controls.inputs import InputOptions
from wp2_jax.controls.tokenizer import Tokenizer
from wp2_jax.inference import generate, video
from wp2_jax.inference.load import Source
from wp2_jax.serve import fragments, messages, pictures, session
from wp2_jax.serve.engine import Engine
from wp2_jax.serve.protocol import ProtocolError
from wp2_jax.serve.world import Controls, Start, World, told, within


@dataclasses.dataclass(frozen=True, eq=False)
class Game:
    """`weights` and `expect` are what the page says of the weights; `options` how input files are read for them;
    `rotation` (yaw, pitch) the largest trained speeds, None where not known; `chunks` the most of a world."""

    engine: Engine
    weights: str
    expect: str
    height: int
    width: int
    chunk: int
    chunks: int
    capacity: int
    options: InputOptions
    rotation: tuple[float, float] | None
    gallery: tuple[pictures.Place, ...] = ()
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, engine: Engine, source: Source, capacity: int, gallery: tuple[pictures.Place, ...]) -> "Game":
        """Of a checkpoint, with worlds laid out for `capacity` chunks."""
        config = source.world.config
        tiny = config.height * config.width < 256 * 256
        return cls(
            engine,
            f"{source.workdir.name}, stage {source.stage}, step {source.step}, mode {source.mode}, "
            f"{config.width} x {config.height} pixels",
            "Tiny weights, trained for hours on two processor cores on rooms of a simple maze: expect a blurred "
            "picture that turns and walks as told and slowly loses its way. Fog and darkness come when told; coloured "
            "light only dims."
            if tiny
            else "",
            config.height,
            config.width,
            config.chunk,
            min(capacity, source.world.longest),
            capacity,
            generate.input_options(source),
            source.trained_rotation,
            gallery,
            source.tokenizer(),
        )

    @property
    def speeds(self) -> tuple[float, float]:
        """(yaw, pitch) degrees a latent frame that worlds start with."""
        o = self.options
        return actions.rotation_speeds(o.rotation_speed_deg, o.yaw_rotation_speed_deg, o.pitch_rotation_speed_deg)

    @property
    def scale(self) -> int:
        return video.view_scale(self.height, self.width)

    def hello(self) -> messages.Hello:
        yaw, pitch = self.speeds
        return messages.Hello(
            version=messages.VERSION,
            weights=self.weights,
            expect=self.expect,
            mime=fragments.mime(self.height, self.width, self.scale),
            height=self.height,
            width=self.width,
            scale=self.scale,
            rate=PICTURES_PER_SECOND,
            chunk=self.chunk,
            chunks=self.chunks,
            yaw=yaw,
            pitch=pitch,
            trained=self.rotation is not None,
            max_bytes=pictures.MAX_BYTES,
            max_pixels=pictures.MAX_PIXELS,
            gallery=tuple(_shown(place) for place in self.gallery),
        )

    def place(self, name: str) -> pictures.Place:
        """A starting point by its name. ProtocolError: there is none."""
        for place in self.gallery:
            if place.name == name:
                return place
        names = ", ".join(repr(place.name) for place in self.gallery)
        what = f'picture is {name!r}: give "upload" after a binary message with a picture' + (
            f", or one of {names}" if names else ""
        )
        raise ProtocolError("picture", what)

    def begin(self, message: messages.Start, upload: bytes | None) -> tuple[Start, Controls, list[str]]:
        """What a start message asks for, and notices. Decodes a picture, which takes a while.

        ProtocolError and ControlError: what it asks for cannot be had.
        """
        place = None if message.picture == messages.UPLOAD else self.place(message.picture)
        data = upload if place is None else place.picture
        if data is None:
            raise ProtocolError(
                "picture", "picture is 'upload', but no picture came: send it before, as a binary message"
            )
        caption = caption_of(message, message.perspective)
        if caption is None and place is not None:
            caption = place.caption
            if isinstance(caption, Caption) and message.perspective == "fps":
                caption = dataclasses.replace(caption, character=None)
        yaw, pitch = self.speeds
        yaw, pitch, said = self.within(message.yaw or yaw, message.pitch or pitch)
        controls = Controls(caption or Caption(), message.perspective, yaw, pitch)
        image = pictures.fitted(data, self.height, self.width, message.fit)
        seed = secrets.randbelow(messages.MAX_SEED + 1) if message.seed is None else message.seed
        start = Start(data, image, message.fit, message.perspective, seed)
        return start, controls, [text for text in (said, self.cut(controls.text())) if text]

    def within(self, yaw: float, pitch: float) -> tuple[float, float, str]:
        """See `world.within`."""
        return within(self.rotation, yaw, pitch)

    def cut(self, caption: str) -> str:
        """What of a caption the model will not read, "" for nothing."""
        return "" if self.tokenizer is None else self.tokenizer.notice(caption)

    def items(self, world: World) -> list[dict[str, Any]]:
        """See `session.items`."""
        return session.items(world.start, world.history, self.capacity, self.options)


def caption_of(message: messages.Start | messages.Caption, perspective: str) -> Caption | str | None:
    """The caption of a message, None where it has none. ProtocolError: two kinds of captions, or a character in first
    person; CaptionError of the field."""
    fields = {name: getattr(message, name) for name in ("scene", "character", "event")}
    given = [name for name, value in fields.items() if value is not None]
    if message.caption is not None:
        if given:
            raise ProtocolError("caption", f"caption and {given[0]} are both given: keep one of the two kinds")
        return pictures.structured(message.caption)
    if not given:
        return None
    try:
        caption = Caption(**fields)
    except CaptionError as error:
        raise ProtocolError(next(name for name in given if str(error).startswith(name)), str(error)) from error
    if caption.character is not None and perspective == "fps":
        raise ProtocolError(
            "character",
            f"character is {caption.character!r}: first person (fps) has none; leave it out, or start in tps",
        )
    return caption


def _shown(place: pictures.Place) -> messages.Place:
    caption = place.caption
    return messages.Place(
        name=place.name,
        perspective=place.perspective,
        caption=told(caption, None),
        scene=caption.scene if isinstance(caption, Caption) else None,
        character=caption.character if isinstance(caption, Caption) else None,
        events=place.events,
        thumbnail=place.thumbnail(),
    )
