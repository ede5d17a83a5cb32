"""The backbone apart from golden numbers: streams against one pass, precision, rematerialisation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax.models import cache as kv
from wp2_jax.models import passes
from wp2_jax.models.dit import DiT, DiTConfig
from wp2_jax.models.experts import expert_models
from wp2_jax.models.memory import MemoryConfig, average_down, init_state
from wp2_jax.verify.experts import apply

CONFIG = DiTConfig(
    dim=40,
    num_heads=2,
    num_layers=2,
    ffn_dim=64,
    freq_dim=32,
    text_dim=12,
    text_len=5,
    memory=MemoryConfig(widths=(8, 8, 16, 16), spatial_down=(1, 1, 1), temporal_down=(1, 0, 0), attention_blocks=1),
)
MODEL = DiT(CONFIG)
H, W, CHUNK = 8, 16, 4


@functools.partial(jax.jit, static_argnums=0)
def random_params(config: DiTConfig, seed: int = 0) -> dict:
    """Weights that are random everywhere: those that start at zero would hide mistakes."""
    params = passes.init(config, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [leaf + 0.15 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def random_clip(frames: int, batch: int = 1, seed: int = 2) -> passes.History:
    keys = jax.random.split(jax.random.key(seed), 5)

    def normal(key, *shape):
        return jax.random.normal(key, (batch, *shape))

    actions = jnp.round(normal(keys[4], frames, 6))
    captions = jnp.broadcast_to(jnp.arange(frames, dtype=jnp.int32) // CHUNK, (batch, frames))
    return passes.History(
        normal(keys[0], frames, H, W, 16),
        normal(keys[1], frames, H, W, 20),
        normal(keys[2], frames // 2, H // 4, W // 4, 16),
        normal(keys[3], frames // 2, H // 4, W // 4, 20),
        actions,
        captions,
    )


def part(clip: passes.History, start: int, end: int) -> passes.History:
    small = slice(start // 2, end // 2)
    return passes.History(
        clip.latents[:, start:end],
        clip.y[:, start:end],
        clip.lr_latents[:, small],
        clip.lr_y[:, small],
        clip.actions[:, start:end],
        clip.captions[:, start:end],
    )


def contexts(count: int, batch: int = 1) -> jnp.ndarray:
    return jax.random.normal(jax.random.key(7), (batch, count, CONFIG.text_len, CONFIG.text_dim))


# --- memory ----------------------------------------------------------------------------------------------------------


def test_average_down_by_hand():
    x = jnp.arange(8.0).reshape(1, 2, 2, 2, 1)
    # One channel in, two out: the first is the mean of the first frame, the second of the second.
    np.testing.assert_allclose(average_down(x, 2, 2, 2)[0, 0, 0, 0], [1.5, 5.5])


@pytest.mark.parametrize("sizes", [(2, 6, 4), (4, 4, 4), (10, 2)])
def test_the_compressor_streams(params, sizes):
    clip = random_clip(sum(sizes), batch=2)
    whole = jax.jit(passes.compress, static_argnums=0)(MODEL, params, clip)
    step = jax.jit(passes.compress_chunk, static_argnums=0)
    state, parts, at = init_state(CONFIG.memory, 2, H, W), [], 0
    for size in sizes:
        new = part(clip, at, at + size)
        tokens, state = step(MODEL, params, state, new.latents, new.y, new.lr_latents, new.lr_y)
        parts.append(tokens)
        at += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5 * np.abs(whole).max())


def test_an_odd_number_of_frames_is_refused(params):
    clip = random_clip(4)
    with pytest.raises(ValueError, match="3 latent frames cannot be compressed: use a multiple of 2"):
        MODEL.apply(
            {"params": params},
            clip.latents[:, :3],
            clip.y[:, :3],
            init_state(CONFIG.memory, 1, H, W),
            method="compress",
        )


# --- cache -----------------------------------------------------------------------------------------------------------


def layout(chunks: int) -> kv.CacheLayout:
    rows, cols = passes.memory_grid(MODEL, H, W)
    return kv.CacheLayout(1, 1, CHUNK, chunks, H // 2, W // 2, rows, cols)


@functools.partial(jax.jit, static_argnames=("first",))
def absorb(params, cache, state, new: passes.History, start, context, *, first: bool):
    tokens, state = passes.compress_chunk(MODEL, params, state, new.latents, new.y, new.lr_latents, new.lr_y)
    grid = passes.memory_grid(MODEL, H, W)
    compressed = passes.memory_frames(tokens, new.actions, new.captions, start // 2, grid)

    def still(index: int):
        one = slice(index, index + 1)
        return passes.full_frames(
            MODEL,
            params,
            new.latents[:, one],
            new.y[:, one],
            jnp.zeros((1, 1)),
            new.actions[:, one],
            jnp.broadcast_to(start + index, (1, 1)),
            new.captions[:, one],
        )

    cache = passes.prefill(MODEL, params, cache, still(0) if first else None, compressed, still(CHUNK - 1), context)
    return cache, state


@jax.jit
def denoise(params, cache, clip: passes.History, start, context):
    positions = start + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    t = jnp.full((1, CHUNK), 700.0)
    frames = passes.full_frames(MODEL, params, clip.latents, clip.y, t, clip.actions, positions, clip.captions)
    return passes.denoise(MODEL, params, cache, frames, context)


def run(params, capacity: int, chunks: int):
    """Caches after 0, 1, ... chunks."""
    clip, context = random_clip(4 * CHUNK), contexts(4)
    cache = passes.empty_cache(MODEL, layout(capacity), 1)
    state, caches = init_state(CONFIG.memory, 1, H, W), [cache]
    for index in range(chunks):
        new = part(clip, index * CHUNK, (index + 1) * CHUNK)
        cache, state = absorb(params, cache, state, new, jnp.int32(index * CHUNK), context, first=index == 0)
        caches.append(cache)
    return clip, context, caches


def test_old_entries_are_a_prefix_of_any_later_cache(params):
    _, _, caches = run(params, 3, 3)
    sizes = caches[0].layout
    compressed = sizes.compressed_start
    sink = slice(sizes.temporal_tokens, compressed)
    for count in (1, 2):
        cut = kv.truncate(caches[3], count)
        assert int(cut.chunks) == count
        kept = slice(compressed, compressed + count * sizes.chunk_tokens)
        for side in ("k", "v"):
            early, late = getattr(caches[count], side), getattr(cut, side)
            np.testing.assert_array_equal(late[:, :, sink], early[:, :, sink])
            np.testing.assert_array_equal(late[:, :, kept], early[:, :, kept])
            assert not np.asarray(early[:, :, kept.stop :]).any()


def test_a_cut_cache_with_its_own_anchor_denoises_as_it_did_then(params):
    clip, context, caches = run(params, 3, 3)
    sizes, early = caches[0].layout, caches[2]
    tmp = slice(0, sizes.temporal_tokens)
    cut = kv.truncate(caches[3], 2)
    cut = cut.replace(k=cut.k.at[:, :, tmp].set(early.k[:, :, tmp]), v=cut.v.at[:, :, tmp].set(early.v[:, :, tmp]))
    target = part(clip, 8, 12)
    then, now = (denoise(params, cache, target, jnp.int32(8), context) for cache in (early, cut))
    np.testing.assert_allclose(now, then, atol=1e-5)


def test_capacity_does_not_change_the_result(params):
    outputs = []
    for capacity in (2, 5):
        clip, context, caches = run(params, capacity, 2)
        outputs.append(denoise(params, caches[2], part(clip, 8, 12), jnp.int32(8), context))
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-5)


def test_an_empty_cache_is_the_pass_without_memory(params):
    clip, context = random_clip(CHUNK), contexts(1)
    cache = passes.empty_cache(MODEL, layout(2), 1)
    positions = jnp.arange(CHUNK, dtype=jnp.int32)[None]
    alone = jax.jit(passes.bidirectional, static_argnums=0)(
        MODEL,
        params,
        clip.latents,
        clip.y,
        jnp.full((1, CHUNK), 700.0),
        clip.actions,
        context,
        clip.captions,
        positions,
    )
    np.testing.assert_allclose(denoise(params, cache, clip, jnp.int32(0), context), alone, atol=1e-5)


# --- one bidirectional pass with memory ------------------------------------------------------------------------------


def arguments(batch: int = 1, length: int = 8):
    """Positional and keyword arguments of `passes.bidirectional` with a history padded to 8 frames."""
    clip = random_clip(8 + CHUNK, batch)
    target = part(clip, 8, 8 + CHUNK)
    positions = jnp.broadcast_to(8 + jnp.arange(CHUNK, dtype=jnp.int32), (batch, CHUNK))
    t = jnp.full((batch, CHUNK), 600.0)
    context = contexts(3, batch)
    given = (target.latents, target.y, t, target.actions, context, target.captions, positions)
    return given, {"history": part(clip, 0, 8), "length": jnp.full((batch,), length, jnp.int32)}


@functools.partial(jax.jit, static_argnums=0)
def bidirectional(config: DiTConfig, params, given, options):
    return passes.bidirectional(DiT(config), params, *given, **options)


def test_frames_past_the_length_change_nothing(params):
    given, options = arguments(length=4)
    history = options["history"]
    other = jax.tree.map(
        lambda a, b: jnp.concatenate([a[:, : a.shape[1] // 2], b[:, b.shape[1] // 2 :]], axis=1),
        history,
        random_clip(8, seed=9),
    )
    one = bidirectional(CONFIG, params, given, options)
    two = bidirectional(CONFIG, params, given, options | {"history": other})
    np.testing.assert_allclose(one, two, atol=1e-5)
    more = bidirectional(CONFIG, params, given, options | {"length": jnp.array([8], jnp.int32)})
    assert np.abs(np.asarray(more - one)).max() > 1e-3


def test_batch_entries_do_not_touch(params):
    given, options = arguments(batch=2)
    options["length"] = jnp.array([4, 8], jnp.int32)
    both = bidirectional(CONFIG, params, given, options)
    for entry in range(2):
        one = slice(entry, entry + 1)
        alone = bidirectional(
            CONFIG, params, jax.tree.map(lambda a, s=one: a[s], given), jax.tree.map(lambda a, s=one: a[s], options)
        )
        np.testing.assert_allclose(both[one], alone, atol=1e-5)


@pytest.fixture(scope="module")
def plain(params):
    """Output and gradients without rematerialisation, layer by layer."""
    return value_and_gradient({}, params)


def value_and_gradient(changes: dict, params):
    config = dataclasses.replace(CONFIG, **changes)
    given, options = arguments()

    @jax.jit
    def loss(params):
        out = bidirectional(config, params, given, options)
        return jnp.square(out).mean(), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return out, gradient


@pytest.mark.parametrize("changes", [{"remat": "full"}, {"remat": "dots"}, {"unroll": 2}])
def test_how_layers_run_changes_nothing(params, plain, changes):
    out, gradient = value_and_gradient(changes, params)
    np.testing.assert_allclose(out, plain[0], atol=1e-5)
    for ours, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain[1]), strict=True):
        assert np.linalg.norm(ours - expected) <= 1e-5 * max(np.linalg.norm(expected), 1e-6)


def test_every_parameter_has_a_gradient(plain):
    flat = jax.tree_util.tree_leaves_with_path(plain[1])
    still = [jax.tree_util.keystr(path) for path, leaf in flat if not np.asarray(leaf).any()]
    assert not still


# --- bfloat16 --------------------------------------------------------------------------------------------------------


HALF = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="bfloat16")


def operations(jaxpr):
    """All equations, also of inner functions."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)


