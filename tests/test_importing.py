"""`wp2 convert import`: golden weights in and out bit for bit, every layout and container, and what is refused."""

import json

import numpy as np
import pytest
import random_workdir
from safetensors.numpy import load_file, save_file
from test_export import golden_config

from wp2_jax import tree
from wp2_jax.checkpoints import tensor_file, torch_io, trained
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.cli import main
from wp2_jax.controls.inputs import load_inputs
from wp2_jax.convert import export, importing, sources
from wp2_jax.inference import generate, load
from wp2_jax.verify import autoencoders, experts, text
from wp2_jax.verify import golden as items


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return random_workdir.write(tmp_path_factory.mktemp("run"), ("base", "teacher_forcing", "pdd", "stable_forcing"))


@pytest.fixture(scope="module")
def published(golden):
    """{expert: its golden tensors by published name}, and the config of their world."""
    named = {name: items.below(items.load(golden, f"weights_dit_{name}")[1], "w.") for name in ("high", "low")}
    return named, golden_config(experts.load_expert(golden, "weights_dit_high")[0])


def written(folder, named):
    folder.mkdir(parents=True)
    return {name: save(folder / f"{name}.safetensors", tensors) for name, tensors in named.items()}


def save(path, tensors, metadata=None):
    save_file(tensors, path, metadata)
    return path


def packed(workdir, stage):
    return tensor_file.read(workdir / stage / trained.FILE)


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def exported(folder, output, part, **changes):
    """The tensors of a part that `export` writes."""
    export.export(folder, output, export.Request(**changes))
    reader = torch_io.open_weights(output / json.loads((output / "world.json").read_text())["parts"][part])
    return {name: reader.read(name) for name in reader.specs}


def test_golden_experts_go_in_and_come_out_bit_for_bit(tmp_path, published, monkeypatch):
    named, config = published
    monkeypatch.setattr(tensor_file, "PART", 1000)
    files = written(tmp_path / "theirs", named)
    request = importing.Request(files=files, stage="memory_2", config=config)
    paths, said = importing.import_files(request, tmp_path / "run")
    assert paths == [tmp_path / "run/memory_2" / trained.FILE]
    assert sum("nothing in it tells" in line for line in said) == 2 and "non-commercial" in said[-1]
    about = trained.load_metadata(tmp_path / "run/memory_2")
    assert about["licence"] == "non-commercial" and about["stage"] == about["config"]["stage"] == "memory_2"
    assert about["provenance"]["imported"]["low"] == {"file": "theirs/low.safetensors", "layout": "published"}
    for name in ("high", "low"):
        same(exported(tmp_path / "run/memory_2", tmp_path / name, name), named[name])
        reader = torch_io.open_weights(tmp_path / name / f"{name}_noise_model")
        assert reader.metadata["wp2.licence"] == "non-commercial"
        assert "non-commercial licence" in (tmp_path / name / "README.md").read_text()


def test_golden_autoencoder_and_text_encoder_go_in_and_come_out(tmp_path, golden):
    sidecar, tensors = items.load(golden, "weights_vae")
    vae, vae_config = items.below(tensors, "w."), vars(autoencoders.wan_config(sidecar))
    sidecar, tensors = items.load(golden, "j_t5")
    encoder, text_config = items.below(tensors, "w."), vars(text.config_of(sidecar))
    config = random_workdir.config("base", model={"text_dim": text_config["dim"]})
    config |= {"autoencoder": {"kind": "wan", **vae_config}, "text": text_config}
    for layout in ("wan", "diffusers"):
        files = written(tmp_path / layout, {"autoencoder": vae, "text": encoder})
        run = tmp_path / f"{layout}_run"
        importing.import_files(importing.Request(files=files, config=config), run)
        assert trained.roles(run / "autoencoder") == {"autoencoder": True}
        assert trained.roles(run / "base") == {"text": True}
        for part, home, wanted in (("autoencoder", "autoencoder", vae), ("text", "base", encoder)):
            there = exported(run / home, tmp_path / f"{layout}_{part}", part, layout=layout, parts=(part,))
            if layout == "diffusers":  # in once more, and out under Wan's names
                request = importing.Request(
                    files=sources.find(tmp_path / f"{layout}_{part}"), config=config if part == "text" else None
                )
                importing.import_files(request, tmp_path / f"again_{part}")
                there = exported(tmp_path / f"again_{part}" / home, tmp_path / f"back_{part}", part, parts=(part,))
            same(there, wanted)


