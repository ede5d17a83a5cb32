"""Random numbers: one base key, folded with a name and then with counters.

A stream is `fold(key, "noise", step)`. Nothing is split or carried along, so a resumed run and a replayed
step draw exactly what the first run drew.
"""

import secrets
import zlib

import jax

from wp2_jax.array_types import PRNGKey


def fold(key: PRNGKey, name: str, *counters: int | jax.Array) -> PRNGKey:
    """The key of the stream `name`, at the given counters (step, chunk, ...; integers or int32 scalars).

    The name enters as its CRC-32, which unlike Python's `hash` is the same in every process.
    """
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    for counter in counters:
        key = jax.random.fold_in(key, counter)
    return key


def base_key(seed: int) -> PRNGKey:
    """The one base key of a run."""
    return jax.random.key(seed)


def drawn_seed(seed: int | None) -> int:
    """`seed` as it is (0 included), or a drawn one, printed so that the run can be repeated."""
    if seed is None:
        seed = secrets.randbelow(2**31)
        print(f"seed: {seed} (drawn; pass it to repeat this run)")
    return seed
