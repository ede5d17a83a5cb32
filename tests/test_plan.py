"""Targets by name, and what a compiled program moves between devices. Compilers of other chips are not needed here."""

import jax
import jax.numpy as jnp
import pytest

from wp2_jax import sharding
from wp2_jax.plan import fit, hlo, targets

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