def test_every_container_gives_the_same(tmp_path, published):
    """Shards with an index, and pickles with wrappers and prefixes."""
    named, config = published
    request = importing.Request(files=written(tmp_path / "one", named), stage="memory_2", config=config)
    importing.import_files(request, tmp_path / "run")
    wanted = packed(tmp_path / "run", "memory_2")
    for name, tensors in named.items():
        specs = {key: torch_io.Spec(x.shape, str(x.dtype)) for key, x in tensors.items()}
        torch_io.write_weights(tmp_path / "shards" / name / "m", specs, lambda key, t=tensors: [t[key]], 60_000)
    files = {name: tmp_path / "shards" / name for name in named}
    importing.import_files(importing.Request(files, "memory_2", config), tmp_path / "sharded")
    same(packed(tmp_path / "sharded", "memory_2"), wanted)

    torch = pytest.importorskip("torch", reason="needs pip install 'wp2_jax[torch]'")
    wrap = {
        "high": lambda x: {"generator": {}, "generator_ema": {f"model.{k}": v for k, v in x.items()}},
        "low": lambda x: {"state_dict": {"generator_ema": {f"module.{k}": v for k, v in x.items()}}},
    }
    for name, tensors in named.items():
        torch.save(wrap[name]({k: torch.from_numpy(v) for k, v in tensors.items()}), tmp_path / f"{name}.pt")
    files = {name: tmp_path / f"{name}.pt" for name in named}
    importing.import_files(importing.Request(files, "memory_2", config, average=True), tmp_path / "pickled")
    same(packed(tmp_path / "pickled", "memory_2"), wanted)
    origin = trained.load_metadata(tmp_path / "pickled/memory_2")["provenance"]["imported"]["low"]
    assert origin["weights"] == "state_dict/generator_ema"


@pytest.mark.parametrize("layout", ["wan", "diffusers"])
def test_a_plain_backbone_gets_actions_and_memory_that_add_nothing_yet(workdir, tmp_path, layout, capsys):
    export.export(workdir / "base", tmp_path / "out", export.Request(layout=layout))
    command = ["convert", "import", str(tmp_path / "out"), "--output", str(tmp_path / "run"), "--seed", "3"]
    assert main(command) == 0
    assert "add nothing to the backbone until they are trained" in capsys.readouterr().out
    config = random_workdir.the_world().dit
    for name in ("high", "low"):
        before = tree.named_leaves(trained.load_params(workdir / "base", f"experts/{name}", ema=True))
        after = tree.named_leaves(trained.load_params(tmp_path / "run/base", f"experts/{name}"))
        assert before.keys() == after.keys()
        added = [path for path in after if path.startswith(("blocks/action/", "action_encoder/", "compressor/"))]
        for path in set(after) - set(added):
            np.testing.assert_array_equal(after[path], before[path])
        for path in added:
            assert after[path].shape == before[path].shape
            assert np.isfinite(after[path]).all()
        # Zero where the spec says so; Xavier-uniform bounds sqrt(6 / (in + out)), each layer drawn for itself.
        for path in ("blocks/action/out/kernel", "blocks/action/out/bias", "compressor/out/kernel"):
            assert not after[path].any()
        kernel, bound = after["blocks/action/kernel"], np.sqrt(6 / (3 * config.dim))
        assert 0.95 * bound < np.abs(kernel).max() <= bound and not np.array_equal(kernel[0], kernel[1])
        # The spread of the tables: sqrt(2 / (1024 + dim)) / sqrt(2).
        tables = np.concatenate([np.ravel(after[f"action_encoder/table_{i}"]) for i in range(4)])
        assert abs(tables.std() * np.sqrt(1024 + config.dim) - 1) < 0.15
    assert main([*command[:-3], str(tmp_path / "again"), "--seed", "3"]) == 0
    same(packed(tmp_path / "again", "base"), packed(tmp_path / "run", "base"))


@pytest.mark.parametrize(("stage", "role"), [("teacher_forcing", "experts"), ("pdd", "experts")])
def test_a_run_exported_and_imported_has_the_same_tensors(workdir, tmp_path, stage, role):
    export.export(workdir / stage, tmp_path / "out", export.Request())
    importing.import_files(importing.Request(sources.find(tmp_path / "out")), tmp_path / "run")
    for folder, part in ((stage, role), ("autoencoder", "autoencoder"), ("base", "text")):
        before = tree.named_leaves(trained.load_params(workdir / folder, part, ema=True))
        same(tree.named_leaves(trained.load_params(tmp_path / "run" / folder, part)), before)
    mode = "ar" if stage == "teacher_forcing" else "few_step"
    assert load.locate(tmp_path / "run", mode).world == load.locate(workdir / stage, mode).world
    assert trained.steps(tmp_path / "run" / stage) == [7]
    assert (tmp_path / "run/tokenizer.model").read_bytes() == (workdir / "tokenizer.model").read_bytes()


