"""Configs: experiment files with `get_config(arg)`, overrides as words, sections as dataclasses."""

import ast
import dataclasses
import difflib
import importlib.util
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ml_collections

T = TypeVar("T")


class ConfigError(ValueError):
    """A config or an override is wrong; the message names the key and what would be right."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A resolved config and where it came from."""

    config: Any  # ml_collections.ConfigDict, whose fields no type checker knows
    file: str
    arg: str
    diff: dict[str, dict[str, Any]]  # what the overrides changed: {"optim.lr": {"from": 1e-4, "to": 1e-3}}

    def record(self) -> dict[str, Any]:
        """JSON for the checkpoint: the config as used and its differences from the file."""
        return {"experiment": self.file, "arg": self.arg, "config": plain(self.config), "diff": self.diff}


def load(spec: str, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment "path/to/file.py:ARG" (":ARG" optional) with overrides "--config.section.key=value".

    Raises:
      ConfigError: no such file, no `get_config` in it, an unknown key, or a value of the wrong type.
    """
    file, _, arg = spec.partition(".py")
    file, arg = f"{file}.py", arg.removeprefix(":")
    config, base = _get_config(file, arg), _get_config(file, arg)
    for text in overrides:
        override(config, text)
    return Experiment(config, file, arg, diff(config, base))


def override(config: ml_collections.ConfigDict, text: str) -> None:
    """Apply one "--config.section.key=value" in place. The value is read as the type that the key holds.

    Raises:
      ConfigError: for an unknown key (with near matches) or a value that is not of the key's type.
    """
    name, equals, value = text.partition("=")
    key = name.removeprefix("--").removeprefix("config.")
    if not equals or key == name.removeprefix("--"):
        raise ConfigError(f"override {text!r} is not understood; write --config.section.key=value")
    known = flat(config)
    if key not in known:
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        # The last part alone: a right key under the wrong section is the usual slip.
        near += [k for k in known if k.rsplit(".")[-1] == key.rsplit(".")[-1] and k not in near]
        hint = f"did you mean {', '.join(near)}?" if near else f"known keys: {', '.join(known)}"
        raise ConfigError(f"override {text!r}: there is no key {key!r}; {hint}")
    *parents, last = key.split(".")
    section_: Any = config
    for parent in parents:
        section_ = section_[parent]
    section_[last] = _parse(key, value, known[key], section_.get_type(last))


def section(values: Mapping[str, Any] | ml_collections.ConfigDict, cls: type[T], name: str = "") -> T:
    """Unpack a section into a frozen dataclass; fields that are dataclasses take their own sub-section.

    Raises:
      ConfigError: for a key that `cls` does not have (with near matches) or a field without a value.
    """
    name = name or cls.__name__
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"known keys: {', '.join(fields)}"
            raise ConfigError(f"{name}: there is no key {key!r}; {hint}")
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping | ml_collections.ConfigDict):
            value = section(value, typing.cast(type, hints[key]), f"{name}.{key}")
        arguments[key] = _tuples(value)
    required = [
        n for n, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    missing = [n for n in required if n not in arguments]
    if missing:
        raise ConfigError(f"{name}: no value for {', '.join(missing)}; set it in the experiment file")
    return cls(**arguments)


def diff(config: Any, base: Any) -> dict[str, dict[str, Any]]:
    """What differs between two configs (ConfigDicts or plain dicts), by dotted key (None: not there)."""
    new, old = flat(config), flat(base)
    return {
        key: {"from": plain(old.get(key)), "to": plain(new.get(key))}
        for key in sorted({*new, *old})
        if plain(new.get(key)) != plain(old.get(key))
    }


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"section.key": value} of a nested config; an empty section is a value."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict) and len(value):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out


def plain(value: Any) -> Any:
    """The same in what JSON can hold: dicts, lists, numbers, strings."""
    if isinstance(value, Mapping | ml_collections.ConfigDict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def _get_config(file: str, arg: str) -> ml_collections.ConfigDict:
    path = Path(file)
    if not path.exists() and not path.is_absolute():
        path = Path(__file__).parents[2] / file  # named from the root of the project, run from elsewhere
    if not path.exists():
        raise ConfigError(f"config: no file {file}; give experiments/NAME.py[:ARG]")
    spec = importlib.util.spec_from_file_location(f"wp2_experiment_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"config: {file} has no get_config(arg)")
    return module.get_config(arg)


def _parse(key: str, text: str, old: Any, kind: type) -> Any:
    """`text` as the type of the key: a number for a number, a tuple for a tuple, a string as it is."""
    if kind is str:
        return text
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise ConfigError(f"{key}: {text!r} is not a bool; use true or false")
        return words[text.lower()]
    if issubclass(kind, list | tuple) and "(" not in text and "[" not in text:
        items = [item for item in text.split(",") if item.strip()]
        example = old[0] if old else None
        return kind(_parse(key, i.strip(), None, type(example)) if old else _literal(i.strip()) for i in items)
    value = _literal(text)
    if kind is float and type(value) is int:
        value = float(value)
    if issubclass(kind, list | tuple) and isinstance(value, list | tuple):
        value = kind(value)
    if kind is not type(None) and type(value) is not kind:
        raise ConfigError(f"{key}: {text!r} is a {type(value).__name__}, not a {kind.__name__} like {old!r}")
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value
