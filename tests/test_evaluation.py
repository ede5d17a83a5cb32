"""The measures against library oracles and values worked by hand."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from data_pipelines import events as recorded_events
from wp2_jax.evaluation import drift, events, navigation, quality, revisit, statistics
from wp2_jax.evaluation.navigation import Commanded, Recovered


def pairs_of_pictures():
    """Noise, a noisy smooth picture and a shifted one, each beside its other: uint8 [3, 64, 64, 3] twice."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (3, 64, 64, 3)).astype(np.uint8)
    y, x = np.mgrid[0:64, 0:64]
    smooth = np.stack([127 + 100 * np.sin(x / 9 + k) * np.cos(y / (7 + k)) for k in range(3)], -1)
    noisy = np.clip(smooth + rng.normal(0, 20, smooth.shape), 0, 255).astype(np.uint8)
    near = np.clip(noise[0].astype(int) + rng.integers(-9, 9, noise[0].shape), 0, 255).astype(np.uint8)
    smooth = smooth.astype(np.uint8)
    return np.stack([noise[0], noisy, smooth]), np.stack([near, smooth, np.roll(smooth, 4, 1)])


def test_quality_agrees_with_torchmetrics_and_the_published_lpips_weights():
    a, b = pairs_of_pictures()
    # torchmetrics 1.9 (SSIM: mean of its map without the 5 pixels of padding).
    np.testing.assert_allclose(quality.psnr(a, b), [33.852983, 22.158443, 21.291840], atol=1e-4)
    np.testing.assert_allclose(quality.ssim(a, b), [0.99750843, 0.47435660, 0.85600704], atol=1e-5)
    # The published AlexNet and linear weights through torch 2.13's convolutions.
    np.testing.assert_allclose(quality.lpips(a, b), [0.000947, 0.507161, 0.034810], atol=1e-4)


