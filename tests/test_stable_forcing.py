"""Whole updates of Stable Forcing at the smallest size: what is scored, what moves, what is skipped, the memory."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_world import (
    CHUNK,
    null_context,
    quick_compilation,
    quick_jit,
    stream_spec,
    student_weights,
    teacher_weights,
    vae_weights,
    world_batch,
)

from wp2_jax import rng, sharding
from wp2_jax.diffusion import flow, guidance
from wp2_jax.objectives import dmd
from wp2_jax.objectives import stable_forcing as sf
from wp2_jax.train import state as train_state
from wp2_jax.train import step

CLIP = 8
CAPACITY = 16
# Three clips, of which two have a memory.
CHUNKS = 6
KEY = jax.random.key(0)


class _Metered(sf.StableForcing):
    """Notes the peak of one update: what is alive at each call, and what its program takes besides."""

    def __post_init__(self):
        super().__post_init__()
        self.programs = {}
        self.reset()

    def reset(self):
        self.peak, self.record, self.calls, self.measuring = 0, 0, 0, False

    def call(self, name, *args):
        if not self.measuring:
            return super().call(name, *args)
        with jax.set_mesh(self.mesh):
            if name not in self.programs:
                self.programs[name] = self.functions[name].lower(*args).compile().memory_analysis()
            use = self.programs[name]
            live = sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())
            new = use.temp_size_in_bytes + use.output_size_in_bytes - use.alias_size_in_bytes
            self.peak = max(self.peak, live + new)
        out = super().call(name, *args)
        if name.endswith("_chunk"):
            # The listed record: the rollout and what it was asked for.
            self.record = _bytes((out, args[2]))
        self.calls += 1
        return out


def _bytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _program(capacity: int, fake_updates: int = 2) -> _Metered:
    spec = stream_spec(capacity)
    optimisers = {"student": optax.adam(1e-4), "fake": optax.adam(1e-4)}
    teacher = teacher_weights(spec, 20)
    with quick_compilation():
        return _Metered(
            spec=spec,
            config=sf.StableForcingConfig(fake_updates=fake_updates, score=dmd.ScoreConfig(clip=CLIP)),
            create=lambda key, params: train_state.create(key, params, optimisers, ema=("student",)),
            apply=functools.partial(step.apply_gradients, optimisers=optimisers, ema_decay=0.9),
            finish=step.finish,
            mesh=sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1]),
            frozen={"teacher": teacher, "autoencoder": vae_weights(), "null_context": null_context()},
            load_given=lambda: {"student": student_weights(spec), "teacher": teacher},
        )


@functools.cache
def _shared():
    return _program(CAPACITY)


def _fresh_state(program):
    with quick_compilation():
        return step.jit_init(program.init, KEY, program.given(), program.mesh, program.rules)


@functools.cache
def _rolled():
    """(conditions, rollout of CHUNKS chunks, fake weights that are not the teacher's)."""
    program = _shared()
    given = program._conditions(world_batch(1, 1, CHUNKS), program.frozen)
    rolled = program.roll_out(student_weights(program.spec), program.frozen, given, KEY, np.arange(CHUNKS) % 4)
    return given, rolled, teacher_weights(program.spec, 30)


def _moved(before, after) -> bool:
    return any(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), before, after)))


def test_twenty_updates_keep_every_step_and_train_both_experts():
    program = _shared()
    state = _fresh_state(program)
    before = jax.device_get(state.params)
    rows = []
    for index in range(20):
        state, metrics = program.update(state, world_batch(index, 1, CHUNKS), program.frozen)
        rows.append({name: float(value) for name, value in metrics.items()})
    assert int(state.step) == 20 and int(state.skipped) == 0
    for block in range(4):
        assert sum(row[f"kept/{block}"] for row in rows) > 0
        norms = [row[f"grad_norm/step_{block}"] for row in rows]
        # Measured exactly where the block was kept.
        assert [np.isfinite(norm) and norm > 0 for norm in norms] == [row[f"kept/{block}"] > 0 for row in rows]
    assert all(sum(row[f"kept/{block}"] for block in range(4)) == CHUNKS for row in rows)
    for expert, blocks in (("high", (0, 1)), ("low", (2, 3))):
        for row in rows:
            norm = row[f"grad_norm/student/{expert}"]
            assert np.isfinite(norm) and (norm > 0) == any(row[f"kept/{block}"] for block in blocks)
    after = jax.device_get(state.params)
    for role in ("student", "fake"):
        for expert in ("high", "low"):
            assert _moved(before[role][expert]["blocks"], after[role][expert]["blocks"])
    assert _moved(before["fake"]["low"]["compressor"], after["fake"]["low"]["compressor"])
    # The student's caches are constants by default.
    assert not _moved(before["student"]["low"]["compressor"], after["student"]["low"]["compressor"])
    assert _moved(jax.device_get(state.ema["student"]), after["student"])
    for name in ("fake_loss", "score_gradient", "replay_loss", "grad_norm/student", "grad_norm/fake"):
        assert all(np.isfinite(row[name]) and row[name] > 0 for row in rows), name
    # A rollout of another length compiles nothing.
    sizes = {name: function._cache_size() for name, function in program.functions.items()}
    program.update(state, world_batch(0, 1, 4), program.frozen)
    assert sizes == {name: function._cache_size() for name, function in program.functions.items()}


