"""Names and transforms of every table, one tensor at a time, against whole trees and the files."""

import numpy as np
import pytest

from wp2_jax.checkpoints import names_dit, names_umt5, tensor_file, torch_names
from wp2_jax.checkpoints.names_vae import wan_rules
from wp2_jax.checkpoints.tensor_file import Spec
from wp2_jax.verify import autoencoders, experts, text
from wp2_jax.verify import golden as items


def tables(folder):
    """(rules, tensors by published name) of a golden expert, autoencoder and text encoder."""
    sidecar, tensors = items.load(folder, "weights_dit_high")
    yield names_dit.rules(experts.dit_config(sidecar)), items.below(tensors, "w.")
    sidecar, tensors = items.load(folder, "weights_vae")
    yield wan_rules(autoencoders.wan_config(sidecar)), items.below(tensors, "w.")
    sidecar, tensors = items.load(folder, "j_t5")
    yield names_umt5.rules(text.config_of(sidecar).num_layers), items.below(tensors, "w.")


def test_one_tensor_at_a_time_and_back_is_what_the_file_held(golden, monkeypatch):
    for rules, tensors in tables(golden):
        specs = {name: Spec(x.shape, str(x.dtype)) for name, x in tensors.items()}
        ours = torch_names.own(rules, specs)
        assert torch_names.published(rules, ours) == specs
        arrays = {}
        monkeypatch.setattr(tensor_file, "PART", 300)  # some arrays come by their rows

        def rows_of(name, rows, tensors=tensors):
            return tensors[name][slice(None) if rows is None else rows]

        for rule in rules:
            pieces = list(torch_names.own_pieces(rule, specs, rows_of))
            if not rule.layers and rule.transform is torch_names.IDENTITY:
                pieces = [np.concatenate(pieces) if len(pieces) > 1 else pieces[0]]
            elif rule.transform is torch_names.IDENTITY and len(pieces) > rule.layers:
                pieces = list(np.concatenate(pieces).reshape(ours[rule.ours].shape))
            arrays[rule.ours] = np.stack(pieces) if rule.layers else pieces[0]
            assert arrays[rule.ours].shape == ours[rule.ours].shape
        flat = torch_names.flatten(torch_names.to_tree(rules, tensors))
        assert flat.keys() == arrays.keys()
        for path, value in flat.items():
            np.testing.assert_array_equal(value, arrays[path])

        def read(path, layer, arrays=arrays):
            return arrays[path] if layer is None else arrays[path][layer]

        made = torch_names.published_pieces(rules, read)
        assert made.keys() == tensors.keys()
        for name, make in made.items():
            np.testing.assert_array_equal(make(), tensors[name])


def test_all_that_is_wrong_is_listed_by_its_published_name(golden):
    rules, tensors = next(iter(tables(golden)))
    specs = {name: Spec(x.shape, str(x.dtype)) for name, x in tensors.items()}
    shapes = {path: spec.shape for path, spec in torch_names.own(rules, specs).items()}
    torch_names.check(rules, specs, shapes)
    del specs["blocks.1.ffn.0.bias"]
    specs["blocks.9.ffn.0.bias"] = Spec((3,), "float32")
    specs["blocks.0.ffn.2.weight"] = Spec((3, 4), "float32")
    specs["head.head.bias"] = specs["head.head.bias"]._replace(dtype="int64")
    with pytest.raises(ValueError) as error:
        torch_names.check(rules, specs, shapes)
    wanted = tensors["blocks.0.ffn.2.weight"].shape
    lines = [
        "missing blocks.1.ffn.0.bias",
        "extra blocks.9.ffn.0.bias (3,)",
        "head.head.bias is int64",
        f"misshapen blocks.0.ffn.2.weight (3, 4), expected {wanted}",
    ]
    assert str(error.value).split("\n  ")[1:] == lines


@pytest.mark.parametrize("shape", [(700, 300), (256, 256), (3, 500), (2, 300, 280)])
def test_large_transposed_matrices_keep_their_values(shape):
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    turned = torch_names.contiguous(array.T)
    assert turned.flags.c_contiguous
    np.testing.assert_array_equal(turned, array.T)
