"""Matrices in eight bits: one scale a column, int8 or float8 (e4m3); quantized and multiplied by qwix.

A `Matrix` stands in a parameter tree where the float kernel stood; `matmul` takes either. With `activations` the
other side is brought to eight bits too, one scale a token, and the hardware multiplies eight bits by eight bits;
without, the matrix is turned back where it is used, which saves memory and its traffic, not arithmetic.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

FORMATS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


class Matrix(flax.struct.PyTreeNode):
    """values [..., in, out] in eight bits and scale float32 [..., 1, out]: the matrix is values * scale."""

    values: jax.Array
    scale: jax.Array
    activations: bool = flax.struct.field(pytree_node=False, default=False)

    def rows(self, first: int, end: int) -> "Matrix":
        """Some rows of the matrix, whose scales are those of the whole."""
        return self.replace(values=self.values[..., first:end, :])


def quantize(kernel: jax.Array, form: str, *, activations: bool = False) -> Matrix:
    """A kernel [..., in, out] in one of FORMATS."""
    import qwix  # half a second that a start without eight bits does not wait for

    columns = (*range(kernel.ndim - 2), kernel.ndim - 1)
    made = qwix.quantize(kernel.astype(jnp.float32), FORMATS[form], channelwise_axes=columns)
    return Matrix(made.qvalue, made.scale, activations)


def dequantize(matrix: Matrix) -> jax.Array:
    """The float32 kernel that the matrix stands for."""
    return matrix.values.astype(jnp.float32) * matrix.scale


def rows(kernel: Any, first: int, end: int) -> Any:
    """Rows first..end of a kernel [in, out] of either kind."""
    return kernel.rows(first, end) if isinstance(kernel, Matrix) else kernel[first:end]


def matmul(x: jax.Array, kernel: "jax.Array | Matrix") -> jax.Array:
    """x [..., in] @ kernel [in, out] in x's dtype."""
    if not isinstance(kernel, Matrix):
        return x @ kernel.astype(x.dtype)
    if not kernel.activations:
        return (x @ kernel.values.astype(x.dtype)) * kernel.scale[0].astype(x.dtype)
    import qwix

    theirs = qwix.QArray(kernel.values, kernel.scale, qtype=kernel.values.dtype)
    # One scale a token: a loud token does not cost the quiet ones their precision.
    ours = qwix.quantize(x.astype(jnp.float32), kernel.values.dtype, channelwise_axes=range(x.ndim - 1))
    with jax.numpy_dtype_promotion("standard"):  # the library multiplies an int32 sum by its float scales
        out = qwix.dot_general(ours, theirs, (((x.ndim - 1,), (0,)), ((), ())))
    return out.astype(x.dtype)
