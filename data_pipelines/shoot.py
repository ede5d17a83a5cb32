"""A script and an engine give a record."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from data_pipelines.doom import Engine
from data_pipelines.script import Script
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, PICTURES_PER_SECOND

SOURCE = "vizdoom"


def shoot(engine: Engine, world: int, script: Script, name: str, place: str, seed: int) -> dict[str, Any]:
    """Play `script` on map number `world` of the engine: the record called `name` in the world `place`."""
    engine.start(world, script.poses[0], script.perspective == "tps", script.setup)
    pictures, cameras, depth = [], [], []
    for index, pose in enumerate(script.poses):
        keep_depth = index % PICTURES_PER_LATENT == 0
        shot = engine.shoot(pose, script.orders.get(index, ()), depth=keep_depth)
        pictures.append(shot.picture)
        cameras.append(shot.camera_to_world)
        if shot.depth is not None:
            depth.append(shot.depth)
    return {
        "id": name,
        "source": SOURCE,
        "world": place,
        "kind": script.kind,
        "seed": np.int64(seed),
        "perspective": script.perspective,
        "caption": json.dumps(script.caption.to_json()),
        "picture_rate": np.float32(PICTURES_PER_SECOND),
        "pictures": np.stack(pictures),
        "actions": script.rows,
        "camera_to_world": np.stack(cameras),
        "intrinsics": engine.config.intrinsics,
        "depth": np.stack(depth),
    }
