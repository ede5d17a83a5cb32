"""Memory phase 1: which frames are drawn, what is noised, and what trains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_objectives import CHUNK, VELOCITY, counted, encode_text, frozen_trees, random_batch, random_weights

from wp2_jax import tree
from wp2_jax.diffusion.experts import Experts
from wp2_jax.objectives import batch as batches
from wp2_jax.objectives import memory


def test_drawn_frames_are_distinct_rising_and_uniform_below_the_length():
    length = jnp.asarray([4, 8, 12] * 1000, jnp.int32)
    drawn = np.asarray(memory.draw_frames(jax.random.key(0), length, 16, 3))
    assert (np.diff(drawn, axis=1) > 0).all() and drawn.min() == 0
    for row, frames in enumerate((4, 8, 12)):
        counts = np.bincount(drawn[row::3].ravel(), minlength=frames)
        assert len(counts) == frames and np.abs(counts / 3000 - 1 / frames).max() < 0.03


def test_drawn_frames_stay_clean_and_the_twin_follows_the_cleaner_of_its_two():
    rows = random_batch(0, 2, 8, 16, 16)
    # Every frame all ones: the mean of a noised frame is 1 - sigma, its spread sigma.
    rows = {name: np.ones_like(x) if name != "caption_ids" else x for name, x in rows.items()}
    clip = batches.clip_from_batch(rows, CHUNK)
    clean = jnp.asarray([[0, 5], [2, 3]], jnp.int32)
    noised = memory.noise_history(jax.random.key(0), clip, clean, (0.2, 1.0))
    for row in range(2):
        latents = np.asarray(noised.latents[row]).reshape(8, -1)
        sigma = latents.std(axis=1)
        own = np.asarray(clean[row])
        assert (latents[own] == 1.0).all()
        others = np.delete(np.arange(8), own)
        assert (sigma[others] > 0.15).all() and (sigma[others] < 1.05).all()
        np.testing.assert_allclose(latents[others].mean(axis=1), 1 - sigma[others], atol=0.08)
        twin = np.asarray(noised.lr_latents[row]).reshape(4, -1)
        has_drawn = np.isin(np.arange(8).reshape(4, 2), own).any(axis=1)
        assert (twin[has_drawn] == 1.0).all()
        lower = sigma.reshape(4, 2).min(axis=1)
        np.testing.assert_allclose(twin[~has_drawn].std(axis=1), lower[~has_drawn], rtol=0.35)
    for name in ("y", "lr_y", "actions", "captions"):
        np.testing.assert_array_equal(getattr(noised, name), getattr(clip, name))


def _setup(boundary=None):
    experts = Experts(boundary)
    weights = {name: random_weights(index) for index, name in enumerate(experts.names)}
    params = memory.init_params(weights, 2, jax.random.key(0))
    loss = functools.partial(
        memory.loss,
        models=dict.fromkeys(experts.names, VELOCITY),
        experts=experts,
        encode_text=encode_text,
        drawn=2,
        scale=0.5,
        chunk=CHUNK,
    )
    return params, {**frozen_trees(8), "experts": weights}, loss


def test_only_compressor_and_adapters_train_and_both_do():
    params, frozen, loss = _setup()
    assert set(params) == {"compressor", "adapters"}
    grads, metrics = jax.jit(jax.grad(loss, has_aux=True))(params, random_batch(0, 2, 8), frozen, jax.random.key(0))
    assert np.isfinite(metrics["loss/all"])
    for name, grad in tree.named_leaves(grads["adapters"]["all"]).items():
        assert np.any(grad) == name.endswith("/b"), name  # a has no gradient while b is zero
    assert all(np.any(grad) for grad in jax.tree.leaves(grads["compressor"]["all"]))


def test_merged_weights_start_as_the_backbone():
    params, frozen, _ = _setup(0.9)
    merged = memory.merged(params, frozen["experts"], 0.5)
    jax.tree.map(np.testing.assert_array_equal, merged, frozen["experts"])
    # The adapters of the experts are not the same.
    a = [tree.named_leaves(params["adapters"][name])["blocks/action/kernel/a"] for name in ("high", "low")]
    assert np.abs(a[0] - a[1]).max() > 0.1


def test_only_memory_within_the_history_is_seen():
    params, frozen, loss = _setup()
    value, compilations = counted(loss)
    batch = random_batch(0, 2, 8)
    late = {**batch, "latents": batch["latents"].copy(), "lr_latents": batch["lr_latents"].copy()}
    late["latents"][:, 4:] += 1.0
    late["lr_latents"][:, 2:] += 1.0
    one_chunk = {**frozen, "max_history": jnp.asarray(4, jnp.int32)}
    a, b = (value(params, rows, one_chunk, jax.random.key(0))[0] for rows in (batch, late))
    assert a == b
    early = {**batch, "latents": batch["latents"].copy()}
    early["latents"][:, :4] += 1.0
    assert value(params, early, one_chunk, jax.random.key(0))[0] != a
    assert len(compilations) == 1


def test_more_frames_than_a_clip_holds_are_an_error():
    params, frozen, loss = _setup()
    with pytest.raises(ValueError, match="cannot hold the 9 that are needed"):
        loss(params, random_batch(0, 2, 8), frozen, jax.random.key(0), drawn=9)
