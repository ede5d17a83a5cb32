"""The few-step grid, its step, and the fused heads."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax.diffusion import flow, pdd
from wp2_jax.diffusion.experts import Experts
from wp2_jax.verify.samplers import check_pdd_heads, check_pdd_schedule

GOLDEN = Path(__file__).parent / "golden"


def test_golden_schedule_and_steps():
    results = check_pdd_schedule(GOLDEN, "f_pdd")
    assert [r.item for r in results] == [
        f"f_pdd/{part}" for part in ("blocks", "sigmas", "timesteps", "c0.steps", "c1.steps")
    ]
    assert not [r for r in results if not r.ok]


def test_golden_fused_heads():
    results = check_pdd_heads(GOLDEN, "weights_pdd_heads")
    assert len(results) == 4
    assert not [r for r in results if not r.ok]


def test_published_numbers():
    schedule = pdd.schedule(Experts(0.9))
    assert [(b.expert, b.start, b.end) for b in schedule.blocks] == [
        ("high", 0, 28),
        ("high", 28, 56),
        ("low", 56, 92),
        ("low", 92, 128),
    ]
    np.testing.assert_allclose(1000 * schedule.starts, [1000, 961.538, 900, 732.558], atol=1e-3)
    assert schedule.sigmas[56] == 0.9 and schedule.sigmas[-1] == 0.0 and schedule.sigmas.dtype == np.float64
    assert schedule.ends[-1] == 0.0 and np.array_equal(schedule.starts[1:], schedule.ends[:-1])
    np.testing.assert_array_equal(schedule.lasts, schedule.sigmas[[27, 55, 91, 127]])
    assert schedule.intervals("high") == 56 and schedule.intervals("low") == 72
    # With these counts the two pieces happen to be one uniform grid in raw time.
    np.testing.assert_allclose(schedule.sigmas, flow.shift(np.linspace(1, 0, 129), 7.0), atol=1e-15)


@pytest.mark.parametrize(
    "boundary, intervals, blocks",
    [(0.9, (6, 8), (2, 2)), (0.5, (3, 10), (1, 5)), (None, (16,), (4,))],
)
def test_other_grids_are_uniform_in_raw_time_on_each_side(boundary, intervals, blocks):
    schedule = pdd.schedule(Experts(boundary), intervals, blocks, 7.0)
    assert schedule.sigmas.shape == (sum(intervals) + 1,) and len(schedule.blocks) == sum(blocks)
    assert schedule.sigmas[0] == 1.0 and schedule.sigmas[-1] == 0.0
    first = 0
    for count in intervals:
        raw = flow.unshift(schedule.sigmas[first : first + count + 1], 7.0)
        np.testing.assert_allclose(np.diff(raw), (raw[-1] - raw[0]) / count, atol=1e-14)
        first += count
    if boundary is not None:
        assert schedule.sigmas[intervals[0]] == boundary
    assert schedule.blocks[0].start == 0 and schedule.blocks[-1].end == sum(intervals)
    np.testing.assert_allclose(sum(schedule.widths(b).sum() for b in schedule.blocks), -1.0)


@pytest.mark.parametrize(
    "intervals, blocks", [((56,), (2, 2)), ((55, 72), (2, 2)), ((56, 72), (0, 2)), ((0, 4), (1, 1))]
)
def test_bad_counts(intervals, blocks):
    with pytest.raises(ValueError, match=r"pdd\.intervals"):
        pdd.schedule(Experts(0.9), intervals, blocks)


def test_fused_heads_equal_the_sum_over_the_bank():
    schedule = pdd.schedule(Experts(0.9), (4, 6), (2, 2))
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(7, 5)).astype(np.float32)
    for expert, n in (("high", 4), ("low", 6)):
        kernel = rng.normal(size=(n, 5, 3)).astype(np.float32)
        bias = rng.normal(size=(n, 3)).astype(np.float32)
        velocities = np.einsum("ld,ndc->nlc", hidden, kernel) + bias[:, None]
        fused_kernel, fused_bias = pdd.fuse_heads(jnp.asarray(kernel), jnp.asarray(bias), schedule, expert)
        assert fused_kernel.shape == (2, 5, 6) and fused_bias.shape == (2, 6)
        for b, block in enumerate(schedule.expert_blocks(expert)):
            out = hidden @ np.asarray(fused_kernel[b]) + np.asarray(fused_bias[b])
            own = velocities[block.start - block.offset : block.end - block.offset]
            widths = schedule.widths(block)
            np.testing.assert_allclose(out[:, :3], np.tensordot(widths[:-1], own[:-1], 1), atol=1e-5)
            np.testing.assert_allclose(out[:, 3:], own[-1], atol=1e-5)
    with pytest.raises(ValueError, match="head bank"):
        pdd.fuse_heads(jnp.zeros((5, 5, 3)), jnp.zeros((5, 3)), schedule, "low")


def test_a_step_with_exact_interval_velocities_lands_on_the_path():
    """Data are one point, so the velocity is constant along a path and each block returns the point."""
    schedule = pdd.schedule(Experts(0.9))
    point, key = jnp.full((2, 4, 3, 3, 16), 0.7), jax.random.key(0)
    x = jax.random.normal(key, point.shape)
    for b, block in enumerate(schedule.blocks):
        v = (x - point) / schedule.starts[b]
        moved = float(schedule.widths(block)[:-1].sum()) * v
        np.testing.assert_allclose(pdd.block_x0(x, moved, v, schedule.lasts[b]), point, atol=1e-5)
        noise = jax.random.normal(jax.random.fold_in(key, b), point.shape)
        x = pdd.step(x, moved, v, schedule.lasts[b], schedule.ends[b], noise)
        expected = (1 - schedule.ends[b]) * point + schedule.ends[b] * noise
        np.testing.assert_allclose(x, expected, atol=1e-5)
    np.testing.assert_allclose(x, point, atol=1e-5)


def test_a_step_takes_levels_per_sample():
    x, d, v, noise = (jax.random.normal(jax.random.key(i), (2, 3, 4)) for i in range(4))
    last, end = np.array([0.9, 0.2]), np.array([0.5, 0.0])
    both = pdd.step(x, d, v, last, end, noise)
    for i in range(2):
        np.testing.assert_allclose(both[i], pdd.step(x[i], d[i], v[i], last[i], end[i], noise[i]), atol=1e-6)
