"""One update: a pure inner function, and `jit` with donation and shardings around it.

A stage with one loss is a `LossProgram`. A stage with several (distillation: rollout, replay, fake score)
writes its own update from `apply_gradients` and `finish` and jits its parts itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wp2_jax import rng, sharding, xla_flags
from wp2_jax.array_types import ArrayTree, Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.train import optim
from wp2_jax.train import state as train_state
from wp2_jax.train.state import TrainState

LossFn = Callable[[Params, Batch, dict[str, Any], PRNGKey], tuple[Scalar, Metrics]]
"""loss_fn(params {role: tree}, batch, frozen, key) -> (loss, metrics of scalars)."""
Update = Callable[[TrainState, Batch, dict[str, Any]], tuple[TrainState, Metrics]]
Optimisers = Mapping[str, optax.GradientTransformation]


class Program(Protocol):
    """What the loop needs of a stage of training."""

    mesh: Mesh
    rules: sharding.Rules
    frozen: dict[str, Any]  # trees that are used but not trained, on the devices; passed to update and evaluate

    def given(self) -> dict[str, Any]:
        """Weights of earlier stages to start from, `{}` if none. Not called if a run resumes."""
        ...

    def init(self, key: PRNGKey, given: dict[str, Any]) -> TrainState:
        """A state at step 0; pure and jittable. With `given` empty it has the same shapes (to resume)."""
        ...

    def update(self, state: TrainState, batch: Batch, frozen: dict[str, Any]) -> tuple[TrainState, Metrics]:
        """One update. It may donate `state`, and must not wait for the devices.

        Metrics are scalars on the device; NaN means "not measured in this step". `skipped` (0 or 1) and
        `skipped_in_row`, as `finish` gives them, make the loop name the samples and stop.
        """
        ...

    def evaluate(self, state: TrainState, batch: Batch, frozen: dict[str, Any]) -> Metrics:
        """Scalars on one held-out batch; the same numbers whenever it is called with the same weights."""
        ...

    def sample(self, state: TrainState) -> dict[str, np.ndarray]:
        """Pictures to look at, uint8 [H, W, 3] by name; `{}` if there are none."""
        ...


def all_finite(*trees: ArrayTree) -> jax.Array:
    """bool []: whether every number in the trees is finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(trees)]
    return functools.reduce(jnp.logical_and, leaves, jnp.asarray(True))


def apply_gradients(
    state: TrainState,
    grads: Params,
    optimisers: Optimisers,
    *,
    ok: jax.Array,
    ema_decay: float = 0.0,
) -> tuple[TrainState, Metrics]:
    """Move the roles in `grads` by their optimisers, and their averages where `state.ema` has them.

    Where `ok` (bool []) is False everything stays as it is. The step is not counted: see `finish`.
    The metrics are the norms of the gradients by role, before clipping.
    """

    trees = (state.params, state.opt_state, state.ema)
    before = tuple({role: tree[role] for role in grads if role in tree} for tree in trees)

    def move(before: tuple[Params, dict[str, Any], Params]) -> tuple[Params, dict[str, Any], Params]:
        params, opt_state, ema = (dict(tree) for tree in before)
        for role, grad in grads.items():
            with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 count with floats
                updates, opt_state[role] = optimisers[role].update(grad, opt_state[role], params[role])
            params[role] = optax.apply_updates(params[role], updates)
            if role in ema:
                ema[role] = optim.ema_update(ema[role], params[role], ema_decay)
        return params, opt_state, ema

    # A branch, and not a select at every leaf: XLA would compute `ok` once more in the kernel of each leaf, and
    # compile for the better part of a minute.
    after = jax.lax.cond(ok, move, lambda before: before, before)
    params, opt_state, ema = ({**tree, **moved} for tree, moved in zip(trees, after, strict=True))
    norms = {f"grad_norm/{role}": optax.tree.norm(grad) for role, grad in grads.items()}
    return state.replace(params=params, opt_state=opt_state, ema=ema), norms


