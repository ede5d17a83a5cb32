"""What was played as an input file that `wp2 generate` makes again: every branch of a world is one of its items."""

import io
import itertools
import json
import zipfile
from typing import Any

import numpy as np

from wp2_jax.controls import actions
from wp2_jax.controls.errors import ControlError
from wp2_jax.controls.inputs import InputOptions
from wp2_jax.serve.pictures import kind_of
from wp2_jax.serve.world import History, Node, Start

NAME = "input.json"


def items(start: Start, history: History, capacity: int, options: InputOptions) -> list[dict[str, Any]]:
    """An item for every branch, in the order in which they were made. `options` are those the file is read with.

    ValueError: nothing has been made yet.
    """
    leaves = list(history.leaves())
    if not leaves:
        raise ValueError("there is nothing to save: no chunk of this world has been made yet")
    return [_item(number, leaf, start, capacity, options) for number, leaf in enumerate(leaves)]


def _item(number: int, leaf: Node, start: Start, capacity: int, options: InputOptions) -> dict[str, Any]:
    path = leaf.path()
    names: dict[str, str] = {}
    for node in path:
        names.setdefault(node.caption, f"prompt{len(names) + 1}")
    runs = [(names[caption], sum(len(n.rows) for n in nodes)) for caption, nodes in _runs(path)]
    rows = np.concatenate([node.rows for node in path])
    item = {
        "image_path": f"start.{kind_of(start.picture)}",
        "perspective": start.perspective,
        "prompt_event": ",".join(f"{name}-{length}" for name, length in runs),
        **{name: caption for caption, name in names.items()},
        "output_name": f"branch{number}",
        "fit": start.fit,
        "seed": start.seed,
        "capacity": capacity,
        "rows": rows.tolist(),
    }
    text = _action(rows, start.perspective, options)
    return item if text is None else {"action": text} | item


def _runs(path: list[Node]) -> Any:
    return itertools.groupby(path, key=lambda node: node.caption)


def _action(rows: np.ndarray, perspective: str, options: InputOptions) -> str | None:
    """The published action string of the rows, None where it would not be read as exactly these."""
    speeds = (options.rotation_speed_deg, options.yaw_rotation_speed_deg, options.pitch_rotation_speed_deg)
    try:
        text = actions.render_actions(rows).action
    except ControlError:
        return None
    return text if np.array_equal(actions.parse_actions(text, perspective, *speeds), rows) else None


def pack(items: list[dict[str, Any]], picture: bytes) -> bytes:
    """A zip of the input file with `items`, and the start picture that they name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(NAME, json.dumps(items, indent=1, ensure_ascii=False))
        archive.writestr(items[0]["image_path"], picture)
    return out.getvalue()
