"""Attention behind one function: the only place where a kernel is chosen.

XLA writes the table of scores to memory and reads it again: for one chunk of the full-size world over 64 chunks of
memory, 2.4 GB a layer on each of eight H100 (read in the compiled program). TPUs and GPUs have kernels that keep it on
the chip.
"""

import jax
import jax.numpy as jnp

from wp2_jax.models.spans import Range, Span

KERNELS = ("auto", "xla")
"""auto: splash on TPU, cuDNN on GPU in bfloat16, XLA elsewhere and where these do not take the shapes."""
# Scores that are no more than this are left to XLA.
_FEW = 2**18


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    length: jax.Array | None = None,
    blocks: tuple[int, int] | None = None,
    kernel: str = "xla",
) -> jax.Array:
    """Softmax attention, softmax in float32.

    q [B, Lq, N, K], k and v [B, Lk, N, K]; `length` and `blocks` say which keys are seen, as those of a `Span`; kernel
    one of KERNELS. Returns [B, Lq, N, K] in q's dtype.
    """
    platform = _platform() if kernel == "auto" and q.shape[1] * k.shape[1] > _FEW else ""
    if platform == "tpu":
        # Here, because the kernels take time to import.
        from wp2_jax.models import splash

        if splash.fits(q):
            return splash.attend(q, k, v, length, blocks, q.shape[-1] ** -0.5)
    if platform in ("gpu", "cuda") and q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] in range(8, 129, 8):
        return _cudnn(q, k, v, length, blocks)
    key, mask = jnp.arange(k.shape[1]), None
    if length is not None:
        mask = (key < length[:, None])[:, None, None]
    if blocks is not None:
        lead, size = blocks
        end = lead + (jnp.arange(q.shape[1]) // size + 1) * size
        before = (key < end[:, None])[None, None]
        mask = before if mask is None else mask & before
    # Inside, the library mixes its float32 scale with bfloat16 logits.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask)


def attend_spans(q: jax.Array, k: jax.Array, v: jax.Array, spans: tuple[Span, ...], kernel: str = "auto") -> jax.Array:
    """q [B, Lq, N, K] over k and v [B, Lk, N, K] as the spans say, which together have every query once, in order;
    without spans all see all."""
    if not spans:
        return attend(q, k, v, kernel=kernel)
    parts = [
        attend(
            q[:, slice(*span.queries)],
            _laid(k, span.keys),
            _laid(v, span.keys),
            length=span.length,
            blocks=span.blocks,
            kernel=kernel,
        )
        for span in spans
    ]
    return jnp.concatenate(parts, axis=1)


def _laid(x: jax.Array, ranges: tuple[Range, ...]) -> jax.Array:
    return jnp.concatenate([x[:, slice(*tokens)] for tokens in ranges], axis=1)


def _platform() -> str:
    """Of the mesh that a program is made for, which may be of chips that are not here; else of this process."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() if mesh.empty else mesh.abstract_device.platform


def _cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array | None, blocks: tuple[int, int] | None
) -> jax.Array:
    if blocks is not None:
        assert length is None
        lead, size = blocks
        parts = [
            _cudnn(q[:, begin : begin + size], k[:, : lead + begin + size], v[:, : lead + begin + size], None, None)
            for begin in range(0, q.shape[1], size)
        ]
        return jnp.concatenate(parts, axis=1)
    lengths = None if length is None else jnp.broadcast_to(length, (q.shape[0],)).astype(jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")
