"""Floating-point operations of a function, counted in its jaxpr: matrix products and convolutions, loops in full.

XLA's own count takes the body of a loop once, whatever its length.
"""

import math
from collections.abc import Callable
from typing import Any

import jax


def count(function: Callable[..., Any], *arguments: Any) -> int:
    """Multiplications and additions of one call; arguments are arrays or ShapeDtypeStructs."""
    return of(jax.make_jaxpr(function)(*arguments).jaxpr)


def of(jaxpr: Any) -> int:
    """Multiplications and additions of a jaxpr."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        elif name == "conv_general_dilated":
            kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"]
            taps = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
            total += 2 * taps * math.prod(equation.outvars[0].aval.shape)
        elif name == "cond":
            total += max(of(branch.jaxpr) for branch in params["branches"])
        else:
            times = params.get("length", 1) if name == "scan" else 1
            total += times * sum(of(inner) for value in params.values() for inner in _jaxprs(value))
    return total


def _jaxprs(value: Any) -> list[Any]:
    """The jaxprs in a parameter of an equation."""
    if isinstance(value, tuple | list):
        return [inner for item in value for inner in _jaxprs(item)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []
