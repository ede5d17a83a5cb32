"""Recording with the engine, the record schema and the TFDS dataset."""

import argparse
import json

import numpy as np
import pytest

from data_pipelines import maps, record, schema, tfds_builder
from data_pipelines.doom import CameraConfig, Engine, Pose
from data_pipelines.script import ScriptConfig
from wp2_jax.cli import data as cli

CAMERA = CameraConfig(engine_width=160, engine_height=120)
CONFIG = record.RecordConfig(
    seed=3,
    clips=9,
    maps=3,
    test_maps=1,
    camera=CAMERA,
    script=ScriptConfig(latents=24, navigation=1, loop_closure=1, event=1),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return record.record(CONFIG, tmp_path_factory.mktemp("data"), workers=2)


@pytest.fixture(scope="module")
def records(dataset):
    return [clip for split in ("train", "test") for clip in _all(tfds_builder.Records(dataset, split))]


def _all(source):
    return [source[index] for index in range(len(source))]


def _equal(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


def test_what_is_recorded(dataset, records):
    assert not list(dataset.parents[1].glob(".*"))  # nothing is left of the staging
    assert [r["id"] for r in records] == [f"vizdoom-3-{clip:07d}" for clip in range(9)]
    assert {r["kind"] for r in records} == {"navigation", "loop_closure", "event"}
    assert {r["perspective"] for r in records} == {"fps", "tps"}
    for r in records:
        assert schema.faults(r) == []
        assert r["pictures"].shape == (93, 64, 64, 3) and r["actions"].shape == (24, 6) and r["picture_rate"] == 16
        assert r["depth"].shape == (24, 64, 64) and 1000 < np.median(r["depth"]) < 30000
        assert (r["kind"] == "event") == any(i.event for i in schema.read_caption(r).dynamic_interactions)
        assert np.abs(np.diff(r["pictures"].astype(int), axis=0)).max() > 30  # something moves


def test_test_maps_are_held_out(dataset):
    worlds = {split: {r["world"] for r in _all(tfds_builder.Records(dataset, split))} for split in ("train", "test")}
    assert len(worlds["train"]) == 2 and len(worlds["test"]) == 1
    assert not worlds["train"] & worlds["test"]


def test_mirrored_pictures_of_loop_closures_agree(records):
    ratios, moved = [], []
    for r in (r for r in records if r["kind"] == "loop_closure"):
        n = (len(r["actions"]) - 1) // 2
        pictures = r["pictures"].astype(np.float64)
        for k in range(4 * n):
            error = np.mean((pictures[k] - pictures[8 * n - k]) ** 2)
            ratios.append(10 * np.log10(255**2 / max(error, 1e-2)))
        moved.append(np.mean((pictures[0] - pictures[4 * n]) ** 2))
        np.testing.assert_allclose(r["camera_to_world"][: 4 * n], r["camera_to_world"][8 * n : 4 * n : -1])
    assert ratios and np.mean(ratios) >= 30
    assert max(moved) > 65  # the half-way picture is another one: PSNR below 30


def test_the_same_seed_records_the_same_records(dataset, records, tmp_path):
    again = record.record(CONFIG, tmp_path, workers=1)
    for split in ("train", "test"):
        for one, other in zip(
            _all(tfds_builder.Records(dataset, split)), _all(tfds_builder.Records(again, split)), strict=True
        ):
            _equal(one, other)


def test_an_interrupted_recording_leaves_nothing_that_looks_whole_and_goes_on(records, tmp_path):
    def stop(done, total):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.record(CONFIG, tmp_path, workers=1, progress=stop)
    record._close_engine()
    with pytest.raises(ValueError, match="no dataset here"):
        tfds_builder.locate(tmp_path)
    staging = tmp_path / f".vizdoom-{CONFIG.fingerprint}"
    kept = {path.name: path.stat().st_mtime_ns for path in staging.glob("*.npz")}
    assert len(kept) == 2
    (staging / "tmp1.part").write_bytes(b"half a clip")
    # While the dataset itself is being written, too.
    counts = []

    def stop_later(done, total):
        counts.append(done)

    def broken(*args, **kwargs):
        raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "validate", lambda r: broken() if r["id"].endswith("4") else None)
        with pytest.raises(OSError, match="disk is full"):
            record.record(CONFIG, tmp_path, workers=1, progress=stop_later)
    assert counts[0] == 2 and counts[-1] == 9
    assert all((staging / name).stat().st_mtime_ns == time for name, time in kept.items())
    with pytest.raises(ValueError, match="no dataset here"):
        tfds_builder.locate(tmp_path)
    done = record.record(CONFIG, tmp_path, workers=1)
    for one, other in zip(
        records, _all(tfds_builder.Records(done)) + _all(tfds_builder.Records(done, "test")), strict=True
    ):
        _equal(one, other)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir()) == ["1.0.0", "vizdoom"]


