"""Two-way tables between PyTorch parameter names and our trees.

A layout is a list of `Rule`s, and nothing outside of this module reads one, so that a new layout is a new table.
`own` and `published` bring over shapes, `own_pieces` and `published_pieces` one array at a time, `to_tree` and
`from_tree` whole trees. Arrays are NumPy.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from wp2_jax.checkpoints.tensor_file import Spec, parts


@dataclasses.dataclass(frozen=True)
class Transform:
    """An array map and its inverse, both of which keep the dtype."""

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


def _permute(*axes: int) -> Transform:
    inverse = tuple(int(i) for i in np.argsort(axes))
    return Transform(lambda a: a.transpose(axes), lambda a: a.transpose(inverse))


IDENTITY = Transform(lambda a: a, lambda a: a)
LINEAR = _permute(1, 0)  # [out, in] <-> [in, out]
CONV2D = _permute(2, 3, 1, 0)  # [out, in, kh, kw] <-> [kh, kw, in, out]
CONV3D = _permute(2, 3, 4, 1, 0)  # [out, in, kt, kh, kw] <-> [kt, kh, kw, in, out]


def trailing_ones(count: int) -> Transform:
    """[..., 1 x count] in PyTorch, without those axes here (norm gains of convolution stacks)."""
    return Transform(lambda a: a.reshape(a.shape[: a.ndim - count]), lambda a: a.reshape(a.shape + (1,) * count))


def leading_one() -> Transform:
    """[1, ...] in PyTorch, without that axis here (modulation tables)."""
    return Transform(lambda a: a[0], lambda a: a[None])


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter of ours.

    `ours` is a path "a/b/kernel"; `theirs` a PyTorch name, in which "{i}" stands for the layer when `layers` > 0:
    then our array has a leading axis over the layers and the transform applies to each layer.
    """

    ours: str
    theirs: str
    transform: Transform = IDENTITY
    layers: int = 0

    def names(self) -> list[str]:
        """The PyTorch names that this rule reads or writes."""
        return [self.theirs.format(i=i) for i in range(self.layers)] if self.layers else [self.theirs]


def published(rules: Iterable[Rule], ours: Mapping[str, Spec]) -> dict[str, Spec]:
    """Our parameters under their published names, with the shapes they have there."""
    theirs = {}
    for rule in rules:
        shape, dtype = ours[rule.ours]
        like = np.broadcast_to(np.float32(0), shape[1:] if rule.layers else shape)
        theirs |= dict.fromkeys(rule.names(), Spec(rule.transform.to_theirs(like).shape, dtype))
    return theirs


