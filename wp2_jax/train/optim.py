"""Optimisers from path rules: AdamW or Muon with clipping, warm-up, rates and freezing by regular expression."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from wp2_jax import tree
from wp2_jax.array_types import ArrayTree


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """One optimiser. Patterns are regular expressions searched in path names like "blocks/q/kernel".

    `method` "muon" moves the kernels that match `matrices` by their orthogonalised momentum (Muon,
    kellerjordan.github.io/posts/muon), scaled to the size of AdamW's updates so that one learning rate serves both
    (arXiv 2502.16982); all else by Adam with Nesterov momentum. A matched kernel of three axes is a stack of matrices.
    Only matrices decay.
    """

    method: str = "adamw"
    matrices: tuple[str, ...] = (r"(^|/)blocks/.*kernel$",)
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
    """Clip by global norm, AdamW or Muon, weight decay where no `no_decay` pattern matches, rate by path.

    Raises:
      ValueError: for an unknown method, or as `learning_rate`.
    """

    def scale_by_path(updates: ArrayTree, _: ArrayTree) -> ArrayTree:
        def scale(name: str, update: jax.Array) -> jax.Array:
            factor = next((f for pattern, f in config.rates if tree.matches(name, (pattern,))), 1.0)
            return update * factor

        return tree.map_named(scale, updates)

    if config.method not in METHODS:
        raise ValueError(f"optim.method: {config.method!r} is unknown; use {' or '.join(METHODS)}")
    trained = optax.chain(
        optax.clip_by_global_norm(config.clip), METHODS[config.method](config), optax.stateless(scale_by_path)
    )
    return optax.multi_transform(
        {"train": trained, "frozen": optax.set_to_zero()},
        lambda params: tree.map_named(
            lambda name, _: "frozen" if tree.matches(name, config.frozen) else "train", params
        ),
    )


def _decayed(config: OptimConfig) -> Callable[[ArrayTree], ArrayTree]:
    return lambda params: tree.map_named(lambda name, _: not tree.matches(name, config.no_decay), params)


def _adamw(config: OptimConfig) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decayed(config),
    )


def _muon(config: OptimConfig) -> optax.GradientTransformation:
    def matrices(params: ArrayTree) -> ArrayTree:
        def axes(name: str, kernel: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
            # A masked leaf has no axes.
            if not tree.matches(name, config.matrices) or getattr(kernel, "ndim", 0) < 2:
                return None
            if kernel.ndim > 3:
                raise ValueError(f"optim.matrices: {name} has shape {kernel.shape}; give patterns of matrices")
            return optax.contrib.MuonDimensionNumbers(kernel.ndim - 2, kernel.ndim - 1)

        return tree.map_named(axes, params)

    rate = learning_rate(config)
    return optax.contrib.muon(
        rate,
        weight_decay=config.weight_decay,
        weight_decay_mask=_decayed(config),
        eps=config.eps,
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_learning_rate=rate,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=ADAMW_RMS,
    )


METHODS: dict[str, Callable[[OptimConfig], optax.GradientTransformation]] = {"adamw": _adamw, "muon": _muon}
ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates at learning rate 1, about (arXiv 2502.16982)."""


def ema_update(ema: ArrayTree, params: ArrayTree, decay: float) -> ArrayTree:
    """decay * ema + (1 - decay) * params, in float32."""
    return jax.tree.map(lambda e, p: decay * e + (1.0 - decay) * p.astype(jnp.float32), ema, params)
