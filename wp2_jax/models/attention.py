"""Attention behind one function: the only place where a kernel is chosen."""

import jax
import jax.numpy as jnp


def attend(
    q: jnp.ndarray,
    k: jnp.ndarray,
    v: jnp.ndarray,
    mask: jnp.ndarray | None = None,
    *,
    scale: float | None = None,
) -> jnp.ndarray:
    """Softmax attention, softmax in float32.

    q [B, Lq, N, K], k and v [B, Lk, N, K]; mask [B or 1, Lq or 1, Lk] bool, True where a query may look; every query
    must see at least one key. Returns [B, Lq, N, K] in q's dtype.
    """
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None], (mask.shape[0], 1, q.shape[1], k.shape[1]))
    # Inside, the library mixes its float32 scale with bfloat16 logits.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)
