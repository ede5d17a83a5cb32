"""Structured captions, prompt schedules, clip captions."""

import json
from pathlib import Path

import numpy as np
import pytest

from wp2_jax.controls import captions
from wp2_jax.controls.captions import Caption
from wp2_jax.controls.errors import CaptionError, ControlError

ENTRIES = json.loads((Path(__file__).parent / "golden" / "l_inputs.json").read_text())["prompt_event"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e['prompt_event']!r}-{e['latent_frames']}")
def test_published_schedule_answers(entry):
    args = (entry["prompt_event"], entry["prompts"], entry["latent_frames"], entry["chunk_length"])
    if "error" in entry:
        with pytest.raises(CaptionError) as error:
            captions.parse_prompt_event(*args)
        assert error.value.kind == entry["error"]
    else:
        assert captions.parse_prompt_event(*args) == entry["chunk_prompts"]


@pytest.mark.parametrize("schedule", ["prompt-4", "prompt-12"])
def test_schedule_of_another_length_gives_both(schedule):
    with pytest.raises(CaptionError) as error:
        captions.parse_prompt_event(schedule, ["prompt"], 8)
    assert error.value.kind == "total_mismatch"
    assert f"lasts {schedule[7:]} latent frames" in str(error.value) and "last 8" in str(error.value)


def test_schedule_errors_quote_the_piece_and_the_fix():
    with pytest.raises(CaptionError, match=r"'b-2' ends at latent frame 6, .* 4 or 8"):
        captions.parse_prompt_event("a-4,b-2,a-2", ["a", "b"], 8)
    with pytest.raises(CaptionError, match="the prompts are a, b"):
        captions.parse_prompt_event("c-4", ["b", "a"], 4)


@pytest.mark.parametrize(
    ("caption", "text"),
    [
        (
            Caption("A harbour at dusk", "A red fox", "It rains"),
            "The scene in the video is: A harbour at dusk. The character is: A red fox. The event is: It rains.",
        ),
        (Caption("A harbour at dusk."), "The scene in the video is: A harbour at dusk."),
        (Caption(" A harbour. Ships. ", "None", ""), "The scene in the video is: A harbour. Ships."),
        (Caption("A hall", event="A door opens!"), "The scene in the video is: A hall. The event is: A door opens!"),
        (Caption("Ein \U0001f98a", "x\ny"), "The scene in the video is: Ein \U0001f98a. The character is: x\ny."),
        (Caption(), ""),
    ],
)
def test_caption_text_and_back(caption, text):
    assert caption.text == text
    assert captions.parse_caption(text) == caption
    assert captions.parse_caption(f"  {text}\n") == caption


def test_caption_that_cannot_be_read():
    for text in ("A harbour.", "The event is: E. The scene in the video is: S."):
        with pytest.raises(CaptionError, match=r"is not of the form|holds a label"):
            captions.parse_caption(text)
    with pytest.raises(CaptionError, match="holds a label"):
        Caption("A scroll that says The event is: rain")


def test_event_alone_changes():
    caption = Caption("A hall", "A knight")
    assert caption.with_event("The torch goes out.").text.endswith("The event is: The torch goes out.")
    assert caption.with_event("x").with_event(None) == caption


def _clip(**changes):
    data = {
        "scene": "A hall of stone.",
        "character": "None",
        "UI": "None",
        "dynamic_interactions": [
            {"start_time": 0, "end_time": 5, "event": "None"},
            {"start_time": 5, "end_time": 10, "event": "Fog rises."},
            {"start_time": 10, "end_time": 11.5, "event": None},
        ],
    }
    return data | changes


def test_clip_caption_by_chunk():
    clip = captions.parse_clip_caption(_clip(), "fps")
    found = clip.at_chunks(latent_frames=44)
    # Chunk n > 0 shows seconds n - 3/16 to n + 13/16, so its middle is in the interval [5, 10) for n = 5 to 9.
    assert [c.event for c in found] == [None] * 5 + ["Fog rises"] * 5 + [None]
    assert found[5].text == "The scene in the video is: A hall of stone. The event is: Fog rises."
    assert captions.parse_clip_caption(clip.to_json(), "fps") == clip


def test_clip_caption_past_its_intervals_has_no_event():
    clip = captions.parse_clip_caption(_clip(dynamic_interactions=[], character="A knight"), "tps")
    assert {c.text for c in clip.at_chunks(8)} == {
        "The scene in the video is: A hall of stone. The character is: A knight."
    }
    with pytest.raises(ControlError, match="4 or 8"):
        clip.at_chunks(6)


@pytest.mark.parametrize(
    ("changes", "perspective", "match"),
    [
        ({}, "tps", "needs the character"),
        ({"character": "A knight"}, "fps", "first person"),
        ({"scene": " "}, "fps", "scene is needed"),
        ({"scene": 3}, "fps", "scene = 3"),
        ({"mood": "dark"}, "fps", "unknown field"),
        ({"dynamic_interactions": "rain"}, "fps", "list of objects"),
        ({"dynamic_interactions": [{"start_time": 0, "event": "x"}]}, "fps", r"dynamic_interactions\[0\]"),
        ({"dynamic_interactions": [{"start_time": 5, "end_time": 5, "event": "x"}]}, "fps", "start_time < end_time"),
        ({"dynamic_interactions": [{"start_time": 0, "end_time": float("nan"), "event": "x"}]}, "fps", "nan"),
        (
            {
                "dynamic_interactions": [
                    {"start_time": 0, "end_time": 6, "event": "x"},
                    {"start_time": 5, "end_time": 10, "event": "y"},
                ]
            },
            "fps",
            r"\[1\].*not before 6",
        ),
    ],
)
def test_bad_clip_captions(changes, perspective, match):
    with pytest.raises(CaptionError, match=match):
        captions.parse_clip_caption(_clip(**changes), perspective)


def test_captions_are_stripped_and_numbered():
    texts, index = captions.index_captions(["b ", " a", "b", ""], chunk_length=2)
    assert texts == ["b", "a", ""]
    assert index.dtype == np.int32
    assert index.tolist() == [0, 0, 1, 1, 0, 0, 2, 2]
