"""Messages as text and back, checked whole, and their JSON schema.

Nothing but the standard library is imported here and in `messages`, so that a client can use them.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any

from wp2_jax.serve.messages import FROM_CLIENT, FROM_SERVER, VERSION


class ProtocolError(ValueError):
    """A message that is not one: `field` (None: the whole) and what is wrong with it and how to repair it."""

    def __init__(self, field: str | None, message: str):
        super().__init__(message)
        self.field = field


def name_of(kind: type) -> str:
    """The `type` of a class of messages."""
    return kind.__name__.lower()


def dump(message: Any) -> str:
    """A message as text."""
    return json.dumps({"type": name_of(type(message)), **dataclasses.asdict(message)}, allow_nan=False)


def parse(text: str, kinds: tuple[type, ...] = FROM_CLIENT) -> Any:
    """A text as a message of one of `kinds`. ProtocolError, naming field, value and what is allowed."""
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except ProtocolError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProtocolError(None, f"not JSON ({error}): send one JSON object a message") from error
    by_name = {name_of(kind): kind for kind in kinds}
    if not isinstance(data, dict):
        raise ProtocolError(None, f"{_shown(data)} is no object: send a JSON object with a type")
    kind = data.pop("type", None)
    if not isinstance(kind, str) or kind not in by_name:
        raise ProtocolError("type", f"type {_shown(kind)}: give one of {', '.join(by_name)}")
    return _object(by_name[kind], data, "")


def type_in(text: str) -> str | None:
    """The type that a text claims to have, if it can be read: to say what an error is about."""
    try:
        kind = json.loads(text)["type"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return kind[:40] if isinstance(kind, str) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ProtocolError(twice[:40], f"{_shown(twice)} is given twice: keep one")
    return data


def _no_constant(name: str) -> Any:
    raise ProtocolError(None, f"{name} is no JSON number: give a finite one")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _object(kind: type, data: dict[str, Any], prefix: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            allowed = ", ".join(fields) or "none"
            raise ProtocolError(
                prefix + key[:40], f"{name_of(kind)} has no field {_shown(key)}: its fields are {allowed}"
            )
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _value(prefix + name, data[name], _hints(kind)[name], field.metadata)
        elif field.default is dataclasses.MISSING:
            raise ProtocolError(prefix + name, f"{name_of(kind)} needs the field {prefix + name}")
    return kind(**values)


def _value(name: str, value: Any, kind: Any, limits: typing.Mapping[str, Any]) -> Any:
    def wrong(what: str) -> ProtocolError:
        return ProtocolError(name, f"{name} is {_shown(value)}: give {what}")

    if isinstance(kind, types.UnionType):
        inner, _ = typing.get_args(kind)  # X | None
        return None if value is None else _value(name, value, inner, limits)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise wrong("a list")
        if len(value) > limits.get("maxItems", math.inf):
            raise wrong(f"at most {limits['maxItems']} entries")
        return tuple(_value(f"{name}[{number}]", item, inner, limits) for number, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise wrong("an object")
        return _object(typing.cast(type, kind), value, f"{name}.")
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if kind is str:
        return _checked_text(value, limits, wrong)
    whole = kind is int
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise wrong("a whole number" if whole else "a number")
    least, most, above = limits.get("minimum"), limits.get("maximum"), limits.get("exclusiveMinimum")
    too_small = (least is not None and value < least) or (above is not None and value <= above)
    if too_small or (most is not None and value > most):
        start = f"from {least}" if above is None else f"above {above}"
        raise wrong(f"a {'whole ' if whole else ''}number {start} to {most}")
    return value if whole else float(value)


def _checked_text(value: Any, limits: typing.Mapping[str, Any], wrong: typing.Callable[[str], ProtocolError]) -> str:
    if not isinstance(value, str):
        raise wrong("a text")
    if "enum" in limits and value not in limits["enum"]:
        raise wrong(f"one of {', '.join(limits['enum'])}")
    if len(value) > limits.get("maxLength", math.inf):
        raise wrong(f"at most {limits['maxLength']} characters (it has {len(value)})")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong("a text without halves of surrogate pairs") from None
    return value


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of all messages: `client` and `server` name those of each side."""
    definitions = {name_of(kind): _schema_of(kind, True) for kind in (*FROM_CLIENT, *FROM_SERVER)}
    sides = {
        side: {"oneOf": [{"$ref": f"#/$defs/{name_of(kind)}"} for kind in kinds]}
        for side, kinds in (("client", FROM_CLIENT), ("server", FROM_SERVER))
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"wp2 serve, protocol {VERSION}",
        "$defs": {**sides, **definitions},
    }


def _schema_of(kind: type, message: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {"type": {"const": name_of(kind)}} if message else {}
    required = ["type"] if message else []
    for field in dataclasses.fields(kind):
        properties[field.name] = _schema_type(_hints(kind)[field.name], field.metadata)
        if field.default is dataclasses.MISSING:
            required.append(field.name)
        else:
            properties[field.name]["default"] = field.default
    return {
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _schema_type(kind: Any, limits: typing.Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(kind, types.UnionType):
        inner = _schema_type(typing.get_args(kind)[0], limits)
        return {"anyOf": [inner, {"type": "null"}]}
    if typing.get_origin(kind) is tuple:
        outer = {key: value for key, value in limits.items() if key == "maxItems"}
        inner = {key: value for key, value in limits.items() if key != "maxItems"}
        return {"type": "array", **outer, "items": _schema_type(typing.get_args(kind)[0], inner)}
    if dataclasses.is_dataclass(kind):
        return _schema_of(typing.cast(type, kind), False)
    return {"type": _NAMES[kind], **{key: list(v) if key == "enum" else v for key, v in limits.items()}}
