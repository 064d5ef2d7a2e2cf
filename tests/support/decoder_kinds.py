"""Small tokenizers, one for each kind of decoder that users have, and random texts of their tokens."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from specdec_fast.assets import demo_pair

SPECIAL = "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Bytes of é, € and a rocket come often, so that some runs of bytes are characters and most are not.
OFTEN = [f"<0x{byte:02X}>" for byte in "é€🚀".encode() * 12]
SPACED = ["▁", "▁▁", "▁a", "a", "▁do", "n", "▁n", "▁n't", "n't", "'", "▁'", "s", "▁'s", "m", "t", "ve", "re", ".", "▁.",
          "▁,", "?", "▁!", "é", "▁é", "\ufffd", "in", "▁v", "r"]  # fmt: skip
PIECES = ["a", "do", "n't", "'", "s", "m", "ve", "re", "t", ".", ",", "?", "!", "n", "##n", "##a", "##'", "##'s", "not",
          "é", "it", "##.", "v", "r", "'s", "'m"]  # fmt: skip


def _fast(model: Any, decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL, **options)


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(dict.fromkeys(words))}


def _unigram(decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    words = list(dict.fromkeys(["<unk>", *SPACED]))
    return _fast(models.Unigram([(word, -1.0) for word in words], unk_id=0), decoder, **options)


def _fallback(*end: Any, begin: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    vocab = _numbered(["<unk>", *BYTES, *SPACED])
    steps = [begin or decoders.Replace("▁", " "), decoders.ByteFallback(), *end]
    return _fast(models.BPE(vocab, [], byte_fallback=True), decoders.Sequence(steps), **options)


def _word_piece(cleanup: bool, **options: Any) -> PreTrainedTokenizerFast:
    model = models.WordPiece(_numbered(["[UNK]", *PIECES]), unk_token="[UNK]")
    return _fast(model, decoders.WordPiece(cleanup=cleanup), **options)


def _byte_level(**options: Any) -> PreTrainedTokenizerFast:
    backend = AutoTokenizer.from_pretrained(demo_pair() / "target").backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL, **options)


class JoinedByMarks(PreTrainedTokenizer):
    """A tokenizer in Python, as CTRL's: a mark at the end of a token removes the space before the next one."""

    words = ("a", "b@@", "c", "d@@", ".")

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return _numbered(list(self.words))

    def _convert_id_to_token(self, index: int) -> str:
        return self.words[index]

    def _convert_token_to_id(self, token: str) -> int:
        return self.words.index(token) if token in self.words else 0

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens).replace("@@ ", "")


class Reversing(PreTrainedTokenizerFast):
    """Decodes unlike any known decoder: a text with one more token begins with that token."""

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return super().decode(token_ids, *args, **kwargs)[::-1]


FUSE, STRIP = decoders.Fuse(), decoders.Strip(" ", 1, 0)
CLEAN = {"clean_up_tokenization_spaces": True}
FORCED = {**CLEAN, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
KINDS = {
    "Llama-2": lambda: _fallback(FUSE, STRIP),
    "Gemma": lambda: _fallback(FUSE),
    "byte fallback, not fused": _fallback,
    "byte fallback, Metaspace": lambda: _fallback(begin=decoders.Metaspace()),
    "byte fallback, cleaned": lambda: _fallback(FUSE, STRIP, **FORCED),
    "ByteLevel": _byte_level,
    "ByteLevel, cleaned": lambda: _byte_level(**FORCED),
    "WordPiece": lambda: _word_piece(False),
    "WordPiece, cleaned": lambda: _word_piece(False, **CLEAN),
    "WordPiece, cleaned twice": lambda: _word_piece(True, **CLEAN),
    "Unigram, Metaspace": lambda: _unigram(decoders.Metaspace()),
    "Unigram, Metaspace, cleaned": lambda: _unigram(decoders.Metaspace(), **CLEAN),
    "no decoder": lambda: _fast(models.WordLevel(_numbered(["[UNK]", *PIECES]), unk_token="[UNK]"), None, **CLEAN),
    "suffix": lambda: _fast(models.BPE(_numbered(["a", "b</w>", "c", "d</w>"]), []), decoders.BPEDecoder()),
}
# Of their texts nothing is certain before the last token.
WAITING = {
    "CTC": lambda: _unigram(decoders.CTC(pad_token="<unk>")),
    "replaced when fused": lambda: _fallback(FUSE, decoders.Replace("a ", "b")),
    "in Python": JoinedByMarks,
    "a decode of its own": lambda: Reversing(tokenizer_object=_fallback(FUSE).backend_tokenizer),
}


def random_ids(tokenizer: Any, rng: random.Random, longest: int) -> list[int]:
    """Draw ids, some special and some beyond the vocabulary, as models with padded embeddings emit them."""
    often = [i for i in map(tokenizer.get_vocab().get, OFTEN) if i is not None]
    size = len(tokenizer) + (0 if isinstance(tokenizer, PreTrainedTokenizer) else 2)
    words = range(1, size)
    if often:
        words = [*often, *range(len(BYTES), size)]
    return [rng.randrange(size) if rng.random() < 0.05 else rng.choice(words) for _ in range(rng.randint(0, longest))]