def test_what_is_not_finite_is_skipped_and_counted():
    program = _shared()
    state = _fresh_state(program)
    before = jax.device_get((state.params, state.opt_state, state.ema))
    batch = world_batch(0, 1, CHUNKS)
    batch["actions"][0, 5, 0] = np.nan
    state, metrics = program.update(state, batch, program.frozen)
    assert not _moved(before, jax.device_get((state.params, state.opt_state, state.ema)))
    assert int(metrics["skipped"]) == int(metrics["skipped_student"]) == int(state.skipped) == 1
    assert int(metrics["skipped_fake"]) == program.config.fake_updates
    assert int(state.step) == 1


@functools.cache
def _velocities():
    """(real weights, fake weights, rollout, conditions, clip) -> guided real velocity, fake velocity, x, sigma."""
    program = _shared()
    spec, config = program.spec, program.config.score
    model = dmd.scorers(spec)["low"]

    def velocities(real, fake, rolled, given, index, key):
        clip = dmd.cut(spec, config, rolled, given, index)
        eps, sigma = dmd.draw(spec, config, "low", key, clip)
        x = flow.interpolate(clip.latents, eps, sigma)
        null = dmd.clip_velocity(spec, model, real, clip, null=True)
        guided = guidance.guided(dmd.clip_velocity(spec, model, real, clip), null, config.guide_scale)
        return guided(x, sigma), dmd.clip_velocity(spec, model, fake, clip)(x, sigma), x, sigma

    function = quick_jit(velocities)

    def run(*args, key=KEY):
        return jax.device_get(function(*args, key))

    return run


def _without(weights):
    """The weights with another compressor."""
    return {**weights, "compressor": jax.tree.map(lambda x: 1.5 * x, weights["compressor"])}


