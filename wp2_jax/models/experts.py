"""The two experts of a world model as modules: same sizes, heads of their own length (spec sections 1 and 5)."""

import dataclasses
from collections.abc import Iterable, Mapping

from wp2_jax.models.dit import DiT, DiTConfig


def expert_models(
    config: DiTConfig,
    names: Iterable[str],
    *,
    head: str = "velocity",
    intervals: Mapping[str, int] | None = None,
    blocks: Mapping[str, int] | None = None,
) -> dict[str, DiT]:
    """One module an expert name; `intervals` and `blocks` per expert are needed by the PDD heads."""
    if head == "velocity":
        return {name: DiT(dataclasses.replace(config, head=head)) for name in names}
    if intervals is None or blocks is None:
        raise ValueError(f"a {head} head needs the intervals and blocks of each expert (see diffusion.pdd)")
    return {
        name: DiT(dataclasses.replace(config, head=head, intervals=intervals[name], blocks=blocks[name]))
        for name in names
    }
