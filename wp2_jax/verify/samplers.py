"""Checks of the samplers, the few-step schedule and the fused heads against golden items."""

import ast
import operator
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wp2_jax.diffusion import pdd, samplers, solver_schedule
from wp2_jax.diffusion.experts import Experts
from wp2_jax.verify.core import Result, compare, failed
from wp2_jax.verify.golden import load

TOLERANCE = 1e-5
TIMESTEP_TOLERANCE = 1e-3
# The published few-step schedule; golden items do not carry these two numbers.
PDD_BOUNDARY, PDD_SHIFT = 0.9, 7.0

_BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_CALLS: dict[str, Callable] = {"sin": jnp.sin, "cos": jnp.cos, "exp": jnp.exp}


def parse_velocity(text: str) -> samplers.Predict:
    """A predict function from text such as "v = sin(2*x) - 0.2*sigma".

    Arithmetic on numbers, x, sigma and sin, cos, exp; anything else in the text is a ValueError.
    """
    expression = ast.parse(text.split("=", 1)[-1].strip(), mode="eval").body

    def evaluate(node: ast.expr, names: dict[str, jax.Array]):
        match node:
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](evaluate(left, names), evaluate(right, names))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return _UNARY[type(op)](evaluate(operand, names))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _CALLS:
                return _CALLS[name](evaluate(argument, names))
        raise ValueError(f"velocity function {text!r}: cannot read {ast.unparse(node)!r}")

    def predict(x, t, sigma, index):
        return jnp.broadcast_to(evaluate(expression, {"x": x, "sigma": sigma}), x.shape)

    one = jnp.ones((), jnp.float32)
    evaluate(expression, {"x": one, "sigma": one})  # so that a bad text is an error here and not in the sampler
    return predict


def check_samplers(folder: str | Path, name: str) -> list[Result]:
    """An item of kind g: timesteps (exactly), sigmas and every trajectory of every run that its sidecar
    lists."""
    sidecar, tensors = load(folder, name)
    functions = {key: parse_velocity(text) for key, text in sidecar["velocity_functions"].items()}
    x = jnp.asarray(tensors["in.x"], jnp.float32)
    results, seen = [], {"in.x"}

    def check(key: str, actual, tolerance: float) -> None:
        seen.add(key)
        item = f"{name}/{key.removeprefix('out.')}"
        if key not in tensors:
            results.append(failed(item, "the sidecar lists it, the file lacks it"))
        else:
            results.append(compare(item, actual, tensors[key], tolerance))

    for run in sidecar["runs"]:
        schedule = solver_schedule(run["solver"], run["steps"], run["shift"])
        check(f"out.{run['name']}.timesteps", schedule.timesteps, 0.0)
        check(f"out.{run['name']}.sigmas", schedule.sigmas, TOLERANCE)
        for key, function in functions.items():
            states = samplers.trajectory(schedule, function, x)
            check(f"out.{run['name']}.{key}.states", states, TOLERANCE)
    results += [failed(f"{name}/{key}", "belongs to no run of the sidecar") for key in sorted(set(tensors) - seen)]
    return results


def schedule_of(sidecar: dict) -> pdd.PddSchedule:
    """The few-step schedule with the blocks and the split between the experts that a sidecar lists."""
    blocks, split = sidecar["blocks"], sidecar["boundary_index"]
    experts = Experts(PDD_BOUNDARY)
    counts = tuple(sum(block["expert"] == expert for block in blocks) for expert in experts.names)
    return pdd.schedule(experts, (split, blocks[-1]["end"] - split), counts, PDD_SHIFT)


def check_pdd_schedule(folder: str | Path, name: str) -> list[Result]:
    """The part of an item of kind f that needs no network: blocks, grid, and the chain of steps of every
    chunk when it is fed the golden displacements, velocities and noises."""
    sidecar, tensors = load(folder, name)
    blocks, schedule = sidecar["blocks"], schedule_of(sidecar)
    table = [(b["expert"], b["local_index"], b["start"], b["end"]) for b in blocks]
    ours = [(b.expert, b.local_index, b.start, b.end) for b in schedule.blocks]
    results = [
        Result(f"{name}/blocks", 0.0, 0.0, 0.0, True) if table == ours else failed(f"{name}/blocks", f"{ours}"),
        compare(f"{name}/sigmas", schedule.sigmas, tensors["out.sigmas"], TOLERANCE),
        compare(
            f"{name}/timesteps",
            schedule.timesteps,
            tensors["out.timesteps"],
            TIMESTEP_TOLERANCE,
            absolute=True,
        ),
    ]
    chunks = sorted(key for key in tensors if re.fullmatch(r"in\.c\d+\.latent", key))
    for chunk in (key.split(".")[1] for key in chunks):
        x = jnp.asarray(tensors[f"in.{chunk}.latent"])
        for b, (last, end) in enumerate(zip(schedule.lasts, schedule.ends, strict=True)):
            moved, velocity = (tensors[f"out.{chunk}.b{b}.{part}"] for part in ("displacement", "endpoint"))
            # The last block's x0 is the result: there is no noise to mix in.
            noise = tensors[f"in.{chunk}.b{b}.noise"] if end > 0 else np.zeros_like(moved)
            x = pdd.step(x, jnp.asarray(moved), jnp.asarray(velocity), last, end, noise)
        results.append(compare(f"{name}/{chunk}.steps", x, tensors[f"out.{chunk}.x0_final"], TOLERANCE))
    return results


def check_pdd_heads(folder: str | Path, name: str) -> list[Result]:
    """weights_pdd_heads: the fused head of every block from the bank of interval heads."""
    _, tensors = load(folder, name)
    experts = Experts(PDD_BOUNDARY)
    intervals = tuple(tensors[f"in.bank.{expert}.weight"].shape[0] for expert in experts.names)
    blocks = tuple(tensors[f"w.{expert}.head.block_weight"].shape[0] for expert in experts.names)
    schedule = pdd.schedule(experts, intervals, blocks, PDD_SHIFT)
    results = []
    for expert in experts.names:
        kernel = jnp.asarray(tensors[f"in.bank.{expert}.weight"]).swapaxes(1, 2)
        fused = pdd.fuse_heads(kernel, jnp.asarray(tensors[f"in.bank.{expert}.bias"]), schedule, expert)
        for part, array in (("weight", fused[0].swapaxes(1, 2)), ("bias", fused[1])):
            key = f"{expert}.head.block_{part}"
            results.append(compare(f"{name}/{key}", array, tensors[f"w.{key}"], TOLERANCE))
    return results