def test_bfloat16_keeps_the_sensitive_parts_in_float32(params):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    given, options = arguments()
    jaxpr = jax.make_jaxpr(lambda params: bidirectional(HALF, params, given, options))(half)
    assert jaxpr.out_avals[0].dtype == jnp.float32
    kinds: dict[str, set] = {}
    for equation in operations(jaxpr.jaxpr):
        if equation.invars:
            kinds.setdefault(equation.primitive.name, set()).add(equation.invars[0].aval.dtype)
    # Softmax, the norms, the sinusoid and the RoPE tables.
    for name in ("exp", "rsqrt", "sqrt", "cos", "sin", "reduce_max"):
        for dtype in kinds.get(name, set()):
            assert dtype == jnp.float32, f"{name} in {dtype}"
    assert {"exp", "rsqrt"} <= set(kinds)
    # The linear layers do run in bfloat16.
    assert jnp.dtype(jnp.bfloat16) in kinds["dot_general"]


def test_bfloat16_keeps_modulation_and_the_residual_stream_in_float32(params):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    (_, _, t, _, context, captions, positions), _ = arguments()
    clip = random_clip(CHUNK)
    model = DiT(HALF)

    def run(params):
        frames = passes.full_frames(model, params, clip.latents, clip.y, t, clip.actions, positions, captions)
        x, e, stream = apply(model, params, [frames], context, method="prepare")
        after, _ = apply(model, params, x, stream, method="run_blocks")
        return frames.tokens, (x, e, stream.e0, stream.cos, stream.sin, after)

    tokens, wide = jax.eval_shape(run, half)
    assert tokens.dtype == jnp.bfloat16
    assert {a.dtype for a in wide} == {jnp.dtype("float32")}


