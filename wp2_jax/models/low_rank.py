"""Low-rank updates of linear kernels: W + scale * A B, as a tree beside the weights (memory phase 1, spec section 5).

Nothing in the model knows of them: a merged tree is an ordinary tree. A and B are float32 and carry the leading layer
axis of stacked kernels.
"""

import jax
import jax.numpy as jnp

from wp2_jax import rng, tree
from wp2_jax.array_types import ArrayTree, PRNGKey

BACKBONE = (r"^blocks/.*kernel$",)
"""The linear maps of all layers: attention, FFN, action injection."""


def init(params: ArrayTree, rank: int, key: PRNGKey, patterns: tuple[str, ...] = BACKBONE) -> dict:
    """Adapters {"<path>": {"a": [..., in, rank], "b": [..., rank, out]}} (nested) for the kernels the patterns find.

    Kernels are [in, out] or stacked [layers, in, out]. `a` is normal with spread in^-1/2, `b` zero: merged at once
    they change nothing. Raises ValueError for a rank below 1, for a match of another shape, or if nothing matches.
    """
    if rank < 1:
        raise ValueError(f"low_rank.rank={rank}: must be at least 1")
    named = {name: leaf for name, leaf in tree.named_leaves(params).items() if tree.matches(name, patterns)}
    if not named:
        raise ValueError(f"low_rank.patterns={patterns}: no weight has such a name")
    adapters = {}
    for name, kernel in named.items():
        if kernel.ndim not in (2, 3):
            raise ValueError(
                f"low_rank.patterns={patterns}: {name} of shape {kernel.shape} is no linear kernel; "
                "narrow the pattern to kernels [in, out] or [layers, in, out]"
            )
        *stack, width, out = kernel.shape
        a = width**-0.5 * jax.random.normal(rng.fold(key, name), (*stack, width, rank), jnp.float32)
        adapters[f"{name}/a"], adapters[f"{name}/b"] = a, jnp.zeros((*stack, rank, out), jnp.float32)
    return tree.nested(adapters)


def merge(params: ArrayTree, adapters: ArrayTree, scale: float = 1.0) -> ArrayTree:
    """params with scale * A B added (in float32) to the adapted kernels; dtypes stay.

    Raises ValueError if an adapter belongs to no weight.
    """
    named = tree.named_leaves(adapters)
    targets = {name.removesuffix("/a") for name in named if name.endswith("/a")}
    unknown = targets - set(tree.named_leaves(params))
    if unknown:
        raise ValueError(f"adapters of {sorted(unknown)} find no such weights: they belong to another model")

    def add(name: str, kernel: jax.Array) -> jax.Array:
        if name not in targets:
            return kernel
        update = named[f"{name}/a"] @ named[f"{name}/b"]
        return (kernel.astype(jnp.float32) + scale * update).astype(kernel.dtype)

    return tree.map_named(add, params)
