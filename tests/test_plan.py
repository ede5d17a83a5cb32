"""Targets by name, and what a compiled program moves between devices. Compilers of other chips are not needed here."""

import collections
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from wp2_jax import cli, sharding
from wp2_jax.plan import fit, hlo, targets, training
from wp2_jax.train import config as configs

EXPERIMENTS = Path(__file__).parents[1] / "experiments"

# A loop of three turns with an asynchronous gather, and a pair of arrays exchanged beside it.
TEXT = """
HloModule example

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]) parameter(0)
  %all-gather-start.1 = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %all-gather-done.1 = f32[16,8]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %t = (s32[], f32[4,8]) tuple(%i, %y)
}

%condition (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%wrapped (p: bf16[2,2]) -> bf16[2,2] {
  ROOT %permute = bf16[2,2]{1,0} collective-permute(%p), source_target_pairs={{0,1}}
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8]) while(%init), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %exchange = (bf16[3,5]{1,0}, pred[7]{0}) all-to-all(%b, %c), dimensions={0}
  %start = ((bf16[2,2]), bf16[2,2]) async-start(%d), calls=%wrapped
  %done = bf16[2,2]{1,0} async-done(%start), calls=%wrapped
  ROOT %r = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_collectives_by_hand():
    assert hlo.collectives(TEXT) == {
        "all-gather": 3 * 16 * 8 * 4,
        "all-to-all": 3 * 5 * 2 + 7,
        "collective-permute": 2 * 2 * 2,
    }


def test_collectives_of_a_compiled_loop():
    mesh = sharding.make_mesh(sharding.MeshConfig(seq=8, fsdp=1))

    def turns(x):
        def turn(x, _):
            total = jax.lax.psum(x, "seq")
            return x + jnp.sin(total), None

        return jax.lax.scan(turn, x, None, length=5)[0]

    cut = jax.P("seq")
    function = jax.jit(jax.shard_map(turns, mesh=mesh, in_specs=cut, out_specs=cut))
    text = function.lower(jnp.ones((8, 6), jnp.float32)).compile().as_text()
    assert text is not None and hlo.collectives(text) == {"all-reduce": 5 * 6 * 4}


@pytest.mark.parametrize(
    ("name", "count", "shape"), [("v5p:4x4x4", 64, (4, 4, 4)), ("h100:8", 8, (8,)), ("h100:4x8", 32, (4, 8))]
)
def test_targets(name, count, shape):
    target = targets.target(name)
    assert (target.count, target.shape) == (count, shape)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "chips: v5e, v5p, v6e, h100"),
        ("v5p", "CHIP:SHAPE"),
        ("v5p:4x0", "'4x0' is no shape"),
        ("v5p:4x-1", "is no shape"),
        ("h100:2x2x8", "at most 2 dimensions"),
    ],
)
def test_wrong_targets(name, message):
    with pytest.raises(ValueError, match=message):
        targets.target(name)


def test_a_lower_bound_of_time():
    target = targets.target("h100:8")
    found = fit.Fit("emit", 0, 0, 3_352_000_000, {}, int(8 * 989e12), 1.0)
    assert found.step_seconds(target) == pytest.approx(1.0)
    assert fit.Fit("emit", 0, 0, 6_704_000_000_000, {}, 0, 1.0).step_seconds(target) == pytest.approx(2.0)
    assert "| emit | 1 | 0.00 | 0.00 | 3.12 | 4% | 7.91e+03 | 1 |  | 1 |" in fit.table([found], target)


def quick(stage):
    overrides = ["--config.mesh.fsdp=8", "--config.train.batch=8"]
    return configs.load(f"{EXPERIMENTS / 'tiny.py'}:quick-{stage}", overrides).config


@pytest.mark.slow
def test_phases_of_stable_forcing():
    """How often each program runs: six chunks in three clips, five updates of the fake score for one of the student."""
    config = quick("stable_forcing")
    assert (config.objective.chunks, config.objective.clip, config.objective.fake_updates) == (6, 8, 5)
    fits = list(training.programs(config, jax.devices(), {}))
    times = collections.Counter()
    for found in fits:
        times[found.name.split("_")[0] if found.name.startswith("replay") else found.name] += found.times
    assert times == {
        **{"encode": 1, "begin": 1, "first_chunk": 1, "later_chunk": 5, "score_begin": 1, "score_all": 3},
        **{"gradients_begin": 1 + 5, "replay": 6, "student_step": 1, "fake_all": 5 * 3, "fake_step": 5},
    }
    assert all(found.peak > 0 for found in fits)
    assert all(found.flops > 0 for found in fits if found.name.startswith(("later", "score_all", "replay", "fake_all")))


def test_a_stage_that_is_none():
    config = quick("base")
    config.stage = "warmup"
    with pytest.raises(ValueError, match="'warmup' is not one of autoencoder, base"):
        next(training.programs(config, jax.devices(), {}))


def test_overrides_need_a_config(capsys):
    assert cli.main(["plan", "--target", "h100:8", "--config.train.batch=8"]) == 2
    assert "--config, which is not given" in capsys.readouterr().err