def test_each_scorer_uses_its_own_compressor():
    given, rolled, fake = _rolled()
    real, fake = _shared().frozen["teacher"]["low"], fake["low"]
    for index in range(CHUNKS * CHUNK // CLIP):
        clip = np.asarray(index, np.int32)
        v_real, v_fake, _, _ = _velocities()(real, fake, rolled, given, clip)
        other_real, same_fake, _, _ = _velocities()(_without(real), fake, rolled, given, clip)
        same_real, other_fake, _, _ = _velocities()(real, _without(fake), rolled, given, clip)
        np.testing.assert_array_equal(same_fake, v_fake)
        np.testing.assert_array_equal(same_real, v_real)
        # The first clip starts the world and has no memory.
        changed = [np.abs(a - b).max() > 1e-4 for a, b in ((other_real, v_real), (other_fake, v_fake))]
        assert changed == [index > 0] * 2


def test_one_history_latent_changes_the_score_and_a_later_one_does_not():
    given, rolled, fake = _rolled()
    real, fake = _shared().frozen["teacher"]["low"], fake["low"]
    clip = np.asarray(1, np.int32)
    expected = _velocities()(real, fake, rolled, given, clip)[:2]

    def changed(frame: int) -> list[bool]:
        latents = rolled.latents.at[:, frame, 3, 4, 5].add(3.0)
        found = _velocities()(real, fake, rolled.replace(latents=latents), given, clip)[:2]
        return [bool(np.abs(a - b).max() > 1e-6) for a, b in zip(found, expected, strict=True)]

    assert changed(2) == changed(CLIP - 1) == [True, True]
    assert changed(2 * CLIP) == [False, False]


def test_g_of_every_clip_is_minus_sigma_times_the_difference_of_velocities():
    program = _shared()
    spec, config = program.spec, program.config.score
    given, rolled, fake = _rolled()
    places = np.asarray([0.1, 0.9, 0.4], np.float32)
    names = [dmd.expert_of(spec, config, float(place)) for place in places]
    assert names == ["low", "high", "low"]
    scored = jax.device_get(program.score(fake, program.frozen, rolled, given, KEY, places, CHUNKS))
    assert not np.any(scored.g[:, CHUNKS * CHUNK :])
    parts = np.split(scored.g[:, : CHUNKS * CHUNK], 3, axis=1)
    np.testing.assert_allclose(scored.size, sum(np.abs(part).mean() for part in parts), rtol=1e-5)
    for index in (0, 2):
        clip = np.asarray(index, np.int32)
        key = rng.fold(KEY, "clip", index)
        real = program.frozen["teacher"]["low"]
        v_real, v_fake, x, sigma = _velocities()(real, fake["low"], rolled, given, clip, key=key)
        assert 0.09 < sigma[0] < 0.9
        level = sigma[:, None, None, None, None]
        x0 = np.asarray(rolled.latents[:, index * CLIP : (index + 1) * CLIP])
        size = np.abs(x0 - (x - level * v_real)).mean(axis=(1, 2, 3, 4), keepdims=True)
        expected = -level * (v_fake - v_real) / size
        np.testing.assert_allclose(parts[index], expected, atol=1e-4 * np.abs(expected).max())


def test_a_clip_is_cut_with_its_controls_and_its_past():
    program = _shared()
    given, rolled, _ = _rolled()
    clip = dmd.cut(program.spec, program.config.score, rolled, given, jnp.asarray(2, jnp.int32))
    np.testing.assert_array_equal(clip.length, [16])
    np.testing.assert_array_equal(clip.positions[0], 16 + np.arange(CLIP))
    np.testing.assert_array_equal(clip.latents, rolled.latents[:, 16:24])
    np.testing.assert_array_equal(clip.y, rolled.state.y[:, 16:24])
    np.testing.assert_array_equal(clip.actions, given.actions[:, 16:24])
    np.testing.assert_array_equal(clip.contexts, given.contexts[:, 4:6])
    np.testing.assert_array_equal(clip.captions[0], [0, 0, 0, 0, 1, 1, 1, 1])
    assert not np.any(clip.history.captions) and np.any(rolled.lr_latents[:, 10:12])
    np.testing.assert_array_equal(clip.history.lr_latents[:, :8], rolled.lr_latents[:, :8])


def test_a_batch_that_does_not_fit_is_an_error():
    program = _shared()
    for chunks, message in ((CAPACITY + 2, "set capacity, now 16"), (3, r"score\.clip=8 does not cut")):
        with pytest.raises(ValueError, match=message):
            program._conditions(world_batch(0, 1, chunks), program.frozen)
    short = world_batch(0, 1, 4)
    short["actions"] = short["actions"][:, :-1]
    with pytest.raises(ValueError, match="15 latent frames for 4 captions"):
        program._conditions(short, program.frozen)
    with pytest.raises(ValueError, match="memory_grad='some'"):
        sf.StableForcingConfig(memory_grad="some")


def _peaks(program, lengths) -> list[int]:
    state = _fresh_state(program)
    peaks = []
    for chunks in lengths:
        batch = world_batch(0, 1, chunks)
        program.reset()
        program.measuring = True
        gc.collect()
        state, metrics = program.update(state, batch, program.frozen)
        jax.block_until_ready(metrics)
        del metrics
        assert program.calls >= 2 * chunks
        peaks.append(program.peak - program.record - _bytes(batch))
        program.reset()
    return peaks


def _assert_flat(peaks):
    assert min(peaks) > 0
    assert max(peaks) <= 1.1 * min(peaks), peaks


def test_memory_does_not_grow_with_the_number_of_chunks():
    _assert_flat(_peaks(_shared(), (4, CAPACITY)))


@pytest.mark.slow
def test_memory_is_the_same_for_4_16_and_80_chunks():
    _assert_flat(_peaks(_program(80, fake_updates=5), (4, 16, 80)))
