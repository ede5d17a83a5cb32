"""The comparisons of `wp2 verify`, by hand."""

import jax.numpy as jnp
import numpy as np

from wp2_jax.verify import core


def test_compare_by_hand():
    expected = np.array([0.0, 4.0, -2.0], np.float32)
    result = core.compare("x", expected + np.array([0, 0, 1e-3], np.float32), expected, 1e-4)
    assert not result.ok and abs(result.max_abs - 1e-3) < 1e-6 and abs(result.max_rel - 2.5e-4) < 1e-6
    assert core.compare("x", expected + 3e-4, expected, 1e-4).ok
    assert not core.compare("x", expected[:2], expected, 1.0).ok
    assert not core.compare("x", expected * np.nan, expected, 1.0).ok
    assert not core.compare("x", expected, np.full_like(expected, np.inf), 1.0).ok
    rows = np.array([[100, 0], [1, 0]], np.float32)
    assert core.compare("x", rows + np.array([[0, 0], [1e-3, 0]], np.float32), rows, 1e-4).ok
    assert not core.compare_rows("x", rows + np.array([[0, 0], [1e-3, 0]], np.float32), rows, 1e-4).ok
    assert not core.compare_rows("x", np.array([[0, 1e-9]], np.float32), np.array([[0, 0]], np.float32), 1e-4).ok


def test_compare_bfloat16_by_hand():
    expected = jnp.arange(1, 2001, dtype=jnp.bfloat16)
    # Between 256 and 512 one unit in the last place is 2.
    one = expected.at[300].add(2)
    assert core.compare_bfloat16("x", expected, expected).ok
    assert core.compare_bfloat16("x", one, expected).ok
    assert not core.compare_bfloat16("x", expected.at[300].add(4), expected).ok
    assert not core.compare_bfloat16("x", one.at[400:410].add(2), expected).ok