def own(rules: Iterable[Rule], theirs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Published parameters under our paths, with the shapes they get here; what cannot be brought over is left out.

    Layers of different dtypes meet in float32, or in float64 where one has that.
    """
    ours = {}
    for rule in rules:
        specs = [theirs[name] for name in rule.names() if name in theirs]
        if len(specs) != len(rule.names()) or len({spec.shape for spec in specs}) != 1:
            continue
        try:
            shape = rule.transform.to_ours(np.broadcast_to(np.float32(0), specs[0].shape)).shape
        except (ValueError, IndexError):
            continue
        dtypes = {spec.dtype for spec in specs}
        dtype = specs[0].dtype if len(dtypes) == 1 else "float64" if "float64" in dtypes else "float32"
        ours[rule.ours] = Spec(((rule.layers,) if rule.layers else ()) + shape, dtype)
    return ours


FLOATS = ("float64", "float32", "float16", "bfloat16")
"""What weights may be kept in."""


def check(rules: Sequence[Rule], theirs: Mapping[str, Spec], shapes: Mapping[str, tuple] | None = None) -> None:
    """Raises ValueError that lists every missing, extra and misshapen tensor, and those of a dtype not in `FLOATS`.

    `shapes` (our path -> shape) is what the model wants; without it shapes need only be what the table can bring over.
    """
    wanted = [name for rule in rules for name in rule.names()]
    problems = [f"missing {name}" for name in wanted if name not in theirs]
    problems += [f"extra {name} {theirs[name].shape}" for name in sorted(set(theirs) - set(wanted))]
    problems += [f"{name} is {theirs[name].dtype}" for name in wanted if _odd(theirs.get(name))]
    if shapes is None:
        ours = own(rules, theirs)
        for rule in rules:
            there = {name: theirs[name].shape for name in rule.names() if name in theirs}
            if len(there) == len(rule.names()) and rule.ours not in ours:
                problems.append(f"misshapen {there} for {rule.ours}")
    else:
        expected = published(rules, {path: Spec(tuple(shape), "float32") for path, shape in shapes.items()})
        problems += [
            f"misshapen {name} {theirs[name].shape}, expected {spec.shape}"
            for name, spec in expected.items()
            if name in theirs and theirs[name].shape != spec.shape
        ]
    if problems:
        raise ValueError("the tensors do not fit this model:\n  " + "\n  ".join(problems))


def _odd(spec: Spec | None) -> bool:
    return spec is not None and spec.dtype not in FLOATS


def own_pieces(
    rule: Rule, specs: Mapping[str, Spec], read: Callable[[str, slice | None], np.ndarray]
) -> Iterator[np.ndarray]:
    """One array of ours, in pieces that follow each other, from PyTorch tensors by name and rows (None: all)."""
    for name in rule.names():
        if rule.transform is IDENTITY:
            yield from parts(read, name, specs[name])
        else:
            yield contiguous(rule.transform.to_ours(read(name, None)))


def published_pieces(rules: Iterable[Rule], read: Callable[[str, int | None], np.ndarray]) -> dict[str, Callable]:
    """For each PyTorch name a function of nothing that makes its tensor. `read(path, layer)` gives a layer of an array
    of ours, or, with None, an array without layers."""
    return {
        name: lambda rule=rule, layer=layer: contiguous(
            rule.transform.to_theirs(read(rule.ours, layer if rule.layers else None))
        )
        for rule in rules
        for layer, name in enumerate(rule.names())
    }


def contiguous(array: np.ndarray) -> np.ndarray:
    """The same values in C order. A large transposed matrix goes in tiles, which stay in the processor's cache."""
    if array.ndim != 2 or array.size < _TILE**2 or not array.flags.f_contiguous:
        return np.ascontiguousarray(array)
    out = np.empty(array.shape, array.dtype)
    for row in range(0, array.shape[0], _TILE):
        for column in range(0, array.shape[1], _TILE):
            tile = slice(row, row + _TILE), slice(column, column + _TILE)
            out[tile] = array[tile]
    return out


_TILE = 256


def to_tree(rules: Iterable[Rule], tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple] | None = None):
    """PyTorch tensors -> our nested dict.

    `shapes` (our path -> shape), where given, is what the model wants. Raises ValueError as `check`; nothing is partly
    loaded.
    """
    rules = list(rules)
    specs = {name: Spec(np.shape(value), str(value.dtype)) for name, value in tensors.items()}
    check(rules, specs, shapes)
    tree: dict = {}
    for rule in rules:
        *parents, leaf = rule.ours.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        arrays = [contiguous(rule.transform.to_ours(np.asarray(tensors[name]))) for name in rule.names()]
        node[leaf] = np.stack(arrays) if rule.layers else arrays[0]
    return tree


def from_tree(rules: Iterable[Rule], tree) -> dict[str, np.ndarray]:
    """Our nested dict -> PyTorch tensors by name; the inverse of `to_tree`. Raises ValueError on unlisted leaves."""
    flat = flatten(tree)
    rules = list(rules)
    check_own(rules, flat)
    made = published_pieces(rules, lambda path, layer: np.asarray(flat[path] if layer is None else flat[path][layer]))
    return {name: make() for name, make in made.items()}


def check_own(rules: Iterable[Rule], ours: Iterable[str]) -> None:
    """Raises ValueError where our paths are not those of the table."""
    wanted, there = {rule.ours for rule in rules}, set(ours)
    if wanted != there:
        raise ValueError(
            f"the tree does not fit the table: missing {sorted(wanted - there)}, extra {sorted(there - wanted)}"
        )


def flatten(tree, prefix: str = "") -> dict:
    """Nested dict -> {"a/b/c": leaf}."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat: dict = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}/{key}" if prefix else key))
    return flat
