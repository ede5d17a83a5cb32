"""The backbone: one class for the bidirectional teacher, the autoregressive student and the few-step student.

They differ by how they are called (frames, mask, cache; see `passes.py`) and by the form of the head (spec section 3).
"""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import sharding
from wp2_jax.models import layers, rope
from wp2_jax.models.actions import ActionEncoder, ActionInjection
from wp2_jax.models.attention import KERNELS, attend, attend_spans
from wp2_jax.models.frames import (
    CaptionKeys,
    Frames,
    Stream,
    Write,
    frame_of_token,
    runs_of,
    take_frames,
    time_of_token,
)
from wp2_jax.models.memory import Compressor, CompressorState, MemoryConfig, init_state
from wp2_jax.models.pdd_heads import FORMS, Head
from wp2_jax.models.spans import Span


@dataclasses.dataclass(frozen=True)
class DiTConfig:
    """Sizes of one expert; the defaults are the full size (Wan2.2 I2V-A14B with actions and memory)."""

    dim: int = 5120
    num_heads: int = 40
    num_layers: int = 40
    ffn_dim: int = 13824
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    latent_channels: int = 16
    condition_channels: int = 20
    patch: int = 2
    eps: float = 1e-6
    rope_frames: int = 1024
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    head: str = "velocity"
    intervals: int = 0
    blocks: int = 2
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"  # the kernel of self-attention: attention.KERNELS
    unroll: int = 1  # layers in one turn of the loop over them: small models run faster unrolled on CPU

    def __post_init__(self):
        if isinstance(self.memory, dict):
            object.__setattr__(self, "memory", MemoryConfig(**self.memory))
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim {self.dim} over num_heads {self.num_heads} must give an even head size: RoPE turns channel pairs"
            )
        if self.head not in FORMS:
            raise ValueError(f"head {self.head!r} is not one of {FORMS}")
        if self.head != "velocity" and (self.intervals <= 0 or self.intervals % self.blocks):
            raise ValueError(f"intervals {self.intervals} must be a positive multiple of blocks {self.blocks}")
        if self.remat not in ("none", "full", "dots"):
            raise ValueError(f"remat {self.remat!r} is not one of none, full, dots")
        if self.attention not in KERNELS:
            raise ValueError(f"attention {self.attention!r} is not one of {', '.join(KERNELS)}")
        if not 1 <= self.unroll <= self.num_layers:
            raise ValueError(f"unroll {self.unroll}: give 1 to num_layers {self.num_layers}")
        if self.memory.space_factor % self.patch:
            raise ValueError(f"memory halves {self.memory.space_factor} times, not a multiple of patch {self.patch}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def in_channels(self) -> int:
        return self.latent_channels + self.condition_channels


class _SelfAttention(nn.Module):
    config: DiTConfig

    @nn.compact
    def __call__(self, x: jnp.ndarray, cached, stream: Stream):
        config = self.config
        owner = _Dtypes.of(config)
        q, k, v = (layers.dense(config.dim, owner, name)(x) for name in ("q", "k", "v"))
        q = layers.RMSNorm(config.eps, owner.param_dtype, name="norm_q")(q)
        k = layers.RMSNorm(config.eps, owner.param_dtype, name="norm_k")(k)
        q, k, v = (a.reshape(*a.shape[:2], config.num_heads, config.head_dim) for a in (q, k, v))
        q, k = rope.apply_rope(q, stream.cos, stream.sin), rope.apply_rope(k, stream.cos, stream.sin)
        # From some tokens of all heads to all tokens of some heads, where the tokens are cut (Ulysses).
        q, k, v = (sharding.constrain(a, "heads")[:, : stream.tokens] for a in (q, k, v))
        if cached is not None and stream.write is not None:
            cached = tuple(stream.write(old, new, stream.chunks) for old, new in zip(cached, (k, v), strict=True))
            k, v = (a.astype(q.dtype) for a in cached)
        elif cached is not None:
            k, v = (
                jnp.concatenate([new, old.astype(q.dtype)], axis=1) for old, new in zip(cached, (k, v), strict=True)
            )
        out = sharding.even(attend_spans(q, k, v, stream.spans, config.attention))
        out = sharding.constrain(out.reshape(*out.shape[:2], config.dim), "tokens")
        out = layers.dense(config.dim, owner, "out")(out)
        return out, cached


class CrossAttention(nn.Module):
    """Tokens over their captions; `keys` is the captions' side of it."""

    config: DiTConfig

    def setup(self):
        config = self.config
        owner = _Dtypes.of(config)
        self.q, self.k, self.v, self.out = (layers.dense(config.dim, owner, name) for name in ("q", "k", "v", "out"))
        self.norm_q = layers.RMSNorm(config.eps, owner.param_dtype)
        self.norm_k = layers.RMSNorm(config.eps, owner.param_dtype)

    def _heads(self, x: jnp.ndarray) -> jnp.ndarray:
        return x.reshape(*x.shape[:-1], self.config.num_heads, self.config.head_dim)

    def keys(self, context: jnp.ndarray) -> CaptionKeys:
        """Embedded contexts [B, C, S, D] -> k and v [B, C, S, N, K] of this layer."""
        return CaptionKeys(self._heads(self.norm_k(self.k(context))), self._heads(self.v(context)))

    def __call__(self, x: jnp.ndarray, keys: CaptionKeys | None, stream: Stream) -> jnp.ndarray:
        if keys is None:
            assert stream.context is not None
            keys = self.keys(stream.context)
        q = self._heads(self.norm_q(self.q(x)))
        out = (
            attend(q, keys.k[:, 0], keys.v[:, 0])
            if stream.captions is None
            else sharding.even(_attend_captions(q[:, : stream.tokens], keys.k, keys.v, stream.captions, stream.runs))
        )
        return self.out(out.reshape(*out.shape[:2], self.config.dim))


def _attend_captions(
    q: jnp.ndarray, k: jnp.ndarray, v: jnp.ndarray, captions: jnp.ndarray, runs: tuple[tuple[int, int], ...]
) -> jnp.ndarray:
    """Tokens q [B, L, N, K] over their own frame's caption of k and v [B, C, S, N, K]; captions [B, F].

    A frame is a row of a larger batch: the work does not grow with the number of captions, as it would under a mask.
    """
    out, token, frame = [], 0, 0
    for frames, grid in runs:
        rows = q[:, token : token + frames * grid].reshape(-1, grid, *q.shape[2:])
        caption = captions[:, frame : frame + frames]
        own = (take_frames(a, caption).reshape(-1, *a.shape[2:]) for a in (k, v))
        out.append(attend(rows, *own).reshape(q.shape[0], frames * grid, *q.shape[2:]))
        token, frame = token + frames * grid, frame + frames
    return jnp.concatenate(out, axis=1)


@dataclasses.dataclass(frozen=True)
class _Dtypes:
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    @classmethod
    def of(cls, config: DiTConfig) -> "_Dtypes":
        return cls(jnp.dtype(config.dtype), jnp.dtype(config.param_dtype))


class Block(nn.Module):
    """One transformer layer: self-attention, cross-attention, action injection, FFN; the residual stays float32."""

    config: DiTConfig

    @nn.compact
    def __call__(self, x: jnp.ndarray, cached, keys: CaptionKeys | None, stream: Stream):
        config = self.config
        owner = _Dtypes.of(config)
        table = self.param("modulation", nn.initializers.normal(config.dim**-0.5), (6, config.dim), owner.param_dtype)
        x = sharding.constrain(x, "tokens")
        modulation = jnp.take(table.astype(jnp.float32) + stream.e0, stream.time_index, axis=1)
        modulation = sharding.constrain(modulation, "tokens")
        shift1, scale1, gate1, shift2, scale2, gate2 = (modulation[:, :, i] for i in range(6))

        h = (layers.layer_norm(x, config.eps) * (1 + scale1) + shift1).astype(owner.dtype)
        attention = _SelfAttention(config, name="self_attention")
        h, cached = attention(h, cached, stream)
        x = x + h.astype(jnp.float32) * gate1

        h = layers.LayerNorm(config.eps, owner.param_dtype, name="cross_norm")(x).astype(owner.dtype)
        h = CrossAttention(config, name="cross_attention")(h, keys, stream)
        x = x + h.astype(jnp.float32)

        if stream.action is not None:
            inject = ActionInjection(config.dim, owner.dtype, owner.param_dtype, name="action")
            x = x + inject(x, stream.action, stream.frame_index).astype(jnp.float32)

        h = (layers.layer_norm(x, config.eps) * (1 + scale2) + shift2).astype(owner.dtype)
        ffn = layers.Mlp((config.ffn_dim, config.dim), "gelu", owner.dtype, owner.param_dtype, name="ffn")
        x = x + ffn(h).astype(jnp.float32) * gate2
        return x, cached


def _block_class(remat: str):
    if remat == "none":
        return Block
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return nn.remat(Block, policy=policy, prevent_cse=False)


class DiT(nn.Module):
    """One expert. Methods are called through `apply(..., method=...)` by `passes.py`."""

    config: DiTConfig

    def setup(self):
        config = self.config
        owner = _Dtypes.of(config)
        self.patch_kernel = self.param(
            "patch_kernel",
            nn.initializers.xavier_uniform(in_axis=(0, 1, 2), out_axis=3),
            (config.patch, config.patch, config.in_channels, config.dim),
            owner.param_dtype,
        )
        self.patch_bias = self.param("patch_bias", nn.initializers.zeros, (config.dim,), owner.param_dtype)
        normal = nn.initializers.normal(0.02)
        widths = (config.dim, config.dim)
        self.text_embedding = layers.Mlp(widths, "gelu", owner.dtype, owner.param_dtype, kernel_init=normal)
        # The time path stays float32 in every precision: modulation multiplies the residual stream.
        self.time_embedding = layers.Mlp(widths, "silu", jnp.float32, owner.param_dtype, kernel_init=normal)
        self.time_projection = nn.Dense(6 * config.dim, dtype=jnp.float32, param_dtype=owner.param_dtype)
        self.action_encoder = ActionEncoder(config.dim, owner.dtype, owner.param_dtype)
        self.compressor = Compressor(config.memory, config.dim, owner.dtype, owner.param_dtype)
        self.head = Head(
            config.patch**2 * config.latent_channels,
            config.head,
            config.intervals,
            config.blocks,
            config.eps,
            owner.param_dtype,
        )
        scanned = nn.scan(
            _block_class(config.remat),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast),  # pyright: ignore[reportArgumentType]
            out_axes=0,
            length=config.num_layers,
            unroll=config.unroll,
        )
        self.blocks = scanned(config)

    def embed(self, latents: jnp.ndarray, y: jnp.ndarray) -> jnp.ndarray:
        """Patch embedding: latents [B, F, h, w, 16] and y [B, F, h, w, 20] -> [B, F*h/2*w/2, D]."""
        config = self.config
        x = jnp.concatenate([latents, y], axis=-1).astype(config.dtype)
        b, f, h, w, c = x.shape
        p = config.patch
        x = x.reshape(b, f, h // p, p, w // p, p, c).transpose(0, 1, 2, 4, 3, 5, 6)
        x = x.reshape(b, f * (h // p) * (w // p), p * p * c)
        kernel = self.patch_kernel.reshape(p * p * c, config.dim).astype(config.dtype)
        return x @ kernel + self.patch_bias.astype(config.dtype)

    def compress(
        self, latents: jnp.ndarray, y: jnp.ndarray, state: CompressorState
    ) -> tuple[jnp.ndarray, CompressorState]:
        """The compressor's part of the memory tokens [B, T/2 * h/8 * w/8, D]; see `Compressor`."""
        return self.compressor(jnp.concatenate([latents, y], axis=-1), state)

    def encode_actions(self, rows: jnp.ndarray) -> jnp.ndarray:
        """[B, F, 6] -> [B, F, D]."""
        return self.action_encoder(rows)

    def encode_time(self, t: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
        """t [B, U] -> e [B, U, D] for the head and e0 [B, U, 6, D] for the blocks, float32."""
        e = self.time_embedding(rope.timestep_sinusoid(t, self.config.freq_dim))
        e0 = self.time_projection(nn.silu(e))
        return e, e0.reshape(*e0.shape[:-1], 6, self.config.dim)

    def encode_text(self, contexts: jnp.ndarray) -> jnp.ndarray:
        """Contexts [B, C, S, text_dim], zero rows past each length -> [B, C, S, D]; padding is embedded too."""
        return self.text_embedding(contexts)

    def prepare(
        self,
        groups: Sequence[Frames],
        text: jnp.ndarray | CaptionKeys,
        spans: tuple[Span, ...] = (),
        chunks: jnp.ndarray | None = None,
        write: Write | None = None,
    ) -> tuple[jnp.ndarray, jnp.ndarray, Stream]:
        """Joins frame groups into hidden tokens [B, L, D] float32, time embeddings e and what the blocks read.

        `text`: contexts [B, C, S, text_dim], or their caption keys, which `run_blocks` is then given too.
        """
        config = self.config
        frame_index, time_index = frame_of_token(groups), time_of_token(groups)
        e, e0 = self.encode_time(jnp.concatenate([group.t.astype(jnp.float32) for group in groups], axis=1))
        with_action = groups[0].actions is not None
        rows = [group.actions for group in groups]
        action = self.encode_actions(jnp.concatenate(rows, axis=1)) if with_action else None
        tables = [
            rope.rope_tables(
                group.positions,
                group.rows,
                group.cols,
                head_dim=config.head_dim,
                table_frames=config.rope_frames,
            )
            for group in groups
        ]
        cos, sin = (sharding.even(jnp.concatenate(parts, axis=1)) for parts in zip(*tables, strict=True))
        tokens = jnp.concatenate([group.tokens for group in groups], axis=1).astype(jnp.float32)
        count, tokens = tokens.shape[1], sharding.constrain(sharding.even(tokens), "tokens")
        # Tokens of the padding are as the first frame's.
        frame_index, time_index = (np.pad(index, (0, tokens.shape[1] - count)) for index in (frame_index, time_index))
        known = isinstance(text, CaptionKeys)
        captions = None
        if (text.k.shape[2] if known else text.shape[1]) > 1:
            captions = jnp.concatenate([group.captions for group in groups], axis=1)
        stream = Stream(
            e0=e0,
            action=action,
            cos=cos,
            sin=sin,
            spans=spans,
            context=None if known else self.encode_text(text),
            captions=captions,
            chunks=chunks,
            frame_index=jnp.asarray(frame_index),
            time_index=jnp.asarray(time_index),
            tokens=count,
            runs=runs_of(groups),
            write=write,
        )
        return tokens, e, stream

    def run_blocks(self, x: jnp.ndarray, stream: Stream, cached=None, keys: CaptionKeys | None = None):
        """All layers. x [B, L, D]; cached: None or (k, v), each [layers, B, tokens, N, K] -> x, cached."""
        return self.blocks(x, cached, keys, stream)

    def output(
        self, x: jnp.ndarray, e: jnp.ndarray, stream: Stream, tail: int, rows: int, cols: int, block=None
    ) -> jnp.ndarray:
        """The head on the last `tail` tokens, as latents float32 [B, F, h, w, 16] (or [n, B, F, h, w, 16])."""
        last = slice(stream.tokens - tail, stream.tokens)
        out = self.head(x[:, last], e, stream.time_index[last], block)
        return unpatchify(out, rows, cols, self.config.patch, self.config.latent_channels)

    def __call__(self, latents, y, rows, contexts):
        """Touches every parameter: used by `passes.init` only."""
        b, f, h, w, _ = latents.shape
        p = self.config.patch
        self.compress(latents, y, init_state(self.config.memory, b, h, w))
        group = Frames(
            self.embed(latents, y),
            jnp.zeros((b, f), jnp.float32),
            rows,
            jnp.zeros((b, f), jnp.int32),
            jnp.zeros((b, f), jnp.int32),
            h // p,
            w // p,
        )
        x, e, stream = self.prepare([group], contexts)
        x, _ = self.run_blocks(x, stream)
        return self.output(x, e, stream, stream.tokens, h // p, w // p, jnp.zeros((), jnp.int32))


def unpatchify(x: jnp.ndarray, rows: int, cols: int, patch: int, channels: int) -> jnp.ndarray:
    """Head outputs -> latents: [B, L, f] -> [B, F, h, w, c]; [B, L, n, f] -> [n, B, F, h, w, c] (golden README 1)."""
    if x.ndim == 4:
        return jnp.stack([unpatchify(x[:, :, i], rows, cols, patch, channels) for i in range(x.shape[2])])
    x = x.reshape(x.shape[0], -1, rows, cols, patch, patch, channels).transpose(0, 1, 2, 4, 3, 5, 6)
    return x.reshape(x.shape[0], x.shape[1], rows * patch, cols * patch, channels)
