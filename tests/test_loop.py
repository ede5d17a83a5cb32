"""What a run writes, and what it does with numbers that are not finite."""

import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_program
from PIL import Image
from toy_program import HELD_OUT, Numbers, TwoLosses

from wp2_jax import sharding
from wp2_jax.checkpoints import orbax_io
from wp2_jax.sharding import MeshConfig
from wp2_jax.train import loop, metrics, optim, plots, step
from wp2_jax.train.optim import OptimConfig


def run(workdir, steps, loader=None, record=None, **changes):
    config = toy_program.config(steps, **changes)
    return loop.run(TwoLosses(), loader or Numbers(), workdir, config, held_out=HELD_OUT, record=record)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_files_of_a_run(tmp_path, capsys):
    record = {"config": {"optim": {"learning_rate": 0.1}}, "diff": {}, "stage": "toy"}
    result = run(tmp_path, 5, record=record, sample_every=3)
    rows = lines(tmp_path)
    assert [row["step"] for row in rows if "train/student_loss" in row] == [2, 3, 4, 5]  # 3: a checkpoint
    assert [row["step"] for row in rows if "eval/student_loss" in row] == [0, 4, 5]
    assert {"train/grad_norm/student", "train/grad_norm/critic", "train/skipped"} <= set(rows[1])
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == ["0000003_weights.png", "0000005_weights.png"]
    assert Image.open(tmp_path / "samples" / "0000005_weights.png").size == (6, 4)

    metadata = orbax_io.load_metadata(tmp_path / "checkpoints")
    assert {name: metadata[name] for name in record} == record
    assert (metadata["step"], metadata["loader"]) == (5, b"5")
    assert metadata["provenance"]["versions"]["jax"] == jax.__version__
    averaged = orbax_io.load_params(tmp_path / "checkpoints", "student", ema=True)
    np.testing.assert_array_equal(averaged["w"], result.state.ema["student"]["w"])
    assert "5/5" in capsys.readouterr().err  # not a terminal: a line now and then

    changed = {**record, "config": {"optim": {"learning_rate": 0.2}}}
    run(tmp_path, 6, record=changed)
    assert "optim.learning_rate was 0.1, is 0.2" in capsys.readouterr().out


def test_held_out_loss_is_the_mean_over_batches(tmp_path):
    run(tmp_path, 1)
    program = TwoLosses()
    state = step.jit_init(program.init, jax.random.key(0), {}, program.mesh, program.rules)
    by_hand = [
        np.mean(
            (b["x"] @ np.asarray(state.params["student"]["w"]) - b["x"] @ np.asarray(program.frozen["teacher"]["w"]))
            ** 2
        )
        for b in HELD_OUT
    ]
    np.testing.assert_allclose(lines(tmp_path)[0]["eval/student_loss"], np.mean(by_hand), rtol=1e-5)


def test_a_nan_in_the_data_is_skipped_and_named(tmp_path, capsys):
    result = run(tmp_path, 6, loader=Numbers(nan_at=(3,)), log_every=1)
    rows = {row["step"]: row for row in lines(tmp_path) if "train/skipped" in row}
    assert [rows[i]["train/skipped"] for i in range(1, 7)] == [0, 0, 0, 1, 0, 0]
    assert (
        "step 4: loss or gradient not finite, update skipped; not finite in the data: clip3-2"
        in capsys.readouterr().err
    )
    assert int(result.state.skipped) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))


def test_too_many_in_a_row_end_the_run_with_the_last_good_checkpoint(tmp_path):
    loader = Numbers(nan_at=range(4, 100))
    with pytest.raises(loop.NonFiniteError, match=r"max_skipped_in_row: 3 .* up to step 7.*clip6-2"):
        run(tmp_path, 50, loader=loader, max_skipped_in_row=3, log_every=5)
    assert orbax_io.steps(tmp_path / "checkpoints")[-1] == 6
    weights = orbax_io.load_params(tmp_path / "checkpoints")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights))


def test_a_loader_that_ends_is_an_error(tmp_path):
    def end():
        raise StopIteration

    with pytest.raises(ValueError, match=r"ended before loop\.steps"):
        run(tmp_path, 9, loader=Numbers(before={2: end}))


def test_a_program_of_one_loss_learns_and_starts_from_given_weights(tmp_path):
    mesh = sharding.make_mesh(MeshConfig())
    teacher = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

    def loss_fn(params, batch, frozen, key):
        noise = 0.1 * jax.random.normal(key, batch["x"].shape)
        return jnp.mean(((batch["x"] + noise) @ params["all"]["w"] - batch["x"] @ frozen["w"]) ** 2), {}

    program = step.LossProgram(
        init_params=lambda key, given: given or {"all": {"w": jnp.zeros((16, 4))}},
        loss_fn=loss_fn,
        optimisers={"all": optim.make(OptimConfig(learning_rate=0.05))},
        mesh=mesh,
        frozen={"w": jnp.asarray(teacher)},
        load_given=lambda: {"all": {"w": jax.device_put(jnp.full((16, 4), 0.5), jax.devices()[0])}},
        ema_decay=0.5,
        accumulate=2,
    )
    config = toy_program.config(60, checkpoint_every=0, log_every=10, evaluate_every=30)
    result = loop.run(program, Numbers(), tmp_path / "a", config, held_out=HELD_OUT)
    losses = [row["eval/loss"] for row in lines(tmp_path / "a") if "eval/loss" in row]
    noise = [0.1 * jax.random.normal(step.rng.fold(result.state.key, "evaluate"), (8, 16)) for _ in HELD_OUT]
    first = [
        np.mean(((b["x"] + n) @ np.full((16, 4), 0.5) - b["x"] @ teacher) ** 2)
        for b, n in zip(HELD_OUT, noise, strict=True)
    ]
    np.testing.assert_allclose(losses[0], np.mean(first), rtol=1e-4)
    assert losses[-1] < 0.2 * losses[0]
    assert set(result.state.ema) == {"all"}


def test_means_leave_out_what_was_not_measured():
    means = metrics.mean([{"a": 1.0, "b": math.nan}, {"a": 3.0, "b": 5.0, "c": math.nan}])
    assert (means["a"], means["b"]) == (2.0, 5.0) and math.isnan(means["c"])


def test_curves(tmp_path):
    run(tmp_path, 5)
    curves = plots.read(tmp_path / "metrics.jsonl")
    assert curves["train/student_loss"][0] == [2, 3, 4, 5]
    picture = Image.open(io.BytesIO(plots.stage(tmp_path / "metrics.jsonl", "toy")))
    assert picture.format == "PNG" and picture.width > picture.height
    plots.plot(curves, [["train/grad_norm/student", "absent"], ["absent"]], "norms")
    with pytest.raises(ValueError, match=r"none of .*absent.*there are .*eval/student_loss"):
        plots.plot(curves, [["absent"]], "nothing")
