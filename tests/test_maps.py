"""Generated maps, their collision, the walker's kinematics and the scripts of clips; no engine is started."""

import itertools
import math
import re
import struct

import numpy as np
import pytest

from data_pipelines import art, events, kinematics, maps, script, wad
from data_pipelines.doom import CIRCLE, camera_matrix, camera_pose, game_wad
from wp2_jax.controls import actions
from wp2_jax.controls.poses import rows_from_poses

MOTION = kinematics.MotionConfig(yaw_degrees=11.25, step=8.0)
LEVEL = np.asarray((0.0, 0.0, 1.0))


def row(pitch=0.0, yaw=0.0, forward=0, lateral=0, jump=0):
    return np.asarray([pitch, yaw, forward, lateral, 1, jump], np.float32)


def test_a_seed_gives_one_map_and_seeds_differ():
    first, again, other = maps.generate(7), maps.generate(7), maps.generate(8)
    np.testing.assert_array_equal(first.cells, again.cells)
    assert (first.regions, first.things, first.door) == (again.regions, again.things, again.door)
    assert (first.cells != other.cells).any()


@pytest.mark.parametrize("seed", range(20))
def test_rooms_are_connected_without_the_door(seed):
    world = maps.generate(seed)
    open_cells = (world.cells != maps.SOLID) & (world.cells != world.door.region)
    seen = np.zeros_like(open_cells)
    stack = [tuple(int(v) for v in np.argwhere(open_cells)[0])]
    while stack:
        r, c = stack.pop()
        if not seen[r, c]:
            seen[r, c] = True
            stack += [(r + dr, c + dc) for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0)) if open_cells[r + dr, c + dc]]
    assert {0, 1, 2, 3} <= set(world.cells[seen].tolist())
    # The border of the map is solid: nothing leads outside.
    assert (world.cells[[0, -1]] == maps.SOLID).all() and (world.cells[:, [0, -1]] == maps.SOLID).all()


@pytest.mark.parametrize("seed", range(5))
def test_things_stand_out_and_apart(seed):
    world = maps.generate(seed)
    for thing in world.things:
        region = world.regions[world.region_at(thing.x, thing.y)]
        assert thing.room == world.region_at(thing.x, thing.y)
        assert thing.colour not in (region.wall[0], region.floor[0])
    assert len({thing.name for thing in world.things}) == len(world.things)


def test_collision_keeps_the_margin_from_walls_door_and_things():
    world = maps.generate(3)
    x0, y0, x1, _ = (v * maps.CELL for v in world.rooms[0])
    middle = (x0 + x1) / 2
    assert world.free(middle, y0 + maps.MARGIN) and not world.free(middle, y0 + maps.MARGIN - 1)
    thing = world.things[0]
    assert not world.free(thing.x, thing.y)
    assert world.free(thing.x, thing.y, ignore=thing.slot)
    door = world.door
    assert not world.free(door.x, door.y) and world.free(door.x, door.y, door_open=True)


def test_sight_ends_at_walls():
    world = maps.generate(3)
    x0, y0 = (v * maps.CELL for v in world.rooms[3][:2])
    start = np.asarray((x0 + 100.0, y0 + 50.0, 41.0))
    assert world.sight(start, np.asarray((0.0, -1.0, 0.0)), 500) == pytest.approx(50, abs=1)
    assert world.sight(start, np.asarray((0.0, 0.0, -1.0)), 500) == pytest.approx(41, abs=1)
    assert world.sight(start, np.asarray((0.0, -1.0, 0.0)), 30) == 30


