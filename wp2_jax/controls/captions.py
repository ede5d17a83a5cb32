"""Structured captions, prompt schedules and clip captions (spec sections 2 and 8, golden README 34-36)."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from wp2_jax.controls.actions import parse_duration, perspective_value
from wp2_jax.controls.errors import CaptionError
from wp2_jax.controls.geometry import (
    PICTURES_PER_SECOND,
    chunk_count,
    nearest_multiples,
    picture_range,
)

_LABELS = {
    "scene": "The scene in the video is:",
    "character": "The character is:",
    "event": "The event is:",
}
_CAPTION = re.compile(
    r"\s*".join(rf"(?:{re.escape(label)}\s*(?P<{name}>.*?))?" for name, label in _LABELS.items()), re.DOTALL
)
FORM = "The scene in the video is: S. The character is: C. The event is: E."
SCHEDULE_FORM = "a schedule is name-duration,name-duration,... with durations in whole latent frames from 1"


def clean(text: str | None) -> str | None:
    """A field without blanks at its ends and full stops at its end; None for nothing and the word None."""
    if text is None:
        return None
    text = text.strip()
    while text.endswith("."):
        text = text[:-1].rstrip()
    return None if text.lower() in ("", "none") else text


@dataclasses.dataclass(frozen=True)
class Caption:
    """Scene, character and event; each a text without its full stop, or None. Fields are cleaned on the way in.

    Error: CaptionError `label_in_field` when a field holds one of the labels (it could not be read back).
    """

    scene: str | None = None
    character: str | None = None
    event: str | None = None

    def __post_init__(self):
        for name in _LABELS:
            value = clean(getattr(self, name))
            if value is not None and any(label in value for label in _LABELS.values()):
                raise CaptionError("label_in_field", f"{name} {value!r} holds a label of the form {FORM!r}; reword it.")
            object.__setattr__(self, name, value)

    @property
    def text(self) -> str:
        """The caption as the model reads it: one sentence a field that is there."""
        sentences = []
        for name, label in _LABELS.items():
            value = getattr(self, name)
            if value is not None:
                sentences.append(f"{label} {value}{'' if value[-1] in '!?。！？' else '.'}")
        return " ".join(sentences)

    def with_event(self, event: str | None) -> "Caption":
        """The same scene and character with another event (None: nothing happens)."""
        return dataclasses.replace(self, event=event)


def parse_caption(text: str) -> Caption:
    """Caption text -> fields; `parse_caption(c.text) == c`. Error: CaptionError `not_a_caption`."""
    match = _CAPTION.fullmatch(text.strip())
    if match is None or (text.strip() and not any(match.groupdict().values())):
        raise CaptionError(
            "not_a_caption", f"caption {text!r} is not of the form {FORM!r} (each sentence may be missing)."
        )
    return Caption(**match.groupdict())


def parse_prompt_event(
    prompt_event: str, prompts: Collection[str], latent_frames: int, chunk_length: int = 4
) -> list[str]:
    """Prompt schedule `name-duration,...` -> the prompt's name for every chunk.

    `prompts` are the known names (case counts); durations are latent frames. A last chunk that the length
    does not fill counts. Errors: CaptionError of kind empty_string, no_name_or_no_dash, bad_duration,
    unknown_prompt, boundary_not_chunk_aligned (looked at while the running total is below the length),
    total_mismatch.
    """
    if not prompt_event.strip():
        raise CaptionError("empty_string", f"prompt_event {prompt_event!r} is empty; {SCHEDULE_FORM}.")
    frames: list[str] = []
    total = 0
    for piece in prompt_event.split(","):
        name, dash, tail = (part.strip() for part in piece.rpartition("-"))
        where = f"prompt_event piece {piece.strip()!r}"
        if not dash or not name:
            raise CaptionError("no_name_or_no_dash", f"{where} has no name or no '-'; {SCHEDULE_FORM}.")
        duration = parse_duration(tail)
        if duration is None:
            raise CaptionError(
                "bad_duration", f"{where}: duration {tail!r} is not a whole number from 1; {SCHEDULE_FORM}."
            )
        if name not in prompts:
            raise CaptionError(
                "unknown_prompt",
                f"{where}: there is no prompt {name!r}; the prompts are {', '.join(sorted(prompts)) or '(none)'}.",
            )
        total += duration
        if total < latent_frames and total % chunk_length:
            valid = " or ".join(map(str, nearest_multiples(total, chunk_length)))
            raise CaptionError(
                "boundary_not_chunk_aligned",
                f"{where} ends at latent frame {total}, inside a chunk of {chunk_length}; let it end at {valid}.",
            )
        frames += [name] * min(duration, latent_frames - len(frames))
    if total != latent_frames:
        raise CaptionError(
            "total_mismatch",
            f"prompt_event {prompt_event!r} lasts {total} latent frames, the actions last {latent_frames}; "
            f"make its durations add up to {latent_frames}, or the actions' to {total}.",
        )
    return frames[::chunk_length]


@dataclasses.dataclass(frozen=True)
class Interaction:
    """An event between two times of a clip, in seconds; None where nothing happens."""

    start_time: float
    end_time: float
    event: str | None


@dataclasses.dataclass(frozen=True)
class ClipCaption:
    """Caption of a recorded clip: lasting scene and character, words on the screen, events by time."""

    scene: str | None
    character: str | None
    ui: str | None
    dynamic_interactions: tuple[Interaction, ...]

    def at_chunks(
        self, latent_frames: int, chunk_length: int = 4, pictures_per_second: float = PICTURES_PER_SECOND
    ) -> list[Caption]:
        """One caption a chunk; a chunk has the event of the interval in which its middle lies.

        Words on the screen are no part of a caption. Error: GeometryError `length_not_multiple_of_chunk`.
        """
        captions = []
        for chunk in range(chunk_count(latent_frames, chunk_length)):
            middle = sum(picture_range(chunk * chunk_length, chunk_length)) / 2 / pictures_per_second
            events = [i.event for i in self.dynamic_interactions if i.start_time <= middle < i.end_time]
            captions.append(Caption(self.scene, self.character, events[0] if events else None))
        return captions

    def to_json(self) -> dict[str, Any]:
        """The caption as `parse_clip_caption` reads it; missing fields are the word None."""
        return {
            "scene": self.scene or "None",
            "character": self.character or "None",
            "UI": self.ui or "None",
            "dynamic_interactions": [
                {"start_time": i.start_time, "end_time": i.end_time, "event": i.event or "None"}
                for i in self.dynamic_interactions
            ],
        }


def parse_clip_caption(data: Any, perspective: str) -> ClipCaption:
    """JSON caption of a clip (spec section 8) -> ClipCaption, checked whole.

    `data`: an object with scene, character, UI (optional) and dynamic_interactions, a list of objects
    start_time, end_time (seconds) and event; the word "None", null and blanks mean nothing. In first person
    the character must be none, in third person it must be there. Errors: CaptionError `bad_clip_caption`,
    naming the field.
    """

    def error(field: str, value: object, what: str) -> CaptionError:
        return CaptionError("bad_clip_caption", f"clip caption, {field} = {value!r}: {what}.")

    def text(owner: Mapping[str, Any], key: str, field: str) -> str | None:
        value = owner.get(key)
        if value is not None and not isinstance(value, str):
            raise error(field, value, 'give a text, or "None"')
        return clean(value)

    first_person = perspective_value(perspective) == 1.0
    if not isinstance(data, Mapping):
        raise error("top level", data, "give an object with scene, character, UI, dynamic_interactions")
    unknown = sorted(set(data) - {"scene", "character", "UI", "dynamic_interactions"})
    if unknown:
        raise error(unknown[0], data[unknown[0]], "unknown field; allowed: scene, character, UI, dynamic_interactions")
    scene, character, ui = (text(data, key, key) for key in ("scene", "character", "UI"))
    if scene is None:
        raise error("scene", data.get("scene"), "a scene is needed")
    if first_person and character is not None:
        raise error("character", character, 'first person (fps) has no character; give "None"')
    if not first_person and character is None:
        raise error("character", data.get("character"), "third person (tps) needs the character")
    raw = data.get("dynamic_interactions")
    if raw is None:
        raw = []
    if isinstance(raw, str | Mapping) or not isinstance(raw, Sequence):
        raise error("dynamic_interactions", raw, "give a list of objects start_time, end_time, event")
    interactions = []
    end = 0.0
    for number, item in enumerate(raw):
        field = f"dynamic_interactions[{number}]"
        if not isinstance(item, Mapping) or set(item) != {"start_time", "end_time", "event"}:
            raise error(field, item, "give an object with exactly start_time, end_time and event")
        start, stop = (_seconds(item[key]) for key in ("start_time", "end_time"))
        if start is None or stop is None or not end <= start < stop:
            raise error(
                field,
                (item["start_time"], item["end_time"]),
                f"give seconds with start_time < end_time, not before {end:g} (the end of the interval before)",
            )
        interactions.append(Interaction(start, stop, text(item, "event", f"{field}.event")))
        end = stop
    return ClipCaption(scene, character, ui, tuple(interactions))


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def index_captions(chunk_texts: Sequence[str], chunk_length: int = 4) -> tuple[list[str], np.ndarray]:
    """Caption text of every chunk -> (distinct texts in order of first use, int32 index a latent frame [T]).

    Texts are stripped first, so a caption that changes to itself is one caption.
    """
    texts = [text.strip() for text in chunk_texts]
    distinct = list(dict.fromkeys(texts))
    index = np.array([distinct.index(text) for text in texts], np.int32)
    return distinct, np.repeat(index, chunk_length)
