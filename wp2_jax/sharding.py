"""Where arrays live: a mesh with axes data, fsdp, seq, tensor, and rules from path names to axes.

Batches are cut over data and fsdp together; weights and optimiser state over fsdp (and tensor); tokens over
seq outside attention and heads over seq inside it. Activations are pinned by name with `constrain`.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wp2_jax import tree
from wp2_jax.array_types import ArrayTree, Batch

AXES = ("data", "fsdp", "seq", "tensor")
BATCH = ("data", "fsdp")


class ShardingError(ValueError):
    """A size does not fit the mesh."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one of them may be -1, for all that remain."""

    data: int = 1
    fsdp: int = -1
    seq: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class Rules:
    """How weights are cut.

    `specs` are (path regex, axes of the last dimensions): the first that is found in the name wins, and
    axes are counted from the last dimension, so that a leading layer axis is never cut. Names without a
    match have their largest dimension that divides cut over fsdp; in names that match `stacked` the first
    dimension is the layer. An axis that does not divide its dimension is left out. `over` stands in for fsdp: a single
    world has no batch to cut, so that its weights may lie on the devices along seq.
    """

    specs: tuple[tuple[str, tuple[str | None, ...]], ...]
    stacked: str = r"(^|/)(blocks|layers)(/|$)"
    min_size: int = 1024  # smaller arrays are on every device
    over: str | None = "fsdp"


RULES = Rules(
    specs=(
        (r"(^|/)(q|k|v|qkv|wi(_\d)?|ffn_in|up|gate)/kernel(/values)?$", ("fsdp", "tensor")),
        (r"(^|/)(o|out|wo|ffn_out|down)/kernel(/values)?$", ("tensor", "fsdp")),
        (r"(^|/)modulation$", ()),  # small, and read by every token
    )
)

ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "batch": (BATCH,),  # any array whose first axis is the batch
    "tokens": (BATCH, "seq"),  # [B, L, D]
    "heads": (BATCH, None, ("seq", "tensor")),  # [B, L, N, K] inside attention: all tokens, some heads
    "cache": (None, BATCH, None, ("seq", "tensor")),  # [layers, B, L, N, K] keys and values that are kept
    "hidden": (BATCH, "seq", "tensor"),  # [B, L, ffn] between the two layers of an FFN
    "bands": (BATCH, None, "seq"),  # [B, F, H, W, C] in an autoencoder: bands of rows; convolutions fetch the next rows
}


def make_mesh(config: MeshConfig, devices: Any = None) -> Mesh:
    """The mesh over all devices (or those given).

    Raises:
      ShardingError: if the sizes do not multiply to the number of devices.
    """
    devices = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    sizes = dataclasses.asdict(config)
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1 or any(size == 0 or size < -1 for size in sizes.values()):
        raise ShardingError(f"mesh: {sizes} must be positive sizes, with at most one -1 (all that remain)")
    known = math.prod(size for size in sizes.values() if size != -1)
    if rest:
        sizes[rest[0]] = devices.size // known
    if math.prod(sizes.values()) != devices.size:
        raise ShardingError(f"mesh: {dataclasses.asdict(config)} does not divide {devices.size} devices")
    shape = tuple(sizes[axis] for axis in AXES)
    return Mesh(mesh_utils.create_device_mesh(shape, devices), AXES)


def first_devices(count: int) -> Mesh:
    """The mesh that a single world runs on: its first `count` devices along seq. ShardingError where there are less."""
    devices = jax.devices()
    if not 1 <= count <= len(devices):
        raise ShardingError(f"devices: {count} asked for, this process has {len(devices)} ({devices[0].device_kind})")
    return make_mesh(MeshConfig(fsdp=1, seq=count), devices[:count])


def one_world(cut_weights: bool) -> Rules:
    """How the weights of a single world lie on `first_devices`: whole on each, or cut over all."""
    return dataclasses.replace(RULES, over="seq" if cut_weights else None)


def check(mesh: Mesh, *, batch_size: int, num_heads: int = 0, accumulate: int = 1) -> None:
    """Check sizes against the mesh when the config is read. `num_heads` 0: there is no attention.

    Raises:
      ShardingError: naming the size, the axis and the nearest sizes that work.
    """
    ways = axis_size(mesh, BATCH) * accumulate
    if batch_size % ways:
        raise ShardingError(
            f"batch_size: {batch_size} is not a multiple of data x fsdp x accumulate = {ways}; "
            f"use {batch_size // ways * ways or ways} or {(batch_size // ways + 1) * ways}"
        )
    heads = axis_size(mesh, ("seq", "tensor"))
    if num_heads % heads:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ShardingError(
            f"num_heads: {num_heads} heads cannot be cut over seq x tensor = {heads}; "
            f"choose a product of mesh.seq and mesh.tensor among {divisors}"
        )


