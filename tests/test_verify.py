"""`wp2 verify`: the golden folder passes, and whatever is wrong with a folder is a failed item, never a traceback."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wp2_jax.checkpoints import names_dit
from wp2_jax.checkpoints.torch_names import from_tree
from wp2_jax.cli import main
from wp2_jax.models import passes
from wp2_jax.verify import run
from wp2_jax.verify.experts import dit_config

GOLDEN = Path(__file__).parent / "golden"
STEMS = sorted(path.stem for path in GOLDEN.glob("*.json") if path.stem != "INDEX")
# Rollouts take the longest; one of each kind of step is enough in the short form.
SHORT_ROLLOUT = "k_pdd_tae"


def failures(results) -> dict[str, str]:
    return {result.item: result.note for result in results if not result.ok}


def copy(tmp_path: Path, *stems: str) -> Path:
    """A folder with these items (all, if none is named) as links, which tests replace one by one."""
    folder = tmp_path / "golden"
    shutil.copytree(
        GOLDEN,
        folder,
        copy_function=os.symlink,
        ignore=lambda directory, names: [
            name for name in names if stems and name != "INDEX.json" and Path(name).stem not in stems
        ],
    )
    return folder


def write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def write_tensors(path: Path, tensors: dict) -> None:
    path.unlink(missing_ok=True)
    save_file({key: np.ascontiguousarray(array) for key, array in tensors.items()}, path)


def refresh_index(folder: Path) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in run.UNINDEXED:
            content = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write(folder / "INDEX.json", json.dumps({"files": files}).encode())


def slow_rollouts(stem: str):
    marks = [pytest.mark.slow] if stem.startswith("k_") and stem != SHORT_ROLLOUT else []
    return pytest.param(stem, marks=marks)


@pytest.mark.parametrize("stem", [slow_rollouts(stem) for stem in STEMS])
def test_golden_item(stem):
    results = list(run.check_item(GOLDEN, stem))
    assert results and not failures(results)


def test_golden_folder_is_complete():
    assert not failures(run.check_index(GOLDEN))
    assert not failures(run.check_complete(GOLDEN, STEMS, list(run.manifests.MODELS)))


# --- a number altered in any file ------------------------------------------------------------------------------------


def test_any_altered_file_is_noticed_by_the_index(tmp_path):
    folder = copy(tmp_path)
    for name in json.loads((folder / "INDEX.json").read_text())["files"]:
        path = folder / name
        content = bytearray(path.read_bytes())
        original = bytes(content)
        # The last digit of a sidecar, or a bit of the last number of a tensor file.
        at = max(
            i for i in range(len(content) - 400, len(content)) if chr(content[i]).isdigit() or path.suffix != ".json"
        )
        content[at] ^= 1
        write(path, bytes(content))
        assert list(failures(run.check_index(folder))) == [f"INDEX.json/{name}"]
        write(path, original)
    assert not failures(run.check_index(folder))


CHEAP = ("a_embed_rope", "b_action_block", "c_bi_denoise", "e_ar", "g_samplers", "i_tae_full", "j_t5")


@pytest.mark.parametrize("stem", CHEAP)
def test_every_altered_output_is_noticed_without_the_index_too(tmp_path, stem):
    folder = copy(tmp_path)
    tensors = load_file(folder / f"{stem}.safetensors")
    outputs = [key for key in tensors if key.startswith("out.")]
    for key in outputs:
        array = np.array(tensors[key])
        # One element, the one nearest to zero, by a thousandth of the largest.
        flat = array.reshape(-1)
        flat[np.abs(flat).argmin()] += max(1e-3 * np.abs(flat).max(), 1 if array.dtype.kind == "i" else 0)
        tensors[key] = array
    write_tensors(folder / f"{stem}.safetensors", tensors)
    refresh_index(folder)
    assert not failures(run.check_index(folder))
    bad = failures(run.check_item(folder, stem))
    assert {f"{stem}/{key.removeprefix('out.')}" for key in outputs} <= set(bad)


@pytest.mark.parametrize("stem", ["weights_pdd_heads", "l_inputs"])
def test_altered_weights_and_answers_are_noticed_too(tmp_path, stem):
    folder = copy(tmp_path)
    if stem == "l_inputs":
        sidecar = json.loads((folder / "l_inputs.json").read_text())
        sidecar["actions"][0]["rows"][1][2] += 1e-3
        write(folder / "l_inputs.json", json.dumps(sidecar).encode())
    else:
        tensors = load_file(folder / f"{stem}.safetensors")
        bank = np.array(tensors["in.bank.low.weight"])
        bank[3, 5, 7] += 0.5
        write_tensors(folder / f"{stem}.safetensors", tensors | {"in.bank.low.weight": bank})
    assert failures(run.check_item(folder, stem))


# --- folders with something wrong ------------------------------------------------------------------------------------


def test_index_missing_unlisted_and_listed_but_gone(tmp_path):
    folder = copy(tmp_path, "g_samplers")
    (folder / "extra.txt").write_text("x")
    bad = failures(run.check_index(folder))
    assert bad["INDEX.json/extra.txt"] == "unlisted file"
    assert bad["INDEX.json/k_ar.json"] == "missing file" and len(bad) == 1 + 46 - 2
    (folder / "INDEX.json").unlink()
    groups = list(run.verify(folder, ["g"]))
    assert [group.name for group in groups] == ["INDEX.json", "g_samplers"]  # the rest still runs
    assert groups[0].failures and not groups[1].failures


def test_tensors_missing_extra_misshapen_and_unknown(tmp_path):
    folder = copy(tmp_path, "g_samplers")
    tensors = load_file(GOLDEN / "g_samplers.safetensors")
    removed = tensors.pop("out.unipc_n4_shift5.sigmas")
    write_tensors(folder / "g_samplers.safetensors", tensors | {"in.more": removed, "in.x": tensors["in.x"][:, :1]})
    note = failures(run.check_item(folder, "g_samplers"))["g_samplers/tensors"]
    assert "missing out.unipc_n4_shift5.sigmas" in note and "unlisted in.more" in note and "in.x is [[1, 1" in note

    folder = copy(tmp_path / "unknown", "b_action_block", "weights_dit_high")
    tensors = load_file(GOLDEN / "b_action_block.safetensors")
    sidecar = json.loads((GOLDEN / "b_action_block.json").read_text())
    sidecar["tensors"]["out.surprise"] = [[1, 24, 48], "float32"]
    write(folder / "b_action_block.json", json.dumps(sidecar).encode())
    write_tensors(folder / "b_action_block.safetensors", tensors | {"out.surprise": tensors["in.x"]})
    bad = failures(run.check_item(folder, "b_action_block"))
    assert list(bad) == ["b_action_block/surprise"] and "unknown tensor" in bad["b_action_block/surprise"]


def test_files_cut_short_missing_or_of_an_unknown_kind(tmp_path):
    folder = copy(tmp_path, "g_samplers", "j_t5")
    write(folder / "g_samplers.safetensors", (GOLDEN / "g_samplers.safetensors").read_bytes()[:-40])
    (folder / "j_t5.json").unlink()
    write(folder / "z_new.json", b"{}")
    write(folder / "a_broken.json", b"{")
    bad = failures(result for group in run.verify(folder) for result in group.results)
    assert "g_samplers/tensors" in bad
    assert bad["j_t5"] == "j_t5.json is missing"
    assert "unknown kind" in bad["z_new"]
    assert "a_broken/tensors" in bad
    assert bad["complete/k"] == "no item of this kind" and "complete/UMT5-XXL" in bad


@pytest.mark.parametrize("change", ["missing", "misshapen", "gone", "not a number"])
def test_bad_weights_are_one_line_with_the_reason(tmp_path, change):
    folder = copy(tmp_path, "b_action_block", "weights_dit_high")
    path, name = folder / "weights_dit_high.safetensors", "w.blocks.1.ffn.0.weight"
    tensors = load_file(path)
    if change == "missing":
        del tensors[name]
    elif change == "misshapen":
        tensors[name] = tensors[name][:, :7]
    elif change == "not a number":
        tensors[name] = np.full_like(tensors[name], np.nan)
    write_tensors(path, tensors)
    if change == "gone":
        path.unlink()
    results = list(run.check_item(folder, "b_action_block"))
    bad = failures(results)
    if change == "not a number":
        assert "non-finite" in bad["b_action_block/block_with_action"]
        return
    expected = "No such file" if change == "gone" else "blocks.1.ffn.0.weight"
    assert expected in bad["b_action_block"] and "\n" not in bad["b_action_block"]
    assert "not reached" in bad["b_action_block/block_with_action"]


def test_an_item_that_names_absent_weights(tmp_path):
    folder = copy(tmp_path, "c_bi_denoise")
    bad = failures(run.check_complete(folder, ["c_bi_denoise"], []))
    assert "c_bi_denoise names it" in bad["complete/weights_dit_high"] and "complete/inputs_cdef" in bad


# --- a folder of other sizes -----------------------------------------------------------------------------------------


def save_item(folder: Path, stem: str, sidecar: dict, tensors: dict) -> None:
    listed = {key: [list(array.shape), str(array.dtype)] for key, array in tensors.items()}
    write(folder / f"{stem}.json", json.dumps({**sidecar, "tensors": listed}).encode())
    write_tensors(folder / f"{stem}.safetensors", tensors)


OTHER = {
    "model_config": {
        "patch_size": [1, 2, 2],
        "text_len": 6,
        "in_dim": 36,
        "out_dim": 16,
        "dim": 40,
        "num_heads": 2,
        "ffn_dim": 56,
        "freq_dim": 64,
        "text_dim": 10,
        "num_layers": 3,
        "eps": 1e-6,
    },
    "compressor": {
        "dims": [4, 8, 8, 16],
        "spatial_down": [1, 1, 1],
        "temporal_down": [0, 1, 0],
        "attn_num": 1,
        "attn_heads": 2,
    },
}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Items c, d and e of another width, head count, depth, grid, batch, chunk, sink and tmp. The outputs are ones:
    what is checked is that all of them are computed in the right shape."""
    folder = tmp_path_factory.mktemp("other")
    config = dit_config(OTHER)
    params = jax.jit(lambda key: passes.init(config, key))(jax.random.key(0))
    weights = from_tree(names_dit.rules(config), jax.tree.map(np.asarray, params))
    random = np.random.default_rng(0)
    weights = {f"w.{k}": (a + 0.1 * random.standard_normal(a.shape)).astype(np.float16) for k, a in weights.items()}
    save_item(folder, "weights_other", OTHER, weights)
    h, w, frames, batch = 8, 16, 24, 2

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    inputs = {
        "in.hr_latents": normal(batch, 16, frames, h, w),
        "in.hr_y": normal(batch, 20, frames, h, w),
        "in.lr_latents": normal(batch, 16, frames // 2, h // 4, w // 4),
        "in.lr_y": normal(batch, 20, frames // 2, h // 4, w // 4),
        "in.hr_action": normal(batch, frames, 6),
        "in.context0": normal(6, 10),
        "in.context3": normal(2, 10),
    }
    save_item(folder, "inputs_other", {}, inputs)
    named = {"weights": "weights_other.safetensors (w.*)", "inputs": "inputs_other"}

    cases = [
        {"case": 0, "t": "in.t_case0 per-token", "context": 3, "s": 8, "L": 2, "batch": 2},
        {"case": 4, "t": "7 (int64)", "context": 0, "s": 0, "L": 6, "batch": 1, "action": None},
    ]
    t = np.repeat(np.array([[100, 900], [0, 450.5]], np.float32), h * w // 4, axis=1)
    c = {"in.t_case0": t, "out.case0": np.ones((2, 16, 2, h, w), np.float32)}
    save_item(folder, "c_two", {**named, "cases": cases}, c | {"out.case4": np.ones((1, 16, 6, h, w), np.float32)})

    grid, coarse, dim = h * w // 4, h * w // 64, 40
    cases, tensors = [], {}
    for index, (size, history, sink, temporal) in enumerate([(2, 6, 0, 3), (1, 12, 2, 2)]):
        run_case = {"s": history, "L": 2, "t": 300.5, "context": 3}
        if size == 2:
            run_case["t"] = "in.case0.t per-token"
            tensors["in.case0.t"] = np.full((2, 2 * grid), 300.5, np.float32)
        cases.append(
            {
                "case": index,
                "history": history,
                "sink_size": sink,
                "temporal_size": temporal,
                "batch": size,
                "bi_denoise": run_case,
            }
        )
        tokens = (sink + temporal) * grid + history // 2 * coarse
        shapes = {
            "tokens": (size, tokens, dim),
            "freqs_flat.re": (tokens, 10),
            "freqs_flat.im": (tokens, 10),
            "vec_action": (size, tokens, dim),
            "e0_one": (1, 1, 6, dim),
            "e_one": (1, 1, dim),
            "memory_compress": (size, history // 2 * coarse, dim),
            "bi_denoise": (size, 16, 2, h, w),
        }
        tensors |= {f"out.case{index}.{key}": np.ones(shape, np.float32) for key, shape in shapes.items()}
    save_item(folder, "d_two", {**named, "cases": cases}, tensors)

    steps, tensors = [], {}
    for index in range(3):
        step = {"chunk": index, "denoise": {"s": 8 * index, "t": 500.0, "context": 3, "ar_chunk_start": 8 * index}}
        tensors[f"out.q.denoise_chunk{index}"] = np.ones((2, 16, 8, h, w), np.float32)
        if index < 2:
            step["prefill"] = {"history": 8 * (index + 1), "context": 0}
            tokens = 2 * grid + 4 * (index + 1) * coarse
            for layer in range(3):
                for side in "kv":
                    key = f"out.q.prefill_after_chunk{index}.layer{layer}.{side}"
                    tensors[key] = np.ones((2, tokens, 2, 20), np.float32)
        steps.append(step)
    sequence = {"sequence": "q", "sink_size": 0, "temporal_size": 2, "batch": 2, "steps": steps}
    save_item(folder, "e_two", {**named, "sequences": [sequence]}, tensors)
    return folder


@pytest.mark.parametrize("stem", ["weights_other", "c_two", "d_two", "e_two"])
def test_other_sizes(other, stem):
    results = list(run.check_item(other, stem))
    outputs = [key for key in load_file(other / f"{stem}.safetensors") if key.startswith("out.")]
    compared = [result for result in results if math.isfinite(result.max_rel) and result.tolerance]
    assert {r.item for r in compared} == {f"{stem}/{key.removeprefix('out.')}" for key in outputs}
    assert all(result.max_abs > 0 for result in compared)
    assert not failures(result for result in results if result not in compared)


# --- the command -----------------------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["verify", str(GOLDEN), "--only", "g,l", "--json", str(report)]) == 0
    out, err = capsys.readouterr()
    line = next(line for line in out.splitlines() if "g_samplers/unipc_n8_shift5.f1.states" in line)
    assert "ok" in line and "abs" in line and "rel" in line and "1e-05" in line
    assert "checking l_inputs" in err and "checking k_ar" not in err
    items = json.loads(report.read_text())["items"]
    assert json.loads(report.read_text())["ok"] and all(item["ok"] for item in items)

    folder = copy(tmp_path, "g_samplers")
    write(folder / "g_samplers.safetensors", b"nothing")
    assert main(["verify", str(folder), "--only", "g", "--json", str(report)]) == 1
    assert "FAIL g_samplers/tensors" in capsys.readouterr().out
    assert not json.loads(report.read_text())["ok"]


def test_command_errors_are_one_message(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert "absent is not a folder of golden tensors" in capsys.readouterr().err
    assert main(["verify", str(GOLDEN), "--only", "x"]) == 2
    assert "choose from weights, inputs, a, b" in capsys.readouterr().err
    with pytest.raises(ValueError, match="are unknown"):
        main(["verify", str(GOLDEN), "--only", "x", "--debug"])
    with pytest.raises(NotADirectoryError):
        main(["--debug", "verify", str(tmp_path / "absent")])


def test_help_needs_no_jax():
    code = "import sys; sys.argv[0] = 'wp2'; from wp2_jax.cli import main\ntry: main(['--help'])\n"
    code += "except SystemExit: pass\nassert not {'jax', 'numpy', 'tensorflow'} & set(sys.modules), 'heavy import'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("data", "train", "curriculum", "generate", "verify"):
        assert f"\n    {name}" in done.stdout
    module = subprocess.run([sys.executable, "-m", "wp2_jax", "verify", "--help"], capture_output=True, check=False)
    assert module.returncode == 0 and b"--only" in module.stdout
