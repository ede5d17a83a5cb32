"""Experiment files, overrides and sections."""

import dataclasses

import pytest

from wp2_jax.train import config
from wp2_jax.train.config import ConfigError
from wp2_jax.train.optim import OptimConfig

FILE = """
import ml_collections
from ml_collections import config_dict

def get_config(arg):
    steps = config_dict.FieldReference(100)
    return ml_collections.ConfigDict({
        "stage": arg,
        "steps": steps,
        "seed": config_dict.placeholder(int),
        "optim": {"learning_rate": 1e-4, "steps": steps * 2, "frozen": ("old",), "rates": (), "clip": 1.0},
        "model": {"dim": 64, "remat": False, "widths": (1, 2), "text": {"dim": 32}},
    })
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(FILE)
    return str(path)


def test_load_with_overrides_of_every_type(file):
    loaded = config.load(
        f"{file}:memory",
        [
            "--config.optim.learning_rate=1",
            "--config.model.remat=true",
            "config.model.widths=3,4,5",
            "--config.optim.frozen=(r'^a', 'b,c')",
            "--config.optim.rates=(('text', 0.5),)",
            "--config.seed=0",
            "--config.steps=7",
        ],
    )
    values = loaded.config
    assert (loaded.arg, values.stage, loaded.file) == ("memory", "memory", file)
    assert type(values.optim.learning_rate) is float and values.optim.learning_rate == 1.0
    assert values.model.remat is True and values.model.widths == (3, 4, 5)
    assert values.optim.frozen == ("^a", "b,c") and values.seed == 0
    assert values.optim.steps == 14  # follows its reference
    optim = config.section(values.optim, OptimConfig)
    assert optim.rates == (("text", 0.5),) and optim.b1 == OptimConfig().b1
    assert loaded.diff["optim.learning_rate"] == {"from": 1e-4, "to": 1.0}
    assert loaded.diff["seed"] == {"from": None, "to": 0}
    assert set(loaded.diff) == {
        *("steps", "seed", "optim.steps", "optim.learning_rate", "optim.frozen", "optim.rates"),
        *("model.remat", "model.widths"),
    }
    assert loaded.record()["config"]["model"] == {"dim": 64, "remat": True, "widths": [3, 4, 5], "text": {"dim": 32}}
    assert config.load(file).diff == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--config.optim.learning_rat=1", r"no key 'optim.learning_rat'; did you mean optim.learning_rate"),
        ("--config.learning_rate=1", r"no key 'learning_rate'; did you mean .*optim.learning_rate"),
        ("--config.model.text=1", r"no key 'model.text'"),
        ("--config.zzzz=1", r"known keys: .*model.text.dim"),
        ("--config.model.dim=6.5", r"model.dim: '6.5' is a float, not a int like 64"),
        ("--config.model.dim=wide", r"model.dim: 'wide' is a str, not a int"),
        ("--config.model.remat=maybe", r"model.remat: 'maybe' is not a bool; use true or false"),
        ("--config.model.widths=1,x", r"model.widths: 'x' is a str, not a int"),
        ("--config.steps", "write --config.section.key=value"),
        ("--steps=3", "write --config.section.key=value"),
    ],
)
def test_a_wrong_override_names_the_key_and_the_fix(file, text, message):
    with pytest.raises(ConfigError, match=message):
        config.load(file, [text])


def test_a_wrong_file(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*absent\.py"):
        config.load("experiments/absent.py:base")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="has no get_config"):
        config.load(str(tmp_path / "empty.py"))


def test_sections_nest_and_refuse_unknown_keys():
    @dataclasses.dataclass(frozen=True)
    class Text:
        dim: int
        heads: tuple[int, ...] = ()

    @dataclasses.dataclass(frozen=True)
    class Model:
        dim: int
        text: Text

    assert config.section({"dim": 1, "text": {"dim": 2, "heads": [3]}}, Model) == Model(1, Text(2, (3,)))
    with pytest.raises(ConfigError, match=r"Model.text: there is no key 'dims'; did you mean dim\?"):
        config.section({"dim": 1, "text": {"dims": 2}}, Model)
    with pytest.raises(ConfigError, match="Model: no value for text"):
        config.section({"dim": 1}, Model)
