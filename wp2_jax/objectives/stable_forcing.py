"""Stage 6, Stable Forcing: one update in its phases (spec section 5; paper Algorithm 1).

    rollout   M chunks by the student without gradient, a kept block d drawn for each            (`rollout.py`)
    score     g of every clip, real and fake score with memory of what precedes the clip         (`dmd.py`)
    replay    the kept block of each chunk alone with gradients, summed; one optimiser step      (`replay.py`)
    fake      flow matching on all clips of the rollout, fresh draws, one optimiser step; several times

The host goes through chunks and clips; each call runs one compiled function that takes over its accumulator. Which ones
run is drawn at the start and read by the host: the kept blocks, and the expert of every score. So an update needs the
memory of its record and of one chunk or one clip, whatever M is, and a longer rollout does not recompile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from wp2_jax import rng, sharding, xla_flags
from wp2_jax.array_types import ArrayTree, Batch, Metrics, Params, PRNGKey, Scalar
from wp2_jax.inference.spec import StreamSpec
from wp2_jax.models import passes
from wp2_jax.objectives import batch as batches
from wp2_jax.objectives import dmd, replay
from wp2_jax.objectives import rollout as rollouts
from wp2_jax.objectives.rollout import Conditions, Rollout

STUDENT, FAKE = "student", "fake"
Numbers = jax.Array | np.ndarray
"""Drawn on the devices, read on the host."""


@dataclasses.dataclass(frozen=True)
class StableForcingConfig:
    """`fake_updates`: of the fake score for one of the student; `memory_grad`: see `replay.py`; `score`: `dmd.py`."""

    fake_updates: int = 5
    memory_grad: str = "none"
    score: dmd.ScoreConfig = dataclasses.field(default_factory=dmd.ScoreConfig)

    def __post_init__(self):
        if isinstance(self.score, dict):
            object.__setattr__(self, "score", dmd.ScoreConfig(**self.score))
        if self.fake_updates < 1:
            raise ValueError(f"stable_forcing.fake_updates={self.fake_updates}: must be at least 1")
        if self.memory_grad not in replay.MEMORY_GRADS:
            raise ValueError(f"replay.memory_grad={self.memory_grad!r}: choose one of {', '.join(replay.MEMORY_GRADS)}")


class Draws(flax.struct.PyTreeNode):
    """What decides which programs run, for a rollout of the full capacity of C chunks, K clips.

    blocks [C] int32, the kept d of each chunk; score [K] and fake [updates, K] float32 in 0..1, see `dmd.expert_of`.
    """

    blocks: Numbers
    score: Numbers
    fake: Numbers


class Scored(flax.struct.PyTreeNode):
    """g [B, T, h, w, 16] of the clips scored so far, and the sum over them of mean |g|."""

    g: jax.Array
    size: Scalar


class Gradients(flax.struct.PyTreeNode):
    """Sums so far: gradients {expert: tree} in float32, the loss, and the norm of single chunks' gradients by d."""

    grads: Params
    loss: Scalar
    norms: jax.Array


def init_params(spec: StreamSpec, key: PRNGKey, given: dict[str, Any]) -> Params:
    """{"student": {expert: fused tree}, "fake": {expert: tree}}: the fake score starts as the teacher.

    given {"student": ..., "teacher": ...}, or {} for random weights of the same shapes.
    """
    if given:
        # Copies: an update takes its state over, and the teacher must outlive it.
        copy = lambda tree: jax.tree.map(lambda x: jnp.array(x, copy=True), tree)  # noqa: E731
        return {STUDENT: copy(given["student"]), FAKE: copy(given["teacher"])}
    models = {STUDENT: spec.models, FAKE: dmd.scorers(spec)}
    return {
        role: {name: passes.init(model.config, rng.fold(key, f"{role}/{name}")) for name, model in experts.items()}
        for role, experts in models.items()
    }


