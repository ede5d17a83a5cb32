"""Text to token ids with a sentencepiece model: the published UMT5 one, or a small one trained on our captions."""

import io
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from wp2_jax.controls.errors import ControlError, ControlWarning

PAD, EOS, UNKNOWN = 0, 1, 2


class TokenizerError(ControlError):
    """A tokenizer file or training set that cannot be used."""


def clean(text: str) -> str:
    """Runs of white space become one blank, none at the ends; halves of surrogate pairs become U+FFFD."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(whole.split())


class Tokenizer:
    """Captions -> ids [N, text_len] int32: the pieces, the end id, then padding 0.

    `processor` is the sentencepiece model, `text_len` the static number of tokens, the end id included.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, text_len: int = 512):
        if text_len < 1:
            raise TokenizerError("text_len", f"text_len={text_len}: must be at least 1, the end id needs a place")
        if processor.pad_id() != PAD or processor.eos_id() < 0:
            raise TokenizerError(
                "special_ids",
                f"the sentencepiece model has pad id {processor.pad_id()} and end id {processor.eos_id()}: "
                "padding must be 0 and an end id must exist; train with Tokenizer.train or use UMT5's spiece.model",
            )
        self.processor = processor
        self.text_len = text_len

    @classmethod
    def load(cls, path: str | os.PathLike, text_len: int = 512) -> "Tokenizer":
        """Reads a sentencepiece model file. Errors name the file: TokenizerError `unreadable`, or those of the class
        (`special_ids`: also what a cut file looks like, for the ids stand at its end)."""
        name = os.fspath(path)
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
        except (OSError, RuntimeError) as error:
            raise TokenizerError(
                "unreadable", f"tokenizer {name!r} is not a readable sentencepiece model ({error})"
            ) from error
        try:
            return cls(processor, text_len)
        except TokenizerError as error:
            raise TokenizerError(error.kind, f"tokenizer {name!r}: {error.message}") from error

    @classmethod
    def train(
        cls, sentences: Iterable[str], path: str | os.PathLike, vocab_size: int, text_len: int = 512
    ) -> "Tokenizer":
        """Trains a byte-pair model with byte fallback on `sentences`, writes it to `path` and returns it.

        The same sentences in the same order give the same file, byte for byte. Few sentences give fewer pieces than
        `vocab_size`: read `Tokenizer.vocab_size`. Errors: TokenizerError `no_sentences`, `vocab_size`.
        """
        corpus = [text for text in map(clean, sentences) if text]
        if not corpus:
            raise TokenizerError("no_sentences", "there is no sentence with text in it to train a tokenizer on")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(corpus),
                model_writer=model,
                model_type="bpe",  # merges up to whole words even on few captions, where unigram stays with letters
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                byte_fallback=True,
                character_coverage=1.0,
                pad_id=PAD,
                eos_id=EOS,
                unk_id=UNKNOWN,
                bos_id=-1,
                max_sentence_length=max(10, *(len(text.encode()) + 1 for text in corpus)),  # 10: its minimum
                shuffle_input_sentence=False,
                num_threads=1,  # sums in a fixed order
                minloglevel=2,
            )
        except RuntimeError as error:
            raise TokenizerError(
                "vocab_size",
                f"sentencepiece cannot train with vocab_size={vocab_size}, of which bytes and special ids take 259 and "
                f"every character one ({error})",
            ) from error
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(model.getvalue())
        partial.replace(path)
        return cls.load(path, text_len)

    @property
    def vocab_size(self) -> int:
        """Number of ids: the text encoder's embedding table needs at least as many rows."""
        return self.processor.get_piece_size()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """ids int32 [len(texts), text_len]. Texts are cleaned (`clean`); the empty one is the end id alone.

        A text of more than text_len - 1 pieces is cut, with a ControlWarning that says how much was lost.
        """
        if isinstance(texts, str):
            raise TypeError("encode takes a list of texts, not one text")
        ids = np.full((len(texts), self.text_len), PAD, np.int32)
        for row, text in zip(ids, texts, strict=True):
            kept, said = self._fitted(text)
            if said:
                warnings.warn(said, ControlWarning, stacklevel=2)
            row[: len(kept) + 1] = [*kept, self.processor.eos_id()]
        return ids

    def notice(self, text: str) -> str:
        """What `encode` warns of for a text, "" for nothing."""
        return self._fitted(text)[1]

    def _fitted(self, text: str) -> tuple[list[int], str]:
        pieces = self.processor.encode(clean(text), out_type=int)
        kept = pieces[: self.text_len - 1]
        if len(kept) == len(pieces):
            return kept, ""
        return kept, (
            f"a caption of {len(pieces)} tokens is cut to {len(kept)} (text_len={self.text_len} less the end token); "
            f"lost: {self.processor.decode(pieces[len(kept) :])!r}"
        )
