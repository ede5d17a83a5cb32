"""Worlds of the sizes that are measured."""

from wp2_jax.inference import load
from wp2_jax.inference.world import World, from_config

_MID = {
    "world": dict(height=256, width=448, boundary=None, guidance=(1.0,), intervals=(128,), blocks=(4,)),
    "model": dict(dim=1024, num_heads=8, num_layers=12, ffn_dim=4096, text_dim=1024),
    "autoencoder": dict(kind="wan"),
    "text": dict(vocab_size=32000, dim=1024, attention_dim=1024, ffn_dim=2816, num_heads=16, num_layers=8),
}
_FULL = {"world": {}, "model": {}, "autoencoder": dict(kind="wan"), "text": {}}
NAMES = ("tiny", "mid", "full")


def world(size: str) -> World:
    """ "tiny": the world whose weights ship; "mid": width 1024, 12 layers, 256 x 448; "full": the published sizes."""
    if size == "tiny":
        return load.locate(load.shipped(), "few_step").world
    if size not in NAMES:
        raise ValueError(f"size {size!r}: give one of {', '.join(NAMES)}")
    return from_config(_MID if size == "mid" else _FULL)
