"""Draft models with another vocabulary that cannot be joined with the target's: typed errors say what to pass."""

from __future__ import annotations

import copy

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM

import specdec_fast as sd
from support.other_tokenizers import byte_level, fast


@pytest.fixture(scope="module")
def stranger(draft):
    config = copy.deepcopy(draft.config)
    config.vocab_size = 300
    config._name_or_path = ""
    return LlamaForCausalLM(config).eval()


def test_without_tokenizers(target, tokenizer, stranger):
    unnamed = copy.deepcopy(target)
    unnamed.config._name_or_path = ""
    with pytest.raises(sd.VocabularyMismatchError, match=r"pass tokenizer=... and draft_tokenizer=..., or a draft"):
        sd.Engine(unnamed, stranger)
    with pytest.raises(sd.VocabularyMismatchError, match=r"has 300 ids.* pass draft_tokenizer=..., or a draft"):
        sd.Engine(unnamed, stranger, tokenizer=tokenizer)
    with pytest.raises(sd.VocabularyMismatchError, match=r"pass tokenizer=..., or a draft"):
        sd.Engine(unnamed, stranger, draft_tokenizer=byte_level(["a"], 300))


def test_a_tokenizer_of_an_unknown_kind(target, tokenizer, stranger):
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(sd.VocabularyMismatchError, match="bytes of the tokens of the draft are not known"):
        sd.Engine(target, stranger, tokenizer=tokenizer, draft_tokenizer=fast(words, None, None))


def test_no_tokenizer(target, stranger):
    with pytest.raises(sd.ConfigError, match="draft_tokenizer is a str; expected a loaded tokenizer"):
        sd.Engine(target, stranger, draft_tokenizer="gpt2")


def test_recurrent_layers(target, tokenizer):
    model = MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=32, state_size=4, num_hidden_layers=1)).eval()
    with pytest.raises(sd.NotYetSupportedError, match="recurrent layers, whose states cannot go back"):
        sd.Engine(target, model, tokenizer=tokenizer, draft_tokenizer=byte_level(["a"], 300))
