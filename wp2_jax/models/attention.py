"""Attention behind one function: the only place where a kernel is chosen."""

import jax
import jax.numpy as jnp

from wp2_jax.models.spans import Range, Span


def attend(
    q: jnp.ndarray,
    k: jnp.ndarray,
    v: jnp.ndarray,
    *,
    length: jnp.ndarray | None = None,
    blocks: tuple[int, int] | None = None,
    scale: float | None = None,
) -> jnp.ndarray:
    """Softmax attention, softmax in float32.

    q [B, Lq, N, K], k and v [B, Lk, N, K]; `length` and `blocks` say which keys are seen, as those of a `Span`. Returns
    [B, Lq, N, K] in q's dtype.
    """
    key, mask = jnp.arange(k.shape[1]), None
    if length is not None:
        mask = (key < length[:, None])[:, None, None]
    if blocks is not None:
        lead, size = blocks
        end = lead + (jnp.arange(q.shape[1]) // size + 1) * size
        before = (key < end[:, None])[None, None]
        mask = before if mask is None else mask & before
    # Inside, the library mixes its float32 scale with bfloat16 logits.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)


def attend_spans(q: jnp.ndarray, k: jnp.ndarray, v: jnp.ndarray, spans: tuple[Span, ...]) -> jnp.ndarray:
    """q [B, Lq, N, K] over k and v [B, Lk, N, K] as the spans say, which together have every query once, in order;
    without spans all see all."""
    if not spans:
        return attend(q, k, v)
    parts = [
        attend(
            q[:, slice(*span.queries)],
            _laid(k, span.keys),
            _laid(v, span.keys),
            length=span.length,
            blocks=span.blocks,
        )
        for span in spans
    ]
    return jnp.concatenate(parts, axis=1)


def _laid(x: jnp.ndarray, ranges: tuple[Range, ...]) -> jnp.ndarray:
    return jnp.concatenate([x[:, slice(*tokens)] for tokens in ranges], axis=1)
