"""Two-way tables between PyTorch parameter names and our trees.

A layout is a list of `Rule`s. `to_tree` and `from_tree` are the only code that reads one, so that a new layout is a
new table. Arrays are NumPy; nothing here imports jax or torch.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np


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


def to_tree(rules: Iterable[Rule], tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple] | None = None):
    """PyTorch tensors -> our nested dict.

    `shapes` (our path -> shape), where given, is what the model wants. Raises ValueError that lists every missing,
    extra and misshapen tensor; nothing is partly loaded.
    """
    rules = list(rules)
    wanted = [name for rule in rules for name in rule.names()]
    problems = [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"extra {name} {tuple(tensors[name].shape)}" for name in sorted(set(tensors) - set(wanted))]
    if problems:
        raise ValueError("the tensors do not fit this model:\n  " + "\n  ".join(problems))
    tree: dict = {}
    for rule in rules:
        try:
            arrays = [rule.transform.to_ours(np.asarray(tensors[name])) for name in rule.names()]
            array = np.stack(arrays) if rule.layers else arrays[0]
        except ValueError:
            got = {name: tuple(tensors[name].shape) for name in rule.names()}
            problems.append(f"misshapen {got} for {rule.ours}")
            continue
        if shapes is not None and tuple(shapes[rule.ours]) != array.shape:
            problems.append(
                f"misshapen {rule.theirs}: {tuple(tensors[rule.names()[0]].shape)} gives {array.shape} for "
                f"{rule.ours}, which is {tuple(shapes[rule.ours])}"
            )
            continue
        *parents, leaf = rule.ours.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    if problems:
        raise ValueError("the tensors do not fit this model:\n  " + "\n  ".join(problems))
    return tree


def from_tree(rules: Iterable[Rule], tree) -> dict[str, np.ndarray]:
    """Our nested dict -> PyTorch tensors by name; the inverse of `to_tree`. Raises ValueError on unlisted leaves."""
    flat = flatten(tree)
    rules = list(rules)
    ours = {rule.ours for rule in rules}
    if ours != set(flat):
        raise ValueError(
            f"the tree does not fit the table: missing {sorted(ours - set(flat))}, extra {sorted(set(flat) - ours)}"
        )
    tensors = {}
    for rule in rules:
        array = np.asarray(flat[rule.ours])
        layers = array if rule.layers else array[None]
        for name, layer in zip(rule.names(), layers, strict=True):
            tensors[name] = np.ascontiguousarray(rule.transform.to_theirs(layer))
    return tensors


def flatten(tree, prefix: str = "") -> dict:
    """Nested dict -> {"a/b/c": leaf}."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat: dict = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}/{key}" if prefix else key))
    return flat
