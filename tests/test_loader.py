"""The latent cache and the loaders, on records made by hand and an autoencoder of random weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines import latents, loader, schema, tfds_builder
from data_pipelines.doom import camera_matrix
from data_pipelines.faults import FaultBudgetError, FaultWarning
from wp2_jax.controls.captions import ClipCaption, Interaction
from wp2_jax.controls.images import low_resolution
from wp2_jax.inference import condition
from wp2_jax.models import autoencoder

SIZE, LATENTS, CLIPS = 64, 12, 10
VAE = {"encoder_width": 8, "decoder_widths": (8, 8, 8, 8)}


def make_record(index, latent_frames=LATENTS):
    """A good record: a few grey levels that drift, a camera that turns by 11.25 degrees a latent frame."""
    rng = np.random.default_rng(index)
    frames = 4 * (latent_frames - 1) + 1
    actions = np.zeros((latent_frames, 6), np.float32)
    actions[:, 4], actions[1:, 1] = 1, 11.25
    poses = np.stack([camera_matrix(0, 0, 41, -11.25 * k / 4, 0) for k in range(frames)])
    ends = [5.0 * k for k in range(1, 2 + int(frames / 80))]
    events = tuple(Interaction(end - 5, end, f"event {index} at {end:g}") for end in ends)
    coarse = rng.integers(0, 256, (1, 8, 8, 3)) + 4 * np.arange(frames)[:, None, None, None]
    return {
        "id": f"clip-{index}",
        "source": "hand",
        "world": f"hand/{index}",
        "kind": "navigation",
        "seed": np.int64(index),
        "perspective": "fps",
        "caption": json.dumps(ClipCaption("a test", None, None, events).to_json()),
        "picture_rate": np.float32(16),
        "pictures": (coarse % 256).astype(np.uint8).repeat(SIZE // 8, 1).repeat(SIZE // 8, 2),
        "actions": actions,
        "camera_to_world": poses,
        "intrinsics": np.asarray([40, 40, 32, 32], np.float32),
        "depth": np.zeros((latent_frames, SIZE, SIZE), np.uint16),
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    splits = {
        "train": lambda: (make_record(i) for i in range(CLIPS)),
        "test": lambda: (make_record(i) for i in range(CLIPS, CLIPS + 3)),
    }
    folder = tmp_path_factory.mktemp("records")
    return tfds_builder.write(folder, "hand", splits, SIZE, SIZE, {"fingerprint": "by hand"}, "made by hand")


@pytest.fixture(scope="module")
def records(dataset):
    return tfds_builder.Records(dataset, "train")


def make_encoder(seed=0):
    module = autoencoder.build("tiny", **VAE)
    params = autoencoder.init_params(module, jax.random.key(seed))
    return latents.Encoder("tiny", VAE, module, params, condition.image_latents, condition.chunk_low_res)


@pytest.fixture(scope="module")
def encoder():
    return make_encoder()


@pytest.fixture(scope="module")
def cache(records, encoder, tmp_path_factory):
    return latents.build(records, encoder, tmp_path_factory.mktemp("latents"), batch=4)


def tokenize(texts):
    """Ids that tell captions apart: 1 + letter codes of the last 6 letters, padded to 8."""
    out = np.zeros((len(texts), 8), np.int32)
    for row, text in enumerate(texts):
        codes = [1 + ord(letter) for letter in text[-6:]]
        out[row, : len(codes)] = codes
    return out


def test_records_come_back_as_they_were(records):
    assert records.splits == {"train": CLIPS, "test": 3} and len(records) == CLIPS
    assert records.settings == {"fingerprint": "by hand"}
    for index in (0, CLIPS - 1):
        made, read = make_record(index), records[index]
        assert made.keys() == read.keys()
        for name, value in made.items():
            np.testing.assert_array_equal(value, read[name])
            assert schema.FIELDS[name].dtype == "str" or read[name].dtype == np.dtype(schema.FIELDS[name].dtype)


def test_a_bad_record_leaves_no_dataset(tmp_path):
    def broken():
        yield make_record(0)
        yield {**make_record(1), "actions": np.full((LATENTS, 6), np.nan, np.float32)}

    with pytest.raises(schema.RecordError, match="clip-1: actions: row 0 holds NaN"):
        tfds_builder.write(tmp_path, "hand", {"train": broken}, SIZE, SIZE, {}, "broken")
    with pytest.raises(ValueError, match="no dataset here"):
        tfds_builder.locate(tmp_path)


def test_cached_latents_are_those_of_inference(records, encoder, cache):
    """Against the functions generation calls: one-shot encoding, y of the first picture, the twin chunk by chunk."""
    module, params = encoder.module, encoder.params
    clip, record = cache[3], records[3]
    assert clip["id"] == record["id"] and clip["latents"].dtype == np.float32
    np.testing.assert_array_equal(clip["actions"], record["actions"])
    video = jnp.asarray(record["pictures"][None].astype(np.float32) / 127.5 - 1)
    encode = jax.jit(lambda pictures: module.apply({"params": params}, pictures, method="encode"))
    one_shot = encode(video)[0]
    np.testing.assert_allclose(clip["latents"], one_shot, atol=2e-5)
    still = jnp.concatenate([video[:, :1], jnp.zeros_like(video[:, 1:])], axis=1)
    np.testing.assert_allclose(clip["y"], encode(still)[0], atol=2e-5)
    small = low_resolution(still[:, :21])  # 4 (T/2) - 3 pictures
    np.testing.assert_allclose(clip["lr_y"], encode(small)[0], atol=2e-5)
    state, parts = module.apply({"params": params}, 1, 16, 16, method="init_encode_state"), []
    for first, end in ((0, 13), (13, 29), (29, 45)):
        twin = condition.chunk_low_res(video[:, first:end])
        state, part = module.apply({"params": params}, state, twin, first == 0, method="encode_chunk")
        parts.append(part)
    np.testing.assert_allclose(clip["lr_latents"], jnp.concatenate(parts, 1)[0], atol=2e-5)


def test_the_mask_channels_are_those_of_inference():
    y = np.random.default_rng(0).normal(size=(6, 2, 2, 16)).astype(np.float32)
    np.testing.assert_array_equal(loader.with_mask(y), condition.with_mask(jnp.asarray(y)[None])[0])


def test_statistics_are_those_of_all_latents(cache):
    values = np.concatenate([cache[i]["latents"].reshape(-1, 16) for i in range(len(cache))]).astype(np.float64)
    np.testing.assert_allclose(cache.statistics["mean"], values.mean(0), atol=1e-6)
    np.testing.assert_allclose(cache.statistics["std"], values.std(0), atol=1e-6)


def test_a_cache_of_another_autoencoder_or_dataset_is_refused(records, encoder, cache):
    folder = cache.directory.parent
    assert latents.build(records, encoder, folder).info == cache.info  # used as it is
    with pytest.raises(latents.CacheError, match=r"encoded with another autoencoder.*different: fingerprint"):
        latents.build(records, make_encoder(seed=1), folder)
    with pytest.raises(latents.CacheError, match="different: kind"):
        latents.LatentCache(cache.directory, {**encoder.identity, "kind": "wan"})
    with pytest.raises(latents.CacheError, match="dataset by hand, not another"):
        latents.LatentCache(cache.directory, encoder.identity, "another")
    with pytest.raises(latents.CacheError, match="no latent cache here"):
        latents.LatentCache(folder / "nowhere")


def test_an_interrupted_cache_is_no_cache(records, encoder, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        latents.build(records, encoder, tmp_path, progress=stop)
    assert not (tmp_path / "train").exists()
    assert len(latents.build(records, encoder, tmp_path)) == CLIPS
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_records_that_cannot_be_encoded_are_set_aside_by_name(records, encoder, tmp_path):
    class Spoiled:
        split, settings, directory = "train", records.settings, records.directory

        def __len__(self):
            return 3

        def __getitem__(self, index):
            record = records[index]
            return {**record, "caption": "{}"} if index == 1 else record

    with pytest.warns(FaultWarning, match="clip-1 is set aside: caption"):
        cache = latents.build(Spoiled(), encoder, tmp_path / "a", fault_budget=1)  # type: ignore[arg-type]
    assert [cache[i]["id"] for i in range(len(cache))] == ["clip-0", "clip-2"]
    assert list(cache.info["set_aside"]) == ["clip-1"]
    with pytest.warns(FaultWarning), pytest.raises(FaultBudgetError, match="1 bad records, the fault budget is 0"):
        latents.build(Spoiled(), encoder, tmp_path / "b")  # type: ignore[arg-type]


def clips(cache, **kwargs):
    return loader.LatentClips(cache, tokenize, **kwargs)


def test_batches_hold_what_training_takes(cache):
    batch = next(loader.Loader(clips(cache), loader.LoaderConfig(batch=4)))
    shapes = {name: value.shape for name, value in batch.items() if name != "key"}
    assert shapes == {
        "latents": (4, 12, 8, 8, 16),
        "y": (4, 12, 8, 8, 20),
        "lr_latents": (4, 6, 2, 2, 16),
        "lr_y": (4, 6, 2, 2, 20),
        "actions": (4, 12, 6),
        "caption_ids": (4, 3, 8),
    }
    assert batch["caption_ids"].dtype == np.int32 and len(batch["key"]) == 4
    assert all(batch[name].dtype == np.float32 for name in shapes if name != "caption_ids")
    for row, key in enumerate(batch["key"]):
        clip = cache[int(key.split("-")[1])]
        np.testing.assert_array_equal(batch["y"][row, ..., 4:], clip["y"])
        np.testing.assert_array_equal(batch["caption_ids"][row], np.repeat(tokenize([" at 5."]), 3, 0))
    short = next(loader.Loader(clips(cache, frames=8), loader.LoaderConfig(batch=2)))
    assert short["latents"].shape[1] == 8 and short["lr_y"].shape[1] == 4 and short["caption_ids"].shape[1] == 2
    with pytest.raises(ValueError, match="6 latent frames do not fill whole chunks"):
        clips(cache, frames=6)


def test_captions_change_at_the_chunk_of_their_interval(encoder, tmp_path):
    splits = {"train": lambda: [make_record(0, 24)]}
    folder = tfds_builder.write(tmp_path, "hand", splits, SIZE, SIZE, {}, "one long clip")
    cache = latents.build(tfds_builder.Records(folder), encoder, tmp_path / "latents", batch=1)
    ids = clips(cache).sample(0, np.random.default_rng(0))["caption_ids"]
    expected = tokenize(["x at 5."] * 5 + ["x at 10."])  # 16 pictures a second: chunk 5 starts at 4.8 s
    np.testing.assert_array_equal(ids, expected)
    texts = loader.caption_texts(tfds_builder.Records(folder)[i] for i in range(1))
    assert [text.split("is: ")[-1] for text in texts] == ["event 0 at 5.", "event 0 at 10."]


def take(source, count):
    return [next(source) for _ in range(count)]


def same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_every_epoch_is_a_shuffle_of_its_own(cache):
    keys = [batch["key"] for batch in take(loader.Loader(clips(cache), loader.LoaderConfig(batch=5, seed=1)), 6)]
    epochs = [keys[i] + keys[i + 1] for i in (0, 2, 4)]
    assert all(sorted(epoch) == sorted(f"clip-{i}" for i in range(CLIPS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = loader.Loader(clips(cache), loader.LoaderConfig(batch=5, seed=1))
    assert [batch["key"] for batch in take(again, 6)] == keys
    other = loader.Loader(clips(cache), loader.LoaderConfig(batch=5, seed=2))
    assert [batch["key"] for batch in take(other, 6)] != keys


@pytest.mark.parametrize("make", [clips, None])
def test_a_restored_position_goes_on_exactly(cache, records, make):
    source = clips(cache) if make else loader.PictureWindows(records, 13)
    config = loader.LoaderConfig(batch=4, seed=3)
    whole = take(loader.Loader(source, config), 9)
    first = loader.Loader(source, config)
    same(take(first, 4), whole[:4])
    state = json.loads(json.dumps(first.get_state()))
    resumed = loader.Loader(source, config)
    take(resumed, 1)  # where it stood before does not matter
    resumed.set_state(state)
    same(take(resumed, 5), whole[4:])
    with pytest.raises(ValueError, match="seed was 3, is 4"):
        loader.Loader(source, loader.LoaderConfig(batch=4, seed=4)).set_state(state)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_global_batches(cache, records, processes):
    """Their rows put together are the batch of one process, also after a restore on another number of processes."""
    for source in (clips(cache), loader.PictureWindows(records, 5)):
        config = loader.LoaderConfig(batch=4, seed=5)
        single = loader.Loader(source, config)
        take(single, 2)
        state, whole = single.get_state(), take(single, 4)
        cut = np.split(np.arange(4), processes)
        shards = [loader.Loader(source, config, rows.tolist()) for rows in cut]
        for shard in shards:
            shard.set_state(state)
        for expected in whole:
            parts = [next(shard) for shard in shards]
            for name, value in expected.items():
                if name == "key":
                    assert [key for part in parts for key in part["key"]] == value
                else:
                    np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)
    apart, whole = next(loader.Loader(source, config, [0, 3])), next(loader.Loader(source, config))
    np.testing.assert_array_equal(apart["video"], whole["video"][[0, 3]])
    for rows in ([], [4], [-1, 0]):
        with pytest.raises(ValueError, match=r"rows=.* are not rows of a batch of 4"):
            loader.Loader(clips(cache), loader.LoaderConfig(batch=4), rows)


class WithNaN:
    """A cache in which some clips hold a NaN."""

    def __init__(self, cache, bad):
        self.cache, self.bad, self.info = cache, bad, cache.info

    def __len__(self):
        return len(self.cache)

    def __getitem__(self, index):
        clip = self.cache[index]
        if index in self.bad:
            clip["latents"] = clip["latents"].copy()
            clip["latents"][2, 1, 0, 3] = np.nan
        return clip


def test_a_nan_is_counted_skipped_and_named(cache):
    source = clips(WithNaN(cache, {4}))
    shards = [loader.Loader(source, loader.LoaderConfig(batch=4, seed=1), rows) for rows in ([0, 1], [2, 3])]
    single = loader.Loader(source, loader.LoaderConfig(batch=4, seed=1))
    with pytest.warns(FaultWarning, match=r"record clip-4 is set aside: latents is not finite at \(2, 1, 0, 3\)"):
        for _ in range(5):
            whole = next(single)
            assert "clip-4" not in whole["key"] and np.isfinite(whole["latents"]).all()
            # A clip set aside on one process shifts nothing on another.
            assert whole["key"] == [key for shard in shards for key in next(shard)["key"]]
    assert single.faults.reasons == {"clip-4": "latents is not finite at (2, 1, 0, 3)"}
    resumed = loader.Loader(source, loader.LoaderConfig(batch=4, seed=1))
    resumed.set_state(single.get_state())
    assert resumed.faults.reasons == single.faults.reasons


def test_too_many_bad_records_stop_the_job(cache):
    source = clips(WithNaN(cache, {1, 4, 7}))
    stopped = loader.Loader(source, loader.LoaderConfig(batch=5, fault_budget=2))
    with (
        pytest.warns(FaultWarning),
        pytest.raises(FaultBudgetError, match="3 bad records, the fault budget is 2") as error,
    ):
        take(stopped, 2)
    assert all(f"clip-{i}: latents is not finite" in str(error.value) for i in (1, 4, 7))
    nothing = loader.Loader(clips(WithNaN(cache, set(range(CLIPS)))), loader.LoaderConfig(batch=2, fault_budget=99))
    with pytest.raises(ValueError, match=f"none of the {CLIPS} records can be used"):
        next(nothing)


def test_picture_windows(records):
    source = loader.PictureWindows(records, 13)
    batches = take(loader.Loader(source, loader.LoaderConfig(batch=2, seed=0)), 20)
    starts = set()
    for batch in batches:
        assert batch["video"].shape == (2, 13, SIZE, SIZE, 3) and batch["video"].dtype == np.float32
        for video, key in zip(batch["video"], batch["key"], strict=True):
            pictures = records[int(key.split("-")[1])]["pictures"]
            stored = np.round((video + 1) * 127.5).astype(np.uint8)
            [start] = [s for s in range(33) if (pictures[s : s + 13] == stored).all()]
            starts.add(start)
    assert len(starts) > 15 and min(starts) >= 0 and max(starts) <= 32
    for frames in (0, 15, 16, 17, 80):
        if frames == 17:
            loader.PictureWindows(records, frames)
        else:
            with pytest.raises(ValueError):
                loader.PictureWindows(records, frames)
    with pytest.raises(ValueError, match="use 13 or 17"):
        loader.PictureWindows(records, 15)


def test_held_out_batches_are_the_same_every_time(dataset):
    source = loader.PictureWindows(tfds_builder.Records(dataset, "test"), 5)
    held_out = loader.HeldOut(source, loader.LoaderConfig(batch=2))
    first = list(held_out)
    same(first, list(held_out))
    assert len(held_out) == len(first) == 1 and first[0]["key"] == ["clip-10", "clip-11"]
    filled = loader.HeldOut(source, loader.LoaderConfig(batch=4))
    assert [batch["key"] for batch in filled] == [["clip-10", "clip-11", "clip-12", "clip-10"]]
    spread = loader.HeldOut(source, loader.LoaderConfig(batch=1), limit=2)
    assert [batch["key"] for batch in spread] == [["clip-10"], ["clip-12"]]


def test_a_missing_split_names_those_there_are(dataset):
    with pytest.raises(ValueError, match=r"no split 'valid'; there are \['test', 'train'\]"):
        tfds_builder.Records(dataset, "valid")
