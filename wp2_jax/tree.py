"""Trees of arrays by path name: "blocks/attention/q/kernel".

Sharding, weight decay, freezing, checkpoints and weight conversion all speak of weights by these names.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from wp2_jax.array_types import ArrayTree


class TreeMismatchError(ValueError):
    """Weights do not fit the tree they are for; the message lists every name and shape."""


def name_of(path: Sequence[Any]) -> str:
    """ "a/b/c" of a key path as `jax.tree_util` gives it."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def named_leaves(tree: ArrayTree) -> dict[str, Any]:
    """All leaves by name, in tree order."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_named(
    fn: Callable[..., Any], tree: ArrayTree, *rest: ArrayTree, leaf: Callable[[Any], bool] | None = None
) -> ArrayTree:
    """A tree of `fn(name, leaf, *leaves of rest)`; `leaf` says which nodes count as leaves too."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(name_of(path), *leaves), tree, *rest, is_leaf=leaf)


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of a dict by name: the inverse of `named_leaves` for trees of dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether any of the regular expressions is found in the name (`re.search`: anchor with ^ and $)."""
    return any(re.search(pattern, name) for pattern in patterns)


def mask(tree: ArrayTree, patterns: Sequence[str]) -> ArrayTree:
    """A tree of bools: True where `matches(name, patterns)`."""
    return map_named(lambda name, _: matches(name, patterns), tree)


def check_fits(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    *,
    what: str = "weights",
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
) -> None:
    """Compare leaves by name (anything with a shape) and raise one error with all that is wrong.

    Names that match `allow_missing` may lack in `found`, names that match `allow_extra` may be in it for
    nothing.

    Raises:
      TreeMismatchError: listing missing, extra and misshapen names with their shapes.
    """
    missing = [n for n in expected if n not in found and not matches(n, allow_missing)]
    extra = [n for n in found if n not in expected and not matches(n, allow_extra)]
    misshapen = [n for n in expected if n in found and np.shape(found[n]) != np.shape(expected[n])]
    if not (missing or extra or misshapen):
        return
    lines = [f"{what} do not fit: {len(missing)} missing, {len(extra)} extra, {len(misshapen)} misshapen"]
    lines += [f"  missing    {n} {np.shape(expected[n])}" for n in missing]
    lines += [f"  extra      {n} {np.shape(found[n])}" for n in extra]
    lines += [f"  misshapen  {n} {np.shape(found[n])}, expected {np.shape(expected[n])}" for n in misshapen]
    lines.append("nothing was loaded; check that the file belongs to this model, size and expert")
    raise TreeMismatchError("\n".join(lines))


def merge(
    into: ArrayTree,
    values: ArrayTree,
    *,
    what: str = "weights",
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
) -> ArrayTree:
    """`into` with its leaves replaced by those of the same name in `values`, cast to the dtype of `into`.

    Works on arrays and under `jit`. Leaves of `into` allowed to be missing stay as they are.

    Raises:
      TreeMismatchError: if a name that is not allowed is missing or extra, or a shape differs.
    """
    found = named_leaves(values)
    check_fits(named_leaves(into), found, what=what, allow_missing=allow_missing, allow_extra=allow_extra)
    return map_named(lambda name, old: found[name].astype(old.dtype) if name in found else old, into)


def count(tree: ArrayTree) -> int:
    """The number of elements of all leaves (arrays or ShapeDtypeStructs)."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(tree))


def overview(tree: ArrayTree) -> str:
    """A table of names, shapes and sizes, for printing."""
    from clu import parameter_overview  # here, because it takes long to import

    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named_leaves(tree).items()}
    return parameter_overview.get_parameter_overview(nested(shapes), include_stats=False)
