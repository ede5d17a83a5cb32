"""What files of weights are recognised as: golden tensors, the lists of the full-size files, and other layouts."""

import dataclasses
import json

import pytest

from wp2_jax.checkpoints import torch_names
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.checkpoints.tensor_file import Spec
from wp2_jax.convert import layouts
from wp2_jax.verify import autoencoders, experts, manifests, text
from wp2_jax.verify import golden as items


def specs_of(folder, name):
    sidecar, tensors = items.load(folder, name)
    return sidecar, {key: Spec(x.shape, str(x.dtype)) for key, x in items.below(tensors, "w.").items()}


def manifest(folder, name):
    listed = json.loads((folder / f"manifests/{name}.json").read_text())["tensors"]
    return {key: Spec(tuple(entry["shape"]), entry["dtype"]) for key, entry in listed.items()}


def golden_models(folder):
    """(tensors' specs, config) of the golden folder's models; heads are no part of a file."""
    sidecar, specs = specs_of(folder, "weights_dit_high")
    config = experts.dit_config(sidecar)
    yield specs, config
    sidecar, specs = specs_of(folder, "weights_vae")
    yield specs, autoencoders.wan_config(sidecar)
    sidecar, specs = specs_of(folder, "j_t5")
    yield specs, text.config_of(sidecar)


def given(config):
    """What no shape shows."""
    if not isinstance(config, layouts.DiTConfig):
        return {}
    return {"num_heads": config.num_heads, "memory": config.memory, "text_len": config.text_len}


def test_full_size_files_are_known_with_all_their_sizes(golden):
    expected = {
        "m1_a14b_expert_bi_ar": (layouts.EXPERT, layouts.PUBLISHED, manifests.A14B),
        "m2_a14b_expert_pdd": (layouts.EXPERT, layouts.PUBLISHED, manifests.A14B_FEW_STEP),
        "m3_wan21_vae": (layouts.WAN_VAE, layouts.WAN, manifests.WAN21_VAE),
        "m4_umt5_xxl_encoder": (layouts.TEXT, layouts.WAN, manifests.UMT5_XXL),
        "m5_causal_tae": (layouts.TINY_VAE, layouts.PUBLISHED, manifests.CAUSAL_TAE),
    }
    for name, (kind, layout, config) in expected.items():
        found = layouts.recognise(manifest(golden, name))
        assert (found.kind, found.layout) == (kind, layout)
        if hasattr(config, "param_dtype"):
            config = dataclasses.replace(config, param_dtype="float32")
        if getattr(config, "head", "") == "fused":
            config = dataclasses.replace(config, intervals=2)  # fused heads do not show it
        assert found.config == config
        found.check()


def test_a_bank_of_heads_is_known_under_all_its_names(golden):
    base = manifest(golden, "m1_a14b_expert_bi_ar")
    base = {name: spec for name, spec in base.items() if not name.startswith("head.head.")}
    for weight, bias in (
        ("head.weight", "head.bias"),
        ("head.pdd_weight", "head.pdd_bias"),
        ("head.head.weight", "head.head.bias"),
    ):
        bank = {weight: Spec((72, 64, 5120), "bfloat16"), bias: Spec((72, 64), "bfloat16")}
        found = layouts.recognise(base | bank)
        assert isinstance(found.config, layouts.DiTConfig)
        assert (found.config.head, found.config.intervals) == ("bank", 72)
        assert (found.stored["head.weight"], found.stored["head.bias"]) == (weight, bias)
        found.check()


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_every_layout_of_the_golden_models_is_known_again(golden, layout):
    for specs, config in golden_models(golden):
        own = layouts.recognise(specs, given(config))
        assert own.config == config
        own.check()
        theirs = torch_names.published(layouts.RULES[own.kind](layout, config), own.own_specs())
        found = layouts.recognise(theirs, given(config))
        # The autoencoder and the text encoder have one layout for Wan and WorldPlay2.
        same = layout == layouts.PUBLISHED and own.kind != layouts.EXPERT
        assert (found.kind, found.layout, found.config) == (own.kind, layouts.WAN if same else layout, config)
        found.check()


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_each_misfit_is_named(golden, layout):
    """One tensor of each file missing, extra, misshapen, of whole numbers: here four spread over it."""
    for specs, config in golden_models(golden):
        own = layouts.recognise(specs, given(config))
        theirs = torch_names.published(layouts.RULES[own.kind](layout, config), own.own_specs())
        for name in list(theirs)[:: max(1, len(theirs) // 4)]:
            spec = theirs[name]
            changes = {
                f"missing {name}": {key: value for key, value in theirs.items() if key != name},
                f"extra {name}.more": theirs | {f"{name}.more": spec},
                f"misshapen {name} ": theirs | {name: Spec((spec.shape[0] + 2, *spec.shape[1:]), spec.dtype)},
                f"{name} is int32": theirs | {name: spec._replace(dtype="int32")},
            }
            for text_, changed in changes.items():
                known = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
                with pytest.raises(ValueError) as error:
                    layouts.recognise(changed, known).check()
                assert text_ in str(error.value), (text_, str(error.value)[:300])
                # Without a config sizes come from the file. A vocabulary of another length is none the worse.
                if not (name in ("token_embedding.weight", "shared.weight") and text_.startswith("misshapen")):
                    with pytest.raises(ValueError):
                        layouts.recognise(changed, given(config)).check()


def test_names_of_nothing_known_are_refused():
    with pytest.raises(CheckpointError, match=r"no known layout has the names of these 1 tensors \(conv"):
        layouts.recognise({"conv.weight": Spec((3,), "float32")})