def test_bfloat16_is_close_to_float32(params):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    given, options = arguments()
    out = np.asarray(bidirectional(HALF, half, given, options))
    expected = np.asarray(bidirectional(CONFIG, wide, given, options))
    assert np.linalg.norm(out - expected) < 0.03 * np.linalg.norm(expected)


# --- configs ---------------------------------------------------------------------------------------------------------


def test_one_expert_and_two():
    assert list(expert_models(CONFIG, ("all",))) == ["all"]
    two = expert_models(
        CONFIG, ("high", "low"), head="bank", intervals={"high": 4, "low": 6}, blocks={"high": 2, "low": 3}
    )
    assert [(m.config.intervals, m.config.blocks) for m in two.values()] == [(4, 2), (6, 3)]
    shapes = [
        jax.eval_shape(lambda m=m: passes.init(m.config, jax.random.key(0)))["head"]["kernel"].shape
        for m in two.values()
    ]
    assert shapes == [(4, 40, 64), (6, 40, 64)]
    with pytest.raises(ValueError, match="needs the intervals and blocks"):
        expert_models(CONFIG, ("all",), head="fused")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "dim 40 over num_heads 3"),
        ({"num_heads": 8}, "even head size"),
        ({"head": "flow"}, "head 'flow' is not one of"),
        ({"head": "bank", "intervals": 5}, "intervals 5 must be a positive multiple of blocks 2"),
        ({"remat": "some"}, "remat 'some'"),
        ({"unroll": 3}, "unroll 3: give 1 to num_layers 2"),
        ({"patch": 3}, "not a multiple of patch 3"),
    ],
)
def test_config_errors(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_memory_section_of_a_config_file():
    config = dataclasses.replace(CONFIG, memory={"widths": (8, 8), "spatial_down": (1,), "temporal_down": (1,)})
    assert (config.memory.space_factor, config.memory.time_factor) == (2, 2)
    with pytest.raises(TypeError):
        dataclasses.replace(CONFIG, memory={"width": (8, 8)})
    with pytest.raises(ValueError, match="give one entry a stage"):
        MemoryConfig(spatial_down=(1,))