def axis_size(mesh: Any, axes: str | tuple[str, ...] | None) -> int:
    """How many ways the axis (or axes together) cut."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def spec(name: str, shape: tuple[int, ...], rules: Rules, mesh: Mesh) -> PartitionSpec:
    """The axes of one array of a tree."""
    if math.prod(shape) < rules.min_size:
        return PartitionSpec()
    for pattern, axes in rules.specs:
        if tree.matches(name, (pattern,)) and len(axes) <= len(shape):
            axes = tuple(rules.over if axis == "fsdp" else axis for axis in axes)
            return dividing((None,) * (len(shape) - len(axes)) + axes, shape, mesh)
    first = 1 if tree.matches(name, (rules.stacked,)) else 0
    ways = axis_size(mesh, rules.over)
    candidates = [i for i in range(first, len(shape)) if shape[i] % ways == 0]
    if not candidates:
        return PartitionSpec()
    largest = max(candidates, key=lambda i: shape[i])
    return PartitionSpec(*(rules.over if i == largest else None for i in range(len(shape))))


def shardings(shapes: ArrayTree, rules: Rules, mesh: Mesh) -> ArrayTree:
    """A NamedSharding for every leaf; the names of weights, averages and optimiser state end alike."""
    return tree.map_named(lambda name, x: NamedSharding(mesh, spec(name, x.shape, rules, mesh)), shapes)


def abstract(shapes: ArrayTree, rules: Rules, mesh: Mesh) -> ArrayTree:
    """ShapeDtypeStructs with shardings, for restoring a checkpoint or compiling ahead of time."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings(shapes, rules, mesh),
    )


def place(arrays: ArrayTree, rules: Rules, mesh: Mesh) -> ArrayTree:
    """Put weights onto the devices by the rules."""
    return jax.device_put(arrays, shardings(arrays, rules, mesh))


def constrain(x: jax.Array, name: str) -> jax.Array:
    """Pin an activation to its axes (`ACTIVATIONS`) in the mesh of `jax.set_mesh`, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    axes = ACTIVATIONS[name]
    return jax.lax.with_sharding_constraint(x, dividing(axes + (None,) * (x.ndim - len(axes)), x.shape, mesh))


def bands(x: jax.Array) -> jax.Array:
    """[B, F, H, W, C] in bands of rows along seq, or whole on every device where a band would be of a single row.

    Convolutions fetch the rows of their neighbours' bands that they need. XLA partitioned convolutions over fewer rows
    than devices wrongly (jaxlib 0.10.2 on CPU: memory tokens off by their own size), so that it is not left to choose.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else axis_size(mesh, "seq")
    return constrain(x, "bands" if x.shape[2] % ways == 0 and x.shape[2] >= 2 * ways else "batch")


def even(x: jax.Array) -> jax.Array:
    """[B, L, ...] with zeros behind, so that L divides among the devices along seq."""
    mesh = jax.sharding.get_abstract_mesh()
    missing = 0 if mesh.empty else -x.shape[1] % axis_size(mesh, "seq")
    return jnp.pad(x, [(0, missing) if axis == 1 else (0, 0) for axis in range(x.ndim)]) if missing else x


def process_rows(mesh: Mesh, batch: int, devices: Iterable[Any] | None = None) -> list[int]:
    """The rows of a global batch that this process's devices (or those given) hold, ascending.

    Processes along data and fsdp hold different rows, those along seq and tensor the same ones.
    """
    cut = NamedSharding(mesh, PartitionSpec(BATCH)).devices_indices_map((batch,))
    held = [cut[device] for device in (mesh.local_devices if devices is None else devices)]
    return sorted({row for (rows,) in held for row in range(batch)[rows]})


def put_batch(batch: Batch, mesh: Mesh) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Put the arrays of a batch onto the devices, cut along the batch; all else (`key`) stays on the host.

    With several processes each gives the rows of `process_rows`.
    """
    arrays = {name: x for name, x in batch.items() if isinstance(x, np.ndarray)}
    host = {name: x for name, x in batch.items() if name not in arrays}
    cut = NamedSharding(mesh, PartitionSpec(BATCH))
    return {name: jax.make_array_from_process_local_data(cut, x) for name, x in arrays.items()}, host


def dividing(axes: tuple[Any, ...], shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """`axes` of the dimensions of a shape, without those that do not divide theirs."""
    return PartitionSpec(
        *(axis if size % axis_size(mesh, axis) == 0 else None for axis, size in zip(axes, shape, strict=True))
    )
