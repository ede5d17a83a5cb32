"""Action strings, rows, keys, random commands, camera poses, timeline."""

import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wp2_jax.controls import actions, commands, poses
from wp2_jax.controls.errors import ActionError, CaptionError, ControlError, ControlWarning
from wp2_jax.controls.timeline import timeline
from wp2_jax.verify.controls import check_inputs

GOLDEN = Path(__file__).parent / "golden" / "l_inputs.json"
ENTRIES = json.loads(GOLDEN.read_text())


def _args(entry) -> dict[str, Any]:
    return {k: float(v) if k.endswith("_deg") and isinstance(v, str) else v for k, v in entry["args"].items()}


def _name(entry):
    return f"{entry['action']!r}-{entry['args']}"


@pytest.mark.parametrize("entry", ENTRIES["actions"] + ENTRIES["actions_options"], ids=_name)
def test_published_action_answers(entry):
    if "error" in entry:
        with pytest.raises(ActionError) as error:
            actions.parse_actions(entry["action"], **_args(entry))
        assert error.value.kind == entry["error"]
    else:
        rows = actions.parse_actions(entry["action"], **_args(entry))
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, np.array(entry["rows"], np.float32))
        assert len(rows) == entry["latent_frames"]


@pytest.mark.parametrize("entry", ENTRIES["load_action_sequence"], ids=_name)
def test_published_loading_answers(entry):
    if "error" in entry:
        with pytest.raises(ControlError) as error:
            actions.load_action_sequence(entry["action"], **entry["args"])
        assert error.value.kind == entry["error"]
    else:
        assert len(actions.load_action_sequence(entry["action"], **entry["args"])) == entry["latent_frames"]


@pytest.mark.parametrize(
    ("action", "kind", "quoted"),
    [
        ("w-3, right-0.5", "bad_duration", "right-0.5"),
        ("w-1e2", "bad_duration", "1e2"),
        ("w-inf", "bad_duration", "inf"),
        ("w-0", "bad_duration", "w-0"),
        ("w--3", "unknown_token", "w--3"),
        ("w\u22123", "no_action_or_no_dash", "w\u22123"),
        ("w-\uff13", "bad_duration", "\uff13"),
        ("w-" + "9" * 5000, "bad_duration", "w-9"),
        ("w-999999999999", "too_long", "999999999999"),
        ("s-4,fly-3", "unknown_token", "fly-3"),
        ("w", "no_action_or_no_dash", "'w'"),
        ("-", "no_action_or_no_dash", "'-'"),
    ],
)
def test_bad_commands_are_quoted_and_the_form_is_given(action, kind, quoted):
    with pytest.raises(ActionError) as error:
        actions.parse_actions(action)
    assert error.value.kind == kind
    assert quoted in str(error.value)
    if kind != "too_long":
        assert "tokens-duration" in str(error.value)


def test_forgiven_spellings():
    expected = actions.parse_actions("w-3,right-2")
    for text in ("W-3,RIGHT-2", " w - 3 , right - 2 ", "w-3,,right-2,", ",w-3,\n right-2"):
        np.testing.assert_array_equal(actions.parse_actions(text), expected)


def test_length_error_names_the_nearest_lengths():
    with pytest.raises(ControlError, match="4 or 8"):
        actions.load_action_sequence("w-4,s-2")
    with pytest.raises(ControlError, match="add up to 4"):
        actions.load_action_sequence("w-3")


def test_an_action_acts_on_its_own_frame():
    rows = actions.parse_actions("none-5,w-1,none-2")
    np.testing.assert_array_equal(np.flatnonzero(rows.any(axis=1)), [5])
    assert rows[5].tolist() == [0, 0, 1, 0, 0, 0]


