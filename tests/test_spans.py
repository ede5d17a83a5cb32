"""Who sees whom, written out by hand, and attention by spans against attention under the mask that they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax.models import cache as kv
from wp2_jax.models import spans
from wp2_jax.models.attention import attend_spans


def rows(text: str) -> np.ndarray:
    """One line a query, "x" where it may look."""
    return np.array([[letter == "x" for letter in line.split()] for line in text.strip().splitlines()])


def seen(found: tuple[spans.Span, ...], keys: int, sample: int = 0) -> np.ndarray:
    """[queries, keys] what the spans let each token see, key by key; they follow each other without a gap."""
    lines, at = [], 0
    for span in found:
        begin, end = span.queries
        assert begin == at and end > begin
        at = end
        order = np.concatenate([np.arange(*tokens) for tokens in span.keys])
        length = len(order) if span.length is None else int(span.length[min(sample, len(span.length) - 1)])
        for query in range(end - begin):
            last = length
            if span.blocks is not None:
                lead, size = span.blocks
                last = min(last, lead + (query // size + 1) * size)
            line = np.zeros(keys, bool)
            line[order[:last]] = True
            assert line.sum() == last > 0
            lines.append(line)
    return np.stack(lines)


# Every frame is one token.
LAYOUT = kv.CacheLayout(sink=1, temporal=1, chunk=4, chunks=2, rows=1, cols=1, memory_rows=1, memory_cols=1)


def test_prefill_by_hand():
    # Keys: tmp, sink, four memory frames (room for two chunks).
    first = spans.prefill(LAYOUT, jnp.int32(0), True, 2)
    np.testing.assert_array_equal(
        seen(first, 6),
        rows("""
            . x . . . .
            . x x x . .
            . x x x . .
            x x x x . .
        """),
    )
    second = spans.prefill(LAYOUT, jnp.int32(1), False, 2)
    np.testing.assert_array_equal(
        seen(second, 6),
        rows("""
            . x x x x x
            . x x x x x
            x x x x x x
        """),
    )
    both = spans.prefill(LAYOUT, jnp.int32(0), True, 4)
    np.testing.assert_array_equal(
        seen(both, 6),
        rows("""
            . x . . . .
            . x x x . .
            . x x x . .
            . x x x x x
            . x x x x x
            x x x x x x
        """),
    )


def test_prefill_of_half_a_block():
    # Chunks of two latent frames are one memory frame: the first of a block does not see the second, not yet there.
    layout = dataclasses.replace(LAYOUT, chunk=2)
    np.testing.assert_array_equal(
        seen(spans.prefill(layout, jnp.int32(0), True, 1), 4), rows(". x . .\n. x x .\nx x x .")
    )
    np.testing.assert_array_equal(seen(spans.prefill(layout, jnp.int32(1), False, 1), 4), rows(". x x x\nx x x x"))


def test_denoise_by_hand():
    # Keys: two generated frames, then tmp, sink and four memory frames.
    for chunks, line in ((0, "x x . . . . . ."), (1, "x x x x x x . ."), (2, "x x x x x x x x")):
        np.testing.assert_array_equal(seen(spans.denoise(LAYOUT, jnp.int32(chunks), 2), 8), rows(f"{line}\n{line}"))


def test_hidden_memory_leaves_the_temporal_part():
    hidden = dataclasses.replace(LAYOUT, memory=False)
    for chunks, line in ((0, "x x . . . . . ."), (1, "x x x . . . . ."), (2, "x x x . . . . .")):
        np.testing.assert_array_equal(seen(spans.denoise(hidden, jnp.int32(chunks), 2), 8), rows(f"{line}\n{line}"))
    # The temporal part sees itself alone; the memory is kept up as always.
    before, after = (seen(spans.prefill(layout, jnp.int32(1), False, 2), 6) for layout in (LAYOUT, hidden))
    np.testing.assert_array_equal(after[:2], before[:2])
    np.testing.assert_array_equal(after[2:], rows("x . . . . ."))


def test_bidirectional_by_hand():
    # Keys: sink, four memory frames, tmp, generated.
    found = spans.bidirectional(jnp.array([0, 4]), 1, 4, 1, 1, 1, 2)
    np.testing.assert_array_equal(seen(found, 7, 0), np.tile(rows(". . . . . . x"), (7, 1)))
    np.testing.assert_array_equal(seen(found, 7, 1), np.tile(rows("x x x . . x x"), (7, 1)))


def test_teacher_forcing_by_hand():
    # sink, two memory frames, then (tmp, noisy, noisy) twice; chunks of 2 latent frames, the first starts the world.
    found = spans.teacher_forcing(jnp.array([0]), 1, 2, 1, 1, 2, 2, 1, 2)
    np.testing.assert_array_equal(
        seen(found, 9),
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


def test_frames_of_several_tokens():
    # sink of two tokens, memory frames of one, tmp of two, one noisy frame; four latent frames of history.
    found = spans.teacher_forcing(jnp.array([4]), 1, 4, 1, 1, 1, 1, 2, 2)
    np.testing.assert_array_equal(
        seen(found, 10),
        rows("""
            x x . . . . . . . .
            x x . . . . . . . .
            x x x x . . . . . .
            x x x x . . . . . .
            x x x x x x . . . .
            x x x x x x . . . .
            x x x x . . x x . .
            x x x x . . x x . .
            x x x x . . x x x x
            x x x x . . x x x x
        """),
    )
    layout = dataclasses.replace(LAYOUT, cols=2)
    line = "x x x x x x x x x x . ."
    np.testing.assert_array_equal(seen(spans.denoise(layout, jnp.int32(1), 4), 12), rows("\n".join([line] * 4)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_by_spans_equals_attention_under_a_mask(dtype):
    found = spans.teacher_forcing(jnp.array([0, 8]), 1, 6, 2, 1, 2, 2, 4, 2)
    tokens = found[-1].queries[1]
    q, k, v = (
        jax.random.normal(jax.random.key(i), (2, tokens, 3, 8)).astype(dtype).astype(jnp.float32) for i in range(3)
    )
    mask = jnp.stack([seen(found, tokens, sample) for sample in range(2)])
    scores = jnp.einsum("bqnk,bsnk->bnqs", q, k) / 8**0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), -1)
    expected = jnp.einsum("bnqs,bsnk->bqnk", weights, v)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    out = attend_spans(q, k, v, found)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-6 if dtype == jnp.float32 else 2e-2)
