"""Calls that are wrong as a whole: a typed error before any work, that says what came and what to do."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    PhimoeConfig,
    T5Config,
    T5Model,
)

import specdec_fast as sd
from specdec_fast.assets import demo_pair


def test_unknown_method_lists_the_known(target):
    with pytest.raises(sd.ConfigError, match=r"method='fast': expected one of eqspec, exspec"):
        sd.Engine(target, None, method="fast")


def test_unknown_keyword(target):
    with pytest.raises(sd.ConfigError, match=r"unknown keyword 'batch_size'.*max_batch_size"):
        sd.generate(target, None, [[1]], batch_size=4)


def test_unknown_draft(target):
    with pytest.raises(sd.ConfigError, match="draft is a int"):
        sd.Engine(target, 5)


def test_misspelt_drafter_is_not_looked_for_on_a_hub(target):
    with pytest.raises(sd.ConfigError, match=r"draft='n-gram': did you mean 'ngram'"):
        sd.Engine(target, "n-gram")


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


def test_window_that_only_the_mask_knows_is_refused():
    """PhiMoE slides through its mask; on pages it would see too much, and its short probe would not show it."""
    config = PhimoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        sliding_window=20,
        max_position_embeddings=128,
    )
    with pytest.raises(sd.UnsupportedModelError, match="window through the mask alone"):
        sd.Engine(AutoModelForCausalLM.from_config(config).eval(), None)


def test_model_without_a_head():
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(sd.UnsupportedModelError, match="LlamaModel cannot run"):
        sd.Engine(AutoModel.from_config(config).eval(), None)


def test_field_of_a_request_among_the_engines(target):
    with pytest.raises(sd.ConfigError, match=r"'max_new_tokens' belongs to a request; pass params=SamplingParams"):
        sd.generate(target, None, [[5]], max_new_tokens=3)


def test_pool_larger_than_memory(target):
    engine = sd.Engine(target, None, kv_cache_tokens=10**14)
    with pytest.raises(sd.KVCacheAllocationError, match=r"100000000000000 positions needs .* GiB.*kv_cache_tokens"):
        engine.generate([[5]])


class TestShapesOfPrompts:
    """What else callers pass: a tokenizer's result, tensors, NumPy integers."""

    PARAMS = sd.SamplingParams(max_new_tokens=4)

    @pytest.fixture
    def engine(self, target):
        return sd.Engine(target, None)

    @pytest.mark.parametrize("tensors", [None, "pt"], ids=["lists", "tensors"])
    def test_tokenizer_result_without_its_padding(self, engine, tokenizer, tensors):
        texts = ["One day, a little bird", "Items: owl"]
        padded = tokenizer(texts, padding=True, return_tensors=tensors)
        outputs = engine.generate(padded, self.PARAMS)
        assert [o.prompt_ids for o in outputs] == [tokenizer(text).input_ids for text in texts]

    def test_one_encoded_text(self, engine, tokenizer):
        (output,) = engine.generate(tokenizer("Items: owl"), self.PARAMS)
        assert output.prompt_ids == tokenizer("Items: owl").input_ids

    def test_mapping_of_something_else(self, engine):
        with pytest.raises(sd.ConfigError, match="mapping of 'prompts'"):
            engine.generate({"prompts": ["a"]})

    def test_padded_tensor_without_its_mask(self, engine):
        with pytest.raises(sd.ConfigError, match="cannot tell padding from content"):
            engine.generate(torch.zeros(2, 3, dtype=torch.int64))

    @pytest.mark.parametrize(
        "prompts",
        [torch.tensor([0, 70]), np.array([0, 70]), [[np.int64(0), np.int32(70)]], [torch.tensor([0, 70])], (0, 70)],
        ids=["tensor", "array", "NumPy integers", "list of tensors", "tuple"],
    )
    def test_integers_of_any_kind(self, engine, prompts):
        (output,) = engine.generate(prompts, self.PARAMS)
        assert output.raise_for_error().prompt_ids == [0, 70]
        assert all(type(token) is int for token in output.prompt_ids)
