"""The JSON input file, picture sizes, lengths, memory options."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from wp2_jax.controls import geometry, inputs
from wp2_jax.controls.errors import GeometryError
from wp2_jax.controls.inputs import InputFileError, InputOptions, load_inputs

ENTRIES = json.loads((Path(__file__).parent / "golden" / "l_inputs.json").read_text())["validate_geometry"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e['height']}x{e['width']}")
def test_published_size_answers(entry):
    if "error" in entry:
        with pytest.raises(GeometryError) as error:
            geometry.check_size(entry["height"], entry["width"])
        assert error.value.kind == entry["error"]
    else:
        geometry.check_size(entry["height"], entry["width"])


def test_size_error_derives_the_multiple_and_offers_sizes():
    with pytest.raises(GeometryError) as error:
        geometry.check_size(833, 481)
    for part in ("64 = 8 (autoencoder stride) x 2 (patch) x 4 (memory scale)", "832x448", "896x512"):
        assert part in str(error.value)
    with pytest.raises(GeometryError, match="Nearest: 64x128"):
        geometry.check_size(3, 128)
    with pytest.raises(GeometryError) as error:
        geometry.check_size(33, 64, geometry.Grid(vae_stride=8, patch=1, memory_scale=4))
    assert error.value.kind == "size_not_multiple_of_32"
    with pytest.raises(GeometryError, match="not a whole number"):
        geometry.check_size(448.0, 832)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pictures", "latents", "trimmed"), [(1, 1, 0), (15, 4, 2), (16, 4, 3), (17, 5, 0), (80, 20, 3), (81, 21, 0)]
)
def test_lengths(pictures, latents, trimmed):
    fit = geometry.fit_pictures(pictures)
    assert (fit.latent_frames, fit.trimmed) == (latents, trimmed)
    assert fit.pictures == pictures - trimmed == geometry.picture_count(latents) == 4 * (latents - 1) + 1
    assert (f"the last {trimmed} are left out" in fit.note) == bool(trimmed)


def test_no_pictures():
    with pytest.raises(GeometryError, match="at least 1 picture"):
        geometry.fit_pictures(0)
    with pytest.raises(GeometryError):
        geometry.picture_count(0)


def test_pictures_of_chunks():
    assert [geometry.chunk_pictures(i) for i in range(3)] == [13, 16, 16]
    assert [geometry.chunk_pictures(i, 8) for i in range(2)] == [29, 32]
    ends = [geometry.picture_range(4 * i, 4) for i in range(4)]
    assert ends == [(0, 13), (13, 29), (29, 45), (45, 61)]
    assert geometry.chunk_count(80, 4) == 20


def _item(**changes):
    item = {
        "image_path": "pictures/a.png",
        "perspective": "fps",
        "action": "w-4,right-4",
        "prompt_event": "prompt1-4,prompt2-4",
        "prompt1": "  A street. ",
        "prompt2": "",
    }
    return {key: value for key, value in (item | changes).items() if value is not None}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"not looked into here")

    def write(data):
        path = tmp_path / "input.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return write


def test_a_good_file(write):
    path = write([_item(), _item(output_name=" walk.mp4 ", prompt_event="prompt1-8")])
    first, second = load_inputs(path, InputOptions(yaw_rotation_speed_deg=2, pitch_rotation_speed_deg=1))
    assert first.image_path == path.parent / "pictures" / "a.png"
    assert first.rows.shape == (8, 6) and first.rows[4].tolist() == [0, 2, 0, 0, 1, 0]
    assert first.chunk_prompts == ("prompt1", "prompt2")
    assert first.chunk_captions == ("A street.", "")
    assert (first.output_name, second.output_name) == ("000_a", "walk")
    assert second.chunk_prompts == ("prompt1", "prompt1")


def test_a_file_with_byte_order_mark(write):
    path = write([_item()])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(load_inputs(path)) == 1


def test_all_problems_are_reported_together(write):
    path = write(
        [
            _item(action="w-4,fly-4", perspective="FPS", steps=3),
            _item(),
            _item(image_path="b.png", action="w-6", prompt1=5),
            _item(prompt_event="prompt1-4", output_name="x/y"),
            _item(action=None, prompt1=None, prompt2=None),
            "walk",
        ]
    )
    with pytest.raises(InputFileError) as error:
        load_inputs(path)
    found = [(p.index, p.field, p.kind) for p in error.value.problems]
    assert found == [
        (0, "steps", "unknown_field"),
        (0, "perspective", "bad_perspective"),
        (0, "action", "unknown_token"),
        (2, "prompt1", "not_a_text"),
        (2, "image_path", "image_not_found"),
        (2, "action", "length_not_multiple_of_chunk"),
        (3, "prompt_event", "total_mismatch"),
        (3, "output_name", "bad_output_name"),
        (4, "action", "missing_field"),
        (4, "prompt", "missing_field"),
        (5, "", "not_an_object"),
    ]
    text = str(error.value)
    assert str(path) in text and "11 problem(s)" in text and "item 2, image_path: 'b.png'" in text
    copy = pickle.loads(pickle.dumps(error.value))
    assert copy.problems == error.value.problems and str(copy) == text


def test_prompts_longer_than_the_actions(write):
    with pytest.raises(InputFileError, match="lasts 16 latent frames, the actions last 8"):
        load_inputs(write([_item(prompt_event="prompt1-8,prompt2-8")]))


def test_names_of_outputs_are_unique(write):
    with pytest.raises(InputFileError, match="also the name of item 0"):
        load_inputs(write([_item(output_name="Walk"), _item(output_name="walk")]))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "not_json"),
        ("{", "not_json"),
        ("[" * 100_000, "not_json"),
        ("{}", "not_a_list"),
        ("[]", "not_a_list"),
        ('[{"action": "w-4", "action": "s-4"}]', "duplicate_field"),
    ],
)
def test_files_that_are_no_input(write, text, kind):
    with pytest.raises(InputFileError) as error:
        load_inputs(write(text))
    assert error.value.problems[0].kind == kind


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputFileError, match=r"nothing\.json"):
        load_inputs(tmp_path / "nothing.json")


def test_memory_options_of_the_model_are_checked(write):
    with pytest.raises(GeometryError) as error:
        load_inputs(write([_item()]), InputOptions(chunk_length=3))
    assert error.value.kind == "chunk_length_odd"
    with pytest.raises(InputFileError) as error:
        load_inputs(write([_item(action="w-4", prompt_event="prompt1-4")]), InputOptions(sink_size=4))
    assert error.value.problems[0].kind == "sink_ge_length"


def test_unknown_option_is_an_error():
    with pytest.raises(TypeError):
        inputs.InputOptions(chunks=4)  # type: ignore[call-arg]


ROWS = [[0, 0, 0, 0, 1, 0], [0.1, -5.625, 1, 0, 1, 0], [0, 0, 1, -1, 1, 1], [0, 0, 0, 0, 1, 0]]


def played(tmp_path, **changes) -> Path:
    """An input file as a played world leaves it; a change to None takes the field away."""
    (tmp_path / "a.png").write_bytes(b"")
    item = {"image_path": "a.png", "perspective": "fps", "rows": ROWS, "prompt_event": "prompt-4", "prompt": "x"}
    item |= {"seed": 0, "capacity": 64} | changes
    path = tmp_path / "played.json"
    path.write_text(json.dumps([{key: value for key, value in item.items() if value is not None}]))
    return path


def test_rows_of_a_played_world(tmp_path):
    (item,) = load_inputs(played(tmp_path))
    assert item.rows.dtype == np.float32 and item.action == "" and (item.seed, item.capacity) == (0, 64)
    np.testing.assert_array_equal(item.rows, np.asarray(ROWS, np.float32))
    # Every float32 survives the file.
    odd = np.nextafter(np.float32(2.8125), np.float32(3))
    rows = [ROWS[0], [float(odd), *ROWS[1][1:]], *ROWS[2:]]
    assert load_inputs(played(tmp_path, rows=rows))[0].rows[1, 0] == odd
    (item,) = load_inputs(played(tmp_path, rows=None, action="w-4", seed=None, capacity=None))
    assert (item.seed, item.capacity, item.fit) == (None, None, None)
    # An action string that says the same may stand beside the rows.
    same = [[0, 0, 0, 0, 1, 0], *[[0, 3, 1, 0, 1, 0]] * 3]
    (item,) = load_inputs(played(tmp_path, rows=same, action="w+right-4", fit="crop"))
    assert item.action == "w+right-4" and item.fit == "crop"
    np.testing.assert_array_equal(item.rows, np.asarray(same, np.float32))


@pytest.mark.parametrize(
    ("changes", "field", "kind"),
    [
        ({"action": "w-4"}, "rows", "rows_and_action"),
        ({"rows": None}, "action", "missing_field"),
        ({"rows": []}, "rows", "bad_shape"),
        ({"rows": "w-4"}, "rows", "bad_rows"),
        ({"rows": {"a": 1}}, "rows", "bad_rows"),
        ({"rows": [[0] * 5] * 4}, "rows", "bad_rows"),
        ({"rows": [[True] * 6] * 4}, "rows", "bad_rows"),
        ({"rows": [[1e39] * 6] * 4}, "rows", "bad_rows"),
        ({"rows": [ROWS[0], [float("nan"), 0, 0, 0, 1, 0], *ROWS[2:]]}, "rows", "bad_rows"),
        ({"rows": [ROWS[0], [0, 0, 0.5, 0, 1, 0], *ROWS[2:]]}, "rows", "bad_discrete"),
        ({"rows": ROWS[:3]}, "rows", "length_not_multiple_of_chunk"),
        ({"rows": ROWS[1:] + ROWS[:1]}, "rows", "not_at_rest"),
        ({"perspective": "tps"}, "rows", "other_perspective"),
        ({"seed": -1}, "seed", "bad_seed"),
        ({"seed": 2**31}, "seed", "bad_seed"),
        ({"seed": True}, "seed", "bad_seed"),
        ({"capacity": "64"}, "capacity", "bad_capacity"),
        ({"fit": "squeeze"}, "fit", "bad_fit"),
    ],
)
def test_wrong_numbers_of_a_played_world(tmp_path, changes, field, kind):
    with pytest.raises(InputFileError) as caught:
        load_inputs(played(tmp_path, **changes))
    assert [(p.field, p.kind) for p in caught.value.problems][:1] == [(field, kind)]