def test_the_textmap_encloses_every_open_cell():
    world = maps.generate(5)
    text = maps.textmap(world)
    vertices = [tuple(map(int, v)) for v in re.findall(r"vertex\{x=(\d+);y=(\d+);\}", text)]
    sides = [int(s) for s in re.findall(r"sidedef\{sector=(\d+);", text)]
    lines = re.findall(r"linedef\{v1=(\d+);v2=(\d+);sidefront=(\d+);(?:sideback=(\d+);)?", text)
    assert len(re.findall(r"sector\{", text)) == len(world.regions)
    area = np.zeros(len(world.regions))
    for v1, v2, front, back in lines:
        (ax, ay), (bx, by) = vertices[int(v1)], vertices[int(v2)]
        # Green's theorem: a sector lies to the right of its front sides, to the left of its back sides.
        term = (ax * by - bx * ay) / 2
        area[sides[int(front)]] -= term
        if back:
            area[sides[int(back)]] += term
    expected = [(world.cells == region).sum() * maps.CELL**2 for region in range(len(world.regions))]
    np.testing.assert_allclose(area, expected)


def test_wad_lumps_read_back(tmp_path):
    path = tmp_path / "a.wad"
    path.write_bytes(wad.pack([("ONE", b"abc"), ("TWO", b""), ("THREE", b"xyz")]))
    assert (wad.read_lump(path, "ONE"), wad.read_lump(path, "THREE")) == (b"abc", b"xyz")
    with pytest.raises(ValueError, match="no lump FOUR"):
        wad.read_lump(path, "FOUR")
    (tmp_path / "b.wad").write_bytes(b"not a wad at all")
    with pytest.raises(ValueError, match="no WAD file"):
        wad.read_lump(tmp_path / "b.wad", "ONE")


def test_a_sprite_reads_back():
    pixels = np.where(np.random.default_rng(0).random((150, 9)) < 0.3, -1, np.arange(150)[:, None])
    data = wad.patch(pixels)
    width, height, left, top = struct.unpack_from("<hhhh", data)
    assert (width, height, left, top) == (9, 150, 4, 150)
    out = np.full((height, width), -1)
    for x in range(width):
        at = struct.unpack_from("<i", data, 8 + 4 * x)[0]
        while data[at] != 255:
            start, length = data[at], data[at + 1]
            out[start : start + length, x] = list(data[at + 3 : at + 3 + length])
            at += length + 4
    np.testing.assert_array_equal(out, pixels)


def test_colours_of_the_art_are_told_apart_in_the_games_palette():
    palette = wad.palette(game_wad())
    assert len({wad.nearest_index(palette, main) for main, _ in art.COLOURS.values()}) == len(art.COLOURS)
    assert all(len({wad.nearest_index(palette, colour) for colour in pair}) == 2 for pair in art.COLOURS.values())