def test_a_bank_is_fused_as_export_and_play_fuse_it(workdir, tmp_path):
    """In by --fuse, out by --fuse, and at loading: the same heads."""
    export.export(workdir / "pdd", tmp_path / "bank", export.Request())
    importing.import_files(importing.Request(sources.find(tmp_path / "bank"), fuse=True), tmp_path / "run")
    loaded = load.load(workdir / "pdd", "few_step").params["experts"]
    ours = trained.load_params(tmp_path / "run/stable_forcing", "student")
    same(tree.named_leaves(ours), {name: np.asarray(x) for name, x in tree.named_leaves(loaded).items()})
    theirs = exported(workdir / "pdd", tmp_path / "fused", "low", fuse=True)
    same(exported(tmp_path / "run/stable_forcing", tmp_path / "again", "low"), theirs)


def test_the_student_plays_the_same_after_export_and_import(tmp_path):
    """The weights that ship, out and in again: the same pictures bit for bit."""
    export.export(load.shipped() / "stable_forcing", tmp_path / "out", export.Request())
    importing.import_files(importing.Request(sources.find(tmp_path / "out")), tmp_path / "run")
    same(packed(tmp_path / "run", "stable_forcing"), packed(load.shipped(), "stable_forcing"))
    inputs = random_workdir.write_inputs(tmp_path, 8)
    videos = []
    for folder in (load.shipped(), tmp_path / "run"):
        loaded = load.load(folder, "few_step")
        worlds = load_inputs(inputs, generate.input_options(loaded.source))
        (request,) = generate.prepare(loaded.source, loaded.tokenizer, worlds)
        videos.append(np.concatenate(list(generate.generate(loaded, request, 0))))
    np.testing.assert_array_equal(videos[1], videos[0])