def test_a_dataset_of_other_settings_is_not_touched(dataset):
    other = record.RecordConfig(seed=4, clips=2, maps=1, test_maps=0, camera=CAMERA)
    with pytest.raises(ValueError, match="holds a dataset of other settings"):
        record.record(other, dataset.parents[1])
    assert record.record(CONFIG, dataset.parents[1]) == dataset


def test_config_survives_json_and_names_its_errors():
    import dataclasses

    values = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
    assert record.RecordConfig.from_dict(values) == CONFIG
    with pytest.raises(TypeError, match="colour"):
        record.RecordConfig.from_dict({**values, "colour": 1})
    with pytest.raises(ValueError, match="test_maps=3 of maps=3"):
        record.RecordConfig(clips=9, maps=3, test_maps=3)
    with pytest.raises(ValueError, match="seed=-1"):
        record.RecordConfig(seed=-1)
    with pytest.raises(ValueError, match="64x65"):
        record.RecordConfig(camera=CameraConfig(width=65))


@pytest.mark.parametrize("third_person", [False, True])
def test_depth_pose_and_intrinsics_fit_the_map(tmp_path, third_person):
    worlds = [maps.generate(seed) for seed in range(2)]
    rng = np.random.default_rng(0)
    with Engine(worlds, tmp_path, CAMERA) as engine:
        # The switch to third person outlives a map: go through the other setting first.
        engine.start(1, Pose(*_centre(worlds[1], 0), 0), not third_person)
        for index, world in enumerate(worlds):
            pose = Pose(*_centre(world, index), int(rng.integers(128)) * 512)
            engine.start(index, pose, third_person)
            shot = engine.shoot(pose, depth=True)
            assert shot.depth is not None
            fx, fy, cx, cy = engine.config.intrinsics
            matrix = shot.camera_to_world.astype(np.float64)
            errors = []
            for u, v in rng.integers(0, 64, (300, 2)):
                ray = np.asarray([(u + 0.5 - cx) / fx, (v + 0.5 - cy) / fy, 1.0])
                length = np.linalg.norm(ray)
                reach = world.sight(matrix[:3, 3] * 32, matrix[:3, :3] @ ray / length, 880)
                if shot.depth[v, u]:
                    errors.append(reach / length / 32 - shot.depth[v, u] / 1000)
            # Things and the character stand before some walls; a depth step is 0.22 m.
            assert abs(np.median(errors)) < 0.25, errors


def _centre(world, room):
    x0, y0, x1, y1 = world.rooms[room]
    return (x0 + x1) * maps.CELL // 2, (y0 + y1) * maps.CELL // 2


def test_the_engine_answers_to_orders_and_lifts(tmp_path):
    world = maps.generate(0)
    thing = world.things[0]
    pose = Pose(thing.x - 160 if world.free(thing.x - 160, thing.y) else thing.x + 160, thing.y, 0)
    pose = pose if pose.x < thing.x else Pose(pose.x, pose.y, 32768)
    with Engine([world], tmp_path, CAMERA) as engine:
        engine.start(0, pose, False)
        before = engine.shoot(pose).picture
        gone = engine.shoot(pose, (f"give Hide{thing.slot}",)).picture
        back = engine.shoot(pose, (f"give Show{thing.slot}",)).picture
        assert (before != gone).any()
        np.testing.assert_array_equal(before, back)
        lifts = [engine.shoot(Pose(pose.x, pose.y, pose.heading, lift=lift)).picture for lift in (14, 32, 14, 0)]
        np.testing.assert_array_equal(lifts[0], lifts[2])
        np.testing.assert_array_equal(lifts[3], before)
        assert (lifts[1] != lifts[0]).any()
        engine.start(0, pose, False)
        np.testing.assert_array_equal(engine.shoot(pose).picture, before)


def test_nothing_of_a_clip_is_left_in_the_next(tmp_path):
    world = maps.generate(CONFIG.map_seed(1))
    poses = [Pose(*_centre(world, room), heading) for room in range(4) for heading in range(0, 65536, 2048)]
    tint, fog, gone = ("testcolor 8080ff 0",), ("testfade e0e0e0", "give Light160", "r_visibility 1"), ("give Hide1",)

    def look(engine, orders=()):
        engine.start(0, poses[0], False)
        return np.stack([engine.shoot(pose, orders if index == 0 else ()).picture for index, pose in enumerate(poses)])

    with Engine([world], tmp_path, CAMERA) as engine:
        before = look(engine)
        for orders in (tint, fog, gone):
            assert (look(engine, orders) != before).any()
            np.testing.assert_array_equal(look(engine), before, err_msg=str(orders))


