"""What the objectives make of a batch, and the flow matching of the bidirectional model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_objectives import (
    CHUNK,
    TEXT_DIM,
    VELOCITY,
    counted,
    encode_text,
    frozen_trees,
    random_batch,
    random_weights,
)

from wp2_jax.diffusion.experts import Experts
from wp2_jax.objectives import batch as batches
from wp2_jax.objectives import flow_matching


def test_history_lengths_are_uniform_multiples_within_all_bounds():
    draw = functools.partial(batches.draw_history, jax.random.key(0), 4000, chunk=4)
    lengths = np.asarray(draw(maximum=12, limit=40))
    values, counts = np.unique(lengths, return_counts=True)
    assert values.tolist() == [0, 4, 8, 12] and counts.min() > 900
    assert np.unique(draw(maximum=15, limit=9)).tolist() == [0, 4, 8]
    assert np.unique(draw(maximum=12, limit=40, minimum=5)).tolist() == [8, 12]
    assert np.unique(draw(maximum=0, limit=40, minimum=4)).tolist() == [4]
    traced, compilations = counted(lambda maximum: draw(maximum=maximum, limit=40))
    assert {int(traced(jnp.asarray(m)).max()) for m in (0, 8, 20)} == {0, 8, 20} and len(compilations) == 1
    with pytest.raises(ValueError, match="room for 4 latent frames"):
        draw(maximum=12, limit=4, minimum=8)


def test_targets_begin_likelier_where_the_caption_changes():
    ids = jnp.asarray([[[1, 2], [1, 2], [1, 3], [1, 3], [1, 2], [4, 2]]], jnp.int32)
    weights = batches.change_weights(ids, 3.0)
    assert weights is not None
    np.testing.assert_array_equal(weights, [[1, 1, 3, 1, 3, 3]])
    assert batches.change_weights(ids, 1.0) is None
    draw = functools.partial(
        batches.draw_history, jax.random.key(0), 8000, chunk=4, weights=jnp.repeat(weights, 8000, axis=0)
    )
    lengths = np.asarray(draw(maximum=40, limit=16))
    assert lengths.dtype == np.int32
    # Chunk 5 is past the limit; the others in proportion to 1, 1, 3, 1, 3.
    values, counts = np.unique(lengths, return_counts=True)
    assert values.tolist() == [0, 4, 8, 12, 16]
    np.testing.assert_allclose(counts / 8000, np.array([1, 1, 3, 1, 3]) / 9, atol=0.02)
    assert np.unique(draw(maximum=4, limit=16)).tolist() == [0, 4]
    assert np.unique(draw(maximum=0, limit=16, minimum=8)).tolist() == [8]


def test_clip_counts_captions_by_chunk():
    clip = batches.clip_from_batch(random_batch(0, 2, 12), CHUNK)
    assert np.asarray(clip.captions).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]] * 2
    half = batches.first_frames(clip, 8)
    assert half.latents.shape[1] == half.captions.shape[1] == 8 and half.lr_y.shape[1] == 4
    with pytest.raises(ValueError, match="3 captions for 12 latent frames in chunks of 2"):
        batches.clip_from_batch(random_batch(0, 2, 12), 2)


def test_captions_are_dropped_by_sample():
    frozen = frozen_trees(0)
    ids = jnp.asarray(random_batch(0, 400, 8)["caption_ids"])
    encode = functools.partial(batches.encode_captions, {}, frozen, ids, encode_text=encode_text)
    plain, dropped = encode(jax.random.key(0), dropout=0.0), encode(jax.random.key(0), dropout=0.1)
    null = np.broadcast_to(frozen["null_context"], plain.shape[1:])
    is_null = np.array([np.array_equal(row, null) for row in np.asarray(dropped)])
    assert 0.06 < is_null.mean() < 0.14
    np.testing.assert_array_equal(dropped[~is_null], plain[~is_null])
    # While the encoder trains the negative prompt is encoded by it.
    table = 2.0 * frozen["text"]
    own = batches.null_context({"text": table}, {"null_ids": jnp.asarray([[9, 0, 0]])}, encode_text)
    np.testing.assert_array_equal(own, 2.0 * frozen["null_context"])


def test_shares_are_even_and_cover_the_batch():
    rows = {"x": np.arange(6)}
    assert [batches.share(rows, 2, i)["x"].tolist() for i in range(2)] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match="multiple of 4"):
        batches.share(rows, 4, 0)


def test_quarters_split_the_range_an_expert_draws_from():
    experts = Experts(0.9)
    for name in experts.names:
        sigma = experts.sample_sigma(jax.random.key(0), name, (4000,), 5.0)
        place = batches.sigma_place(sigma, experts, name, 5.0)
        np.testing.assert_allclose(np.quantile(place, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.03)
        assert np.corrcoef(place, sigma)[0, 1] > 0.9
    metrics = batches.quarters(jnp.asarray([1.0, 3.0, 5.0]), jnp.asarray([0.1, 0.2, 1.0]))
    assert metrics["q0"] == 2.0 and metrics["q3"] == 5.0 and np.isnan(metrics["q1"]) and np.isnan(metrics["q2"])


def _loss(params, batch, frozen, key, *, boundary=None, frames=4, **options):
    experts = Experts(boundary)
    return flow_matching.loss(
        params,
        batch,
        frozen,
        key,
        models=dict.fromkeys(experts.names, VELOCITY),
        experts=experts,
        encode_text=encode_text,
        frames=frames,
        chunk=CHUNK,
        **options,
    )


def _single():
    return {"experts": {"all": random_weights(0)}}


@functools.cache
def _with_memory():
    return jax.jit(functools.partial(_loss, memory=True, caption_dropout=0.0))


def test_a_silent_model_scores_the_power_of_the_velocity():
    # Velocity 0 against eps - 2: mean square 1 + 4.
    weights = random_weights(0)
    weights = {**weights, "head": jax.tree.map(jnp.zeros_like, weights["head"])}
    batch = random_batch(0, 8, 4)
    batch["latents"] = np.full_like(batch["latents"], 2.0)
    value, metrics = jax.jit(functools.partial(_loss, memory=False))(
        {"experts": {"all": weights}}, batch, frozen_trees(0), jax.random.key(0)
    )
    np.testing.assert_allclose(value, 5.0, rtol=0.02)
    assert metrics["loss/all"] == value
    assert all(np.isnan(metrics[f"loss/all/q{i}"]) or abs(metrics[f"loss/all/q{i}"] - 5) < 0.5 for i in range(4))


def test_a_dropped_picture_is_not_seen():
    frozen, batch = frozen_trees(0), random_batch(1, 2, 4)
    other = {**batch, "y": batch["y"] + 1.0}
    for dropout, same in ((0.0, False), (1.0, True)):
        loss = jax.jit(functools.partial(_loss, memory=False, image_dropout=dropout))
        a, b = (float(loss(_single(), rows, frozen, jax.random.key(0))[0]) for rows in (batch, other))
        assert (a == b) == same
    with pytest.raises(ValueError, match=r"image_dropout 0\.5: a history shows"):
        _loss(_single(), random_batch(1, 2, 8), frozen, jax.random.key(0), memory=True, image_dropout=0.5)


def test_a_target_at_the_start_has_no_memory():
    batch, frozen = random_batch(1, 2, 8), frozen_trees(0)
    alone = jax.jit(functools.partial(_loss, memory=False, caption_dropout=0.0))
    a, b = (f(_single(), batch, frozen, jax.random.key(0))[0] for f in (alone, _with_memory()))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_history_counts_and_what_follows_the_target_does_not():
    frozen = frozen_trees(4)
    value, params = _with_memory(), _single()
    # With this key one of the two samples starts at the world's start, the other has one chunk of history.
    key = next(
        jax.random.key(seed)
        for seed in range(50)
        if float(value(params, random_batch(1, 2, 8), frozen_trees(0), jax.random.key(seed))[0])
        != float(value(params, random_batch(1, 2, 8), frozen, jax.random.key(seed))[0])
    )
    batch = random_batch(1, 2, 8)
    base = float(value(params, batch, frozen, key)[0])
    for name, frame in (("latents", 0), ("y", 1), ("actions", 2), ("lr_latents", 0), ("lr_y", 1)):
        changed = {**batch, name: batch[name].copy()}
        changed[name][:, frame] += 10.0
        assert float(value(params, changed, frozen, key)[0]) != base, name
    # The low-resolution twin of the target is nobody's input.
    changed = {**batch, "lr_latents": batch["lr_latents"].copy()}
    changed["lr_latents"][:, 2:] += 1.0
    assert float(value(params, changed, frozen, key)[0]) == base
    # At the start everything behind the target is out of sight.
    changed = {name: x.copy() for name, x in batch.items()}
    changed["latents"][:, 4:] += 1.0
    changed["caption_ids"][:, 1:] = 1
    at_start = [float(value(params, x, frozen_trees(0), key)[0]) for x in (batch, changed)]
    assert at_start[0] == at_start[1]


def test_each_expert_learns_from_its_own_samples():
    params = {"experts": {"high": random_weights(0), "low": random_weights(1)}, "text": frozen_trees(0)["text"]}
    batch = random_batch(2, 4, 4)
    frozen = {"null_ids": jnp.asarray([[9, 0, 0]], jnp.int32)}
    grad = jax.jit(jax.grad(functools.partial(_loss, boundary=0.9, memory=False, actions=False), has_aux=True))
    grads, metrics = grad(params, batch, frozen, jax.random.key(0))
    assert {"loss/high", "loss/low", "loss/high/q0", "loss/low/q3"} <= set(metrics)
    other = {**batch, "latents": batch["latents"].copy()}
    other["latents"][1::2] *= 2
    moved, _ = grad(params, other, frozen, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, moved["experts"]["high"], grads["experts"]["high"])
    before, after = (np.asarray(g["experts"]["low"]["head"]["kernel"]) for g in (grads, moved))
    assert np.abs(after - before).max() > 0
    # The text encoder trains along, the action modules and the compressor have no part in this stage.
    assert grads["text"].shape == (10, TEXT_DIM) and np.abs(grads["text"]).max() > 0
    unused = (grads["experts"]["high"]["action_encoder"], grads["experts"]["high"]["compressor"])
    assert all(not np.any(g) for g in jax.tree.leaves(unused))


def test_clips_too_short_are_an_error():
    with pytest.raises(ValueError, match="frames 8 as target in clips of 8 latent frames"):
        _loss(_single(), random_batch(0, 2, 8), frozen_trees(0), jax.random.key(0), frames=8, memory=True)
    with pytest.raises(ValueError, match="use a multiple of chunk 4"):
        _loss(_single(), random_batch(0, 2, 8), frozen_trees(0), jax.random.key(0), frames=6, memory=False)
