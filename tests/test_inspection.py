"""`wp2 convert inspect`: what files are, and what cannot be told from them."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from wp2_jax.cli import main
from wp2_jax.convert import inspection
from wp2_jax.inference import load
from wp2_jax.verify import golden as items


def written(folder, golden, changes=None, metadata=None):
    """A golden expert as a file, with some tensors replaced (None: without them)."""
    _, tensors = items.load(golden, "weights_dit_low")
    named = {name: x for name, x in (items.below(tensors, "w.") | (changes or {})).items() if x is not None}
    folder.mkdir(exist_ok=True)
    save_file(named, folder / "x.safetensors", metadata)
    (folder / "config.json").write_text('{"num_heads": 2, "ffn_dim": 96}')
    return folder / "x.safetensors", named


def test_an_expert_whose_name_alone_says_which_it_is(tmp_path, golden):
    path, named = written(tmp_path / "low_noise_model", golden)
    rows = dict(inspection.describe(path))
    assert (rows["kind"], rows["layout"], rows["head"]) == ("expert", "published", "many-step: one velocity")
    assert rows["expert"] == "cannot be told from the file (its path says low, which nothing in it confirms)"
    assert rows["stage"].startswith("cannot be told from the file")
    count = sum(x.size for x in named.values())
    assert rows["tensors"].startswith(f"{len(named)} tensors ({len(named)} float32), {count:,} numbers")
    assert rows["fits"].startswith("yes") and "num_heads 2" in rows["sizes"]


def test_heads_and_experts_that_can_be_told(tmp_path, golden):
    _, heads = items.load(golden, "weights_pdd_heads")
    old = {"head.head.weight": None, "head.head.bias": None}
    fused = {f"head.block_{part}": heads[f"w.low.head.block_{part}"] for part in ("weight", "bias")}
    path, _ = written(tmp_path / "a", golden, old | fused, {"wp2.expert": "high", "wp2.stage": "stable_forcing"})
    rows = dict(inspection.describe(path))
    assert (rows["head"], rows["expert"]) == ("fused few-step: 2 blocks", "high")
    _, features, dim = fused["head.block_weight"].shape
    bank = {
        "head.pdd_weight": np.zeros((72, features // 2, dim), np.float32),
        "head.pdd_bias": np.zeros((72, features // 2), np.float32),
    }
    rows = dict(inspection.describe(written(tmp_path / "b", golden, old | bank)[0]))
    assert (rows["head"], rows["expert"]) == ("few-step bank: 72 intervals", "low")


def test_misfits_and_strangers(tmp_path, golden, capsys):
    path, _ = written(tmp_path / "a", golden, {"blocks.1.ffn.0.bias": None})
    assert main(["convert", "inspect", str(path)]) == 1
    assert "missing blocks.1.ffn.0.bias" in capsys.readouterr().out
    save_file({"conv.weight": np.zeros(3, np.float32)}, tmp_path / "b.safetensors")
    assert dict(inspection.describe(tmp_path / "b.safetensors"))["kind"].startswith("unknown")
    assert main(["convert", "inspect", str(tmp_path / "none")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_shipped_weights(capsys):
    assert main(["convert", "inspect", str(load.shipped())]) == 0
    out = capsys.readouterr().out
    assert "stable_forcing, step" in out and "  student" in out


@pytest.mark.parametrize("choice", ["ema", "raw"])
def test_a_choice_where_there_is_none_is_an_error(tmp_path, golden, choice, capsys):
    path, _ = written(tmp_path / "a", golden)
    assert main(["convert", "inspect", str(path), "--weights", choice]) == 2
    assert "leave the choice out" in capsys.readouterr().err