def _spoil(name, change):
    def spoil(r):
        r = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in r.items()}
        r[name] = change(r[name])
        return r

    return spoil


def _set(place, value):
    def change(array):
        array[place] = value
        return array

    return change


def _caption(**changes):
    return lambda text: json.dumps({**json.loads(text), **changes})


SPOILED = {
    "pictures: 92 pictures and 24": [_spoil("pictures", lambda p: p[:-1]), _spoil("camera_to_world", lambda p: p[:-1])],
    "actions: row 3 holds NaN": [_spoil("actions", _set((3, 1), np.nan))],
    "actions: forward of row 2 is 0.5": [_spoil("actions", _set((2, 2), 0.5))],
    "first row is not at rest": [_spoil("actions", _set((0, 2), 1))],
    "actions: row 5 says pitch, yaw": [_spoil("actions", _set((5, 1), 77.0))],
    "camera pose of picture 7 holds NaN": [_spoil("camera_to_world", _set((7, 0, 3), np.nan))],
    "camera pose of picture 8 is not a rotation": [
        _spoil("camera_to_world", lambda p: np.where(np.arange(len(p))[:, None, None] == 8, p @ _SCALE, p))
    ],
    "camera pose of picture 0 is not a rotation": [_spoil("camera_to_world", lambda p: p @ _MIRROR)],
    "third person (tps) needs the character": [_spoil("caption", _caption(character="None"))],
    "give an object with exactly start_time": [
        _spoil("caption", _caption(dynamic_interactions=[{"start_time": 0, "event": "None"}]))
    ],
    "the intervals end at 5": [
        _spoil("caption", _caption(dynamic_interactions=[{"start_time": 0, "end_time": 5, "event": "None"}]))
    ],
    "kind: 'dance'": [_spoil("kind", lambda kind: "dance")],
    "depth: dtype uint16 expected": [_spoil("depth", lambda depth: depth.astype(np.int32))],
    "missing fields ['depth']": [lambda r: {name: value for name, value in r.items() if name != "depth"}],
    "unknown fields ['mood']": [lambda r: {**r, "mood": "good"}],
}
_SCALE = np.diag([2.0, 2.0, 2.0, 1.0]).astype(np.float32)
_MIRROR = np.diag([-1.0, 1.0, 1.0, 1.0]).astype(np.float32)


@pytest.mark.parametrize("reason", SPOILED)
def test_bad_records_are_refused_with_the_reason(records, reason):
    r = next(r for r in records if r["perspective"] == "tps")
    for spoil in SPOILED[reason]:
        r = spoil(r)
    assert any(reason in found for found in schema.faults(r)), schema.faults(r)
    with pytest.raises(schema.RecordError, match=r["id"]):
        schema.validate(r)


def test_other_schema_versions_are_refused():
    schema.check_version("1.4.0")
    with pytest.raises(ValueError, match=r"version 2\.0\.0 cannot be read"):
        schema.check_version("2.0.0")


def _cli(*arguments):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(argument) for argument in arguments]))


def test_info_and_check(dataset, capsys, tmp_path):
    assert _cli("info", dataset) == 0
    assert "2 in train, 1 in test" in capsys.readouterr().out
    assert _cli("check", dataset, "--list", tmp_path / "bad.json") == 0
    assert "9 records, 9 good, 0 bad" in capsys.readouterr().out
    assert json.loads((tmp_path / "bad.json").read_text()) == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "faults", lambda r: ["spoiled"] if r["id"].endswith("5") else [])
        assert _cli("check", dataset) == 1
        assert _cli("check", dataset, "--fault-budget", 1) == 0
    assert "vizdoom-3-0000005: spoiled" in capsys.readouterr().out
    assert _cli("info", tmp_path) == 2
    assert "no dataset here" in capsys.readouterr().err


def test_record_from_the_command_line(tmp_path, capsys):
    arguments = ("record", "--output", tmp_path, "--clips", 1, "--maps", 1, "--test-maps", 0, "--latents", 4)
    assert _cli(*arguments, "--engine-width", 160, "--workers", 1, "--seed", 0) == 0
    assert "seed 0" in capsys.readouterr().out
    [clip] = _all(tfds_builder.Records(tmp_path))
    assert clip["pictures"].shape == (13, 64, 64, 3)
    assert _cli("record", "--output", tmp_path, "--yaw-degrees", 3) == 2
    assert "yaw_degrees=3.0" in capsys.readouterr().err
