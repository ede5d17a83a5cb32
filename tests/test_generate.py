"""Generation from a workdir and an input file: modes, seeds, requests one after another, meshes, bad input."""

import json
import re
import shutil
from pathlib import Path

import av
import jax
import numpy as np
import pytest
import random_workdir
from PIL import Image
from random_workdir import PITCH, SIZE, YAW, config, experts, save, the_world, write_inputs

from wp2_jax import cli, tree
from wp2_jax.checkpoints.orbax_io import CheckpointError
from wp2_jax.controls.errors import ControlWarning, GeometryError
from wp2_jax.controls.images import load_image
from wp2_jax.controls.inputs import load_inputs
from wp2_jax.diffusion import pdd
from wp2_jax.inference import condition, generate, load, video
from wp2_jax.inference.world import from_config
from wp2_jax.models import autoencoder

EXAMPLE = Path(__file__).parent.parent / "launch" / "example" / "input.json"


@pytest.fixture(scope="session")
def workdir(tmp_path_factory) -> Path:
    return random_workdir.write(tmp_path_factory.mktemp("curriculum"))


@pytest.fixture(scope="session")
def student(workdir) -> load.Loaded:
    return load.load(workdir, "few_step")


def requests_for(loaded: load.Loaded, path: Path, **options) -> list[generate.Request]:
    items = load_inputs(path, generate.input_options(loaded.source))
    return generate.prepare(loaded.source, loaded.tokenizer, items, **options)


def command(*words) -> int:
    return cli.main(["generate", *(str(word) for word in words)])


def pictures_in(path: Path) -> int:
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == 16
        return sum(1 for _ in container.decode(video=0))


