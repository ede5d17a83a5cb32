"""The state of a training run: one pytree with all that a resumed run needs, save the loader's position."""

from collections.abc import Collection, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from wp2_jax.array_types import Params, PRNGKey


class TrainState(flax.struct.PyTreeNode):
    """All that training changes.

    `params` and `opt_state` have one entry a role, which is what one optimiser moves: an expert in the
    regression stages, student and fake score in the distillation. `ema` holds the roles that are averaged,
    in float32.
    """

    step: jax.Array  # int32 []: batches consumed, skipped ones included
    params: Params
    opt_state: dict[str, Any]
    ema: Params
    key: PRNGKey  # the base key; never changes
    skipped: jax.Array  # int32 []: updates left out because loss or gradient was not finite
    skipped_in_row: jax.Array  # int32 []


def create(
    key: PRNGKey,
    params: Params,
    optimisers: Mapping[str, optax.GradientTransformation],
    ema: Collection[str] = (),
) -> TrainState:
    """A state at step 0. `optimisers` has one entry a role of `params`; `ema` names the averaged roles.

    Raises:
      ValueError: if the roles of params, optimisers and ema do not agree.
    """
    if set(optimisers) != set(params) or not set(ema) <= set(params):
        raise ValueError(
            f"roles differ: params {sorted(params)}, optimisers {sorted(optimisers)}, ema {sorted(ema)}; "
            "every role of params needs one optimiser, and ema may only name roles of params"
        )
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params=params,
        opt_state={role: optimisers[role].init(params[role]) for role in params},
        ema={role: jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params[role]) for role in ema},
        key=key,
        skipped=zero,
        skipped_in_row=zero,
    )
