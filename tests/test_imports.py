"""Imports go one way (the table below), found in the syntax tree of every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BASE = {"array_types", "rng", "tree", "allocator", "xla_flags"}
MODELS = {"models", "diffusion"}
# What each part of wp2_jax may import from the others, besides itself. Top-level modules stand under their own name.
ALLOWED: dict[str, set[str]] = {
    "array_types": set(),
    "allocator": set(),
    "xla_flags": set(),
    "rng": {"array_types"},
    "tree": {"array_types"},
    "sharding": BASE,
    "controls": BASE,
    "models": BASE | {"controls", "sharding"},
    "diffusion": BASE | {"controls", "sharding"},
    "checkpoints": {"array_types", "tree"},
    "inference": BASE | MODELS | {"controls", "sharding", "checkpoints"},
    "objectives": BASE | MODELS | {"controls", "sharding", "inference"},
    "train": BASE | {"sharding", "checkpoints"},
    "serve": {"controls", "inference"},
    "evaluation": {"array_types"},
    "verify": BASE | MODELS | {"controls", "checkpoints", "inference"},
    "stages": BASE
    | MODELS
    | {"controls", "sharding", "checkpoints", "inference", "objectives", "train", "evaluation", "data_pipelines"},
    "convert": BASE | MODELS | {"controls", "checkpoints", "inference", "verify"},
    "bench": BASE | MODELS | {"controls", "checkpoints", "inference", "objectives", "train", "evaluation"},
    "plan": BASE | MODELS | {"sharding", "controls", "inference", "objectives", "train", "stages", "bench"},
    "data_pipelines": {"array_types", "controls", "inference.condition"},
    "experiments": set(),
}
# These stand above everything.
FREE = {"cli", "__main__", "__init__"}
OUTSIDE = ("data_pipelines", "experiments", "launch")


def modules() -> list[Path]:
    return sorted(path for top in ("wp2_jax", *OUTSIDE) for path in (ROOT / top).rglob("*.py"))


def part_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "wp2_jax" else parts[0]


def imported(path: Path) -> set[str]:
    """Dotted names that a module imports anywhere, also inside functions; of `from a import b` it is "a.b"."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; the tables here read absolute ones"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def may_import(allowed: set[str], own: str, name: str) -> bool:
    top, _, rest = name.partition(".")
    if top not in ("wp2_jax", *OUTSIDE):
        return True
    inner = rest if top == "wp2_jax" else name
    return any(inner == entry or inner.startswith(f"{entry}.") for entry in allowed | {own})


def test_every_part_has_its_directions():
    parts = {part_of(path) for path in modules()}
    assert parts - FREE - {"launch"} <= set(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_directions(part):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules()
        if part_of(path) == part
        for name in sorted(imported(path))
        if not may_import(ALLOWED[part], part, name)
    ]
    assert not wrong


def test_the_table_has_no_cycle():
    """The parts can be put in a row in which each only imports from those before it."""
    left = {part: {entry.split(".")[0] for entry in allowed} - {part} for part, allowed in ALLOWED.items()}
    while left:
        free = [part for part, needs in left.items() if not needs & set(left)]
        assert free, f"{sorted(left)} import each other"
        left = {part: needs for part, needs in left.items() if part not in free}


def test_torch_is_imported_where_it_is_read_where_it_is_timed_and_where_it_is_compared():
    files = ("checkpoints/torch_io.py", "bench/torch_peer.py", "convert/torch_side.py")
    places = {ROOT / "wp2_jax" / file for file in files}
    users = [path for path in modules() if any(name.split(".")[0] == "torch" for name in imported(path))]
    assert set(users) <= places


def test_linen_stays_in_the_models():
    """Flax modules are defined inside models/ only (an interface may name the type)."""
    outside = []
    for path in modules():
        if part_of(path) == "models":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("nn.Module" in ast.unparse(base) for base in node.bases):
                outside.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not outside


def test_a_wrong_import_would_be_seen(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from wp2_jax.models import dit\n    import wp2_jax.inference.stream\n")
    assert imported(path) == {"wp2_jax.models.dit", "wp2_jax.inference.stream"}
    assert not may_import(ALLOWED["diffusion"], "diffusion", "wp2_jax.models.dit")
    assert not may_import(ALLOWED["data_pipelines"], "data_pipelines", "wp2_jax.inference.stream")
    assert may_import(ALLOWED["data_pipelines"], "data_pipelines", "wp2_jax.inference.condition.conditioning")


def test_a_world_starts_without_what_only_training_needs():
    """Each of these takes a noticeable part of the time to the first picture."""
    slow = ("orbax.checkpoint", "tensorstore", "clu", "optax", "grain", "tensorflow_datasets", "matplotlib", "scipy")
    code = (
        "import sys, wp2_jax.inference.generate, wp2_jax.inference.load, wp2_jax.inference.aot\n"
        f"print([name for name in {slow} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
