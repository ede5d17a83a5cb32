"""Programs kept on disk: the same results, nothing compiled again, and damaged or foreign files made anew."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import random_workdir

from wp2_jax import cli
from wp2_jax.inference import aot


@dataclasses.dataclass(frozen=True)
class Setting:
    factor: float


class Pair(NamedTuple):
    grow: Callable[..., Any]
    add: Callable[..., Any]


def programs(log: list[str]) -> Pair:
    """Traced when they are compiled, which the log tells."""

    def grow(setting: Setting, state: dict, *, first: bool) -> dict:
        log.append("grow")
        return {"x": state["x"] * setting.factor + (1 if first else 0), "key": state["key"]}

    def add(a, b):
        log.append("add")
        return a + b

    return Pair(jax.jit(grow, static_argnums=0, static_argnames="first", donate_argnums=1), jax.jit(add))


def state() -> dict:
    return {"x": jnp.arange(3.0), "key": jax.random.key(1)}


def test_programs_are_found_again(tmp_path, monkeypatch):
    folder, log = tmp_path / "kept", []
    one = aot.kept(programs(log), folder)
    made = [one.grow(Setting(2.0), state(), first=first)["x"] for first in (True, False, True)]
    np.testing.assert_array_equal(made, [[1, 3, 5], [0, 2, 4], [1, 3, 5]])
    one.add(jnp.ones(2), np.ones(2, np.float32))
    assert log == ["grow", "grow", "add"] and len(list(folder.iterdir())) == 3
    assert folder.stat().st_mode & 0o077 == 0

    two = aot.kept(programs(log), folder)
    again = two.grow(Setting(2.0), state(), first=True)
    np.testing.assert_array_equal(again["x"], made[0])
    assert jax.random.key_data(again["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
    assert len(log) == 3
    # Another setting, another shape, another version of the source: other programs.
    two.grow(Setting(3.0), state(), first=True)
    two.add(jnp.ones(3), jnp.ones(3))
    assert log[3:] == ["grow", "add"]
    monkeypatch.setattr(aot, "_here", lambda: ("another machine",))
    aot.kept(programs(log), folder).add(jnp.ones(2), jnp.ones(2))
    assert log[5:] == ["add"]


def test_a_damaged_file_is_made_anew(tmp_path):
    log: list[str] = []
    aot.kept(programs(log), tmp_path).add(jnp.ones(2), jnp.ones(2))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    np.testing.assert_array_equal(aot.kept(programs(log), tmp_path).add(jnp.ones(2), jnp.ones(2)), [2, 2])
    assert log == ["add", "add"] and len(path.read_bytes()) > len(whole) // 2
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_warmup_leaves_nothing_to_compile(tmp_path, monkeypatch, capsys):
    """Of a world of random weights; the second time every program is found."""
    workdir = random_workdir.write(tmp_path / "run", ("base", "stable_forcing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cli.main(["warmup", "--checkpoint", str(workdir), "--chunks", "3"]) == 0
    assert "3 chunks, chunk 2:" in capsys.readouterr().out
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "cache" / "wp2_jax").iterdir())
    assert names == ["absorb", "absorb", "caption", "emit", "emit", "encode_text", "start"]

    def never(path, lowered):
        raise AssertionError(f"{path.name} was compiled again")

    monkeypatch.setattr(aot, "_keep", never)
    assert cli.main(["warmup", "--checkpoint", str(workdir), "--chunks", "3"]) == 0
    assert cli.main(["warmup", "--checkpoint", str(workdir), "--chunks", "0"]) == 2
    assert "give 1 to 20" in capsys.readouterr().err