def draw(spec: StreamSpec, config: StableForcingConfig, key: PRNGKey, step: jax.Array) -> tuple[Draws, dict]:
    """The draws of update `step` (int32 []) and its keys {"rollout", "score", "fake"}; key: the base key."""
    key = rng.fold(key, "stable_forcing", step)
    clips = spec.capacity * spec.chunk // config.score.clip
    blocks = len(spec.pdd_schedule.blocks)
    draws = Draws(
        blocks=jax.random.randint(rng.fold(key, "blocks"), (spec.capacity,), 0, blocks, jnp.int32),
        score=jax.random.uniform(rng.fold(key, "score_expert"), (clips,), jnp.float32),
        fake=jax.random.uniform(rng.fold(key, "fake_expert"), (config.fake_updates, clips), jnp.float32),
    )
    return draws, {name: rng.fold(key, name) for name in ("rollout", "score", "fake")}


@dataclasses.dataclass
class StableForcing:
    """The program of the stage (see `train.step.Program`); states come from `create` and move by `apply` and `finish`.

    A batch holds image [B, H, W, 3] float32, actions [B, 4M, 6] float32 and captions of M chunks: caption_ids [B, M, S]
    int32, which `encode_text` turns into contexts, or without it contexts [B, M, S, text_dim] themselves. M may change
    from batch to batch, up to `spec.capacity`.

    frozen: "teacher" {expert: tree}, "autoencoder", "null_context" [1, S, text_dim], and what encode_text reads.
    State: params {"student": {expert: fused tree}, "fake": {expert: tree}}, one optimiser a role, ema of the student.

    `create(key, params)` makes a state at step 0; `apply(state, {role: gradients}, ok=...)` -> (state, metrics) is
    `train.step.apply_gradients` bound to the optimisers; `finish(state, ok)` is `train.step.finish`.
    `quick_compile` is for runs of a few updates (`xla_flags.quick_compile`).
    """

    spec: StreamSpec
    config: StableForcingConfig
    create: Callable[[PRNGKey, Params], Any]
    apply: Callable[..., tuple[Any, Metrics]]
    finish: Callable[[Any, jax.Array], tuple[Any, Metrics]]
    mesh: Mesh
    rules: sharding.Rules = sharding.RULES
    frozen: dict[str, Any] = dataclasses.field(default_factory=dict)
    load_given: Callable[[], dict[str, Any]] = dict
    sample_fn: Callable[[Any], dict[str, np.ndarray]] = lambda state: {}
    encode_text: batches.EncodeText | None = None
    quick_compile: bool = False

    def __post_init__(self) -> None:
        keep = self.config.memory_grad != "none"
        options = xla_flags.quick_compile(self.mesh.devices.flat[0].platform) if self.quick_compile else None
        jit = functools.partial(jax.jit, compiler_options=options)
        self.functions: dict[str, Callable[..., Any]] = rollouts.functions(
            self.spec, keep_compressors=keep, compiler_options=options
        )
        self.functions |= {
            "draw": jit(lambda key, step: draw(self.spec, self.config, key, step)),
            "encode": jit(self._encode),
            "score_begin": jit(self._score_begin),
            "gradients_begin": jit(self._gradients_begin),
            "student_step": jit(self._student_step, donate_argnums=0),
            "fake_step": jit(self._fake_step, donate_argnums=0),
            "finish": jit(self._finish, donate_argnums=0),
        }
        for name in self.spec.experts.names:
            self.functions[f"score_{name}"] = jit(self._score(name), donate_argnums=0)
            self.functions[f"fake_{name}"] = jit(self._fake(name), donate_argnums=0)
        for block in range(len(self.spec.pdd_schedule.blocks)):
            for second in (False, True) if keep else (False,):
                function = jit(self._replay(block, second), donate_argnums=0)
                self.functions[self._replay_name(block, second)] = function

    def call(self, name: str, *args: Any) -> Any:
        """Runs one compiled function; everything an update does on the devices goes through here."""
        with jax.set_mesh(self.mesh):
            return self.functions[name](*args)

    def given(self) -> dict[str, Any]:
        return self.load_given()

    def init(self, key: PRNGKey, given: dict[str, Any]) -> Any:
        return self.create(key, init_params(self.spec, rng.fold(key, "init"), given))

    def sample(self, state: Any) -> dict[str, np.ndarray]:
        return self.sample_fn(state)

    def update(self, state: Any, batch: Batch, frozen: dict[str, Any]) -> tuple[Any, Metrics]:
        """One update of the student and `fake_updates` of the fake score; `state` is taken over.

        Gradients that are not finite leave their role as it is; such an update counts as skipped. It waits for the
        update before it, whose end sets the number of the step that the draws come from.
        Metrics: fake_loss; score_gradient, the mean |g|; replay_loss; grad_norm/<role>, grad_norm/student/<expert>,
        grad_norm/step_<d>, the mean over the chunks that kept d of the norm of one chunk's gradient (NaN without any);
        kept/<d>, how many chunks kept d; skipped_student and skipped_fake, how many of their updates were left out.
        """
        given = self._conditions(batch, frozen)
        draws, keys = self._draw(state.key, state.step)
        chunks = batch["actions"].shape[1] // self.spec.chunk
        kept = draws.blocks[:chunks]
        rolled = self.roll_out(state.params[STUDENT], frozen, given, keys["rollout"], kept)
        scored = self.score(state.params[FAKE], frozen, rolled, given, keys["score"], draws.score, chunks)
        gradients = self.replay(state.params[STUDENT], rolled, given, scored.g, kept)
        counts = np.bincount(kept, minlength=len(self.spec.pdd_schedule.blocks)).astype(np.float32)
        state, student_ok, metrics = self.call("student_step", state, gradients, counts)
        size = scored.size / dmd.clip_count(self.spec, self.config.score, chunks)
        del scored, gradients
        fakes = []
        for number, places in enumerate(draws.fake):
            gradients = self.fake_gradients(state.params[FAKE], rolled, given, keys["fake"], places, chunks, number)
            state, fake = self.call("fake_step", state, gradients)
            del gradients
            fakes.append(fake)
        state, counted = self.call("finish", state, student_ok, fakes)
        return state, {
            **metrics,
            **counted,
            "score_gradient": size,
            **{f"kept/{block}": count for block, count in enumerate(counts)},
        }

    def evaluate(self, state: Any, batch: Batch, frozen: dict[str, Any]) -> Metrics:
        """fake_loss and score_gradient of a rollout by the averaged student, with the same draws at every call."""
        given = self._conditions(batch, frozen)
        draws, keys = self._draw(rng.fold(state.key, "evaluate"), np.asarray(0, np.int32))
        chunks = batch["actions"].shape[1] // self.spec.chunk
        student = state.ema.get(STUDENT, state.params[STUDENT])
        rolled = self.roll_out(student, frozen, given, keys["rollout"], draws.blocks[:chunks])
        fake = state.params[FAKE]
        scored = self.score(fake, frozen, rolled, given, keys["score"], draws.score, chunks)
        size = scored.size / dmd.clip_count(self.spec, self.config.score, chunks)
        del scored
        gradients = self.fake_gradients(fake, rolled, given, keys["fake"], draws.fake[0], chunks, 0)
        return {"score_gradient": size, "fake_loss": gradients.loss}

    def roll_out(
        self, student: Params, frozen: dict[str, Any], given: Conditions, key: PRNGKey, blocks: Numbers
    ) -> Rollout:
        """Phase 1; blocks: the kept d of each chunk."""
        params = {"experts": student, "autoencoder": frozen["autoencoder"]}
        return rollouts.run(self.call, params, given, key, blocks)

    def score(
        self,
        fake: Params,
        frozen: dict[str, Any],
        rolled: Rollout,
        given: Conditions,
        key: PRNGKey,
        places: Numbers,
        chunks: int,
    ) -> Scored:
        """Phase 2: g of all clips of `chunks` chunks; `places` as in `Draws.score`."""
        scored = self.call("score_begin", rolled)
        for index, name in self._clips(places, chunks):
            scored = self.call(f"score_{name}", scored, frozen["teacher"][name], fake[name], rolled, given, index, key)
        return scored

    def replay(self, student: Params, rolled: Rollout, given: Conditions, g: jax.Array, blocks: Numbers) -> Gradients:
        """Phase 3: the student's gradients, the mean over the chunks; blocks: the kept d of each, as rolled out."""
        gradients = self.call("gradients_begin", student)
        scale = np.asarray(1.0 / len(blocks), np.float32)
        for index, block in enumerate(map(int, blocks)):
            expert = self.spec.pdd_schedule.blocks[block].expert
            name = self._replay_name(block, index == 1 and self.config.memory_grad != "none")
            gradients = self.call(
                name, gradients, student[expert], rolled, given, g, np.asarray(index, np.int32), scale
            )
        return gradients

    def fake_gradients(
        self,
        fake: Params,
        rolled: Rollout,
        given: Conditions,
        key: PRNGKey,
        places: Numbers,
        chunks: int,
        number: int,
    ) -> Gradients:
        """Phase 4 before its optimiser step: the fake score's gradients, the mean over the clips.

        `number` is that of the fake update within this update, `places` as in a row of `Draws.fake`.
        """
        gradients = self.call("gradients_begin", fake)
        clips = dmd.clip_count(self.spec, self.config.score, chunks)
        scale, number_ = np.asarray(1.0 / clips, np.float32), np.asarray(number, np.int32)
        for index, name in self._clips(places, chunks):
            gradients = self.call(f"fake_{name}", gradients, fake[name], rolled, given, index, key, number_, scale)
        return gradients

    def _conditions(self, batch: Batch, frozen: dict[str, Any]) -> Conditions:
        contexts = self.call("encode", frozen, batch["caption_ids"]) if self.encode_text else batch["contexts"]
        dmd.clip_count(self.spec, self.config.score, contexts.shape[1])
        return rollouts.conditions(self.spec, batch["image"], batch["actions"], contexts, frozen["null_context"])

    def _draw(self, key: PRNGKey, step: Numbers) -> tuple[Draws, dict[str, PRNGKey]]:
        draws, keys = self.call("draw", key, step)
        return jax.device_get(draws), keys

    def _clips(self, places: Numbers, chunks: int) -> list[tuple[np.ndarray, str]]:
        """Number and expert of each clip."""
        count = dmd.clip_count(self.spec, self.config.score, chunks)
        names = (dmd.expert_of(self.spec, self.config.score, float(place)) for place in places[:count])
        return [(np.asarray(index, np.int32), name) for index, name in enumerate(names)]

    @staticmethod
    def _replay_name(block: int, second: bool) -> str:
        return f"replay_{block}_second" if second else f"replay_{block}"

    # What is compiled.

    def _encode(self, frozen: dict[str, Any], ids: jax.Array) -> jax.Array:
        assert self.encode_text is not None
        return self.encode_text({}, frozen, ids)

    def _score_begin(self, rolled: Rollout) -> Scored:
        return Scored(jnp.zeros_like(rolled.latents), jnp.zeros(()))

    def _score(self, name: str) -> Callable[..., Scored]:
        def score(scored: Scored, real, fake, rolled: Rollout, given: Conditions, index, key: PRNGKey) -> Scored:
            clip = dmd.cut(self.spec, self.config.score, rolled, given, index)
            g = dmd.score_clip(self.spec, self.config.score, name, real, fake, clip, rng.fold(key, "clip", index))
            start = index * self.config.score.clip
            put = jax.lax.dynamic_update_slice_in_dim(scored.g, g, start, axis=1)
            return Scored(put, scored.size + jnp.abs(g).mean())

        return score

    def _gradients_begin(self, experts: Params) -> Gradients:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), experts)
        return Gradients(self._pin(zeros), jnp.zeros(()), jnp.zeros((len(self.spec.pdd_schedule.blocks),)))

    def _add(self, sums: Gradients, name: str, loss: Scalar, grads: Params, scale: jax.Array) -> Gradients:
        own = jax.tree.map(lambda total, x: total + scale * x.astype(jnp.float32), sums.grads[name], grads)
        return sums.replace(grads=self._pin({**sums.grads, name: own}), loss=sums.loss + scale * loss)

    def _replay(self, block: int, second: bool) -> Callable[..., Gradients]:
        spec = self.spec
        name = spec.pdd_schedule.blocks[block].expert

        def replay_chunk(sums: Gradients, weights, rolled: Rollout, given: Conditions, g, index, scale) -> Gradients:
            options = {"block": block, "memory_grad": self.config.memory_grad, "second": second}
            loss, grads = jax.value_and_grad(
                lambda weights: replay.loss(spec, weights, rolled, given, g, index, **options)
            )(weights)
            sums = self._add(sums, name, loss, grads, scale)
            return sums.replace(norms=sums.norms.at[block].add(optax.tree.norm(grads)))

        return replay_chunk

    def _fake(self, name: str) -> Callable[..., Gradients]:
        spec, score = self.spec, self.config.score

        def fake_clip(
            sums: Gradients, weights, rolled: Rollout, given: Conditions, index, key: PRNGKey, number, scale
        ) -> Gradients:
            clip = dmd.cut(spec, score, rolled, given, index)
            key = rng.fold(key, "update", number, index)
            loss, grads = jax.value_and_grad(lambda weights: dmd.fake_loss(spec, score, name, weights, clip, key))(
                weights
            )
            return self._add(sums, name, loss, grads, scale)

        return fake_clip

    def _student_step(self, state: Any, sums: Gradients, counts: jax.Array) -> tuple[Any, jax.Array, Metrics]:
        metrics = {f"grad_norm/{STUDENT}/{name}": optax.tree.norm(grads) for name, grads in sums.grads.items()}
        ok = _finite(sums.loss, *metrics.values())
        state, norms = self.apply(state, {STUDENT: sums.grads}, ok=ok)
        by_step = jnp.where(counts > 0, sums.norms / jnp.maximum(counts, 1.0), jnp.nan)
        metrics |= {f"grad_norm/step_{block}": by_step[block] for block in range(by_step.shape[0])}
        return self._pin(state), ok, {**metrics, **norms, "replay_loss": sums.loss}

    def _fake_step(self, state: Any, sums: Gradients) -> tuple[Any, Metrics]:
        norm = optax.tree.norm(sums.grads)
        ok = _finite(sums.loss, norm)
        state, _ = self.apply(state, {FAKE: sums.grads}, ok=ok)
        return self._pin(state), {"fake_loss": sums.loss, f"grad_norm/{FAKE}": norm, "ok": ok}

    def _finish(self, state: Any, student_ok: jax.Array, fakes: list[Metrics]) -> tuple[Any, Metrics]:
        together = jax.tree.map(lambda *values: jnp.stack(values), *fakes)
        fake_ok = together.pop("ok")
        state, counts = self.finish(state, student_ok & jnp.all(fake_ok))
        return self._pin(state), {
            **{name: values.mean() for name, values in together.items()},
            **counts,
            "skipped_student": 1 - student_ok.astype(jnp.int32),
            "skipped_fake": jnp.sum(1 - fake_ok.astype(jnp.int32)),
        }

    def _pin(self, tree: ArrayTree) -> ArrayTree:
        return jax.lax.with_sharding_constraint(tree, sharding.shardings(tree, self.rules, self.mesh))


def _finite(*values: jax.Array) -> jax.Array:
    """bool []: all of these scalars are finite; a norm is finite only where all of its tree is."""
    return jnp.all(jnp.isfinite(jnp.stack(values)))
