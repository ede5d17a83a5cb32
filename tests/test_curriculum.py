"""The curriculum end to end: every stage trains from the one before, stops, goes on, and leaves a report."""

import json
import math

import jax
import numpy as np
import pytest
from PIL import Image
from tiny_world import quick_compilation

from wp2_jax import sharding
from wp2_jax.stages import run
from wp2_jax.train import plots

REGRESSION = ("autoencoder", "base", "action", "memory_1", "memory_2", "teacher_forcing", "pdd")

# The quick recipe with other numbers, and with two experts: what is left is mostly compiling.
SMALLEST = {
    "train.steps": 2,
    "train.batch": 4,
    "train.log_every": 1,
    "train.evaluate_every": 0,
    "train.sample_every": 0,
    "train.evaluate_batches": 1,
    "optim.warmup": 1,
    "data.clips": 6,
    "data.maps": 3,
    "data.test_maps": 1,
    "model.dim": 24,
    "model.num_heads": 2,
    "model.num_layers": 1,
    "model.unroll": 1,
    "model.ffn_dim": 32,
    "model.memory.widths": "(8, 8, 8, 8, 8, 8, 8)",
    "autoencoder.encoder_width": 8,
    "autoencoder.decoder_widths": "(8, 8, 8, 8)",
    "world.boundary": 0.9,
    "world.guidance": "(1.5, 1.5)",
    "world.intervals": "(4, 4)",
    "world.blocks": "(2, 2)",
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """The tiny recipe is one for a laptop: it runs on one of the virtual devices."""
    make = sharding.make_mesh
    monkeypatch.setattr(sharding, "make_mesh", lambda config: make(config, jax.devices()[:1]))


def curve(workdir, stage):
    return plots.read(workdir / stage / "metrics.jsonl")


def test_every_stage_runs_from_the_one_before(tmp_path):
    words = [f"--config.{key}={value}" for key, value in SMALLEST.items()]
    with quick_compilation():
        assert run.curriculum("experiments/tiny.py:quick", tmp_path, words)
    for stage in run.STAGES:
        losses = [values for name, (_, values) in curve(tmp_path, stage).items() if name.endswith("loss")]
        assert losses and np.isfinite(np.concatenate(losses)).all(), stage
    page = (tmp_path / "report.html").read_text()
    assert all(f"id='{stage}'" in page for stage in run.STAGES)

    before = (tmp_path / "pdd" / "metrics.jsonl").read_bytes()
    assert run.curriculum("experiments/tiny.py:quick", tmp_path, words), "finished stages are skipped"
    assert (tmp_path / "pdd" / "metrics.jsonl").read_bytes() == before


def test_a_stage_without_the_one_before_says_what_to_run(tmp_path):
    from wp2_jax.train import config

    experiment = config.load("experiments/tiny.py:quick-memory_2", ["--config.data.clips=6", "--config.data.maps=3"])
    with pytest.raises(ValueError, match=r"wp2 train --config experiments/NAME.py:\w+ --workdir"):
        run.train(experiment, tmp_path)


def test_an_unknown_stage_names_the_stages():
    from wp2_jax.train import config

    with pytest.raises(ValueError, match="memory_1, memory_2"):
        config.load("experiments/tiny.py:memori")


@pytest.mark.slow
def test_the_quick_curriculum_learns(tmp_path):
    """The held-out loss of every regression stage falls; Stable Forcing stays finite (about 20 minutes)."""
    assert run.curriculum("experiments/tiny.py:quick", tmp_path)
    for stage in REGRESSION:
        _, held_out = curve(tmp_path, stage)["eval/loss"]
        assert held_out[-1] < held_out[0], (stage, held_out)
    rows = [json.loads(line) for line in (tmp_path / "stable_forcing" / "metrics.jsonl").read_text().splitlines()]
    for name in ("fake_loss", "score_gradient", "grad_norm/student", "grad_norm/fake"):
        values = [row[f"train/{name}"] for row in rows if f"train/{name}" in row]
        assert values and all(math.isfinite(value) for value in values), name
    for stage in run.STAGES:
        for path in (tmp_path / stage / "samples").glob("*.png"):
            assert np.asarray(Image.open(path)).std() > 5, path