def test_directions_of_a_latent_frame():
    start = kinematics.Walker(100, 100, 0)
    after, poses = kinematics.advance(start, row(forward=1), MOTION)
    assert (after.x, after.y) == pytest.approx((132, 100)) and len(poses) == 4
    assert [pose.x for pose in poses] == [108, 116, 124, 132]
    after, _ = kinematics.advance(start, row(lateral=1), MOTION)
    assert (after.x, after.y) == pytest.approx((100, 68))  # right of east is south
    after, _ = kinematics.advance(start, row(forward=1, lateral=-1), MOTION)
    assert (after.x, after.y) == pytest.approx((100 + 32 / math.sqrt(2), 100 + 32 / math.sqrt(2)))
    after, _ = kinematics.advance(start, row(yaw=11.25, pitch=2.8125), MOTION)
    assert (after.heading, after.pitch) == (-2048, 512)
    north = kinematics.Walker(100, 100, CIRCLE // 4)
    after, _ = kinematics.advance(north, row(forward=1), MOTION)
    assert (after.x, after.y) == pytest.approx((100, 132))


def test_a_jump_is_a_parabola_over_two_latent_frames():
    walker, first = kinematics.advance(kinematics.Walker(0, 0, 0), row(jump=1), MOTION)
    walker, second = kinematics.advance(walker, row(jump=1), MOTION)
    assert [pose.lift for pose in first + second] == [14, 24, 30, 32, 30, 24, 14, 0]
    assert walker.airborne == 0


def test_inverse_rows_retrace_the_walk():
    rng = np.random.default_rng(0)
    rows = np.stack([row(0, 11.25 * rng.integers(-1, 2), *rng.integers(-1, 2, 2)) for _ in range(50)])
    walker, out = kinematics.Walker(0.0, 0.0, 512), []
    for r in rows:
        out.append(walker)
        walker, _ = kinematics.advance(walker, r, MOTION)
    for r, there in zip(actions.inverse_rows(rows), reversed(out), strict=True):
        walker, _ = kinematics.advance(walker, r, MOTION)
        assert (walker.x, walker.y) == pytest.approx((there.x, there.y), abs=1e-9)
        assert walker.heading == there.heading


def test_walking_stops_before_a_row_that_would_hit_something():
    world = maps.generate(3)
    x0, y0, _, y1 = (v * maps.CELL for v in world.rooms[0])
    start = kinematics.Walker(x0 + maps.MARGIN + 70, (y0 + y1) // 2, CIRCLE // 2)
    walker, poses, done = kinematics.walk(start, np.stack([row(forward=1)] * 5), kinematics.World(world), MOTION)
    assert done == 2 and len(poses) == 8 and walker.x == pytest.approx(start.x - 64)
    upwards = np.stack([row(pitch=2.8125)] * 12)
    assert kinematics.walk(start, upwards, kinematics.World(world), MOTION)[2] == 8  # 22.5 degrees


def test_turns_the_engine_cannot_do_are_errors():
    with pytest.raises(ValueError, match=r"yaw_degrees=3\.0: turns are whole multiples of 0\.0219"):
        kinematics.MotionConfig(yaw_degrees=3.0)
    kinematics.MotionConfig(yaw_degrees=137 * 4 * 360 / CIRCLE)
    with pytest.raises(ValueError, match="no whole"):
        kinematics.advance(kinematics.Walker(0, 0, 0), row(yaw=3.0), MOTION)


def test_camera_axes():
    east = camera_matrix(32, 64, 96, 0, 0)
    np.testing.assert_allclose(east[:3, 3], (1, 2, 3))
    np.testing.assert_allclose(east[:3, :3].T, [(0, -1, 0), (0, 0, -1), (1, 0, 0)], atol=1e-7)  # right, down, forward
    up = camera_matrix(0, 0, 0, 90, 30)
    np.testing.assert_allclose(up[:3, 2], (0, math.cos(math.pi / 6), 0.5), atol=1e-6)


CONFIG = script.ScriptConfig(latents=40, motion=MOTION)


@pytest.mark.parametrize("index", range(24))
def test_scripts_perform_their_rows(index):
    world = maps.generate(index // 4)
    written = script.write(world, CONFIG, 11, index)
    again = script.write(world, CONFIG, 11, index)
    np.testing.assert_array_equal(written.rows, again.rows)
    assert (written.poses, written.orders, written.caption) == (again.poses, again.orders, again.caption)
    assert len(written.rows) == 40 and len(written.poses) == 157
    assert not written.rows[0, [0, 1, 2, 3, 5]].any()
    # The rows are what the camera did: the rotation of all, the walking of those without a character in between.
    cameras = np.stack([camera_pose(world, pose, written.perspective == "tps") for pose in written.poses])
    turned = rows_from_poses(cameras, written.perspective, math.inf, LEVEL)
    np.testing.assert_allclose(turned[:, :2], written.rows[:, :2], atol=1e-3)
    eyes = np.stack([camera_pose(world, pose, False) for pose in written.poses])
    walked = rows_from_poses(eyes, written.perspective, 0.5, LEVEL)
    np.testing.assert_array_equal(walked[:, 2:4], written.rows[:, 2:4])
    # Nothing was walked into; the door and a thing count only until an event takes them away.
    opened = any("OpenDoor" in order for orders in written.orders.values() for order in orders)
    gone = [int(o.split("Hide")[1]) for orders in written.orders.values() for o in orders if "Hide" in o]
    for pose in written.poses:
        assert world.free(pose.x, pose.y, opened, gone[-1] if gone else 0)


def test_loop_closures_go_back_the_way_they_came():
    config = script.ScriptConfig(latents=24, navigation=0, loop_closure=1, event=0)
    written = script.write(maps.generate(1), config, 0, 0)
    n = (24 - 1) // 2
    assert written.poses[: 4 * n] == written.poses[8 * n : 4 * n : -1]
    np.testing.assert_array_equal(written.rows[n + 1 : 2 * n + 1], actions.inverse_rows(written.rows[1 : n + 1]))
    assert written.rows[1 : n + 1, :4].any() and not written.rows[:, 5].any()


def test_commands_last_from_one_to_five_seconds():
    config = script.ScriptConfig(latents=160, navigation=1, loop_closure=0, event=0)
    for index in range(6):
        rows = script.write(maps.generate(index), config, 5, index).rows[1:]
        changes = np.flatnonzero((np.diff(rows, axis=0) != 0).any(1)) + 1
        lengths = np.diff(np.asarray([0, *changes, len(rows)]))
        assert (lengths[:-1] >= 4).all()  # two equal commands in a row may look longer than five


def test_events_are_in_their_interval_and_watched():
    config = script.ScriptConfig(latents=60, navigation=0, loop_closure=0, event=1)
    seen = set()
    for index in range(60):
        written = script.write(maps.generate(index // 3), config, 2, index)
        intervals = written.caption.dynamic_interactions
        assert [(i.start_time, i.end_time) for i in intervals] == [(0, 5), (5, 10), (10, 15)]
        assert any(i.event for i in intervals)
        for picture, orders in written.orders.items():
            chunk = (picture + 3) // 16
            assert written.caption.at_chunks(60)[chunk].event is not None, (index, picture, orders)
            assert picture >= 5  # a world's first picture is from before
            seen.update(order.rstrip("0123456789") for order in orders)
    told = {"give Show", "give Hide", "give Blast", "give OpenDoor", "give Light", "r_visibility "}
    assert told <= seen
    assert sum(len(kinds) for kinds in events.CATEGORIES.values()) == 8


def test_dense_events_fill_a_clip():
    config = script.ScriptConfig(latents=160, navigation=0, loop_closure=0, event=1, event_density=0.9)
    counts = []
    for index in range(20):
        written = script.write(maps.generate(index // 3), config, 2, index)
        sentences = [i.event for i in written.caption.dynamic_interactions]
        assert len(written.rows) == 160 and len(sentences) == 8
        counts.append(sum(sentence is not None for sentence in sentences))
        if counts[-1] > 1:
            # What comes goes again before it comes anew.
            kinds = [events.kind_of(sentence) for sentence in sentences if sentence]
            assert all(a != b for a, b in itertools.pairwise(kinds))
    # Picking up and blasts happen once.
    assert np.mean([n >= 5 for n in counts]) > 0.5 and min(counts) >= 1


def test_the_share_of_fog_and_light_is_as_asked():
    for share, low, high in ((0.0, 0.2, 0.5), (0.9, 0.8, 0.98)):
        config = script.ScriptConfig(navigation=0, loop_closure=0, event=1, event_environment=share)
        plans = [script.write(maps.generate(index // 8), config, 3, index).caption for index in range(160)]
        first = [next(i.event for i in plan.dynamic_interactions if i.event) for plan in plans]
        environment = [events.kind_of(sentence) in events.KINDS_OF["environment"] for sentence in first]
        assert low < np.mean(environment) < high


def test_config_errors_name_the_field():
    with pytest.raises(ValueError, match="latents=10"):
        script.ScriptConfig(latents=10)
    with pytest.raises(ValueError, match="first_person=2"):
        script.ScriptConfig(first_person=2)
    with pytest.raises(ValueError, match="event_density=-1"):
        script.ScriptConfig(event_density=-1)
    with pytest.raises(ValueError, match="event_environment=2"):
        script.ScriptConfig(event_environment=2)
