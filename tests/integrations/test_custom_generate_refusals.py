"""What ``custom_generate`` refuses: by its name, with what to use instead, before it decodes a token."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import specdec_fast as sd
from specdec_fast.errors import (
    ConfigError,
    InvalidParamsError,
    InvalidPromptError,
    LogitsProcessorError,
    NotYetSupportedError,
    StoppingCriteriaError,
    UnsupportedModelError,
)
from specdec_fast.integrations.transformers import arguments, custom_generate
from specdec_fast.model_arguments import cache_argument
from support.models import tiny_model
from support.padded import padded

BATCH = padded([[3, 17, 5, 9, 3], [41, 4]], pad=0)
LIMIT = {"max_new_tokens": 8, "pad_token_id": 0}
OWN = {"custom_generate": custom_generate}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 3}, r"num_beams=3; there is no beam search; .*num_return_sequences"),
        ({"num_beams": 2, "do_sample": True}, r"num_beams=2; there is no beam search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha=0.6; there is no contrastive search; decode greedily"),
        ({"dola_layers": "low"}, r"dola_layers='low'"),
        ({"guidance_scale": 1.5}, r"guidance_scale=1.5"),
        ({"encoder_repetition_penalty": 1.2}, r"encoder_repetition_penalty=1.2; use repetition_penalty"),
        ({"assistant_early_exit": 1}, r'assistant_early_exit=1; use draft="self"'),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, r"output_hidden_states=True"),
        ({"output_attentions": True, "return_dict_in_generate": True}, r"output_attentions=True"),
        ({"cache_implementation": "offloaded"}, r"cache_implementation='offloaded'; the engine has a paged KV cache"),
        ({"inputs_embeds": torch.zeros(2, 5, 32)}, r"inputs_embeds.*token ids only"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 7, 8]])}, "position_ids"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
)
def test_what_has_no_counterpart_is_named(model, asked, message):
    with pytest.raises(NotYetSupportedError, match=message):
        model.generate(**BATCH, **LIMIT, **asked, **OWN)


def test_a_cache_of_the_caller(model):
    """transformers 5.24 has another name for it."""
    name = cache_argument(model)
    with pytest.raises(NotYetSupportedError, match=rf"{name}.*prefix_cache=True"):
        model.generate(**BATCH, **LIMIT, **{name: DynamicCache()}, **OWN)


def test_encoder_decoder_models():
    sizes = {"d_model": 16, "vocab_size": 20, "max_position_embeddings": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads)).eval()
    with pytest.raises(NotYetSupportedError, match=r"encoder-decoder.*call generate without custom_generate"):
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, **OWN)


def test_every_field_of_a_generation_config_is_decided_on():
    """A field that a later transformers adds is refused if it is set; here it must be put where it belongs."""
    known = {*arguments._REFUSED, *arguments._SERVED, *arguments._NEUTRAL}
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= known


def test_a_field_that_nobody_knows_is_refused(model, monkeypatch):
    monkeypatch.setattr(arguments, "_NEUTRAL", arguments._NEUTRAL - {"low_memory"})
    with pytest.raises(NotYetSupportedError, match=r"low_memory=True, which the engine does not know"):
        model.generate(**BATCH, **LIMIT, low_memory=True, **OWN)


@pytest.mark.parametrize("config", [{"num_beams": 4}, {"penalty_alpha": 0.6, "top_k": 4}])
def test_configs_are_read_as_arguments_are(model, config):
    with pytest.raises(NotYetSupportedError, match=next(iter(config))):
        model.generate(**BATCH, generation_config=GenerationConfig(**config, **LIMIT), **OWN)


def test_processors_of_transformers_that_read_other_rows(model):
    from transformers import EncoderNoRepeatNGramLogitsProcessor

    processor = EncoderNoRepeatNGramLogitsProcessor(2, BATCH["input_ids"])
    with pytest.raises(NotYetSupportedError, match="EncoderNoRepeatNGramLogitsProcessor, which reads other rows"):
        model.generate(**BATCH, **LIMIT, logits_processor=LogitsProcessorList([processor]), **OWN)


def test_autocast(model):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotYetSupportedError, match="autocast"):
        model.generate(**BATCH, **LIMIT, **OWN)


def test_training_mode(model):
    model.train()
    try:
        with pytest.raises((ConfigError, UnsupportedModelError), match=r"eval\(\)"):
            model.generate(**BATCH, **LIMIT, **OWN)
    finally:
        model.eval()


@pytest.mark.parametrize("others", [{"draft": "ngram"}, {"prompt_lookup_num_tokens": 3}])
def test_two_drafters(model, others):
    with pytest.raises(ConfigError, match=rf"{next(iter(others))}.*expected one drafter|expected one drafter"):
        model.generate(**BATCH, **LIMIT, assistant_model=tiny_model("llama", seed=1), **others, **OWN)


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"device": "cpu"}, {"quantization": "int8"}])
def test_settings_that_would_change_the_model(model, setting):
    with pytest.raises(ConfigError, match=rf"engine_config sets {next(iter(setting))}="):
        model.generate(**BATCH, **LIMIT, engine_config=sd.EngineConfig(**setting), **OWN)


def test_k_twice(model):
    with pytest.raises(ConfigError, match="not both"):
        model.generate(**BATCH, **LIMIT, engine_config=sd.EngineConfig(), num_draft_tokens=3, **OWN)


def test_an_argument_that_nobody_knows(model):
    """transformers refuses it before the callable is called."""
    with pytest.raises(ValueError, match="num_daft_tokens"):
        model.generate(**BATCH, **LIMIT, num_daft_tokens=3, **OWN)


def test_a_row_without_tokens(model):
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}
    with pytest.raises(InvalidPromptError, match="row 1 has no tokens"):
        model.generate(**batch, **LIMIT, **OWN)


def test_ids_outside_the_vocabulary(model):
    with pytest.raises(InvalidPromptError, match="token id 500 is outside"):
        model.generate(torch.tensor([[3, 500]]), **LIMIT, **OWN)


def test_no_padding_id(model):
    with pytest.raises(InvalidParamsError, match="pass pad_token_id"):
        model.generate(**BATCH, max_new_tokens=8, stopping_criteria=StoppingCriteriaList([Failing()]), **OWN)


class Failing(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise OSError("a criterion failed")


class FailingProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise OSError("a processor failed")


class TestCodeOfTheCaller:
    """What it raises ends the call with a typed error, and leaves the engine fit for the next one."""

    @pytest.fixture(autouse=True)
    def _next_call(self, model):
        yield
        expected = model.generate(**BATCH, **LIMIT)
        assert model.generate(**BATCH, **LIMIT, **OWN).tolist() == expected.tolist()

    def test_criteria(self, model):
        with pytest.raises(StoppingCriteriaError, match="OSError: a criterion failed") as raised:
            model.generate(**BATCH, **LIMIT, stopping_criteria=StoppingCriteriaList([Failing()]), **OWN)
        assert isinstance(raised.value.__cause__, OSError)

    def test_processors(self, model):
        processors = LogitsProcessorList([FailingProcessor()])
        with pytest.raises(LogitsProcessorError, match=re.escape("'FailingProcessor' raised OSError: a processor")):
            model.generate(**BATCH, **LIMIT, logits_processor=processors, **OWN)

    def test_streamers(self, model):
        class Closed:
            def put(self, value):
                if value.ndim == 1:
                    raise BrokenPipeError("the reader has gone")

        with pytest.raises(BrokenPipeError):
            model.generate(**BATCH, **LIMIT, streamer=Closed(), **OWN)