# One chunk after the first is all that differs from the first; longer worlds run in few-step mode below.
@pytest.mark.parametrize(
    ("mode", "stage", "lengths"),
    [("few_step", "stable_forcing", (12, 4)), ("ar", "teacher_forcing", (8,)), ("bi", "base", (8,))],
)
def test_command(workdir, tmp_path, capsys, mode, stage, lengths):
    path = write_inputs(tmp_path, *lengths)
    out = tmp_path / "out"
    assert command("--checkpoint", workdir, "--input", path, "--output", out, "--mode", mode, "--seed", 0) == 0
    for number, length in enumerate(lengths):
        assert pictures_in(tmp_path / "out" / f"world{number}.mp4") == 13 + 16 * (length // 4 - 1)
        sheet = Image.open(tmp_path / "out" / f"world{number}.png")
        assert sheet.width > (1 + length // 4) * 256
    said = capsys.readouterr().out
    # Everything that was understood comes before anything is made.
    assert said.index("chunk   1  latents 4-7") < said.index(f"stage {stage}, step 7") < said.index("world0.mp4")
    assert random_workdir.FOG.text in said and f"(yaw {YAW})" in said
    assert "seed" not in said
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        f"world{number}.{kind}" for number in range(len(lengths)) for kind in ("mp4", "png")
    )


def test_seeds_and_state(student, tmp_path):
    long, short = requests_for(student, write_inputs(tmp_path, 12, 8))

    def run(request, seed):
        return np.concatenate(list(generate.generate(student, request, seed)))

    first = run(long, 0)
    assert first.shape == (45, SIZE, SIZE, 3) and np.isfinite(first).all() and np.abs(first).max() <= 1
    other = run(short, 0)
    assert other.shape == (29, SIZE, SIZE, 3)
    # Nothing of the world in between is left; the same seed gives the same video, another seed another one.
    np.testing.assert_array_equal(run(long, 0), first)
    np.testing.assert_array_equal(run(short, 0), other)
    assert np.abs(run(short, 1) - other).max() > 0.05
    # Two worlds made in turns, chunk by chunk, do not touch each other.
    worlds = [generate.generate(student, request, 0) for request in (long, short)]
    made = [[], []]
    for number in (0, 1, 1, 0, 0):
        made[number].append(next(worlds[number]))
    np.testing.assert_array_equal(np.concatenate(made[0]), first)
    np.testing.assert_array_equal(np.concatenate(made[1]), other)


def test_what_runs_how_often(student, tmp_path):
    calls = []

    def counted(name, function):
        return lambda *given, **static: (calls.append(name), function(*given, **static))[1]

    programs = generate.Programs(*(counted(*item) for item in generate.PROGRAMS._asdict().items()))
    (request,) = requests_for(student, write_inputs(tmp_path, 12))
    list(generate.generate(student, request, 0, programs=programs))
    # The last chunk is not taken into the memory; each caption is encoded once; without guidance there is no null
    # caption.
    counts = {"start": 1, "emit": 3, "absorb": 2, "caption": 2, "encode_text": 2}
    assert {name: calls.count(name) for name in set(calls)} == counts


def test_weights(workdir, student):
    # The average is 1.25 times the weights; the student is saved with fused heads.
    raw = load.load(workdir, "few_step", ema=False)
    for name, expected in tree.named_leaves(experts(40, "fused")).items():
        np.testing.assert_array_equal(tree.named_leaves(raw.params["experts"])[name], expected)
        np.testing.assert_allclose(tree.named_leaves(student.params["experts"])[name], 1.25 * expected, rtol=1e-6)
    assert (student.source.stage, student.source.step) == ("stable_forcing", 7)
    vae = jax.tree.leaves(student.params["autoencoder"])
    assert all((a == b).all() for a, b in zip(vae, jax.tree.leaves(raw.params["autoencoder"]), strict=True))
    # A stage's folder by itself: the bank of pdd is fused.
    bank = load.load(workdir / "pdd", "few_step")
    table = the_world().stream("few_step", 1).pdd_schedule
    for name, expert in experts(30, "bank").items():
        kernel, bias = pdd.fuse_heads(1.25 * expert["head"]["kernel"], 1.25 * expert["head"]["bias"], table, name)
        head = bank.params["experts"][name]["head"]
        np.testing.assert_allclose(head["kernel"], kernel, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(head["bias"], bias, rtol=1e-5, atol=1e-6)


def test_stage_of_a_mode(tmp_path):
    folder = random_workdir.write(tmp_path / "half", ("base", "pdd"))
    assert load.locate(folder, "few_step").stage == "pdd"
    assert load.locate(folder, "bi").stage == "base"
    save(folder, "action", {"experts": experts(60)}, ("experts",))
    assert load.locate(folder, "bi").stage == "action"
    assert load.locate(folder / "base", "bi").stage == "base"
    with pytest.raises(
        CheckpointError, match=r"mode ar needs .* teacher_forcing.*has action, auto.*--mode few_step or b"
    ):
        load.locate(folder, "ar")
    with pytest.raises(CheckpointError, match=r"stage pdd, .*mode bi \(that needs memory_2 .*--mode few_step"):
        load.locate(folder / "pdd", "bi")
    with pytest.raises(CheckpointError, match=r"stage autoencoder, .*does not serve mode bi"):
        load.locate(folder / "autoencoder", "bi")
    with pytest.raises(CheckpointError, match=r"no folder .*nowhere.*wp2 curriculum"):
        load.locate(tmp_path / "nowhere", "bi")
    with pytest.raises(ValueError, match="mode 'fast': give one of bi, ar, few_step"):
        load.locate(folder, "fast")
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has not been trained yet"):
        load.locate(tmp_path / "new", "bi")


def test_missing_and_misfitting_parts(tmp_path):
    folder = random_workdir.write(tmp_path / "part", ("base", "pdd"))
    for part, message in (
        ("tokenizer.model", r"no .*tokenizer\.model: .*wp2 curriculum --workdir"),
        ("autoencoder", r"autoencoder gives the weights .*no checkpoint; train it with `wp2 curriculum"),
        ("base", r"base gives the weights of the text"),
    ):
        away = tmp_path / "away"
        (folder / part).rename(away)
        with pytest.raises(CheckpointError, match=message):
            load.load(folder, "few_step")
        away.rename(folder / part)
    shutil.rmtree(folder / "pdd")
    wider = config("pdd", model={"ffn_dim": 64})
    save(folder, "pdd", {"experts": experts(30, "bank")}, ("experts",), wider)
    with pytest.raises(tree.TreeMismatchError, match=r"misshapen +high/blocks/ffn/layer_0/kernel .*48\), exp.*64"):
        load.load(folder, "few_step")
    shutil.rmtree(folder / "pdd")
    save(folder, "pdd", {"experts": {"high": experts(30, "bank")["high"]}}, ("experts",))
    with pytest.raises(tree.TreeMismatchError, match=r"missing +low/"):
        load.load(folder, "few_step")
    shutil.rmtree(folder / "pdd")
    save(folder, "pdd", {"experts": experts(30, "bank")}, ("experts",), config("pdd", text={"vocab_size": 20}))
    with pytest.raises(CheckpointError, match=r"ids, the text encoder .*vocab_size=20"):
        load.load(folder, "few_step")


def test_world_longer_than_the_positions(workdir, student, tmp_path, capsys):
    # The model has 80 positions.
    (request,) = requests_for(student, write_inputs(tmp_path / "fits", 80))
    assert request.chunks == 20
    path = write_inputs(tmp_path, 8, 84)
    with pytest.raises(GeometryError, match=r"item 1 \(world1\) lasts 84 latent frames.*at most 80 \(20 chunks\)"):
        requests_for(student, path)
    # The whole file is checked first: nothing is written for the item before.
    assert command("--checkpoint", workdir, "--input", path, "--output", tmp_path / "out") == 2
    assert "lasts 84 latent frames" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_rotation(student, tmp_path):
    source = student.source
    assert source.trained_rotation == (YAW, PITCH)
    path = write_inputs(tmp_path, 8, action="w+right-4,up-4")
    (item,) = load_inputs(path, generate.input_options(source))
    assert item.rows[:, :2].max(axis=0).tolist() == [PITCH, YAW]
    (item,) = load_inputs(path, generate.input_options(source, yaw_degrees=30, pitch_degrees=2))
    with pytest.warns(ControlWarning, match=r"yaw of 3 action rows .*30 degrees.*range of -11.25 to 11.25"):
        (request,) = generate.prepare(source, student.tokenizer, [item])
    assert request.rows[:, :2].max(axis=0).tolist() == [2.0, YAW]
    assert (request.rows[:, 2:] == item.rows[:, 2:]).all()


def test_no_trained_rotation(tmp_path):
    folder = random_workdir.write(tmp_path, ())
    values = config("base")
    del values["data"]["yaw_degrees"]
    save(folder, "base", {"experts": experts(10)}, ("experts",), values)
    source = load.locate(folder, "bi")
    assert source.trained_rotation is None
    (item,) = load_inputs(write_inputs(tmp_path, 8, action="left+up-8"), generate.input_options(source))
    assert item.rows[-1, :2].tolist() == [3.0, -3.0]
    (item,) = load_inputs(tmp_path / "input.json", generate.input_options(source, yaw_degrees=1000.0))
    (request,) = generate.prepare(source, source.tokenizer(), [item])
    assert request.rows[-1, 1] == -1000


def test_seed_and_steps(workdir, tmp_path, capsys):
    source = load.locate(workdir, "few_step")
    path = write_inputs(tmp_path, 8)

    def run(*words):
        code = command("--checkpoint", workdir, "--input", path, "--output", tmp_path, *words)
        return code, capsys.readouterr()

    for seed in (-1, 2**31):
        code, said = run("--seed", seed)
        assert code == 2 and f"seed {seed}: give a whole number from 0 to 2147483647" in said.err
    code, said = run("--steps", 3)
    assert code == 2 and "steps=3: few_step mode" in said.err
    code, said = run("--mode", "bi", "--steps", 0)
    assert code == 2 and "steps=0" in said.err
    assert generate.stream_spec(load.locate(workdir, "ar"), 3, 6).steps == 6
    assert generate.stream_spec(source, 5).capacity == 4 and generate.stream_spec(source, 6).capacity == 8


def test_a_drawn_seed_is_printed(workdir, tmp_path, capsys):
    path = write_inputs(tmp_path, 4)
    words = ("--checkpoint", workdir, "--input", path, "--mode", "few_step")
    assert command(*words, "--output", tmp_path / "a") == 0
    seed = re.search(r"seed: (\d+) \(drawn", capsys.readouterr().out)
    assert seed
    assert command(*words, "--output", tmp_path / "b", "--seed", seed.group(1)) == 0
    assert (tmp_path / "a" / "world0.mp4").read_bytes() == (tmp_path / "b" / "world0.mp4").read_bytes()


def test_captions(student, tmp_path):
    path = write_inputs(tmp_path, 16)
    tokenizer = student.tokenizer
    (request,) = requests_for(student, path)
    assert request.caption_of_chunk == (0, 0, 1, 1)
    expected = tokenizer.encode([random_workdir.SCENE.text, random_workdir.FOG.text])
    np.testing.assert_array_equal(request.caption_ids, expected)
    # An empty negative prompt is the configured one.
    for given, used in (("", "nothing"), ("  ", "nothing"), ("the lights go out", "the lights go out")):
        (request,) = requests_for(student, path, negative_prompt=given)
        np.testing.assert_array_equal(request.null_ids, tokenizer.encode([used]))
    items = json.loads(path.read_text())
    items[0]["prompt"] = "a room with red walls, " * 60
    path.write_text(json.dumps(items))
    with pytest.warns(ControlWarning, match="cut to 111"):
        requests_for(student, path)


@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_the_sheet_shows_the_fitted_picture(student, tmp_path, fit):
    path = write_inputs(tmp_path, 4)
    picture = np.random.default_rng(0).integers(0, 256, (SIZE, 2 * SIZE, 3), np.uint8)
    Image.fromarray(picture).save(tmp_path / "start.png")
    (request,) = requests_for(student, path, fit=fit)
    expected = video.to_uint8(load_image(tmp_path / "start.png", SIZE, SIZE, fit))
    if fit == "crop":
        np.testing.assert_array_equal(expected, picture[:, SIZE // 2 : 3 * SIZE // 2])
    written = generate.write(student, request, 0, tmp_path / fit)
    sheet = np.asarray(Image.open(written.sheet))
    large = video.enlarge(expected, 4)
    places = np.argwhere((sheet[:-255, :-255] == large[0, 0]).all(-1) & (sheet[255:, 255:] == large[-1, -1]).all(-1))
    assert any((sheet[y : y + 256, x : x + 256] == large).all() for y, x in places)


def test_example_input():
    """The example that the quickstart generates from fits the tiny experiment."""
    from experiments import tiny

    options = generate.InputOptions(yaw_rotation_speed_deg=YAW, pitch_rotation_speed_deg=PITCH)
    items = load_inputs(EXAMPLE, options)
    assert [item.output_name for item in items] == ["video", "walk_first_person"]
    assert len(set(items[0].chunk_captions)) == 2 and "The event is:" in items[0].chunk_captions[-1]
    world = tiny.get_config("quick-stable_forcing").to_dict()["world"]
    for item in items:
        assert Image.open(item.image_path).size == (world["width"], world["height"])


@pytest.mark.parametrize("kind", ["tiny", "wan"])
def test_conditioning_settles(kind):
    """y past the first chunks of the world no longer changes, so that a long world needs no more of it."""
    sizes = {"tiny": dict(encoder_width=4, decoder_widths=(4, 4, 4, 4)), "wan": dict(dim=4)}
    module = autoencoder.build(kind, **sizes[kind])
    shapes = jax.eval_shape(lambda: autoencoder.init_params(module, jax.random.key(0)))
    params = random_workdir.random_like(shapes, 0)
    image = np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 3)).astype(np.float32)
    chunks = generate.CONDITION_CHUNKS
    latents = jax.jit(condition.image_latents, static_argnums=(0, 3))(module, params, image, 4 * (chunks + 4))
    last = latents[:, 4 * (chunks - 1) : 4 * chunks]
    assert np.abs(latents[:, :4] - last).max() > 0.01
    for later in range(chunks, chunks + 4):
        np.testing.assert_allclose(latents[:, 4 * later : 4 * (later + 1)], last, atol=1e-6)


def test_a_memory_that_does_not_fit_its_twin_is_named():
    sizes = config("base")
    with pytest.raises(ValueError, match=r"8 latents a side of a memory token, the low-resolution twin has 4"):
        from_config({**sizes, "model": {**sizes["model"], "patch": 1}})
