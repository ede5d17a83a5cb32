"""Messages: what is taken and what not, against the JSON schema and an independent validator of it."""

import dataclasses
import json
import random
from pathlib import Path

import jsonschema
import pytest

from wp2_jax.serve import messages, protocol
from wp2_jax.serve.protocol import ProtocolError

SCHEMA = protocol.schema()


def valid(data, side: str = "client") -> bool:
    """What the schema says, by the reference implementation."""
    checker = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{side}", "$defs": SCHEMA["$defs"]})
    return checker.is_valid(data)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    names = {protocol.name_of(kind) for kind in (*messages.FROM_CLIENT, *messages.FROM_SERVER)}
    assert set(SCHEMA["$defs"]) == names | {"client", "server"}
    assert len(names) == len(messages.FROM_CLIENT) + len(messages.FROM_SERVER)


def test_the_documented_schema_is_this_one():
    """docs/serving.schema.json; write it anew with json.dumps(protocol.schema(), indent=1)."""
    path = Path(__file__).parents[1] / "docs" / "serving.schema.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(SCHEMA))
    documented = (path.parent / "serving.md").read_text()
    for kind in (*messages.FROM_CLIENT, *messages.FROM_SERVER):
        assert f"| `{protocol.name_of(kind)}` |" in documented


EXAMPLES = [
    messages.Start("red room", "fps", scene="a room", seed=0, yaw=3.0),
    messages.Resume("key"),
    messages.Keys(1, ("w", "space"), "fog", 500),
    messages.Caption(scene="a room", event=""),
    messages.Speeds(5.625, 2.8125),
    messages.Pause(True),
    messages.Step(),
    messages.Snapshot(),
    messages.Fork(3),
    messages.Reset(),
    messages.Save(),
    messages.Leave(),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_messages_come_back(message):
    text = protocol.dump(message)
    assert protocol.parse(text) == message
    assert valid(json.loads(text)) and protocol.type_in(text) == protocol.name_of(type(message))


def test_messages_of_the_server_come_back():
    chunk = messages.Chunk(2, 1, 1, ((0.0, -5.625, 1.0, 0.0, 1.0, 0.0),) * 4, "w+left", "a room", 7, 0.1, 16)
    place = messages.Place("red room", "fps", "a room", "a room", None, ("fog",), "data:,")
    hello = messages.Hello(1, "w", "", "video/mp4", 64, 64, 4, 16, 4, 64, 5.6, 2.8, True, 1, 1, (place,))
    for message in (chunk, hello, messages.Error(None, None, "no"), messages.Queue(1)):
        text = protocol.dump(message)
        assert protocol.parse(text, messages.FROM_SERVER) == message and valid(json.loads(text), "server")
        with pytest.raises(ProtocolError, match="type"):
            protocol.parse(text)


KEYS = {"type": "keys", "seq": 1, "keys": []}
START = {"type": "start", "picture": "upload", "perspective": "fps"}


@pytest.mark.parametrize(
    ("data", "field", "said"),
    [
        ([], None, "object"),
        ({}, "type", "start, resume"),
        ({"type": ["keys"]}, "type", "start, resume"),
        (KEYS | {"seq": -1}, "seq", "-1.*from 0"),
        (KEYS | {"seq": 2**53 + 1}, "seq", str(2**53)),
        (KEYS | {"seq": 1.5}, "seq", "whole"),
        (KEYS | {"seq": True}, "seq", "whole"),
        (KEYS | {"seq": None}, "seq", "whole"),
        (KEYS | {"keys": "w"}, "keys", "list"),
        (KEYS | {"keys": ["w", "W"]}, "keys[1]", "'W'.*one of w, a"),
        (KEYS | {"keys": ["w"] * 10}, "keys", "at most 9"),
        (KEYS | {"keys": [["w"]]}, "keys[0]", "text"),
        (KEYS | {"event": 3}, "event", "text"),
        (KEYS | {"event": "x" * 2001}, "event", "2001"),
        (KEYS | {"lease_ms": 99}, "lease_ms", "100 to 10000"),
        (KEYS | {"lease": 100}, "lease", "lease_ms"),
        ({"type": "keys", "seq": 1}, "keys", "needs"),
        (START | {"perspective": "FPS"}, "perspective", "fps, tps"),
        (START | {"seed": 2**31}, "seed", "2147483647"),
        (START | {"seed": "0"}, "seed", "whole"),
        (START | {"yaw": 0}, "yaw", "above 0"),
        (START | {"yaw": -3}, "yaw", "above 0"),
        (START | {"pitch": 1e3}, "pitch", "90"),
        (START | {"fit": "squeeze"}, "fit", "stretch, crop"),
        (START | {"video": "vp9"}, "video", "h264, raw"),
        (START | {"paused": 1}, "paused", "true or false"),
        ({"type": "fork", "chunk": "2"}, "chunk", "whole"),
        ({"type": "pause"}, "paused", "needs"),
        ({"type": "step", "n": 1}, "n", "none"),
    ],
)
def test_wrong_messages(data, field, said):
    with pytest.raises(ProtocolError, match=said) as caught:
        protocol.parse(json.dumps(data))
    assert caught.value.field == field
    assert not valid(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"type": "speeds", "yaw": NaN, "pitch": 1}', "NaN"),
        ('{"type": "speeds", "yaw": -Infinity, "pitch": 1}', "Infinity"),
        ('{"type": "speeds", "yaw": 1e400, "pitch": 1}', "yaw is inf"),
        (f'{{"type": "fork", "chunk": 1{"0" * 5000}}}', "not JSON"),
        ('{"type": "step", "type": "reset"}', "twice"),
        ('{"type": "keys", "seq": 1, "keys": [], "event": "\\ud800"}', "surrogate"),
    ],
)
def test_texts_that_are_no_messages(text, said):
    with pytest.raises(ProtocolError, match=said):
        protocol.parse(text)


def mutated(random_: random.Random) -> dict:
    """An example with some of its fields taken away, added or changed."""
    pool = [None, True, -1, 0, 1, 2**60, 1.5, "", "w", "fps", "x" * 3000, [], ["w"], [1], {}, {"a": 1}]
    data = json.loads(protocol.dump(random_.choice(EXAMPLES)))
    for _ in range(random_.randint(0, 3)):
        kind = random_.choice(messages.FROM_CLIENT)
        names = [field.name for field in dataclasses.fields(kind)] + ["type", "other"]
        name = random_.choice([*names, *data])
        if random_.random() < 0.3:
            data.pop(name, None)
        else:
            data[name] = random_.choice(pool)
    return data


def test_it_takes_what_the_schema_takes():
    random_ = random.Random(0)
    taken = 0
    for _ in range(1500):
        data = mutated(random_)
        try:
            protocol.parse(json.dumps(data))
            ok = True
        except ProtocolError as error:
            ok = False
            assert str(error)
        assert ok == valid(data), data
        taken += ok
    assert 200 < taken < 1300
