"""Attention on TPUs without its table of scores: jax's splash kernel, given spans."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from wp2_jax import sharding

_LANES = 128
_LARGEST_BLOCK = 512


def fits(q: jax.Array) -> bool:
    """Whether the kernel takes heads of this size, q [B, L, N, K]."""
    return q.shape[-1] % _LANES == 0


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array | None,
    blocks: tuple[int, int] | None,
    scale: float,
    *,
    interpret: bool = False,
) -> jax.Array:
    """As `attention.attend`. On a mesh each device has its own rows of the batch and its own heads."""
    keys = k.shape[1]
    if length is None and keys % _LANES:
        length = jnp.full((1,), keys, jnp.int32)
    if length is not None:
        length = jnp.broadcast_to(length, (q.shape[0],))
    whole, heads = q.shape[1], (q.shape[0], q.shape[2])
    # The kernel knows no scale: it lies in the queries.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q, k, v = (_even(x) for x in (q, k, v))
    local = functools.partial(_local, blocks=blocks, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        rows, over = sharding.dividing((sharding.BATCH, ("seq", "tensor")), heads, mesh)
        cut = jax.P(rows, None, over)
        local = jax.shard_map(
            local, in_specs=(cut, cut, cut, None if length is None else jax.P(rows)), out_specs=cut, check_vma=False
        )
    return local(q, k, v, length)[:, :whole]


def _local(
    q: jax.Array, k: jax.Array, v: jax.Array, length: Any, *, blocks: tuple[int, int] | None, interpret: bool
) -> jax.Array:
    run = _kernel(q.shape[1], k.shape[1], q.shape[2], blocks, interpret)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, length: Any) -> jax.Array:
        segments = None
        if length is not None:
            past = (jnp.arange(k.shape[0]) >= length).astype(jnp.int32)
            segments = kernel.SegmentIds(jnp.zeros(q.shape[0], jnp.int32), past)
        return run(*(x.swapaxes(0, 1) for x in (q, k, v)), segment_ids=segments).swapaxes(0, 1)

    # Inside, the library mixes widths.
    with jax.numpy_dtype_promotion("standard"):
        return jax.vmap(one)(q, k, v, length)


def _kernel(queries: int, keys: int, heads: int, blocks: tuple[int, int] | None, interpret: bool) -> Any:
    q, kv = _block(queries), _block(keys)
    sizes = kernel.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_kv_compute=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_kv_dkv_compute=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
    shape = (queries, keys)
    mask = masks.FullMask(shape) if blocks is None else _Blocks(shape, *blocks)
    return kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )


class _Blocks(masks.Mask):
    """Query i sees the keys before lead + (i // size + 1) * size, as `Span.blocks`."""

    def __init__(self, shape: tuple[int, int], lead: int, size: int):
        self._shape, self._blocks = shape, (lead, size)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def __getitem__(self, index: Any) -> np.ndarray:
        queries, keys = (np.arange(size)[part] for size, part in zip(self._shape, index, strict=True))
        lead, size = self._blocks
        return keys[None] < lead + (queries[:, None] // size + 1) * size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Blocks) and (self._shape, self._blocks) == (other._shape, other._blocks)

    def __hash__(self) -> int:
        return hash((self._shape, self._blocks))


def _even(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _LANES), (0, 0), (0, 0)))


def _block(length: int) -> int:
    """The largest size of a tile, in whole lanes, that divides a length."""
    return max(size for size in range(_LANES, _LARGEST_BLOCK + 1, _LANES) if length % size == 0)