def test_errors_survive_pickling():
    with pytest.raises(ActionError) as error:
        actions.parse_actions("w+s-4")
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.kind, str(copy)) == (error.value.kind, str(error.value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rotation_that_is_not_finite_is_an_error(value):
    rows = actions.parse_actions("w-4")
    rows[2, actions.YAW] = value
    with pytest.raises(ActionError, match="row 2") as error:
        actions.clip_rotation(rows, 3, 3)
    assert error.value.kind == "not_finite"


def test_rotation_out_of_range_is_clipped_with_a_warning():
    rows = actions.parse_actions("up+left-4", yaw_rotation_speed_deg=1e3, pitch_rotation_speed_deg=1)
    with pytest.warns(ControlWarning, match="row 1, -1000 degrees.*-6 to 6"):
        clipped = actions.clip_rotation(rows, max_pitch_deg=2, max_yaw_deg=6)
    np.testing.assert_array_equal(clipped[1:, :2], [[1, -6]] * 3)
    np.testing.assert_array_equal(clipped[:, 2:], rows[:, 2:])


def test_bad_rows_name_the_frame():
    rows = actions.parse_actions("w-4")
    rows[3, actions.FORWARD] = 0.5
    with pytest.raises(ActionError, match="row 3") as error:
        actions.check_rows(rows)
    assert error.value.kind == "bad_discrete"
    with pytest.raises(ActionError, match=r"\(4, 5\)"):
        actions.check_rows(rows[:, :5])


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES["actions"] + ENTRIES["actions_options"] if "rows" in e], ids=_name
)
def test_rendered_string_parses_to_the_same_rows(entry):
    rows = np.array(entry["rows"], np.float32)
    string = actions.render_actions(rows)
    np.testing.assert_array_equal(actions.parse_actions(**dataclasses.asdict(string)), rows)


def test_rendered_string_is_short_and_honest():
    assert actions.render_actions(actions.parse_actions("w-2,w-3,none-1,sd+up+right+space-2")).action == (
        "w-5,none-1,sd+up+right+space-2"
    )
    rows = actions.parse_actions("right-4")
    rows[2, actions.YAW] = 1.5
    with pytest.raises(ActionError, match="yaw has the speeds"):
        actions.render_actions(rows)
    with pytest.raises(ActionError, match="starts at rest"):
        actions.render_actions(rows[1:])


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        ([], [0, 0, 0, 0, 1, 0]),
        (["w", "d", "right"], [0, 3, 1, 1, 1, 0]),
        (["W", "s", "left", "up", "space"], [1, -3, 0, 0, 1, 1]),
        (["a", "down", "left", "right"], [-1, 0, 0, -1, 1, 0]),
    ],
)
def test_held_keys(keys, row):
    assert actions.row_from_keys(keys, "fps", yaw_speed_deg=3, pitch_speed_deg=1).tolist() == row


def test_unknown_key():
    with pytest.raises(ActionError, match="'q'"):
        actions.row_from_keys(["w", "q"])


def _walk(rows, step=0.5):
    """Heading, elevation (degrees), x, z after every latent frame; a step goes along half the turn."""
    state = np.zeros(4)
    states = [state]
    for pitch, yaw, forward, lateral, _, _ in rows[1:].astype(np.float64):
        middle = math.radians(state[0] + yaw / 2)
        dx = step * (forward * math.sin(middle) + lateral * math.cos(middle))
        dz = step * (forward * math.cos(middle) - lateral * math.sin(middle))
        state = state + np.array([yaw, pitch, dx, dz])
        states.append(state)
    return np.array(states)


@pytest.mark.parametrize("latent_frames", [1, 2, 3, 40, 121])
def test_out_and_back_retraces(latent_frames):
    rows = commands.random_rows(np.random.default_rng(3), latent_frames, "fps", out_and_back=True)
    assert rows.shape == (latent_frames, 6) and rows.dtype == np.float32
    assert not rows[0, [0, 1, 2, 3, 5]].any() and (rows[:, actions.PERSPECTIVE] == 1).all()
    assert not rows[:, actions.JUMP].any()
    states = _walk(rows)
    pairs = commands.mirrored_pairs(latent_frames)
    assert len(pairs) == (latent_frames - 1) // 2
    for there, back in pairs:
        np.testing.assert_allclose(states[back], states[there], atol=1e-9)
    if latent_frames > 20:
        assert np.abs(np.diff(states, axis=0)).sum() > 5


