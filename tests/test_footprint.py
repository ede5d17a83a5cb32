"""The memory of a world, known from shapes: that of the arrays which are then allocated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_workdir

from wp2_jax import sharding
from wp2_jax.inference import footprint, generate, load


def bytes_of(tree) -> int:
    return sum(
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).nbytes
        for x in jax.tree.leaves(tree)
    )


@pytest.mark.parametrize("mode", ["few_step", "bi"])
@pytest.mark.parametrize("precision", ["full", "int8"])
def test_equals_what_is_allocated(tmp_path, mode, precision):
    source = load.locate(random_workdir.write(tmp_path), mode, precision)
    spec = generate.stream_spec(source, 3)
    frames = generate.condition_frames(spec)
    needed = footprint.of(source, spec, frames)

    loaded = load.load(source)
    ids = jnp.asarray(source.tokenizer().encode(["a room"])[None])
    told = generate.caption(spec, loaded.params, generate.encode_text(source.world, loaded.text_params, ids))
    image = jnp.zeros((1, spec.height, spec.width, 3))
    state = generate.start(spec, loaded.params, image, frames, told if spec.guided else None, jax.random.key(0))
    assert needed.weights == bytes_of((loaded.params, loaded.text_params))
    assert (needed.world, needed.caption) == (bytes_of(state), bytes_of(told))


def test_weights_cut_over_devices(tmp_path):
    source = load.locate(random_workdir.write(tmp_path), "few_step")
    spec, mesh = generate.stream_spec(source, 3), sharding.first_devices(2)
    whole, cut = (
        footprint.of(source, spec, 8, mesh, sharding.one_world(cut_weights)).weights for cut_weights in (False, True)
    )
    loaded = load.load(source, mesh=mesh, rules=sharding.one_world(True))
    first = [
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(loaded.params | {"t": loaded.text_params})
    ]
    assert cut == sum(first) and cut < 0.7 * whole


def test_too_large_is_refused_with_what_helps(monkeypatch):
    monkeypatch.setattr(footprint, "device_memory", lambda: 2**30)
    footprint.Footprint(2**29, 2**28, 2**28).check()
    with pytest.raises(ValueError, match=r"weights 70.00 GiB.* has 1.00 GiB: use --precision int8, --devices N"):
        footprint.Footprint(70 * 2**30, 2**20, 2**20).check()
