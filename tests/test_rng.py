"""Random streams."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax import rng


def data(key):
    return np.asarray(jax.random.key_data(key))


def test_fold_is_fold_in_of_the_crc32_then_the_counters():
    key = rng.base_key(3)
    by_hand = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 0xCBF43926), 5), 7)
    np.testing.assert_array_equal(data(rng.fold(key, "123456789", 5, 7)), data(by_hand))  # CRC-32's check value


def test_names_and_counters_give_different_streams_and_tracing_gives_the_same():
    key = rng.base_key(0)
    streams = [rng.fold(key, name, step) for name in ("a", "b", "ab") for step in (0, 1, 10**6)]
    assert len({tuple(data(k)) for k in streams}) == len(streams)
    traced = jax.jit(lambda step: rng.fold(key, "b", step))(jnp.asarray(1))
    np.testing.assert_array_equal(data(traced), data(rng.fold(key, "b", 1)))


def test_the_same_in_another_process():
    code = "from wp2_jax import rng; import jax; print(jax.random.key_data(rng.fold(rng.base_key(1), 'noise', 2)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(jax.random.key_data(rng.fold(rng.base_key(1), "noise", 2)))


def test_zero_is_a_seed_and_a_drawn_one_is_printed(capsys):
    assert rng.drawn_seed(0) == 0
    assert capsys.readouterr().out == ""
    seed = rng.drawn_seed(None)
    assert str(seed) in capsys.readouterr().out