def test_no_inverse_of_a_jump():
    with pytest.raises(ActionError, match="row 1 jumps"):
        actions.inverse_rows(actions.parse_actions("space-3"))


def test_inverse_is_an_involution():
    rows = actions.parse_actions("w+right-3,sa+up-4,none-2", "fps")
    np.testing.assert_array_equal(actions.inverse_rows(actions.inverse_rows(rows)), rows)
    assert actions.inverse_rows(rows)[2].tolist() == [-3, 0, 1, 1, 1, 0]


def test_random_commands_last_one_to_five_seconds():
    config = commands.CommandConfig(jump_probability=0.3)
    drawn = commands.random_commands(np.random.default_rng(0), 4000, config)
    durations = [c.duration for c in drawn]
    assert sum(durations) == 4000
    assert min(durations[:-1]) == 4 and max(durations) == 20
    seen = {(c.forward, c.lateral) for c in drawn}
    assert seen == {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
    assert {c.yaw for c in drawn} == {c.pitch for c in drawn} == {-1, 0, 1}
    assert {c.jump for c in drawn} == {True, False}
    pitch = np.cumsum([c.pitch * c.duration * config.pitch_speed_deg for c in drawn])
    assert np.abs(pitch).max() <= config.max_pitch_deg


def test_random_rows_depend_on_the_generator_alone():
    first, again = (commands.random_rows(np.random.default_rng(7), 64) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (first != commands.random_rows(np.random.default_rng(8), 64)).any()
    assert not first[0].any()
    string = actions.render_actions(first)
    np.testing.assert_array_equal(actions.parse_actions(**dataclasses.asdict(string)), first)


def test_bad_command_config():
    with pytest.raises(ActionError, match="min_seconds <= max_seconds"):
        commands.CommandConfig(min_seconds=3, max_seconds=2)


def _camera_poses(rows, world):
    """Camera-to-world poses (x right, y down, z ahead), four pictures a latent frame, seen in another world frame."""
    states = _walk(rows)
    out = []
    for heading, elevation, x, z in states:
        h, e = math.radians(heading), math.radians(elevation)
        yaw = np.array([[math.cos(h), 0, math.sin(h)], [0, 1, 0], [-math.sin(h), 0, math.cos(h)]])
        pitch = np.array([[1, 0, 0], [0, math.cos(e), -math.sin(e)], [0, math.sin(e), math.cos(e)]])
        pose = np.eye(4)
        pose[:3, :3] = world @ yaw @ pitch
        pose[:3, 3] = world @ (x, 1.5, z)
        out.append(pose)
    # Only every fourth picture counts; the ones between are a repetition.
    return np.concatenate([out[:1], np.repeat(out[1:], 4, axis=0)])


def _some_rotation():
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    return q * np.sign(np.linalg.det(q))


def test_rows_from_poses_with_gravity():
    world = _some_rotation()
    rows = commands.random_rows(np.random.default_rng(5), 200, "fps", commands.CommandConfig(jump_probability=0))
    found = poses.rows_from_poses(_camera_poses(rows, world), "fps", still_below=0.1, up=world @ (0, -1, 0))
    np.testing.assert_allclose(found, rows, atol=1e-4)


def test_rows_from_poses_relative_to_the_camera_before():
    rows = actions.parse_actions("w+right-6,a-3,sd+left-5,none-4,wa-2", "tps", yaw_rotation_speed_deg=7.5)
    found = poses.rows_from_poses(_camera_poses(rows, _some_rotation()), "tps", still_below=0.1)
    np.testing.assert_allclose(found, rows, atol=1e-4)
    rows = actions.parse_actions("up+w-6,down-9")
    rows[:, actions.FORWARD] = 0
    found = poses.rows_from_poses(_camera_poses(rows, _some_rotation()), "tps", still_below=0.1)
    np.testing.assert_allclose(found, rows, atol=1e-4)


def test_rotation_of_a_latent_frame_is_that_between_pictures_4t():
    rows = actions.parse_actions("right-3")
    path = _camera_poses(rows, np.eye(3))
    # What pictures between 4(t-1) and 4t show does not count.
    path[[1, 2, 3, 5, 6, 7], :3, :3] = _some_rotation()
    np.testing.assert_allclose(poses.rows_from_poses(path, "tps", 0.1), rows, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda p: p * np.nan, "not_finite"),
        (lambda p: p @ np.diag([2, 2, 2, 1.0]), "bad_pose"),
        (lambda p: p @ np.diag([-1, 1, 1, 1.0]), "bad_pose"),
        (lambda p: p[:3], "bad_shape"),
    ],
)
def test_bad_poses(change, kind):
    path = np.stack([np.eye(4)] * 9)
    path = path[:, :3] if kind == "bad_shape" else np.stack([*path[:5], change(path[5]), *path[6:]])
    with pytest.raises(ActionError) as error:
        poses.rows_from_poses(path, "fps", 0.1)
    assert error.value.kind == kind
    if kind != "bad_shape":
        assert "picture 5" in str(error.value)


