"""What the tests of both autoencoders share: jitted methods on golden weights, streams in chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import xla_flags

FAST_COMPILE = xla_flags.quick_compile("cpu")  # compiling takes far longer than running these sizes


def golden_vae(model, params):
    """(model, jitted apply), called as apply(method, *arrays) or apply(method, state, x, first=...)."""
    functions = {}

    def apply(method, *args, **static):
        key = (method, *static.items())
        if key not in functions:
            call = partial(model.apply, method=method, **static)
            functions[key] = jax.jit(lambda *args: call({"params": params}, *args), compiler_options=FAST_COMPILE)
        return functions[key](*args)

    return model, apply


def stream(vae, way, x, sizes):
    """x cut along its frames into `sizes`, each through `{way}_chunk` -> the joined result; state shapes stay."""
    model, apply = vae
    pixels = 1 if way == "encode" else 8
    init = model.init_encode_state if way == "encode" else model.init_decode_state
    state, parts, at = init(x.shape[0], x.shape[2] * pixels, x.shape[3] * pixels), [], 0
    shapes = jax.tree.map(jnp.shape, state)
    for size in sizes:
        state, y = apply(f"{way}_chunk", state, x[:, at : at + size], first=at == 0)
        assert jax.tree.map(jnp.shape, state) == shapes
        parts.append(np.asarray(y))
        at += size
    return np.concatenate(parts, axis=1)
