"""Classifier-free guidance on the text: v = v_null + s (v_text - v_null) (SPEC section 5).

Memory and actions are in both branches; only the caption is replaced by the negative prompt.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def combine(text: jax.Array, null: jax.Array, scale: float | jax.Array) -> jax.Array:
    """v_null + scale (v_text - v_null) in float32; both velocities have the same shape."""
    text, null = text.astype(jnp.float32), null.astype(jnp.float32)
    return null + scale * (text - null)


def guided(text: Callable[..., jax.Array], null: Callable[..., jax.Array], scale: float) -> Callable[..., jax.Array]:
    """A predict function guided by `scale`. At scale 1 the null branch is not run at all: the result would be
    `text`, up to rounding (golden/README.md 23)."""
    if scale == 1.0:
        return text
    return lambda *args: combine(text(*args), null(*args), scale)
