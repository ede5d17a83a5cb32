"""A Stable Forcing run that was stopped and resumed is bit-equal to one that never stopped (cases.md 21)."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_world import (
    null_context,
    quick_compilation,
    stream_spec,
    student_weights,
    teacher_weights,
    vae_weights,
    world_batch,
)

from data_pipelines.loader import Loader, LoaderConfig
from wp2_jax import sharding, tree
from wp2_jax.objectives import dmd
from wp2_jax.objectives import stable_forcing as sf
from wp2_jax.train import loop, step
from wp2_jax.train import state as train_state

STEPS, STOP, CHUNKS = 4, 2, 4


class Worlds:
    """Four start pictures with actions and captions that the loader's own generator draws."""

    def __len__(self):
        return 4

    def name(self, index):
        return f"world-{index}"

    def sample(self, index, rng):
        drawn = world_batch(int(rng.integers(2**31)), 1, CHUNKS)
        return {**{name: rows[0] for name, rows in drawn.items()}, "key": self.name(index)}


@pytest.fixture(scope="module")
def program():
    spec = stream_spec(CHUNKS)
    optimisers = {"student": optax.adam(1e-3), "fake": optax.adam(1e-3)}
    teacher = teacher_weights(spec, 20)
    with quick_compilation():
        return sf.StableForcing(
            spec=spec,
            config=sf.StableForcingConfig(fake_updates=2, score=dmd.ScoreConfig(clip=8)),
            create=lambda key, params: train_state.create(key, params, optimisers, ema=("student",)),
            apply=functools.partial(step.apply_gradients, optimisers=optimisers, ema_decay=0.9),
            finish=step.finish,
            mesh=sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1]),
            frozen={"teacher": teacher, "autoencoder": vae_weights(), "null_context": null_context()},
            load_given=lambda: {"student": student_weights(spec), "teacher": teacher},
        )


def run(program, workdir, steps):
    settings = loop.LoopConfig(steps=steps, log_every=1, evaluate_every=0, sample_every=0, checkpoint_every=0, keep=1)
    with quick_compilation():
        return loop.run(program, Loader(Worlds(), LoaderConfig(batch=1, seed=3)), workdir, settings).state


def numbers(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def metrics(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


@pytest.mark.slow
def test_resumed_is_bit_equal(program, tmp_path):
    straight = run(program, tmp_path / "straight", STEPS)
    stopped = run(program, tmp_path / "stopped", STOP)
    assert int(stopped.step) == STOP
    resumed = run(program, tmp_path / "stopped", STEPS)

    roles = {field.name for field in dataclasses.fields(resumed)}
    assert {"params", "opt_state", "ema", "key", "step"} <= roles
    for (name, a), b in zip(tree.named_leaves(straight).items(), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(numbers(a), numbers(b), err_msg=name)
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "stopped")
    moved = [
        not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (straight.params, stopped.params)), strict=True)
    ]
    assert any(moved)