def finish(state: TrainState, ok: jax.Array) -> tuple[TrainState, Metrics]:
    """Count the step, and whether it was skipped (`ok` False)."""
    skipped = jnp.where(ok, 0, 1).astype(jnp.int32)
    in_row = jnp.where(ok, 0, state.skipped_in_row + 1)
    state = state.replace(step=state.step + 1, skipped=state.skipped + skipped, skipped_in_row=in_row)
    return state, {"skipped": skipped, "skipped_in_row": in_row}


def make_update(loss_fn: LossFn, optimisers: Optimisers, *, ema_decay: float = 0.0, accumulate: int = 1) -> Update:
    """The pure update of a stage with one loss: gradient, guard, optimisers, average.

    The batch is cut into `accumulate` equal parts whose gradients are averaged. If the loss or a gradient
    is not finite nothing moves and the step counts as skipped.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def update(state: TrainState, batch: Batch, frozen: dict[str, Any]) -> tuple[TrainState, Metrics]:
        key = rng.fold(state.key, "update", state.step)

        def part(index: jax.Array, rows: Batch) -> tuple[Params, Metrics]:
            (loss, metrics), grads = value_and_grad(state.params, rows, frozen, rng.fold(key, "part", index))
            return grads, {**metrics, "loss": loss}

        if accumulate == 1:
            grads, metrics = part(jnp.asarray(0), batch)
        else:
            grads, metrics = _mean_over_parts(part, batch, accumulate)
        # A norm is finite only where all of its tree is.
        ok = all_finite(metrics["loss"], {role: optax.tree.norm(grad) for role, grad in grads.items()})
        state, norms = apply_gradients(state, grads, optimisers, ok=ok, ema_decay=ema_decay)
        state, counts = finish(state, ok)
        return state, {**metrics, **norms, **counts}

    return update


def jit_init(
    init: Callable[..., TrainState], key: PRNGKey, given: dict[str, Any], mesh: Mesh, rules: sharding.Rules
) -> TrainState:
    """`init(key, given)` straight into shards: no device ever holds a whole tree."""
    shapes = jax.eval_shape(init, key, given)
    given = sharding.place(given, rules, mesh)
    with jax.set_mesh(mesh):
        shards = sharding.shardings(shapes, rules, mesh)
        return jax.jit(init, out_shardings=shards, compiler_options=_quick(mesh))(key, given)


class JitUpdate:
    """`update` compiled for the mesh. The state is donated and keeps its shards; metrics are replicated."""

    def __init__(self, update: Update, mesh: Mesh, rules: sharding.Rules, *, quick_compile: bool = False):
        self._update, self._mesh, self._rules = update, mesh, rules
        self._options = _quick(mesh) if quick_compile else None
        self._jitted: Any = None

    def _jit(self, state: TrainState) -> Any:
        if self._jitted is None:
            out = (
                sharding.shardings(state, self._rules, self._mesh),
                NamedSharding(self._mesh, PartitionSpec()),
            )
            self._jitted = jax.jit(self._update, donate_argnums=0, out_shardings=out, compiler_options=self._options)
        return self._jitted

    def __call__(self, state: TrainState, batch: Batch, frozen: dict[str, Any]) -> tuple[TrainState, Metrics]:
        with jax.set_mesh(self._mesh):
            return self._jit(state)(state, batch, frozen)

    def trace(self, state: TrainState, batch: Batch, frozen: dict[str, Any]) -> Any:
        """The program that a call runs, of shapes (jax.stages.Traced): nothing is allocated."""
        with jax.set_mesh(self._mesh):
            return self._jit(state).trace(state, batch, frozen)


@dataclasses.dataclass
class LossProgram:
    """The program of a stage with one loss.

    `init_params(key, given)` makes `{role: tree}`. `accumulate` and `ema_decay` as in `make_update`; the
    average is kept for all roles when `ema_decay` is above 0. `eval_fn` (like the loss) defaults to the
    loss itself. `by_step(step)` gives traced entries of `frozen` that change as the training goes on, such as
    the longest history; evaluation uses `frozen` as it is. `quick_compile` is for runs of a few steps
    (`xla_flags.quick_compile`).
    """

    init_params: Callable[[PRNGKey, dict[str, Any]], Params]
    loss_fn: LossFn
    optimisers: Optimisers
    mesh: Mesh
    rules: sharding.Rules = sharding.RULES
    frozen: dict[str, Any] = dataclasses.field(default_factory=dict)
    load_given: Callable[[], dict[str, Any]] = dict
    sample_fn: Callable[[TrainState], dict[str, np.ndarray]] = lambda state: {}
    eval_fn: LossFn | None = None
    by_step: Callable[[jax.Array], dict[str, Any]] = lambda step: {}
    ema_decay: float = 0.0
    accumulate: int = 1
    quick_compile: bool = False

    def __post_init__(self) -> None:
        inner = make_update(self.loss_fn, self.optimisers, ema_decay=self.ema_decay, accumulate=self.accumulate)

        def update(state: TrainState, batch: Batch, frozen: dict[str, Any]) -> tuple[TrainState, Metrics]:
            return inner(state, batch, {**frozen, **self.by_step(state.step)})

        self._update = JitUpdate(update, self.mesh, self.rules, quick_compile=self.quick_compile)
        self._evaluate = jax.jit(self._evaluate_pure, compiler_options=_quick(self.mesh))

    def given(self) -> dict[str, Any]:
        return self.load_given()

    def init(self, key: PRNGKey, given: dict[str, Any]) -> TrainState:
        params = self.init_params(rng.fold(key, "init"), given)
        return train_state.create(key, params, self.optimisers, ema=params if self.ema_decay > 0 else ())

    def update(self, state: TrainState, batch: Batch, frozen: dict[str, Any]) -> tuple[TrainState, Metrics]:
        return self._update(state, batch, frozen)

    def trace(self, state: TrainState, batch: Batch, frozen: dict[str, Any]) -> Any:
        """The program of `update`, of shapes: see `JitUpdate.trace`."""
        return self._update.trace(state, batch, frozen)

    def evaluate(self, state: TrainState, batch: Batch, frozen: dict[str, Any]) -> Metrics:
        with jax.set_mesh(self.mesh):
            return self._evaluate(state.params, state.key, batch, frozen)

    def sample(self, state: TrainState) -> dict[str, np.ndarray]:
        return self.sample_fn(state)

    def _evaluate_pure(self, params: Params, key: PRNGKey, batch: Batch, frozen: dict[str, Any]) -> Metrics:
        # The same noise at every evaluation, so that the curve shows the weights and not the draw.
        loss, metrics = (self.eval_fn or self.loss_fn)(params, batch, frozen, rng.fold(key, "evaluate"))
        return {**metrics, "loss": loss}


def _quick(mesh: Mesh) -> dict[str, int] | None:
    return xla_flags.quick_compile(mesh.devices.flat[0].platform)


def _mean_over_parts(
    part: Callable[[jax.Array, Batch], tuple[Params, Metrics]], batch: Batch, parts: int
) -> tuple[Params, Metrics]:
    size = jax.tree.leaves(batch)[0].shape[0]
    if size % parts:
        raise ValueError(f"accumulate: {parts} does not divide the batch of {size}; choose a divisor")
    # Row i goes to part i mod parts: every device keeps its own rows.
    rows = jax.tree.map(lambda x: x.reshape(size // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(total: ArrayTree, index_rows: tuple[jax.Array, Batch]) -> tuple[ArrayTree, None]:
        return jax.tree.map(jnp.add, total, part(*index_rows)), None

    shapes = jax.eval_shape(part, jnp.asarray(0), jax.tree.map(lambda x: x[0], rows))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (jnp.arange(parts), rows))
    return jax.tree.map(lambda x: x / parts, total)