def test_parts_come_one_after_the_other(workdir, tmp_path):
    """The roles that a stage has are kept; a role that is there is not replaced; the dtype is the one asked for."""
    export.export(workdir / "base", tmp_path / "out", export.Request())
    found = sources.find(tmp_path / "out")
    rest = {part: found[part] for part in ("autoencoder", "text", "tokenizer")}
    importing.import_files(importing.Request({part: found[part] for part in ("high", "low")}), tmp_path / "run")
    first = packed(tmp_path / "run", "base")
    importing.import_files(importing.Request(rest, dtype="bfloat16"), tmp_path / "run")
    both = packed(tmp_path / "run", "base")
    same({name: x for name, x in both.items() if name.startswith("experts/")}, first)
    assert {str(x.dtype) for name, x in both.items() if name.startswith("text/")} == {"bfloat16"}
    assert trained.load_metadata(tmp_path / "run/base")["provenance"]["imported"].keys() == {"high", "low", *rest} - {
        "tokenizer"
    }
    load.load(tmp_path / "run", "bi")
    with pytest.raises(CheckpointError, match="has text already"):
        importing.import_files(importing.Request({"text": found["text"]}), tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds a run's checkpoints"):
        importing.import_files(importing.Request({"text": found["text"]}), workdir)
    other = json.loads((tmp_path / "out/world.json").read_text())["config"]
    other["world"] = other["world"] | {"guidance": [2.0, 2.0]}
    (tmp_path / "run/base" / trained.FILE).unlink()
    importing.import_files(importing.Request({part: found[part] for part in ("high", "low")}), tmp_path / "run")
    with pytest.raises(CheckpointError, match="of another world, by world of its config"):
        importing.import_files(importing.Request({"text": found["text"]}, config=other), tmp_path / "run")


def test_without_any_config_the_files_tell(tmp_path, published, golden):
    """Sizes from shapes and config.json, the text encoder's from its file; what nothing tells is said or asked for."""
    named, config = published
    files = written(tmp_path / "f", named)
    request = importing.Request(files, "memory_2")
    with pytest.raises(ValueError, match="no config says how many heads the width"):
        importing.import_files(request, tmp_path / "run")
    sizes = {"num_heads": config["model"]["num_heads"], "ffn_dim": 1, "text_len": 512}
    (tmp_path / "f/config.json").write_text(json.dumps(sizes | {"wp2_memory": config["model"]["memory"]}))
    with pytest.raises(ValueError, match=r"must equal text.dim 4096.*--config"):
        importing.import_files(request, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layout", ["published", "wan", "diffusers"])
@pytest.mark.parametrize("part", ["low", "autoencoder", "text"])
def test_what_does_not_fit_is_listed_and_nothing_is_written(workdir, tmp_path, layout, part):
    """One tensor missing, extra, misshapen, of whole numbers; a file that is cut."""
    export.export(workdir / "base", tmp_path / "out", export.Request(layout=layout))
    found = sources.find(tmp_path / "out")
    (path,) = found[part].glob("*.safetensors")
    tensors = load_file(path)
    whole = path.read_bytes()
    name = sorted(tensors)[len(tensors) // 2]
    value = tensors[name]
    wrong = {
        f"missing {name}": {key: x for key, x in tensors.items() if key != name},
        f"extra {name}.more": tensors | {f"{name}.more": value},
        f"misshapen {name} ": tensors | {name: np.concatenate([value, value])},
        f"{name} is int32": tensors | {name: value.astype(np.int32)},
    }
    for said, changed in wrong.items():
        save_file(changed, path)
        with pytest.raises(CheckpointError) as error:
            importing.import_files(importing.Request(found), tmp_path / "run")
        assert said in str(error.value) and str(path) in str(error.value)
    path.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="cannot be read"):
        importing.import_files(importing.Request(found), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_in_the_wrong_place_are_refused(workdir, tmp_path):
    export.export(workdir / "pdd", tmp_path / "out", export.Request())
    found = sources.find(tmp_path / "out")
    bare = {}
    for name in ("high", "low"):  # as others would have written them
        (tmp_path / name).mkdir()
        bare[name] = save(tmp_path / name / "x.safetensors", load_file(next(found[name].glob("*.safetensors"))))
    config = json.loads((tmp_path / "out/world.json").read_text())["config"]

    def refused(text, files, **changes):
        with pytest.raises(ValueError, match=text):
            importing.import_files(importing.Request(files, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    refused("says that it is the expert low, and it was given as high", {"high": found["low"], "low": found["high"]})
    refused(
        r"has 8 intervals, the expert high of this world 6; low has that many: are the two swapped",
        {"high": bare["low"], "low": bare["high"]},
        config=config,
    )
    refused("experts are high, low, and there are files for low", {"low": found["low"]})
    refused("is given for high and low", {"high": bare["low"], "low": bare["low"]}, config=config)
    refused("of kind expert, and this world's text is of kind text encoder", {"text": found["low"]})
    refused("this world's high is of kind expert", {"high": found["text"], "low": found["low"]})
    refused("stage stable_forcing keeps heads of the form fused, these files are bank", found, stage="stable_forcing")
    refused("stage 'autoencoder' has no experts", found, stage="autoencoder")
    refused("dtype 'int8': give one of float32", found, dtype="int8")
    refused("nothing to import", {})
    cut = tmp_path / "cut.model"
    cut.write_bytes(found["tokenizer"].read_bytes()[:-300])
    refused("cut.model", found | {"tokenizer": cut})
    with pytest.raises(CheckpointError, match="name the files by their options"):
        sources.find(tmp_path / "high")
    many = importing.import_files(importing.Request(bare, config=config), tmp_path / "run")[1]
    assert not any("nothing in it tells" in line for line in many)  # its length tells


def test_an_import_that_is_stopped_leaves_nothing_that_looks_whole(workdir, tmp_path, monkeypatch):
    export.export(workdir / "base", tmp_path / "out", export.Request())
    found = sources.find(tmp_path / "out")
    importing.import_files(importing.Request({"text": found["text"]}), tmp_path / "run")
    before = (tmp_path / "run/base" / trained.FILE).read_bytes()
    read, count = torch_io.Reader.read, iter(range(40))

    def stop(self, name, rows=None):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return read(self, name, rows)

    monkeypatch.setattr(torch_io.Reader, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        importing.import_files(importing.Request({part: found[part] for part in ("high", "low")}), tmp_path / "run")
    assert (tmp_path / "run/base" / trained.FILE).read_bytes() == before
    assert [path.name for path in (tmp_path / "run/base").iterdir()] == [trained.FILE]


def test_a_licence_goes_on_to_what_is_trained_from_it(tmp_path, published):
    named, config = published
    files = written(tmp_path / "f", named)
    importing.import_files(importing.Request(files, "base", config), tmp_path / "run")
    assert trained.licence(tmp_path / "run", ("autoencoder", "base")) == {"licence": "non-commercial"}
    trained.pack(tmp_path / "run/base", tmp_path / "packed/base", ("experts",))
    assert trained.licence(tmp_path / "packed", ("base",)) == {"licence": "non-commercial"}
    importing.import_files(importing.Request(files, "base", config, licence="ours"), tmp_path / "own")
    assert trained.licence(tmp_path / "own", ("base",)) == {"licence": "ours"}
    assert trained.licence(tmp_path / "own", ("autoencoder",)) == {}