def test_constant_speed_is_the_median():
    rows = np.zeros((6, 6), np.float32)
    rows[:, actions.YAW] = [0, 2.9, -3.0, 3.2, 0.2, -0.1]
    found = poses.constant_speed(rows, still_below_deg=1)
    np.testing.assert_array_equal(found[:, actions.YAW], np.array([0, 3, -3, 3, 0, 0], np.float32))


def test_timeline_shows_every_chunk():
    rows = actions.parse_actions("w+right-6,none-2,a+space-4")
    text = timeline(rows, ["A street.", "A street.", "Rain."], chunk_names=["prompt1", "prompt1", "prompt2"])
    assert text.splitlines() == [
        "3 chunks, 12 latent frames, 2.81 s, third person",
        "  caption prompt1: A street.",
        "  chunk   0  latents 0-3  pictures 0-12  0.00-0.81 s  start at rest, w+right (yaw 3) x3",
        "  chunk   1  latents 4-7  pictures 13-28  0.81-1.81 s  w+right (yaw 3) x2, none x2",
        "  caption prompt2: Rain.",
        "  chunk   2  latents 8-11  pictures 29-44  1.81-2.81 s  a+space x4",
    ]


def test_timeline_lengths_must_agree():
    with pytest.raises(CaptionError, match=r"2 captions for 3 chunks.*give 3 captions, or actions of 8"):
        timeline(actions.parse_actions("w-12"), ["a", "b"])


def test_check_inputs_passes_on_golden_and_notices_changes(tmp_path):
    results = check_inputs(GOLDEN)
    assert {r.item for r in results} == {f"inputs/{name}" for name in ENTRIES if name != "what"}
    assert all(r.ok and r.max_rel == 0 for r in results)

    changed = json.loads(GOLDEN.read_text())
    next(e for e in changed["actions"] if e["action"] == "up-2,down-2")["rows"][1][0] = 3.00001
    next(e for e in changed["actions_options"] if e["args"] == {"perspective": "FPS"})["error"] = "two_yaw"
    changed["load_action_sequence"][1]["latent_frames"] = 9
    changed["prompt_event"] = []
    changed["more"] = [{}]
    changed["validate_geometry"][0] = {"height": 448}
    path = tmp_path / "l_inputs.json"
    path.write_text(json.dumps(changed))
    results = {r.item: r for r in check_inputs(path)}
    assert not any(r.ok for r in results.values()) and len(results) == 6
    assert 1e-6 < results["inputs/actions"].max_rel < 1e-5
    assert "expected two_yaw" in results["inputs/actions_options"].note
    assert not check_inputs(tmp_path / "absent.json")[0].ok
