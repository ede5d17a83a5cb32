"""Camera poses -> action rows (spec sections 2 and 8).

Poses are camera-to-world matrices [4, 4] of a camera with x right, y down, z ahead, one a picture.
"""

import math

import numpy as np

from wp2_jax.controls import actions
from wp2_jax.controls.errors import ActionError
from wp2_jax.controls.geometry import PICTURES_PER_LATENT, fit_pictures

# Half of the 45 degrees between neighbouring directions of the eight.
_HALF_SECTOR_SIN = math.sin(math.radians(22.5))


def check_poses(poses: np.ndarray) -> np.ndarray:
    """float64 poses [F, 4, 4] after a check that they are rigid motions.

    Errors: ActionError `bad_shape`, `not_finite`, `bad_pose` (scaled, sheared or mirrored), naming the
    picture.
    """
    poses = np.asarray(poses, np.float64)
    if poses.ndim != 3 or poses.shape[1:] != (4, 4) or len(poses) == 0:
        raise ActionError("bad_shape", f"camera poses of shape {poses.shape}: [pictures, 4, 4] is needed.")
    bad = np.flatnonzero(~np.isfinite(poses).all(axis=(1, 2)))
    if bad.size:
        raise ActionError("not_finite", f"the camera pose of picture {bad[0]} holds NaN or infinity.")
    rotation = poses[:, :3, :3]
    gram = np.einsum("fij,fik->fjk", rotation, rotation)
    rigid = (np.abs(gram - np.eye(3)).max(axis=(1, 2)) < 1e-3) & (np.linalg.det(rotation) > 0)
    rigid &= np.abs(poses[:, 3] - (0, 0, 0, 1)).max(axis=1) < 1e-6
    bad = np.flatnonzero(~rigid)
    if bad.size:
        raise ActionError(
            "bad_pose",
            f"the camera pose of picture {bad[0]} is not a rotation and a translation (scaled, sheared or "
            "mirrored); give camera-to-world matrices with last row 0 0 0 1.",
        )
    return poses


def rows_from_poses(
    poses: np.ndarray, perspective: str, still_below: float, up: np.ndarray | None = None
) -> np.ndarray:
    """Camera poses [F, 4, 4] -> float32 rows [T, 6], T = (F-1)//4 + 1 (pictures past 4(T-1)+1 are not used).

    The rotation of latent frame t is pose(picture 4t) relative to pose(picture 4(t-1)), split into yaw, then
    pitch, in degrees. The relative rotation is read in the earlier camera's frame; with `up` [3] (world
    coordinates) yaw and pitch are changes of heading and elevation instead, which is what a game with gravity
    commands. Movement is one of eight directions of the step on the camera's ground plane, at half the turn,
    or none where the step is shorter than `still_below` (pose units a latent frame). Row 0 is at rest; jumps
    are not seen. Errors: `check_poses`.
    """
    poses = check_poses(poses)
    latent_frames = fit_pictures(len(poses)).latent_frames
    poses = poses[: PICTURES_PER_LATENT * (latent_frames - 1) + 1 : PICTURES_PER_LATENT]
    rotation, position = poses[:, :3, :3], poses[:, :3, 3]
    before, after = rotation[:-1], rotation[1:]
    if up is None:
        yaw, pitch = _heading(np.einsum("tji,tj->ti", before, after[:, :, 2]))
        plane = before
    else:
        level = _level_frame(before[0] if len(before) else rotation[0], np.asarray(up, np.float64))
        heading, elevation = _heading(rotation[:, :, 2] @ level)
        yaw = (np.diff(heading) + math.pi) % (2 * math.pi) - math.pi
        pitch = np.diff(elevation)
        plane = level @ _yaw_matrix(heading[:-1])
    # A step along an arc points halfway through the turn.
    step = np.einsum("tji,tj->ti", plane @ _yaw_matrix(yaw / 2), np.diff(position, axis=0))
    rows = np.zeros((latent_frames, 6), np.float32)
    rows[:, actions.PERSPECTIVE] = actions.perspective_value(perspective)
    rows[1:, actions.PITCH] = np.degrees(pitch)
    rows[1:, actions.YAW] = np.degrees(yaw)
    length = np.hypot(step[:, 0], step[:, 2])
    for axis, along in ((actions.FORWARD, step[:, 2]), (actions.LATERAL, step[:, 0])):
        moves = (length >= still_below) & (np.abs(along) > _HALF_SECTOR_SIN * length)
        rows[1:, axis] = np.where(moves, np.sign(along), 0)
    return rows


def _heading(ahead: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Yaw to the right and pitch upwards (radians) of directions [T, 3] in a frame x right, y down, z ahead."""
    return np.arctan2(ahead[:, 0], ahead[:, 2]), np.arctan2(-ahead[:, 1], np.hypot(ahead[:, 0], ahead[:, 2]))


def _yaw_matrix(angle: np.ndarray) -> np.ndarray:
    """Turns to the right by `angle` (radians, [T]) about y: [T, 3, 3]."""
    c, s, o = np.cos(angle), np.sin(angle), np.zeros_like(angle)
    return np.stack([np.stack([c, o, s], -1), np.stack([o, o + 1, o], -1), np.stack([-s, o, c], -1)], -2)


def _level_frame(camera: np.ndarray, up: np.ndarray) -> np.ndarray:
    """World rotation [3, 3] whose y axis points against `up`, its z axis as near ahead of `camera` as can be."""
    down = -up / np.linalg.norm(up)
    right = np.cross(down, camera[:, 2])
    if np.linalg.norm(right) < 1e-6:
        # Looking straight up or down: the camera's own right is level.
        right = camera[:, 0] - down * (camera[:, 0] @ down)
    right = right / np.linalg.norm(right)
    return np.stack([right, down, np.cross(right, down)], axis=1)


def constant_speed(rows: np.ndarray, still_below_deg: float) -> np.ndarray:
    """Rows [T, 6] of a recording that turns at constant speed: every rotation becomes 0 or the axis' median speed.

    Rotations below `still_below_deg` (degrees a latent frame) count as none. Source: spec section 8.
    """
    out = actions.check_rows(rows).copy()
    for axis in (actions.PITCH, actions.YAW):
        size = np.abs(out[:, axis])
        turning = size >= still_below_deg
        if turning.any():
            out[:, axis] = np.where(turning, np.sign(out[:, axis]) * np.median(size[turning]), 0)
        else:
            out[:, axis] = 0
    return out
