"""`wp2 convert export`: golden weights out of a training checkpoint bit for bit, every stage, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_workdir
from safetensors.numpy import load_file

from wp2_jax import tree
from wp2_jax.checkpoints import torch_io, trained
from wp2_jax.checkpoints.orbax_io import Checkpoints
from wp2_jax.checkpoints.tensor_file import CheckpointError
from wp2_jax.checkpoints.torch_names import from_tree
from wp2_jax.cli import main
from wp2_jax.convert import export, inspection, layouts
from wp2_jax.train import state
from wp2_jax.verify import experts
from wp2_jax.verify import golden as items


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return random_workdir.write(tmp_path_factory.mktemp("run"), ("base", "teacher_forcing", "pdd", "stable_forcing"))


def golden_config(config):
    """An experiment's config for the golden experts."""
    model = {name: getattr(config, name) for name in ("dim", "num_heads", "num_layers", "ffn_dim", "freq_dim")}
    model |= {name: getattr(config, name) for name in ("text_dim", "text_len")}
    memory = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config.memory).items()}
    values = random_workdir.config("base")
    values["model"] = model | {"memory": memory}
    values["text"] |= {"dim": config.text_dim}
    values["world"] |= {"text_len": config.text_len}
    return values


def test_golden_experts_come_out_of_a_step_of_training_bit_for_bit(tmp_path, golden):
    """One step at learning rate 0 without decay, saved as training saves it."""
    loaded = {name: experts.load_expert(golden, f"weights_dit_{name}") for name in ("high", "low")}
    params = {"experts": {name: params for name, (_, params) in loaded.items()}}
    optimiser = optax.adamw(0.0, weight_decay=0.0)
    whole = state.create(jax.random.key(0), params, {"experts": optimiser}, ema=("experts",))

    def step(params):
        updates, _ = optimiser.update(jax.tree.map(jnp.ones_like, params), optimiser.init(params), params)
        return optax.apply_updates(params, updates)

    with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in whole numbers
        stepped = jax.jit(step)(params["experts"])
    whole = whole.replace(params={"experts": stepped})
    with Checkpoints(tmp_path / "base" / "checkpoints") as checkpoints:
        checkpoints.save(1, whole, {"config": golden_config(loaded["high"][0]), "stage": "base"})
        checkpoints.wait()
    for average in (True, False):
        request = export.Request(average=average, parts=("experts",), max_shard_size=60_000)
        output = tmp_path / f"out{average}"
        export.export(tmp_path / "base", output, request)
        for name in ("high", "low"):
            reader = torch_io.open_weights(output / f"{name}_noise_model")
            assert reader.path.name.endswith(".index.json")
            wanted = items.below(items.load(golden, f"weights_dit_{name}")[1], "w.")
            assert reader.specs.keys() == wanted.keys()
            for key, value in wanted.items():
                assert reader.specs[key].dtype == "float32"
                np.testing.assert_array_equal(reader.read(key), value)
            assert reader.metadata["wp2.expert"] == name
            assert dict(inspection.describe(output / f"{name}_noise_model"))["fits"].startswith("yes")


@pytest.mark.parametrize(
    ("stage", "role", "form"), [("pdd", "experts", "bank"), ("stable_forcing", "student", "fused")]
)
def test_few_step_heads_and_the_parts_beside_them(workdir, tmp_path, stage, role, form, capsys):
    output = tmp_path / "out"
    command = ["convert", "export", "--checkpoint", str(workdir), "--stage", stage, "--output", str(output)]
    assert main(command) == 0
    capsys.readouterr()
    world = json.loads((output / "world.json").read_text())
    assert world["parts"].keys() == {"high", "low", "autoencoder", "text"} and world["stage"] == stage
    for name in ("high", "low"):
        ours = trained.load_params(workdir / stage, f"{role}/{name}", ema=True)
        reader = torch_io.open_weights(output / world["parts"][name])
        found = layouts.recognise(reader.specs, inspection.given_for(reader))
        assert isinstance(found.config, layouts.DiTConfig) and found.config.head == form
        found.check()
        wanted = from_tree(found.rules, jax.tree.map(np.asarray, ours))
        assert wanted.keys() == reader.specs.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(reader.read(key), value)
    assert (output / "tokenizer.model").read_bytes() == (workdir / "tokenizer.model").read_bytes()
    assert main(command) == 2
    assert "holds something already" in capsys.readouterr().err


def test_packed_weights_in_another_dtype(workdir, tmp_path):
    trained.pack(workdir / "teacher_forcing", tmp_path / "packed", ("experts",))
    paths, said = export.export(tmp_path / "packed", tmp_path / "out", export.Request(dtype="float32"))
    assert [path.parent.name for path in paths] == ["high_noise_model", "low_noise_model"] and len(said) == 2
    ours = tree.named_leaves(trained.load_params(tmp_path / "packed", "experts/low"))
    theirs = load_file(paths[1])
    assert {x.dtype for x in theirs.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(theirs["patch_embedding.bias"], ours["patch_bias"])


def test_what_is_refused_leaves_nothing(workdir, tmp_path):
    output = tmp_path / "out"
    cases = [
        ("stable_forcing", export.Request(layout="diffusers"), "one many-step head"),
        ("stable_forcing", export.Request(role="teacher"), "has no teacher; it has fake, student"),
        ("stable_forcing", export.Request(role="fake"), "has no ema/fake"),
        ("stable_forcing", export.Request(fuse=True), "no bank of heads"),
        ("base", export.Request(dtype="int8"), "give one of float32"),
    ]
    for stage, request, text in cases:
        with pytest.raises(ValueError, match=text):
            export.export(workdir / stage, output, request)
        assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="trained ones there: autoencoder, base, pdd"):
        export.stage_folder(workdir, None)


def test_the_layouts_of_others_hold_the_backbone_alone(workdir, tmp_path):
    ours = trained.load_params(workdir / "base", "experts/high", ema=True)
    for layout, folder, name in (
        ("wan", "high_noise_model", "blocks.1.ffn.0.weight"),
        ("diffusers", "transformer", "blocks.1.ffn.net.0.proj.weight"),
    ):
        _, said = export.export(workdir / "base", tmp_path / layout, export.Request(layout=layout, parts=("experts",)))
        assert any("left out" in line for line in said)
        reader = torch_io.open_weights(tmp_path / layout / folder)
        found = layouts.recognise(reader.specs, inspection.given_for(reader))
        assert found.layout == layout
        found.check()
        np.testing.assert_array_equal(reader.read(name), ours["blocks"]["ffn"]["layer_0"]["kernel"][1].T)


def test_diffusers_and_the_files_agree(workdir, tmp_path):
    """The backbone that diffusers builds from our config.json has the names and shapes of our file."""
    diffusers = pytest.importorskip("diffusers", reason="needs pip install 'wp2_jax[bench]'")
    export.export(workdir / "base", tmp_path / "out", export.Request(layout="diffusers", parts=("experts",)))
    config = json.loads((tmp_path / "out/transformer/config.json").read_text())
    module = diffusers.WanTransformer3DModel.from_config(config)
    held = load_file(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors")
    wanted = module.state_dict()
    assert {name: tuple(x.shape) for name, x in wanted.items()} == {name: x.shape for name, x in held.items()}