def test_quality_of_equal_and_of_wrong_pictures():
    a, _ = pairs_of_pictures()
    assert (quality.psnr(a, a) == quality.EQUAL_PSNR).all()
    np.testing.assert_allclose(quality.ssim(a, a), 1.0)
    np.testing.assert_allclose(quality.lpips(a, a), 0.0, atol=1e-7)
    assert quality.lpips(a[:0], a[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"pictures: float32 .* give uint8"):
        quality.psnr(a.astype(np.float32), a)
    with pytest.raises(ValueError, match="differ in shape"):
        quality.ssim(a, a[:2])


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(quality.MissingPackageError, match=r"pip install -e '\.\[evaluate\]'"):
        quality.require_lpips()


def test_an_estimate_is_the_mean_with_the_interval_of_its_cases():
    cases = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = statistics.estimate(list(cases))
    reach = stats.norm.ppf(0.975) * cases.std(ddof=1) / math.sqrt(len(cases))
    assert found.mean == pytest.approx(cases.mean()) and found.count == 400
    assert found.low == pytest.approx(cases.mean() - reach, abs=0.1 * reach)
    assert found.high == pytest.approx(cases.mean() + reach, abs=0.1 * reach)


def test_an_estimate_counts_cases_and_not_their_numbers():
    found = statistics.estimate([[1.0, 1.0, 1.0], [4.0, float("nan")], [], [float("inf")]])
    assert (found.mean, found.count) == (2.5, 2)
    nothing = statistics.estimate([[], float("nan")])
    assert nothing.count == 0 and math.isnan(nothing.mean) and str(nothing) == "-"
    assert statistics.estimate([2.0, 2.0]) == statistics.Estimate(2.0, 2.0, 2.0, 2)


def row(pitch=0.0, yaw=0.0, forward=0.0, lateral=0.0):
    return [pitch, yaw, forward, lateral, 1.0, 0.0]


def test_a_chunk_is_told_what_stays_the_same_in_it():
    rows = np.asarray([row(yaw=5, forward=1)] * 4)
    assert navigation.commanded(rows) == Commanded((0.0, 20.0), 7)
    rows[3] = row(yaw=-5, forward=1, lateral=-1)
    assert navigation.commanded(rows) == Commanded((0.0, None), None)
    assert navigation.CLASSES[7] == (1, 0)
    assert navigation.chunks_of(24, 4) == [1, 2, 3, 4, 5]
    # Chunk 1 is latent frames 4..7: pictures 13..28, seen from picture 12.
    assert navigation.pictures_of(1, 4) == slice(12, 29)


def test_navigation_scores_by_hand():
    def seen(yaw, movement):
        return Recovered((0.5, yaw), movement)

    told = [
        Commanded((0.0, 20.0), 4),
        Commanded((0.0, 20.0), 8),
        Commanded((0.0, 0.0), 7),
        Commanded((None, -10.0), None),
    ]
    score = navigation.score(told, [seen(15.0, 4), seen(17.0, 7), seen(2.0, 1), seen(4.0, 0)])
    # One turn of 40 degrees seen as 32, one of -10 seen as 4.
    assert score.sign == [1.0, 0.0]
    assert score.rotation_error == pytest.approx([0.2, 1.4])
    assert score.translation == [1.0, 0.0, 0.0]
    assert score.walking == [0.0, 0.0], "the resting chunk does not count"
    assert score.axes == [1.0, 0.5, 0.5]
    assert score.drift == pytest.approx([0.5, 0.5, 0.5, 2.0])


def test_out_and_back_pairs_meet_at_one_pose():
    assert revisit.pairs(13) == [(0, 12), (1, 11), (2, 10)]
    assert revisit.pairs(14) == revisit.pairs(13), "the last latent frame of an even walk is a rest"
    out, back = revisit.picture_pairs(np.arange(49))
    assert list(out) == [0, 4, 8] and list(back) == [48, 44, 40]


def camera(yaw=0.0, pitch=0.0, x=0.0, y=0.0):
    """Looking along world x, z up (data_pipelines.doom.camera_matrix without its units)."""
    from data_pipelines.doom import camera_matrix

    return camera_matrix(32 * x, 32 * y, 0.0, yaw, pitch)


def test_a_wall_seen_from_nearer_and_from_the_side():
    intrinsics = np.asarray([32.0, 38.4, 32.0, 32.0], np.float32)
    far = revisit.View(np.full((64, 64), 4.0), camera(), intrinsics)
    near = revisit.View(np.full((64, 64), 2.0), camera(x=2.0), intrinsics)
    places, visible = revisit.correspondence(far, near)
    # Two times nearer: a point is half as far from the middle in the far view.
    np.testing.assert_allclose(places[1, 10], 31.5 + (np.arange(64) - 31.5) / 2, atol=1e-4)
    np.testing.assert_allclose(places[0, :, 10], 31.5 + (np.arange(64) - 31.5) / 2, atol=1e-4)
    assert visible.all()
    aside = revisit.View(np.full((64, 64), 4.0), camera(y=1.0), intrinsics)
    places, visible = revisit.correspondence(far, aside)
    # One metre to the left at four metres: 8 pixels further left in the other view.
    np.testing.assert_allclose(places[1, 10], np.arange(64) - 8, atol=1e-4)
    assert visible[:, 8:].all() and not visible[:, :8].any()
    # The same place seen with the head raised: the engine shears by fy tan(pitch).
    raised = revisit.View(np.full((64, 64), 4.0), camera(pitch=10.0), intrinsics)
    places, _ = revisit.correspondence(far, raised)
    np.testing.assert_allclose(places[0, :, 10], np.arange(64) - 38.4 * math.tan(math.radians(10)), atol=1e-3)
    hidden = dataclasses.replace(far, depth=np.full((64, 64), 1.0))
    assert not revisit.correspondence(hidden, near)[1].any(), "something stands before the wall"


def test_consistent_views_score_high_and_others_low():
    intrinsics = np.asarray([32.0, 38.4, 32.0, 32.0], np.float32)
    far = revisit.View(np.full((64, 64), 4.0), camera(), intrinsics)
    aside = revisit.View(np.full((64, 64), 4.0), camera(y=1.0), intrinsics)
    wall = pairs_of_pictures()[1][1]
    score, share = revisit.consistency(wall, np.roll(wall, 8, 1), far, aside)
    assert score == quality.EQUAL_PSNR and share == pytest.approx(56 / 64)
    assert revisit.consistency(wall, wall, far, aside)[0] < 25
    assert math.isnan(revisit.consistency(wall, wall, far, dataclasses.replace(aside, depth=np.zeros((64, 64))))[0])


def test_every_event_that_is_recorded_has_a_kind():
    from data_pipelines import maps

    found = set()
    for seed in range(200):
        plan = recorded_events.draw(np.random.default_rng(seed), maps.generate(seed % 4), "tps", 4)
        found |= {recorded_events.kind_of(step.sentence) for step in plan.steps}
        plan = recorded_events.draw(np.random.default_rng(seed), maps.generate(seed % 4), "fps", 4)
        found |= {recorded_events.kind_of(step.sentence) for step in plan.steps}
    assert found == set(recorded_events.KINDS[1:])
    assert recorded_events.kind_of(None) == "nothing" == recorded_events.KINDS[0]
    with pytest.raises(ValueError, match="'it rains' is of no known kind"):
        recorded_events.kind_of("it rains")


def test_event_scores_by_hand():
    score = events.score([1, 1, 2, 0], [1, 2, 2, 0], ("nothing", "fog", "door"))
    assert score.right == [1, 0, 1, 1]
    assert score.by_kind == {"fog": [1, 0], "door": [1], "nothing": [1]}
    assert score.confusion.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert events.categories(score.by_kind, {"air": ("fog",), "things": ("lamp",)}) == {"air": [1, 0], "things": []}
    assert list(events.pictures_of(77, 93)) == [76, 80, 84, 92, 92, 92]


def test_drift_by_hand():
    rng = np.random.default_rng(0)
    picture = rng.integers(60, 196, (16, 16, 3))
    steady = np.stack([picture] * 40).astype(np.uint8)
    found = drift.curves(steady)
    for field in dataclasses.fields(found):
        assert drift.change(getattr(found, field.name)) == pytest.approx(1.0)
    assert not drift.collapsed(found)
    fading = np.stack([128 + (picture - 128) * (1 - k / 40) for k in range(40)]).astype(np.uint8)
    found = drift.curves(fading)
    # Means of the last and first ten of 1, 39/40, ...: 5.5/40 over 35.5/40; sharpness goes with the square.
    assert drift.change(found.contrast) == pytest.approx(5.5 / 35.5, rel=0.05)
    assert drift.change(found.sharpness) == pytest.approx(38.5 / 1268.5, rel=0.15)
    assert drift.collapsed(found)
    plain = drift.curves(np.full((8, 4, 4, 3), (255, 0, 51), np.uint8))
    assert plain.saturation == pytest.approx(1.0)
    assert plain.exposure == pytest.approx(0.299 + 0.114 * 0.2) and plain.sharpness == pytest.approx(0.0)


def test_jumps_where_chunks_meet():
    levels = np.cumsum([0, *[3 if index in (12, 28) else 1 for index in range(44)]])
    pictures = np.broadcast_to(levels[:, None, None, None], (45, 4, 4, 3)).astype(np.uint8)
    assert drift.border_jump(pictures, 4) == pytest.approx(3.0)
    assert math.isnan(drift.border_jump(pictures[:13], 4)) and math.isnan(
        drift.border_jump(pictures[:1].repeat(45, 0), 4)
    )
