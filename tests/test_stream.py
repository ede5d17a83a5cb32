"""The streaming step as a stream: actions act on their frame, nothing recompiles, a state is a value."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_workdir
from random_workdir import PITCH, YAW, the_world

from wp2_jax import sharding, xla_flags
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.controls.actions import parse_actions
from wp2_jax.controls.inputs import load_inputs
from wp2_jax.inference import generate, load, snapshot, stream
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT
from wp2_jax.tree import TreeMismatchError

CHUNKS = 16
KEY = jax.random.key(5)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    return random_workdir.write(tmp_path_factory.mktemp("curriculum"), ("base", "stable_forcing"))


@pytest.fixture(scope="module")
def student(workdir) -> load.Loaded:
    return load.load(workdir, "few_step")


@pytest.fixture(scope="module")
def spec(student):
    return generate.stream_spec(student.source, CHUNKS)


@pytest.fixture(scope="module")
def contexts(student) -> jax.Array:
    """[4, 1, 1, S, D]: a context for each of four captions."""
    ids = jnp.asarray(student.tokenizer.encode(random_workdir.CAPTIONS))[:, None]
    return jnp.stack([generate.encode_text(student.world, student.text_params, row[None]) for row in ids])


def begin(spec, student, contexts) -> stream.StreamState:
    image = np.random.default_rng(0).uniform(-1, 1, (1, spec.height, spec.width, 3)).astype(np.float32)
    frames = generate.condition_frames(spec)
    return generate.start(spec, student.params, jnp.asarray(image), frames, jnp.copy(contexts[3]), jnp.copy(KEY))


def forward(spec, student, state, rows, context, first: bool):
    """Emit and absorb from a copy: the state that is given stays."""
    state, made = generate.emit(spec, student.params, copy(state), jnp.asarray(rows[None]), context, first=first)
    state, _ = generate.absorb(spec, student.params, state, made, first=first)
    return state, np.asarray(made.video)[0]


def copy(state):
    return jax.tree.map(jnp.copy, state)


def rows_of(action: str) -> np.ndarray:
    return parse_actions(action, "tps", yaw_rotation_speed_deg=YAW, pitch_rotation_speed_deg=PITCH)


def compiled_programs(jitted) -> int:
    return jitted._cache_size()


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_an_action_reaches_the_tokens_of_its_own_frame():
    """Without self-attention nothing moves between frames: what changes is what the action was injected into."""
    world = the_world()
    params = random_workdir.experts(10)["high"]
    attention = params["blocks"]["self_attention"]
    still = {**attention, "out": jax.tree.map(np.zeros_like, attention["out"])}
    params = {**params, "blocks": {**params["blocks"], "self_attention": still}}
    random = np.random.default_rng(1)
    frames, side = 8, 8
    noisy = random.standard_normal((1, frames, side, side, 16)).astype(np.float32)
    y = random.standard_normal((1, frames, side, side, 20)).astype(np.float32)
    context = jnp.asarray(random.standard_normal((1, 1, 112, 16)).astype(np.float32))
    positions = jnp.arange(frames, dtype=jnp.int32)[None]

    @jax.jit
    def velocity(rows):
        t = jnp.full((1, frames), 700.0)
        captions = jnp.zeros_like(positions)
        model = DiT(world.dit)
        group = passes.full_frames(model, params, noisy, y, t, rows, positions, captions)
        return passes.bidirectional_frames(model, params, None, group, context, None)

    # One w at latent frame 5 only.
    rest, once = np.zeros((2, 1, frames, 6), np.float32)
    once[0, 5, 2] = 1
    changed = np.abs(np.asarray(velocity(rest)) - np.asarray(velocity(once))).max(axis=(0, 2, 3, 4))
    assert changed[5] > 1e-3
    assert (np.delete(changed, 5) == 0).all()


def test_an_action_acts_from_its_frame_on(spec, student, contexts):
    """One w at latent frame 5: chunk 0 (frames 0-3) is the same to the bit, chunk 1 is not."""
    rest, once = rows_of("none-12"), rows_of("none-5,w-1,none-6")
    made = []
    for rows in (rest, once):
        state = begin(spec, student, contexts)
        videos = []
        for chunk in range(2):
            part = rows[4 * chunk : 4 * (chunk + 1)]
            state, video = forward(spec, student, state, part, contexts[0], chunk == 0)
            videos.append(video)
        made.append(videos)
    np.testing.assert_array_equal(made[0][0], made[1][0])
    assert np.abs(made[0][1] - made[1][1]).max() > 1e-3


@pytest.mark.parametrize("mode", ["few_step", "ar", "bi"])
def test_keys_of_a_caption_stand_for_its_context(student, contexts, mode):
    """Two chunks from contexts, whose keys every pass makes anew, and from keys made once: null caption included."""
    world = student.world
    spec = world.stream(mode, 4, **({} if mode == "few_step" else {"steps": 2}))
    params = student.params
    if mode != "few_step":
        params = {**params, "experts": {name: random_workdir.experts(10)[name] for name in spec.experts.names}}
    image = jnp.zeros((1, spec.height, spec.width, 3))
    rows = jnp.asarray(rows_of("w-8")[None])
    start, emit, absorb = generate.programs(xla_flags.quick_compile("cpu"))
    made = []
    for of in (lambda context: context, lambda context: generate.caption(spec, params, context)):
        state = start(spec, params, image, 8, of(contexts[3]), jnp.copy(KEY))
        state, first = emit(spec, params, state, rows[:, :4], of(contexts[0]), first=True)
        state, _ = absorb(spec, params, state, first, first=True)
        _, second = emit(spec, params, state, rows[:, 4:], of(contexts[1]), first=False)
        made.append((first.latents, second.latents))
    for plain, kept in zip(*made, strict=True):
        assert np.abs(np.asarray(plain)).max() > 0.1
        np.testing.assert_allclose(kept, plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_raises(AssertionError, np.testing.assert_allclose, made[0][0], made[0][1], rtol=1e-2)


def test_memory_takes_each_frame_s_own_action(spec, student, contexts):
    """Of chunk 1 (no sink) the memory has frames 0 and 2 (compressed) and 3 (the latest): frame 1 is not in it."""
    rows = rows_of("none-8")[4:]
    state, _ = forward(spec, student, begin(spec, student, contexts), rows, contexts[0], True)
    _, made = generate.emit(spec, student.params, copy(state), jnp.asarray(rows[None]), contexts[0], first=False)

    def caches(frame: int | None):
        changed = rows.copy()
        if frame is not None:
            changed[frame, 1] = YAW
        moved = made.replace(actions=jnp.asarray(changed[None]))
        after, _ = generate.absorb(spec, student.params, copy(state), moved, first=False)
        return [np.asarray(after.experts[name].cache.k) for name in spec.experts.names]

    expected, layout = caches(None), spec.layout
    chunk = layout.compressed_start + layout.chunk_tokens
    frame_tokens = layout.memory_rows * layout.memory_cols
    latest = slice(0, layout.temporal_tokens)
    parts = {0: slice(chunk, chunk + frame_tokens), 2: slice(chunk + frame_tokens, chunk + 2 * frame_tokens), 3: latest}
    for frame in range(4):
        for before, after in zip(expected, caches(frame), strict=True):
            # The keys of the first layer are made before any token sees another.
            changed = np.abs(after[0] - before[0]).max(axis=(0, 2, 3)) > 0
            assert not changed.any()
            deep = np.flatnonzero(np.abs(after[1] - before[1]).max(axis=(0, 2, 3)) > 0)
            if frame == 1:
                assert not deep.size
            else:
                assert set(range(*parts[frame].indices(layout.tokens))) <= set(deep)
                # Earlier chunks and the sink stay as they were computed.
                assert not set(deep) & {*range(layout.temporal_tokens, chunk)}


def check_mesh(workdir, student, tmp_path, devices, axis):
    """The same seed gives the same video with the weights cut over `devices` devices, and along seq the tokens too."""
    items = load_inputs(random_workdir.write_inputs(tmp_path, 8), generate.input_options(student.source))
    (request,) = generate.prepare(student.source, student.tokenizer, items)
    expected = np.concatenate(list(generate.generate(student, request, 0)))
    sizes = sharding.MeshConfig(**{"fsdp": 1, axis: devices})
    mesh = sharding.make_mesh(sizes, jax.devices()[:devices])
    rules = sharding.Rules(sharding.RULES.specs, min_size=1, over=axis)
    spread = load.load(workdir, "few_step", mesh=mesh, rules=rules)
    kernel = spread.params["experts"]["high"]["blocks"]["ffn"]["layer_0"]["kernel"]
    assert len(kernel.sharding.device_set) == devices and not kernel.sharding.is_fully_replicated
    found = np.concatenate(list(generate.generate(spread, request, 0)))
    # Rounding over a rollout: 1e-6 in the start picture moves this random world by 8e-5.
    np.testing.assert_allclose(found, expected, atol=5e-4)


@pytest.mark.parametrize("axis", [pytest.param("fsdp", marks=pytest.mark.slow), "seq"])
def test_mesh(workdir, student, tmp_path, axis):
    check_mesh(workdir, student, tmp_path, 8, axis)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "seq"])
@pytest.mark.parametrize("devices", [2, 4])
def test_meshes(workdir, student, tmp_path, devices, axis):
    check_mesh(workdir, student, tmp_path, devices, axis)


def test_nothing_recompiles_and_nothing_grows(spec, student, contexts):
    rows = rows_of(f"none-4,w+right-{4 * CHUNKS - 4}")
    state = begin(spec, student, contexts)
    shapes = compiled = None
    for chunk in range(CHUNKS):
        part = jnp.asarray(rows[None, 4 * chunk : 4 * (chunk + 1)])
        state, made = generate.emit(spec, student.params, state, part, contexts[chunk % 3], first=chunk == 0)
        state, _ = generate.absorb(spec, student.params, state, made, first=chunk == 0)
        now = jax.tree.map(lambda x: (x.shape, x.dtype), state)
        sizes = compiled_programs(generate.emit), compiled_programs(generate.absorb)
        if chunk == 1:
            shapes, compiled = now, sizes
        elif chunk > 1:
            # The same program and the same buffers: after 64 latent frames a chunk costs what it does after 8.
            assert (now, sizes) == (shapes, compiled)
        assert int(state.index) == chunk + 1 and np.isfinite(made.video).all()
    caches = [expert.cache for expert in state.experts.values()]
    assert all(cache is not None and int(cache.chunks) == CHUNKS for cache in caches)


def test_a_world_can_be_forked(spec, student, contexts):
    rows = rows_of("none-4,w-4,w+right-4")
    state, _ = forward(spec, student, begin(spec, student, contexts), rows[:4], contexts[0], True)
    state, _ = forward(spec, student, state, rows[4:8], contexts[0], False)
    snapshot = copy(state)
    straight = forward(spec, student, state, rows[8:], contexts[0], False)
    other = forward(spec, student, state, -rows[8:], contexts[1], False)
    again = forward(spec, student, state, rows[8:], contexts[0], False)
    assert_equal(straight, again)
    assert_equal(state, snapshot)
    assert np.abs(straight[1] - other[1]).max() > 1e-3


def test_a_world_goes_on_from_disk(spec, student, contexts, tmp_path):
    rows = rows_of("none-4,w-4")
    about = {"stage": "stable_forcing", "mode": "few_step", "capacity": spec.capacity}
    state, _ = forward(spec, student, begin(spec, student, contexts), rows[:4], contexts[0], True)
    path = snapshot.save(tmp_path / "worlds" / "one.safetensors", state, about)
    like = jax.eval_shape(lambda: begin(spec, student, contexts))
    loaded = snapshot.load(path, like, about)
    assert_equal(loaded, state)
    assert_equal(
        forward(spec, student, loaded, rows[4:], contexts[1], False),
        forward(spec, student, state, rows[4:], contexts[1], False),
    )
    with pytest.raises(CheckpointError, match="mode 'few_step', not 'ar'"):
        snapshot.load(path, like, about | {"mode": "ar"})
    with pytest.raises(TreeMismatchError, match=r"missing +decoder"):
        snapshot.load(path, like.replace(decoder={"more": like.index}), about)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        snapshot.load(path, like, about)
    assert [file.name for file in path.parent.iterdir()] == ["one.safetensors"]


def test_step_is_emit_and_absorb(spec, student, contexts):
    rows = rows_of("none-4,w-4")
    state, _ = forward(spec, student, begin(spec, student, contexts), rows[:4], contexts[0], True)
    expected = forward(spec, student, state, rows[4:], contexts[1], False)
    step = jax.jit(stream.step, static_argnums=0, static_argnames=("first",))
    after, video = step(spec, student.params, state, jnp.asarray(rows[None, 4:]), contexts[1], first=False)
    np.testing.assert_allclose(video[0], expected[1], atol=1e-5)
    assert int(after.index) == int(expected[0].index) == 2
