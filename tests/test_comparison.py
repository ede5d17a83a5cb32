"""`wp2 convert verify`: exported models in diffusers and transformers agree with ours, and a wrong one is seen."""

import sys

import jax
import pytest
import random_workdir

from wp2_jax.checkpoints import trained
from wp2_jax.cli import main
from wp2_jax.convert import comparison, export, sources
from wp2_jax.models import autoencoder

REASON = "needs pip install 'wp2_jax[bench]'"
VAE = {"dim": 8, "dim_mult": (1, 2, 2, 2), "num_res_blocks": 1}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run with a Wan autoencoder in place of the tiny one."""
    folder = random_workdir.write(tmp_path_factory.mktemp("run"), ("base", "stable_forcing"))
    module = autoencoder.build("wan", **VAE)
    shapes = jax.eval_shape(lambda: autoencoder.init_params(module, jax.random.key(0)))
    params = random_workdir.random_like(shapes, 5, gain=1.0)
    for stage in ("base", "stable_forcing"):
        about = trained.load_metadata(folder / stage)
        config = about["config"] | {"autoencoder": {"kind": "wan", **VAE}}
        roles = {
            role: trained.load_params(folder / stage, role, ema=True)
            for role, kept in trained.roles(folder / stage).items()
            if kept
        }
        trained.write_packed(folder.parent / "wan" / stage, roles, {"config": config, "step": 7, "stage": stage})
    config["stage"] = "autoencoder"
    trained.write_packed(folder.parent / "wan/autoencoder", {"autoencoder": params}, {"config": config, "step": 7})
    return folder.parent / "wan"


@pytest.mark.parametrize("layout", ["diffusers", "wan", "published"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_modules_of_pytorch_agree(workdir, tmp_path, layout, dtype):
    for package in ("torch", "diffusers", "transformers"):
        pytest.importorskip(package, reason=REASON)
    export.export(workdir / "base", tmp_path / "out", export.Request(layout=layout, max_shard_size=100_000))
    results = [x for x in comparison.verify(sources.find(tmp_path / "out"), dtype) if not isinstance(x, str)]
    names = ["high: velocity", "low: velocity", "autoencoder: latents", "autoencoder: pictures", "text: contexts"]
    assert [result.item for result in results] == names
    assert all(result.ok for result in results), results
    assert all(result.max_abs > 0 for result in results)  # two programs, not one twice


def test_a_wrong_file_is_seen(workdir, tmp_path, capsys):
    for package in ("torch", "diffusers", "transformers"):
        pytest.importorskip(package, reason=REASON)
    export.export(workdir / "base", tmp_path / "out", export.Request(layout="diffusers", parts=("text",)))
    assert main(["convert", "verify", str(tmp_path / "out")]) == 0
    assert "ok   text: contexts" in capsys.readouterr().out
    path = tmp_path / "out/text_encoder/config.json"
    path.write_text(path.read_text().replace("gated-gelu", "gated-silu"))
    assert main(["convert", "verify", str(tmp_path / "out")]) == 1
    assert "FAIL text: contexts" in capsys.readouterr().out


def test_what_pytorch_has_no_module_for_is_said(workdir, tmp_path):
    for package in ("torch", "diffusers", "transformers"):
        pytest.importorskip(package, reason=REASON)
    export.export(workdir / "stable_forcing", tmp_path / "out", export.Request(parts=("experts",)))
    assert list(comparison.verify(sources.find(tmp_path / "out"))) == [
        "high: diffusers has no few-step heads",
        "low: diffusers has no few-step heads",
    ]


def test_without_pytorch_it_says_what_to_install(workdir, tmp_path, monkeypatch, capsys):
    export.export(workdir / "base", tmp_path / "out", export.Request(layout="diffusers", parts=("text",)))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["convert", "verify", str(tmp_path / "out")]) == 2
    assert "pip install 'wp2_jax[bench]'" in capsys.readouterr().err
