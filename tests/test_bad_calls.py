"""Calls that are wrong as a whole: a typed error before any work, that says what came and what to do."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, T5Config, T5Model

import specdec_fast as sd
from specdec_fast.commands.demo import demo_pair


def test_unknown_method_lists_the_known(target):
    with pytest.raises(sd.ConfigError, match=r"method='fast': expected one of eqspec, exspec"):
        sd.Engine(target, None, method="fast")


def test_unknown_keyword(target):
    with pytest.raises(sd.ConfigError, match=r"unknown keyword 'batch_size'.*max_batch_size"):
        sd.generate(target, None, [[1]], batch_size=4)


def test_unknown_draft(target):
    with pytest.raises(sd.ConfigError, match="draft is a int"):
        sd.Engine(target, 5)


def test_number_of_params(target):
    with pytest.raises(sd.ConfigError, match="1 params for 2 prompts"):
        sd.Engine(target, None).generate([[5], [6]], [sd.SamplingParams()])


def test_negative_temperature():
    with pytest.raises(sd.InvalidParamsError, match=r"temperature=-0.5: expected"):
        sd.SamplingParams(temperature=-0.5)


def test_draft_with_another_vocabulary(target):
    config = copy.deepcopy(target.config)
    config.vocab_size = 1000
    config._name_or_path = ""
    stranger = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(sd.VocabularyMismatchError, match=r"has 1000 ids.*has 1024.*ngram"):
        sd.Engine(target, stranger)


def test_draft_with_other_words(target, draft, tmp_path, tokenizer):
    text = (demo_pair() / "draft" / "tokenizer.json").read_text()
    draft.save_pretrained(tmp_path)
    swapped = text.replace('"Ġthe":', '"\\u0000":').replace('"Ġa":', '"Ġthe":').replace('"\\u0000":', '"Ġa":')
    assert swapped != text
    (tmp_path / "tokenizer.json").write_text(swapped)
    (tmp_path / "tokenizer_config.json").write_text((demo_pair() / "draft" / "tokenizer_config.json").read_text())
    with pytest.raises(sd.VocabularyMismatchError, match="different ids to the same words"):
        sd.Engine(target, str(tmp_path), tokenizer=tokenizer)


def test_training_mode(target):
    model = copy.deepcopy(target).train()
    with pytest.raises(sd.ConfigError, match=r"model.eval\(\)"):
        sd.Engine(model, None)


def test_dtype_of_a_loaded_model(target):
    with pytest.raises(sd.ConfigError, match="float32"):
        sd.Engine(target, None, dtype="bfloat16")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AutoModelForCausalLM.from_config(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
            "0 of 2 layers",
        ),
        (
            lambda: T5Model(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=97)),
            "encoder-decoder",
        ),
        (lambda: torch.nn.Linear(2, 2), "not a Hugging Face model"),
    ],
    ids=["own attention", "encoder-decoder", "no language model"],
)
def test_unsupported_model(make, message):
    with pytest.raises(sd.UnsupportedModelError, match=message):
        sd.Engine(make().eval(), None)
