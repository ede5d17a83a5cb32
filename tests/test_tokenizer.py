"""The tokenizer: training, and the inputs that broke others (cases.md 20)."""

import pickle
import warnings

import numpy as np
import pytest
import sentencepiece

from wp2_jax.controls.errors import ControlWarning
from wp2_jax.controls.tokenizer import EOS, PAD, UNKNOWN, Tokenizer, TokenizerError, clean

PLACES = ("a stone hall", "a green yard", "a red cave", "a blue tower", "a wooden barn", "a dark cellar")
EVENTS = ("fog rolls in", "a barrel appears", "a door opens", "the light turns red", "a torch vanishes")
SENTENCES = [
    f"The scene in the video is: {place}. The character is: a marine in armour. The event is: {event}."
    for place in PLACES
    for event in EVENTS
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.train(SENTENCES, tmp_path_factory.mktemp("tokenizer") / "text.model", 400, text_len=96)


def decode(tokenizer: Tokenizer, row: np.ndarray) -> str:
    return tokenizer.processor.decode([int(i) for i in row if i not in (PAD, EOS)])


def test_training_is_deterministic(tmp_path):
    for name in ("a", "b"):
        Tokenizer.train(SENTENCES, tmp_path / name, 400)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_ids_end_with_the_end_id_and_padding(tokenizer):
    ids = tokenizer.encode(SENTENCES)
    assert ids.shape == (30, 96) and ids.dtype == np.int32
    assert ids.max() < tokenizer.vocab_size <= 400
    for row, sentence in zip(ids, SENTENCES, strict=True):
        length = int((row != PAD).sum())
        assert row[length - 1] == EOS and not row[length:].any()
        assert (row == EOS).sum() == 1 and not (row == UNKNOWN).any()
        assert decode(tokenizer, row) == sentence
    assert len({row.tobytes() for row in ids}) == 30
    assert tokenizer.encode([]).shape == (0, 96)


def test_a_loaded_or_pickled_tokenizer_encodes_alike(tokenizer, tmp_path):
    path = tmp_path / "model"
    path.write_bytes(tokenizer.processor.serialized_model_proto())
    expected = tokenizer.encode(SENTENCES)
    for other in (Tokenizer.load(path, text_len=96), pickle.loads(pickle.dumps(tokenizer))):
        np.testing.assert_array_equal(other.encode(SENTENCES), expected)
    assert Tokenizer.load(path).encode(["a"]).shape == (1, 512)


@pytest.mark.parametrize("text", ["", "   ", "\n\t ", "\u3000"])
def test_empty_prompts_are_the_end_id_alone(tokenizer, text):
    assert tokenizer.encode([text])[0].tolist() == [EOS] + [PAD] * 95


def test_white_space_is_forgiven(tokenizer):
    ids = tokenizer.encode(["a red cave", "  a red\n\ncave\t", "a\u00a0red  cave"])
    np.testing.assert_array_equal(ids[1:], ids[[0, 0]])


def test_unknown_characters_fall_back_to_bytes(tokenizer):
    text = "a 🐉 in the 洞窟"
    row = tokenizer.encode([text])[0]
    assert not (row == UNKNOWN).any()
    assert decode(tokenizer, row) == text
    names = [tokenizer.processor.id_to_piece(int(i)) for i in row]
    assert [name for name in names if name.startswith("<0x")][:4] == ["<0xF0>", "<0x9F>", "<0x90>", "<0x89>"]


def test_half_an_emoji_and_written_special_tokens_are_text(tokenizer):
    assert clean("\ud83d\udc09") == "\U0001f409"
    rows = tokenizer.encode(["a \ud83d cave", "a </s> cave <pad>"])
    assert ((rows == EOS).sum(axis=1) == 1).all() and not (rows == UNKNOWN).any()


@pytest.mark.parametrize("count", [95, 96, 600])
def test_long_prompts_are_cut_with_a_notice(tokenizer, count):
    piece = "🐉"  # byte fallback: exactly 4 tokens each, after one for the leading blank
    text = piece * ((count + 3) // 4)
    length = len(tokenizer.processor.encode(text))
    assert length >= count
    with pytest.warns(ControlWarning, match=f"{length} tokens is cut to 95"):
        row = tokenizer.encode([text])[0]
    assert row[-1] == EOS and (row != PAD).all()


def test_a_prompt_that_just_fits_gives_no_notice(tokenizer):
    text = SENTENCES[0]
    length = len(tokenizer.processor.encode(text))
    exact = Tokenizer(tokenizer.processor, text_len=length + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = exact.encode([text])[0]
    assert row[-1] == EOS and decode(tokenizer, row) == text
    with pytest.warns(ControlWarning):
        Tokenizer(tokenizer.processor, text_len=length).encode([text])


def test_bad_training_input(tmp_path):
    for sentences in ([], ["", "  "]):
        with pytest.raises(TokenizerError, match="no sentence"):
            Tokenizer.train(sentences, tmp_path / "m", 400)
    with pytest.raises(TokenizerError, match="vocab_size=100"):
        Tokenizer.train(SENTENCES, tmp_path / "m", 100)
    assert not list(tmp_path.iterdir())


def test_one_short_sentence_is_enough(tmp_path):
    tokenizer = Tokenizer.train(["a cave"], tmp_path / "m", 400)
    assert 256 + 3 < tokenizer.vocab_size < 400
    assert decode(tokenizer, tokenizer.encode(["a cave"])[0]) == "a cave"


def test_bad_model_files(tmp_path, tokenizer):
    (tmp_path / "text").write_text("no model")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut").write_bytes(tokenizer.processor.serialized_model_proto()[:1000])
    for name in ("text", "empty", "cut", "missing"):
        with pytest.raises(TokenizerError, match=name):
            Tokenizer.load(tmp_path / name)


def test_a_model_with_other_special_ids_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(TokenizerError, match="pad id -1"):
        Tokenizer.load(tmp_path / "m.model")


def test_one_text_instead_of_a_list_is_refused(tokenizer):
    with pytest.raises(TypeError, match="list"):
        tokenizer.encode("a cave")
