"""The weights that ship: from one start and seed, only what is commanded changes."""

import json
from pathlib import Path

import numpy as np
import pytest
from motion import shift

from wp2_jax.controls.inputs import load_inputs
from wp2_jax.inference import generate, load

STARTS = {
    "fps": ("red_room.png", "a room with barred red walls, a green floor and a grey ceiling."),
    "tps": ("orange_room.png", "a room with barred orange walls, a chequered green floor and a white ceiling."),
}
SOLDIER = " The character is: a soldier in red armour, seen from behind."
EXAMPLE = Path(__file__).parents[1] / "launch" / "example"
EVENTS = (
    "thick white fog fills the rooms",
    "thick green fog fills the rooms",
    "the lights go out",
    "the light turns red",
    "the light turns blue",
)


def worlds(mode, folder, perspective, latents, changes):
    """A world an entry of `changes` (action, event after one chunk or None), all else equal: [F, H, W, 3] each."""
    loaded = load.load(load.shipped(), mode)
    picture, room = STARTS[perspective]
    caption = f"The scene in the video is: an indoor maze, {room}{SOLDIER if perspective == 'tps' else ''}"
    items = [
        {
            "image_path": str(EXAMPLE / picture),
            "perspective": perspective,
            "action": f"{action}-{latents}",
            "prompt_event": f"prompt-4,prompt2-{latents - 4}" if latents > 4 else "prompt-4",
            "prompt": caption,
            "prompt2": f"{caption} The event is: {event}." if event else caption,
            "output_name": str(index),
        }
        for index, (action, event) in enumerate(changes)
    ]
    path = folder / "input.json"
    path.write_text(json.dumps(items))
    requests = generate.prepare(
        loaded.source, loaded.tokenizer, load_inputs(path, generate.input_options(loaded.source))
    )
    return [np.concatenate(list(generate.generate(loaded, request, 0))) for request in requests]


@pytest.mark.parametrize(("mode", "latents"), [("ar", 12), ("few_step", 12)])
@pytest.mark.parametrize("perspective", STARTS)
def test_only_the_action_turns_the_view_the_other_way(tmp_path, perspective, mode, latents):
    left, right = worlds(mode, tmp_path, perspective, latents, [("left", None), ("right", None)])
    # Turning left moves what is seen to the right.
    moved = [np.mean([shift(video[i], video[i + 4]) for i in range(1, len(video) - 4, 2)]) for video in (left, right)]
    assert moved[0] >= 0.5 and moved[1] <= -0.5, moved


@pytest.mark.xfail(strict=True, reason="the weights have not learned events: see their card")
@pytest.mark.parametrize("perspective", STARTS)
def test_only_the_event_changes_what_it_names(tmp_path, perspective):
    changes = [("none", None)] + [("none", event) for event in EVENTS]
    plain, white, green_fog, dark, red, blue = worlds("few_step", tmp_path, perspective, 12, changes)
    before = slice(0, 13)
    for video in (white, green_fog, dark, red, blue):
        np.testing.assert_array_equal(video[before], plain[before], err_msg="nothing was asked for yet")
    end = {
        name: video[-16:].mean((0, 1, 2))
        for name, video in dict(plain=plain, white=white, green=green_fog, dark=dark, red=red, blue=blue).items()
    }
    # Pictures in [-1, 1]. Fog hides what is behind it, and has its colour; light takes away the other colours.
    contrast = {name: video[-16:].std((1, 2)).mean() for name, video in dict(plain=plain, white=white).items()}
    assert contrast["white"] < 0.8 * contrast["plain"]
    assert (end["green"] - end["plain"])[1] > (end["green"] - end["plain"])[[0, 2]].max() + 0.05
    assert (end["dark"] < end["plain"] - 0.1).all()
    assert (end["red"] - end["plain"])[0] > (end["red"] - end["plain"])[1:].max() + 0.1
    assert (end["blue"] - end["plain"])[2] > (end["blue"] - end["plain"])[:2].max() + 0.1
