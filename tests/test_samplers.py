"""UniPC and DPM++: the golden trajectories, and convergence on equations with known solutions."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wp2_jax.diffusion import SOLVERS, samplers, solver_schedule
from wp2_jax.diffusion.experts import Experts
from wp2_jax.verify.samplers import check_samplers, parse_velocity

GOLDEN = Path(__file__).parent / "golden"


def test_golden_trajectories():
    results = check_samplers(GOLDEN, "g_samplers")
    assert len(results) == 5 * 4
    assert not [r for r in results if not r.ok]
    assert max(r.max_rel for r in results) < 3e-6


@pytest.mark.parametrize("key", ["in.x", "out.unipc_n8_shift5.timesteps", "out.dpmpp_n8_shift5.f2.states"])
def test_an_altered_number_is_noticed(tmp_path, key):
    shutil.copy(GOLDEN / "g_samplers.json", tmp_path)
    tensors = load_file(GOLDEN / "g_samplers.safetensors")
    tensors[key].reshape(-1)[3] += 1
    save_file(tensors, tmp_path / "g_samplers.safetensors")
    assert [r for r in check_samplers(tmp_path, "g_samplers") if not r.ok]


def test_a_missing_and_a_stray_tensor_are_noticed(tmp_path):
    sidecar = json.loads((GOLDEN / "g_samplers.json").read_text())
    tensors = load_file(GOLDEN / "g_samplers.safetensors")
    sidecar["runs"] = sidecar["runs"][1:3]
    del tensors["out.unipc_n8_shift5.f1.states"]
    (tmp_path / "g.json").write_text(json.dumps(sidecar))
    save_file(tensors, tmp_path / "g.safetensors")
    bad = {r.item for r in check_samplers(tmp_path, "g") if not r.ok}
    assert "g/unipc_n8_shift5.f1.states" in bad and "g/out.dpmpp_n8_shift5.sigmas" in bad


def test_velocity_text():
    x, sigma = jnp.float32([0.1, -2.0]), jnp.float32(0.3)
    got = parse_velocity("v = -exp(x/2) + cos(3*x)**2 - 0.2*sigma")(x, sigma, sigma, jnp.int32(0))
    np.testing.assert_allclose(got, -np.exp(x / 2) + np.cos(3 * x) ** 2 - 0.06, rtol=1e-6)
    for text in ("v = __import__('os')", "v = x.shape", "v = x[0]", "v = y", "v = sin(x, x)", "v = 'x'"):
        with pytest.raises(ValueError, match="velocity function"):
            parse_velocity(text)


def _gaussian(spread: float):
    """Data N(0, spread^2): the exact velocity field, and the exact flow map from sigma to data."""

    def predict(x, t, sigma, index):
        alpha = 1.0 - sigma
        return x * (sigma - alpha * spread**2) / (alpha**2 * spread**2 + sigma**2)

    return predict, lambda x, sigma: x * spread / np.sqrt((1 - sigma) ** 2 * spread**2 + sigma**2)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_second_order_convergence_on_gaussian_data(solver, shift):
    predict, solution = _gaussian(0.5)
    x = jnp.linspace(-2.0, 2.0, 5)

    def error(steps: int) -> float:
        schedule = solver_schedule(solver, steps, shift)
        got = samplers.sample(schedule, predict, x)
        return float(np.abs(got - solution(np.asarray(x), schedule.sigmas[0])).max())

    # log sigma and log alpha are singular at the ends of the path, so order 2 is approached from below.
    errors = [error(steps) for steps in (160, 320, 640)]
    assert np.log2(errors[0] / errors[-1]) / 2 > 1.5, errors
    assert errors[-1] < 1e-3


def test_the_second_order_corrector_integrates_quadratic_predictions_exactly():
    """The exact solution is x_t = (sigma_t / sigma_s) x_s + sigma_t * integral of e^lambda m(lambda); the order
    conditions of the corrector say that it has no error when m is a quadratic in lambda."""
    schedule = solver_schedule("unipc", 10, 5.0)
    sigma = schedule.sigmas[:-1]
    lam = np.log(1 - sigma) - np.log(sigma)

    def m(x):
        return 0.7 - 0.4 * x + 0.25 * x**2

    for i in range(2, 10):
        nodes, weights = np.polynomial.legendre.leggauss(40)
        half = (lam[i] - lam[i - 1]) / 2
        grid = half * nodes + (lam[i] + lam[i - 1]) / 2
        start = 1.3
        exact = sigma[i] / sigma[i - 1] * start + sigma[i] * half * np.sum(weights * np.exp(grid) * m(grid))
        row = schedule.corrector[i]
        got = row @ [0.0, start, m(lam[i]), m(lam[i - 1]), m(lam[i - 2])]
        assert got == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_a_point_of_data_is_found_exactly(solver, steps):
    """If all data are one point the prediction of x0 is constant and every step of any order is exact."""
    point = jnp.float32([0.3, -1.2, 4.0])
    x = jnp.float32([1.0, 2.0, -3.0])
    schedule = solver_schedule(solver, steps, 5.0)
    states = samplers.trajectory(schedule, lambda x, t, sigma, i: (x - point) / sigma, x)
    got = states[-1]
    assert states.shape == (steps, 3)
    np.testing.assert_allclose(got, point, atol=2e-6)
    eps = (x - (1 - schedule.sigmas[0]) * point) / schedule.sigmas[0]
    path = [(1 - s) * point + s * eps for s in schedule.sigmas[1:]]
    np.testing.assert_allclose(states, np.stack(path), atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_steps_in_parts_equal_steps_at_once(solver):
    schedule, experts = solver_schedule(solver, 40, 5.0), Experts(0.9)
    x = jax.random.normal(jax.random.key(0), (2, 3))

    def predict(x, t, sigma, index):
        return jnp.sin(2 * x) - 0.2 * sigma

    whole = samplers.sample(schedule, predict, x)
    np.testing.assert_allclose(
        samplers.sample_experts(schedule, experts, {"high": predict, "low": predict}, x), whole, atol=1e-6
    )
    state = samplers.begin(x)
    for first in range(0, 40, 13):
        state = samplers.advance(schedule, predict, state, first, min(first + 13, 40))
    np.testing.assert_allclose(state.x, whole, atol=1e-6)


def test_experts_share_the_published_schedule_15_to_25():
    schedule, experts = solver_schedule("unipc", 40, 5.0), Experts(0.9)
    assert experts.segments(schedule.timesteps) == (("high", 0, 15), ("low", 15, 40))
    x = jnp.ones((2,))
    predict = {
        "high": lambda x, t, s, i: jnp.where(t >= 900, x, jnp.nan),
        "low": lambda x, t, s, i: jnp.where(t < 900, -x, jnp.nan),
    }
    assert np.isfinite(samplers.sample_experts(schedule, experts, predict, x)).all()


def test_the_model_sees_truncated_timesteps_and_full_sigmas():
    seen = []
    schedule = solver_schedule("unipc", 4, 5.0)

    def predict(x, t, sigma, index):
        jax.debug.callback(lambda *a: seen.append([float(v) for v in a]), t, sigma, index, ordered=True)
        return x

    samplers.sample(schedule, predict, jnp.zeros((1,))).block_until_ready()
    jax.effects_barrier()
    assert [s[0] for s in seen] == [999, 937, 833, 624]
    np.testing.assert_allclose([s[1] for s in seen], schedule.sigmas[:-1], rtol=1e-7)
    assert [s[2] for s in seen] == [0, 1, 2, 3]


def test_the_state_stays_float32_with_a_bfloat16_model():
    schedule = solver_schedule("unipc", 6, 5.0)

    def predict(x, t, sigma, index):
        return (0.3 * x).astype(jnp.bfloat16)

    x = jax.random.normal(jax.random.key(0), (64,))
    states = samplers.trajectory(schedule, predict, x.astype(jnp.bfloat16))
    got = states[-1]
    assert got.dtype == states.dtype == jnp.float32
    assert not np.array_equal(got, got.astype(jnp.bfloat16).astype(jnp.float32))


def test_bad_settings():
    for solver, steps, shift, field in (
        ("euler", 4, 5.0, "solver"),
        ("unipc", 0, 5.0, "steps"),
        ("dpm++", 4, 0.0, "shift"),
        ("unipc", 4, float("nan"), "shift"),
    ):
        with pytest.raises(ValueError, match=rf"sampler\.{field}"):
            solver_schedule(solver, steps, shift)
