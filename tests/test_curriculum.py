"""The curriculum end to end: every stage trains from the one before, stops, goes on, and leaves a report."""

import json
import math

import jax
import numpy as np
import pytest
from motion import shift
from PIL import Image
from scipy import ndimage
from tiny_world import quick_compilation

from data_pipelines import loader
from data_pipelines.tfds_builder import Records
from wp2_jax import sharding
from wp2_jax.controls import actions
from wp2_jax.inference import generate, load
from wp2_jax.stages import run, samples
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
    words.append(f"--config.stages={tuple(run.STAGES)}")
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


def test_shift_of_a_shifted_picture():
    picture = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(64, 80, 3)), (2, 2, 0))
    assert [shift(picture[:, 8:72], picture[:, 8 - k : 72 - k]) for k in (-7, 0, 3)] == [-7, 0, 3]


def turns(workdir, command, count=8):
    """Mean shift between pictures two apart in the first chunk, few-step, from held-out start pictures."""
    loaded = load.load(workdir, "few_step")
    world, records = loaded.world, Records(workdir / "data", "test")
    clips = [records[index] for index in range(count)]
    texts = [[loader.chunk_captions(clip, world.config.chunk, world.config.chunk)[0].text] for clip in clips]
    ids = np.stack([loaded.tokenizer.encode(text) for text in texts])
    null = loaded.tokenizer.encode([world.config.negative_prompt])
    contexts, null = (np.asarray(generate.encode_text(world, loaded.text_params, x)) for x in (ids, null[None]))
    rotation = loaded.source.trained_rotation
    assert rotation is not None
    rows = [
        actions.parse_actions(
            f"{command}-{world.config.chunk}",
            clip["perspective"],
            yaw_rotation_speed_deg=rotation[0],
            pitch_rotation_speed_deg=rotation[1],
        )
        for clip in clips
    ]
    images = np.stack([clip["pictures"][0].astype(np.float32) / 127.5 - 1 for clip in clips])
    null = np.broadcast_to(null, (count, *null.shape[1:]))
    made = samples.worlds(world.stream("few_step", 1), loaded.params, images, np.stack(rows), contexts, null)
    videos = np.concatenate(list(made), axis=1)
    return np.mean([shift(video[i], video[i + 2]) for video in videos for i in range(1, 11, 2)])


@pytest.mark.slow
def test_the_quick_curriculum_learns(tmp_path):
    """Held-out losses of the regression stages fall, Stable Forcing stays finite, worlds turn as commanded (20 min)."""
    assert run.curriculum("experiments/tiny.py:quick", tmp_path)
    # Turning left moves what is seen to the right.
    left, right = turns(tmp_path, "left"), turns(tmp_path, "right")
    assert left > 0.05 > -0.05 > right, (left, right)
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
