"""Checks the full-size models against lists of published parameters: names, shapes and dtypes, both ways.

Nothing is materialised: our shapes come from `jax.eval_shape`, and the transforms between the layouts run on arrays
without storage.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from wp2_jax.checkpoints import names_dit, names_umt5
from wp2_jax.checkpoints.names_vae import tiny_rules, wan_rules
from wp2_jax.checkpoints.tensor_file import Spec
from wp2_jax.checkpoints.torch_names import Rule, flatten, own, published
from wp2_jax.models import passes, umt5
from wp2_jax.models.autoencoder import init_params
from wp2_jax.models.dit import DiTConfig
from wp2_jax.models.umt5 import Umt5Config
from wp2_jax.models.vae_tiny import TinyVae, TinyVaeConfig
from wp2_jax.models.vae_wan import WanVae, WanVaeConfig
from wp2_jax.verify.core import Result, equal, failed

A14B = DiTConfig(param_dtype="bfloat16")
# The head of the low expert has 72 intervals; fused heads do not depend on their number.
A14B_FEW_STEP = DiTConfig(param_dtype="bfloat16", head="fused", intervals=56, blocks=2)
WAN21_VAE = WanVaeConfig()
UMT5_XXL = Umt5Config(param_dtype="bfloat16")
CAUSAL_TAE = TinyVaeConfig()

_NAMED = 5


def _specs(tree) -> dict[str, Spec]:
    return {path: Spec(tuple(leaf.shape), str(leaf.dtype)) for path, leaf in flatten(tree).items()}


def _expert(config: DiTConfig) -> tuple[list[Rule], dict[str, Spec]]:
    return names_dit.rules(config), _specs(jax.eval_shape(lambda key: passes.init(config, key), jax.random.key(0)))


def _text() -> tuple[list[Rule], dict[str, Spec]]:
    tree = jax.eval_shape(lambda key: umt5.init(UMT5_XXL, key), jax.random.key(0))
    return names_umt5.rules(UMT5_XXL.num_layers), _specs(tree)


def _wan() -> tuple[list[Rule], dict[str, Spec]]:
    tree = jax.eval_shape(lambda key: init_params(WanVae(WAN21_VAE), key), jax.random.key(0))
    return wan_rules(WAN21_VAE), _specs(tree)


def _tiny() -> tuple[list[Rule], dict[str, Spec]]:
    tree = jax.eval_shape(lambda key: init_params(TinyVae(CAUSAL_TAE), key), jax.random.key(0))
    return tiny_rules(CAUSAL_TAE), _specs(tree)


MODELS: dict[str, Callable[[], tuple[list[Rule], dict[str, Spec]]]] = {
    "many-step expert": lambda: _expert(A14B),
    "few-step expert": lambda: _expert(A14B_FEW_STEP),
    "Wan2.1 VAE": _wan,
    "UMT5-XXL": _text,
    "causal tiny autoencoder": _tiny,
}
"""What a manifest can be of: the table of names and our parameters, by path."""


@functools.cache
def full_size(model: str) -> tuple[list[Rule], dict[str, Spec]]:
    """The entry of `MODELS`, worked out once."""
    return MODELS[model]()


def recognise(names: set[str]) -> str | None:
    """The model of `MODELS` that shares the most names with a manifest; None if none shares half of them."""

    def shared(model: str) -> float:
        wanted = {name for rule in full_size(model)[0] for name in rule.names()}
        return len(names & wanted) / len(names | wanted)

    best = max(MODELS, key=shared)
    return best if shared(best) > 0.5 else None


def _listed(problems: list[str]) -> str:
    more = len(problems) - _NAMED
    return "; ".join(problems[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _differences(item: str, actual: Mapping[str, object], expected: Mapping[str, object]) -> Result:
    """Same value for every name that both have."""
    wrong = [f"{k}: {actual[k]}, expected {expected[k]}" for k in expected if k in actual and actual[k] != expected[k]]
    return failed(item, _listed(wrong)) if wrong else Result(item, 0.0, 0.0, 0.0, True, f"{len(expected)} compared")


def check_manifest(path: str | Path) -> tuple[str | None, list[Result]]:
    """(the model it is of, results) of a manifest {"count", "parameters", "tensors": {name: {"shape", "dtype"}}}."""
    path = Path(path)
    manifest = json.loads(path.read_text("utf-8"))
    theirs = {name: Spec(tuple(t["shape"]), t["dtype"]) for name, t in manifest["tensors"].items()}
    model = recognise(set(theirs))
    if model is None:
        return None, [failed(f"{path.stem}/names", f"these {len(theirs)} names are of none of {', '.join(MODELS)}")]
    return model, list(_check(path.stem, model, manifest, theirs))


def _check(stem: str, model: str, manifest: Mapping, theirs: Mapping[str, Spec]) -> Iterator[Result]:
    rules, ours = full_size(model)
    named = published(rules, ours)
    wrong = [f"missing here: {name}" for name in sorted(set(theirs) - set(named))]
    wrong += [f"extra here: {name}" for name in sorted(set(named) - set(theirs))]
    note = _listed(wrong) if wrong else f"{model}, {len(theirs)} names"
    yield failed(f"{stem}/names", note) if wrong else Result(f"{stem}/names", 0.0, 0.0, 0.0, True, note)
    for index, part in enumerate(Spec._fields):
        actual = {name: spec[index] for name, spec in named.items()}
        yield _differences(f"{stem}/{part}s", actual, {name: spec[index] for name, spec in theirs.items()})
    back = own(rules, theirs)
    lost = [path for path in ours if path not in back]
    if lost:
        yield failed(f"{stem}/our_shapes", f"cannot be filled from the manifest: {_listed(lost)}")
    else:
        yield _differences(f"{stem}/our_shapes", back, ours)
    total = sum(math.prod(spec.shape) for spec in ours.values())
    yield equal(f"{stem}/count", len(named), manifest["count"])
    yield equal(f"{stem}/parameters", total, manifest["parameters"])
