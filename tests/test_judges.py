"""The networks that measure: their samples, labels under augmentation, and an evaluation end to end."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_workdir
from tiny_world import quick_compilation

from data_pipelines import events, judged, record, tfds_builder
from data_pipelines.doom import CameraConfig
from data_pipelines.script import ScriptConfig
from wp2_jax import cli
from wp2_jax.evaluation import events as event_measure
from wp2_jax.evaluation import navigation
from wp2_jax.models import judges as networks
from wp2_jax.objectives import judges as objectives
from wp2_jax.stages import cases, evaluate, evaluation_report, evaluation_results, judges

CONFIG = record.RecordConfig(
    seed=3,
    clips=18,
    maps=3,
    test_maps=1,
    camera=CameraConfig(engine_width=160, engine_height=120),
    script=ScriptConfig(latents=24, navigation=1, loop_closure=1, event=1),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return record.record(CONFIG, tmp_path_factory.mktemp("data"), workers=2)


@pytest.fixture(scope="module")
def records(data):
    return tfds_builder.Records(data, "train")


def test_motion_samples_are_what_was_recorded(records):
    source = judged.Motion(records, chunk=4, windows=6)
    assert len(source) == len(records)
    for index in range(3):
        clip, sample = records[index], source.sample(index, np.random.default_rng(index))
        assert sample["pictures"].shape == (6, judged.motion_pictures(4), 64, 64, 3)
        firsts = np.random.default_rng(index).integers(1, 21, 6)
        for window, first in enumerate(firsts):
            told = navigation.commanded(clip["actions"][first : first + 4])
            np.testing.assert_array_equal(sample["pictures"][window, -1], clip["pictures"][4 * (first + 3)])
            np.testing.assert_array_equal(sample["pictures"][window, 0], clip["pictures"][4 * (first - 1)])
            assert sample["movement"][window] == (judged.CHANGING if told.movement is None else told.movement)
            np.testing.assert_allclose(sample["rotation"][window], clip["actions"][first : first + 4, :2].sum(0))


def test_change_samples_begin_where_the_pictures_change(records):
    source = judged.Changes(records, event_measure.OFFSETS)
    seen = set()
    for index in range(len(records)):
        clip, begins = records[index], judged.event_begins(records[index])
        assert bool(begins) == (clip["kind"] == "event")
        sample = source.sample(index, np.random.default_rng(0))
        assert sample["pictures"].shape[:2] == (2, len(event_measure.OFFSETS))
        if begins:
            assert sample["kind"][0] in begins.values()
            seen |= set(begins.values())
        else:
            assert list(sample["kind"]) == [0, 0]
        for begin, kind in begins.items():
            if events.KINDS[kind] in ("white fog", "dark", "red light", "blue light", "green light"):
                pictures = clip["pictures"].astype(float)
                jump = np.abs(pictures[begin + 3] - pictures[begin - 1]).mean()
                assert jump > 3 * np.abs(pictures[begin - 1] - pictures[max(0, begin - 3)]).mean(), (clip["id"], begin)
    assert len(seen) > 2


def test_matching_finds_where_a_picture_went():
    before = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32, 32, 3)), jnp.float32)
    for down, across in ((0, 0), (1, -3), (-2, 4)):
        found = networks.distances(before, jnp.roll(before, (down, across), (2, 3)))
        best = np.asarray(networks.DISPLACEMENTS)[np.asarray(found[:, :, 6:-6, 6:-6].argmin(-1))]
        assert (best == (down, across)).all()
    np.testing.assert_allclose(networks.distances(before, before + 0.5)[0, 0, 9:20, 9:20, 22], 0.25, rtol=1e-4)


class Reader:
    """Reads forward and pitch from what rises in time, lateral and yaw from what rises in time to the right."""

    def apply(self, variables, pictures, method):
        time = jnp.linspace(-1, 1, pictures.shape[1])[None, :, None, None]
        across = jnp.linspace(-1, 1, pictures.shape[3])[None, None, None]
        forward = 4 * (pictures[..., 0] * time).mean((1, 2, 3))
        lateral = 8 * (pictures[..., 1] * time * across).mean((1, 2, 3))
        index = jnp.round(forward).astype(int) * 3 + jnp.round(lateral).astype(int) + 4
        return jnp.concatenate([forward[:, None], lateral[:, None], 50 * jax.nn.one_hot(index, 9)], 1)


def test_labels_turn_with_mirrored_and_reversed_pictures():
    time, across = np.linspace(-1, 1, 9)[:, None, None], np.linspace(-1, 1, 64)
    pictures, rotation, movement = [], [], []
    for forward, lateral in navigation.CLASSES:
        shown = np.full((9, 64, 64, 3), 127.5)
        shown[..., 0] += 80 * forward * time
        shown[..., 1] += 80 * lateral * time * across
        pictures.append(shown)
        rotation.append((11.25 * forward, 22.5 * lateral))
        movement.append(3 * (forward + 1) + lateral + 1)
    repeat = 4  # draws of the augmentation
    batch = {
        "pictures": jnp.asarray(np.stack([pictures] * repeat), jnp.uint8),
        "rotation": jnp.asarray([rotation] * repeat, jnp.float32),
        "movement": jnp.asarray([movement] * repeat, jnp.int32),
    }
    settings: Any = dict(model=Reader(), speed=(11.25, 22.5))
    for train in (False, True):
        loss, metrics = objectives.motion_loss({"judge": {}}, batch, {}, jax.random.key(0), train=train, **settings)
        assert metrics["movement"] == 1.0 and metrics["turn"] == 1.0, train
        assert metrics["rotation"] < 0.35 and loss < 0.3
    wrong = batch | {"movement": batch["movement"][:, ::-1]}
    assert (
        objectives.motion_loss({"judge": {}}, wrong, {}, jax.random.key(0), train=True, **settings)[1]["movement"] < 0.2
    )
    unknown = batch | {"movement": jnp.full_like(batch["movement"], judged.CHANGING)}
    loss, _ = objectives.motion_loss({"judge": {}}, unknown, {}, jax.random.key(0), train=False, **settings)
    assert loss < 0.3, "a movement that changes is not asked for"


def test_a_repeated_walk_shows_what_was_recorded_again_and_again(data):
    clip = cases.recorded(tfds_builder.Records(data, "test"), "loop_closure", 1, 4)[0]
    long = cases.repeated(clip, 68, 4)
    assert long.recorded is not None and clip.recorded is not None
    assert long.rows.shape == (68, 6) and len(long.captions) == 17 and len(long.recorded) == 4 * 67 + 1
    # A round is 22 latent frames: 11 out, 11 back.
    np.testing.assert_array_equal(long.rows[23:45], long.rows[1:23])
    np.testing.assert_array_equal(long.recorded[4 * 22], long.recorded[0])
    np.testing.assert_array_equal(long.recorded[4 * 33], clip.recorded[4 * 11])
    with np.errstate(all="raise"):
        np.testing.assert_allclose(long.rows[1:23, :4].sum(0), 0, atol=1e-5)


def test_one_command_from_a_start(data):
    clip = cases.recorded(tfds_builder.Records(data, "test"), "navigation", 1, 4)[0]
    left, up = (cases.commanded(clip, command, 8, 4, (5.0, 2.5)) for command in ("left", "up"))
    np.testing.assert_array_equal(left.rows[:, 1], [0] + 7 * [-5])
    np.testing.assert_array_equal(up.rows[:, 0], [0] + 7 * [2.5])
    assert (left.rows[:, 4] == clip.rows[:, 4][:8]).all() and left.captions == 2 * clip.captions[:1]
    assert left.recorded is None and left.image is clip.image


@pytest.mark.slow
def test_an_evaluation_end_to_end(tmp_path, data):
    workdir = random_workdir.write(tmp_path / "run", ("base", "stable_forcing"))
    names = [f"{workdir}:few_step", f"{workdir}:bi"]
    settings = evaluate.Settings(cases=2, drift_cases=1, drift_latents=16)
    with quick_compilation():
        loaded = evaluate.load(names)
        smallest = judges.JudgeConfig(clips=8, maps=2, motion_steps=2, changes_steps=2)
        folders = (data, tmp_path / "judges")
        first = dataclasses.replace(settings, measures=("navigation", "drift"))
        kept = evaluate.run(loaded, *folders, first, parts=tmp_path / "parts", judge=smallest)[0]
        results, accuracy = evaluate.run(loaded, *folders, settings, parts=tmp_path / "parts", judge=smallest)
        again = judges.train(data, tmp_path / "judges", smallest)
    assert again.accuracy == accuracy and 0 <= accuracy["motion/movement"] <= 1
    found = results.values
    # What the first evaluation found was not measured again.
    assert all(results.seconds[name] == seconds for name, seconds in kept.seconds.items())
    assert {name: found[name] for name in kept.values} == kept.values
    for kind in ("sheets", "videos"):
        for title, pictures in getattr(kept, kind).items():
            np.testing.assert_array_equal(getattr(results, kind)[title], pictures)
    assert set(found) == set(evaluate.MEASURES)
    recorded = {name: columns[evaluation_results.RECORDED].mean for name, columns in found["revisit"].items()}
    assert recorded["psnr"] > 30 and recorded["lpips"] < 0.02 and recorded["truth_psnr"] == 60.0
    assert recorded["consistency"] > found["revisit"]["consistency"][names[0]].mean + 3
    assert found["revisit"]["psnr"][f"{names[0]}, memory emptied"].count == 2
    assert found["drift"]["sharpness"][names[1]].count == 1
    assert abs(found["memory"]["gain"][names[1]].mean) < 1 and names[0] not in found["memory"]["gain"]
    page = evaluation_report.write(results, accuracy, {"data": str(data)}, tmp_path / "out")
    assert "motion/movement" in page.read_text() and names[0] in page.read_text()
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["measures"]["revisit"]["psnr"][evaluation_results.RECORDED]["mean"] == recorded["psnr"]
    assert list((tmp_path / "out").glob("navigation_*.png")) and len(list((tmp_path / "out").glob("drift_*.mp4"))) == 2
    sheet = next(sheet for title, sheet in results.sheets.items() if "commands" in title and names[0] in title)
    walks = cases.recorded(tfds_builder.Records(data, "test"), "navigation", 16, 4)
    assert sheet.shape == (64 * len(walks), 64 * 9, 3)
    np.testing.assert_array_equal(sheet[:64, :64], walks[0].image)
    assert "revisit/psnr" in evaluation_report.text(results)


def test_wrong_arguments_say_what_is_right(tmp_path, data, capsys):
    with pytest.raises(ValueError, match="write DIR:MODE with a mode of bi, ar, few_step"):
        evaluate.load([str(tmp_path)])
    with pytest.raises(ValueError, match="measures nothing: choose from reconstruction"):
        evaluate.Settings(measures=("nothing",))
    with pytest.raises(ValueError, match="drift_latents=10: worlds are whole chunks of 4"):
        evaluate.Settings(drift_latents=10)
    arguments = ["evaluate", "--checkpoint", f"{tmp_path}:ar", "--data", str(data), "--output", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert "mode ar needs one of the stages teacher_forcing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
