"""A program with two losses, two optimisers, an average, random numbers and a loader; also run as a script.

python toy_program.py WORKDIR STEPS SECONDS_A_STEP [PROCESS PROCESSES PORT]
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import rng, sharding
from wp2_jax.sharding import MeshConfig
from wp2_jax.train import loop, optim, state, step
from wp2_jax.train.loop import LoopConfig
from wp2_jax.train.optim import OptimConfig


class Numbers:
    """Batches drawn from their index; the position is the index. Calls `before[index]()` when it gets there."""

    def __init__(self, before=None, nan_at=(), seconds=0.0):
        self.index, self.before, self.nan_at, self.seconds = 0, before or {}, nan_at, seconds
        rows = 8 // jax.process_count()  # every process yields its own rows
        self.rows = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)

    def __next__(self):
        time.sleep(self.seconds)
        if self.index in self.before:
            self.before[self.index]()
        x = np.random.default_rng(self.index).normal(size=(8, 16)).astype(np.float32)
        if self.index in self.nan_at:
            x[2, 3] = np.nan
        names = [f"clip{self.index}-{row}" for row in range(8)]
        self.index += 1
        return {"x": x[self.rows], "key": names[self.rows]}

    def get_state(self):
        return str(self.index).encode()

    def set_state(self, position):
        self.index = int(position)


class TwoLosses:
    """A student that matches a frozen teacher, and a critic that follows the student: two jitted functions."""

    optimisers = {  # noqa: RUF012
        "student": optim.make(OptimConfig(learning_rate=1e-2, warmup=3)),
        "critic": optim.make(OptimConfig(learning_rate=3e-3, b1=0.0)),
    }

    def __init__(self, config=MeshConfig(data=2, fsdp=4)):  # noqa: B008
        self.mesh = sharding.make_mesh(config)
        self.rules = sharding.Rules(specs=(), min_size=1)
        teacher = np.random.default_rng(9).normal(size=(16, 16)).astype(np.float32)
        self.frozen = sharding.place({"teacher": {"w": teacher}}, self.rules, self.mesh)
        self._student = step.JitUpdate(self._student_pure, self.mesh, self.rules)
        self._critic = step.JitUpdate(self._critic_pure, self.mesh, self.rules)

    def given(self):
        return {}

    def init(self, key, given):
        params = {
            role: {"w": jax.random.normal(rng.fold(key, role), (16, 16)), "bias": jnp.zeros(16)}
            for role in self.optimisers
        }
        return state.create(key, params, self.optimisers, ema=("student",))

    def update(self, state, batch, frozen):
        state, student = self._student(state, batch, frozen)
        state, critic = self._critic(state, batch, frozen)
        return state, {**student, **critic}

    def evaluate(self, state, batch, frozen):
        return {"student_loss": self.student_loss(state.params["student"], batch["x"], frozen)}

    def sample(self, state):
        return {"weights": np.asarray(jnp.zeros((4, 6, 3)) + 255 * jnp.tanh(state.step)).astype(np.uint8)}

    @staticmethod
    def student_loss(params, x, frozen):
        return jnp.mean((x @ params["w"] + params["bias"] - x @ frozen["teacher"]["w"]) ** 2)

    def _student_pure(self, state, batch, frozen):
        noise = jax.random.normal(rng.fold(state.key, "student", state.step), batch["x"].shape)
        loss, grads = jax.value_and_grad(self.student_loss)(state.params["student"], batch["x"] + noise, frozen)
        ok = step.all_finite(loss, grads)
        state, norms = step.apply_gradients(state, {"student": grads}, self.optimisers, ok=ok, ema_decay=0.9)
        return state, {"student_loss": loss, **norms}

    def _critic_pure(self, state, batch, frozen):
        noise = jax.random.normal(rng.fold(state.key, "critic", state.step), batch["x"].shape)
        target = {"teacher": state.params["student"]}
        x = batch["x"] + noise
        loss, grads = jax.value_and_grad(self.student_loss)(state.params["critic"], x, target)
        ok = step.all_finite(loss, grads)
        state, norms = step.apply_gradients(state, {"critic": grads}, self.optimisers, ok=ok)
        state, counts = step.finish(state, ok)
        return state, {"critic_loss": loss, **norms, **counts}


def config(steps, **changes):
    small = {"log_every": 2, "evaluate_every": 4, "sample_every": 0, "checkpoint_every": 3}
    return LoopConfig(**{"steps": steps, **small, **changes})


HELD_OUT = [{"x": np.random.default_rng(100 + i).normal(size=(8, 16)).astype(np.float32)} for i in range(2)]


if __name__ == "__main__":
    workdir, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) > 4:
        process, processes, port = map(int, sys.argv[4:])
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    loader = Numbers(seconds=seconds)
    held_out = [{"x": batch["x"][loader.rows]} for batch in HELD_OUT]
    loop.run(TwoLosses(), loader, workdir, config(steps, log_every=1), held_out=held_out)
