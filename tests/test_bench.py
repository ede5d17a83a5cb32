"""The benchmark: operations against hand formulas, names of PyTorch's modules, tables, every part once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_workdir

from wp2_jax import cli, tree
from wp2_jax.bench import flops, measure, parts, quality, run
from wp2_jax.checkpoints import names_diffusers
from wp2_jax.checkpoints.torch_names import from_tree, to_tree
from wp2_jax.inference import generate, load
from wp2_jax.inference.world import from_config
from wp2_jax.models import autoencoder, passes, umt5

SMALL = {
    "world": dict(height=64, width=128, boundary=None, guidance=(1.0,), intervals=(8,), blocks=(4,), text_len=16),
    "model": dict(dim=64, num_heads=2, num_layers=3, ffn_dim=96, text_dim=48, text_len=16, freq_dim=32),
    "autoencoder": dict(kind="wan", dim=4),
    "text": dict(vocab_size=500, dim=48, attention_dim=32, ffn_dim=96, num_heads=4, num_layers=2),
}


@pytest.fixture(scope="module")
def world():
    return from_config(SMALL)


def test_operations_of_products_convolutions_and_loops():
    a, b = jnp.zeros((3, 5, 7)), jnp.zeros((7, 11))
    assert flops.count(lambda a, b: a @ b, a, b) == 2 * 3 * 5 * 7 * 11
    x, kernel = jnp.zeros((2, 8, 8, 3)), jnp.zeros((3, 3, 3, 4))

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert flops.count(convolve, x, kernel) == 2 * (3 * 3 * 3) * (2 * 4 * 4 * 4)
    square = jnp.zeros((6, 6))
    looped = jax.jit(lambda s: jax.lax.scan(lambda c, _: (c @ s, None), s, length=10)[0])
    assert flops.count(looped, square) == 10 * 2 * 6**3


def test_operations_of_a_pass(world):
    """Attention's and the FFN's products a layer, by hand; embeddings, time and head come on top."""
    config, tokens, text = world.dit, 4 * 4 * 8, 16
    layer = 2 * tokens * config.dim * (4 * config.dim + 2 * config.dim + 2 * config.ffn_dim)  # q k v out, q out, FFN
    layer += 2 * text * config.dim * 2 * config.dim  # k and v of the caption
    layer += 2 * 2 * tokens * config.dim * (tokens + text)
    outside = 2 * tokens * config.dim * (4 * 36 + 4 * 16)
    outside += 2 * text * (config.text_dim + config.dim) * config.dim
    outside += 2 * 4 * (config.freq_dim + config.dim + 6 * config.dim) * config.dim
    assert parts.dit(world).flops == config.num_layers * layer + outside


def test_names_of_other_modules_are_one_to_one(world):
    """There and back, and a few names by heart."""
    key, config = jax.random.key(0), world.autoencoder.config

    def drawn(init, *given):
        return parts.random_weights(jax.eval_shape(lambda: init(*given, key)), 0)

    trees = {
        "dit": names_diffusers.without_extensions(drawn(passes.init, world.dit)),
        "text": drawn(umt5.init, world.text),
        "vae": drawn(autoencoder.init_params, world.autoencoder),
    }
    tables = {
        "dit": names_diffusers.dit_rules(world.dit),
        "text": names_diffusers.umt5_rules(world.text.num_layers),
        "vae": names_diffusers.wan_rules(config),
    }
    known = {
        "dit": (
            "blocks.2.attn2.to_out.0.weight",
            "condition_embedder.time_proj.bias",
            "blocks.0.ffn.net.0.proj.weight",
        ),
        "text": ("encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight", "shared.weight"),
        "vae": ("encoder.down_blocks.5.time_conv.weight", "decoder.up_blocks.1.upsamplers.0.resample.1.bias"),
    }
    for name, rules in tables.items():
        theirs = from_tree(rules, trees[name])
        assert len(theirs) == sum(len(rule.names()) for rule in rules) and set(known[name]) <= set(theirs)
        back = tree.named_leaves(to_tree(rules, theirs))
        for leaf, value in tree.named_leaves(trees[name]).items():
            np.testing.assert_array_equal(back[leaf], value, err_msg=leaf)


def test_table():
    timing = measure.Timing((2.0, 4.0, 3.0, 5.0, 1.0))
    assert timing.median == 3.0 and timing.spread == pytest.approx((4 - 2) / 2 / 3)
    rows = [run.Row("dit", timing, 3 * 10**9, {"eager": measure.Timing((4.0, 4.0, 6.0, 5.0, 3.0))}, 1e-6)]
    rows.append(run.Row("emit", timing))
    lines = run.table(rows, 2e9).splitlines()
    assert lines[2] == "| dit | 3 | 33.3% | 3 | 50% | 4 | 2.00 | 1.0e-06 |"
    assert lines[3] == "| emit | 3 | 33.3% |  |  |  |  |  |"


@pytest.mark.slow
def test_every_part_runs_once(monkeypatch, tmp_path, capsys):
    from wp2_jax.bench import report

    monkeypatch.setattr(report.sizes, "world", lambda size: from_config(SMALL))
    monkeypatch.setattr(report, "CAPACITIES", (2, 4))
    monkeypatch.setattr(measure.matmul_peak, "__defaults__", (64, 2))
    assert cli.main(["bench", "--size", "mid", "--repeats", "1", "--chunks", "4", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "bench.json").read_text())
    names = [part["name"] for part in found["parts"]]
    assert names == ["dit", "text", "vae_decode", "vae_encode", "train", "emit", "absorb", "chunk"]
    assert all(part["flops"] > 0 and min(part["timing"]["seconds"]) > 0 for part in found["parts"])
    assert [point["latents"] for point in found["history"]] == [8, 16] and (tmp_path / "history.png").is_file()
    assert len(found["held"]) == 2 and min(found["held"]) > 2**20 and (tmp_path / "stream.png").is_file()
    assert "pictures a second over 4 chunks" in said
    assert cli.main(["bench", "--chunks", "2"]) == 2
    assert cli.main(["bench", "--chunks", "257", "--parts", "stream"]) == 2


def test_pytorch_gives_the_same(world):
    """Each of its modules on our weights, in its own process."""
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    from wp2_jax.bench.peer import Peer

    with Peer(world, 2) as peer:
        rows = [
            run.row(part, 1, peer, False) for part in run.single(world, ("dit", "text", "vae_decode", "vae_encode"))
        ]
    assert len(rows) == 4 and all(row.difference is not None and row.difference < 5e-5 for row in rows)


def test_precisions_side_by_side(tmp_path, capsys):
    workdir, file = random_workdir.write(tmp_path / "run"), random_workdir.write_inputs(tmp_path, 12)
    command = ["bench", "--checkpoint", str(workdir), "--precisions", "int8", "full"]
    assert cli.main([*command, "--input", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].startswith(
        "| precision | MB of experts | seconds a chunk | spread | times as fast | PSNR of chunk 0"
    )
    full, int8 = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-2:])
    assert full[0] == "full" and full[4] == "1.00" and full[5:] == [""] * 4
    assert int8[0] == "int8" and float(int8[1]) < float(full[1])
    pictures = []
    for name in ("full", "int8"):
        loaded = load.load(load.locate(workdir, "few_step", name))
        request = quality.requests(workdir, "few_step", file)[0]
        first = next(generate.generate(loaded, request, 0))
        pictures.append(np.round((np.clip(first, -1, 1) + 1) * 127.5))
    error = np.square(pictures[1] - pictures[0]).mean((1, 2, 3))
    assert float(int8[5]) == pytest.approx((20 * np.log10(255) - 10 * np.log10(error)).mean(), abs=0.2)
    assert cli.main(command) == 2
    assert "launch/example/long_walk.json" in capsys.readouterr().err
