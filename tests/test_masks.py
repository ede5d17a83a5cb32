"""The attention masks, written out by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from wp2_jax.models import cache as kv
from wp2_jax.models import masks


def rows(text: str) -> np.ndarray:
    """One line a query, "x" where it may look."""
    return np.array([[letter == "x" for letter in line.split()] for line in text.strip().splitlines()])


LAYOUT = kv.CacheLayout(sink=1, temporal=1, chunk=4, chunks=2, rows=2, cols=2, memory_rows=1, memory_cols=1)


def test_prefill_mask_by_hand():
    # Keys: sink, tmp, four memory frames (room for two chunks).
    first = masks.prefill(LAYOUT, jnp.int32(0), True, 2)
    np.testing.assert_array_equal(
        first[0],
        rows("""
            x . . . . .
            x . x x . .
            x . x x . .
            x x x x . .
        """),
    )
    second = masks.prefill(LAYOUT, jnp.int32(1), False, 2)
    np.testing.assert_array_equal(
        second[0],
        rows("""
            x . x x x x
            x . x x x x
            x x x x x x
        """),
    )
    both = masks.prefill(LAYOUT, jnp.int32(0), True, 4)
    np.testing.assert_array_equal(
        both[0],
        rows("""
            x . . . . .
            x . x x . .
            x . x x . .
            x . x x x x
            x . x x x x
            x x x x x x
        """),
    )


def test_denoise_mask_by_hand():
    for chunks, line in ((0, ". . . . . . x x"), (1, "x x x x . . x x"), (2, "x x x x x x x x")):
        np.testing.assert_array_equal(masks.denoise(LAYOUT, jnp.int32(chunks), 2)[0], rows(f"{line}\n{line}"))


def test_hidden_memory_leaves_the_temporal_part():
    hidden = dataclasses.replace(LAYOUT, memory=False)
    for chunks, line in ((0, ". . . . . . x x"), (1, ". x . . . . x x"), (2, ". x . . . . x x")):
        np.testing.assert_array_equal(masks.denoise(hidden, jnp.int32(chunks), 2)[0], rows(f"{line}\n{line}"))
    # The temporal part sees itself alone; the memory is kept up as always.
    before, after = (masks.prefill(layout, jnp.int32(1), False, 2)[0] for layout in (LAYOUT, hidden))
    np.testing.assert_array_equal(after[:2], before[:2])
    np.testing.assert_array_equal(after[2:], rows(". x . . . ."))


def test_bidirectional_mask_by_hand():
    mask = masks.bidirectional(jnp.array([0, 4]), 1, 4, 1, 1, 2)
    # Keys: sink, four memory frames, tmp, generated. Padding sees itself, so that its softmax has a term.
    np.testing.assert_array_equal(mask[0], np.eye(7, dtype=bool) | (np.arange(7) == 6))
    valid = np.array([1, 1, 1, 0, 0, 1, 1], bool)
    np.testing.assert_array_equal(mask[1], valid | np.eye(7, dtype=bool))


def test_teacher_forcing_mask_by_hand():
    # sink, two memory frames, then (tmp, noisy, noisy) twice; chunks of 2 latent frames, the first starts the world.
    mask = masks.teacher_forcing(jnp.array([0]), 1, 2, 1, 2, 2, 2)
    np.testing.assert_array_equal(
        mask[0],
        rows("""
            x . . . . . . . .
            x x x . . . . . .
            x x x . . . . . .
            . . . x . . . . .
            . . . . x x . . .
            . . . . x x . . .
            x x . . . . x . .
            x x . . . . x x x
            x x . . . . x x x
        """),
    )


def test_expand_repeats_frames_over_their_tokens():
    mask = jnp.array([[[True, False], [True, True]]])
    out = masks.expand(mask, np.array([0, 0, 1]), np.array([0, 1, 1, 1]))
    np.testing.assert_array_equal(out[0], rows("x . . .\nx . . .\nx x x x"))
