"""Optimisers from path rules: AdamW with clipping, warm-up, rates and freezing by regular expression."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from wp2_jax import tree
from wp2_jax.array_types import ArrayTree


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """One optimiser. Patterns are regular expressions searched in path names like "blocks/q/kernel"."""

    learning_rate: float = 1e-5
    schedule: str = "constant"  # or "cosine", down to final_scale * learning_rate at `steps`
    warmup: int = 0  # updates over which the rate rises linearly from 0
    steps: int = 0  # length of the cosine, warm-up included
    final_scale: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = (r"(^|/)(bias|scale|embedding|modulation)$", r"norm", r"table")
    clip: float = 1.0  # largest norm of the gradient of everything this optimiser trains
    rates: tuple[tuple[str, float], ...] = ()  # (pattern, factor on the learning rate); the first that matches
    frozen: tuple[str, ...] = ()  # neither updated nor given optimiser state


def learning_rate(config: OptimConfig) -> optax.Schedule:
    """The learning rate as a function of the number of updates done.

    Raises:
      ValueError: for an unknown schedule, or a cosine that ends before the warm-up does.
    """
    if config.schedule == "constant":
        after = optax.constant_schedule(config.learning_rate)
    elif config.schedule == "cosine":
        if config.steps <= config.warmup:
            raise ValueError(
                f"optim.steps: {config.steps} is not more than optim.warmup {config.warmup}; "
                "set it to the number of training steps"
            )
        after = optax.cosine_decay_schedule(config.learning_rate, config.steps - config.warmup, config.final_scale)
    else:
        raise ValueError(f'optim.schedule: {config.schedule!r} is unknown; use "constant" or "cosine"')
    if config.warmup == 0:
        return after
    # The first update already moves: its rate is learning_rate / warmup, not 0.
    rise = optax.linear_schedule(config.learning_rate / config.warmup, config.learning_rate, config.warmup - 1)
    return optax.join_schedules([rise, after], [config.warmup])


def make(config: OptimConfig) -> optax.GradientTransformation:
    """AdamW: clip by global norm, Adam, weight decay where no `no_decay` pattern matches, rate by path."""

    def scale_by_path(updates: ArrayTree, _: ArrayTree) -> ArrayTree:
        def scale(name: str, update: jax.Array) -> jax.Array:
            factor = next((f for pattern, f in config.rates if tree.matches(name, (pattern,))), 1.0)
            return update * factor

        return tree.map_named(scale, updates)

    adamw = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay,
            mask=lambda params: tree.map_named(lambda name, _: not tree.matches(name, config.no_decay), params),
        ),
        optax.scale_by_learning_rate(learning_rate(config)),
        optax.stateless(scale_by_path),
    )
    return optax.multi_transform(
        {"train": adamw, "frozen": optax.set_to_zero()},
        lambda params: tree.map_named(
            lambda name, _: "frozen" if tree.matches(name, config.frozen) else "train", params
        ),
    )


def ema_update(ema: ArrayTree, params: ArrayTree, decay: float) -> ArrayTree:
    """decay * ema + (1 - decay) * params, in float32."""
    return jax.tree.map(lambda e, p: decay * e + (1.0 - decay) * p.astype(jnp.float32), ema, params)
