"""The TPU's kernel, interpreted, against XLA's attention: values and gradients, lengths, blocks, odd sizes, a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wp2_jax import sharding
from wp2_jax.models import attention, splash
from wp2_jax.models.dit import DiTConfig

SCALE = 128**-0.5


def drawn(queries, keys, heads=2, dtype=jnp.float32):
    shapes = ((2, queries, heads, 128), *[(2, keys, heads, 128)] * 2)
    return tuple(jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes))


@pytest.mark.parametrize(
    ("queries", "keys", "length", "blocks"),
    [(200, 300, (130, 300), None), (128, 300, None, None), (256, 384, (384,), None), (70, 100, None, (30, 14))],
)
def test_splash_equals_xla(queries, keys, length, blocks):
    length = None if length is None else jnp.asarray(length)
    q, k, v = drawn(queries, keys)
    weight = jax.random.normal(jax.random.key(9), q.shape)

    def value(function, *arrays):
        out = function(*arrays)
        return (out * weight).sum(), out

    functions = (
        functools.partial(attention.attend, length=length, blocks=blocks),
        functools.partial(splash.attend, length=length, blocks=blocks, scale=SCALE, interpret=True),
    )
    results = [jax.jit(jax.value_and_grad(functools.partial(value, f), (0, 1, 2), True))(q, k, v) for f in functions]
    ((_, expected), gradients), ((_, out), found) = results
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for a, b in zip(found, gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_splash_in_bfloat16():
    q, k, v = drawn(128, 256, dtype=jnp.bfloat16)
    length = jnp.asarray([200, 40])
    expected = attention.attend(*(x.astype(jnp.float32) for x in (q, k, v)), length=length)  # pyright: ignore
    out = splash.attend(q, k, v, length, None, SCALE, interpret=True)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.parametrize("heads", [4, 3])
def test_splash_on_a_mesh(heads):
    """Four heads over four devices, and three, which do not divide: whole on each."""
    q, k, v = drawn(128, 128, heads)
    length = jnp.asarray([50, 128])
    expected = attention.attend(q, k, v, length=length)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=1, seq=4))
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(splash.attend, blocks=None, scale=SCALE, interpret=True))
        out = run(q, k, v, length)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert out.sharding.shard_shape(out.shape) == (1, 128, 1 if heads == 4 else 3, 128)


def test_a_kernel_that_is_none():
    with pytest.raises(ValueError, match="attention 'flash' is not one of auto, xla"):
        DiTConfig(attention="flash")
