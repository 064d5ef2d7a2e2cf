"""Sampling parameters and engine settings: what is accepted, what is refused, and with which message."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GPT2Config

import specdec_fast as sd
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.errors import ConfigError, InvalidParamsError, NotYetSupportedError
from specdec_fast.models.loading import eos_token_ids
from specdec_fast.sampling_params import as_sampling_params, recommended_sampling
from support.models import tiny_model

NAN = math.nan
# Per field: just outside its range, and the types that a comparison would let slip through (bool, NaN, text).
OUT_OF_RANGE = [
    ("max_new_tokens", 0), ("max_new_tokens", -3), ("max_new_tokens", 1.5), ("max_new_tokens", True),
    ("max_new_tokens", 2**31), ("max_new_tokens", 10**300), ("max_new_tokens", "8"), ("max_new_tokens", None),
    ("temperature", -0.1), ("temperature", NAN),
    ("temperature", "0"), ("temperature", False), ("top_k", -1), ("top_k", 2.0), ("top_k", True), ("top_p", 0),
    ("top_p", 1.01), ("top_p", NAN), ("top_p", None), ("min_p", -0.01), ("min_p", 1.5), ("min_p", NAN),
    ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", NAN),
    ("repetition_penalty", math.inf), ("temperature", math.inf), ("seed", 1.0),
    ("seed", True), ("seed", "7"), ("seed", 2**63), ("seed", -(2**63) - 1),
    ("stop", ("",)), ("stop", ("a", 3)), ("stop", 5),
    ("stop_token_ids", (-1,)), ("stop_token_ids", (1.0,)), ("stop_token_ids", ("</s>",)),
    ("stop_token_ids", (True,)), ("stop_token_ids", 2), ("temperature", 10**400), ("repetition_penalty", 10**400),
    *(("ignore_eos", value) for value in ("false", 0, 1, None, NAN)),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in ("false", -1, 1.0, NAN, (1,))),
    ("logprobs", None), ("prompt_logprobs", True), ("n", 0), ("n", -1), ("n", True), ("n", 1.0), ("n", None),
    ("n", 16_385), ("priority", "high"), ("priority", 1.5), ("priority", True), ("priority", None),
    ("priority", 2**63), ("priority", -(2**63) - 1),
    ("presence_penalty", 2.1), ("presence_penalty", NAN), ("presence_penalty", "1"), ("frequency_penalty", -2.1),
    ("frequency_penalty", True), ("frequency_penalty", None), ("logit_bias", {1: NAN}), ("logit_bias", {1: math.inf}),
    ("logit_bias", {-1: 1.0}), ("logit_bias", [1]), ("logit_bias", {1: "2"}), ("allowed_token_ids", ()),
    ("allowed_token_ids", (-1,)), ("allowed_token_ids", ("a",)), ("allowed_token_ids", 5), ("bad_words", ("",)),
    ("bad_words", (" ",)), ("bad_words", ((),)), ("bad_words", ((1, -2),)), ("bad_words", (3,)), ("bad_words", 3),
    ("min_tokens", -1), ("min_tokens", 129), ("min_tokens", 1.0), ("min_tokens", True), ("min_tokens", None),
    ("logits_processors", ("x",)), ("logits_processors", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=[f"{n}-{v!r}" for n, v in OUT_OF_RANGE])
def test_params_out_of_range(name, value):
    with pytest.raises(InvalidParamsError) as caught:
        sd.SamplingParams(**{name: value})
    assert name in str(caught.value), "names the field"
    assert repr(value) in str(caught.value), "shows the value"
    assert "expected" in str(caught.value), "says what is accepted"


def test_no_new_tokens_only_to_score_a_prompt():
    assert sd.SamplingParams(max_new_tokens=0, prompt_logprobs=0).max_new_tokens == 0
    with pytest.raises(InvalidParamsError, match=r"max_new_tokens=0: expected .*or 0, if prompt_logprobs"):
        sd.SamplingParams(max_new_tokens=0, logprobs=True)
    with pytest.raises(InvalidParamsError, match="max_new_tokens=-1: expected"):
        sd.SamplingParams(max_new_tokens=-1, prompt_logprobs=0)


def test_how_many_of_the_most_likely_tokens():
    found = {value: sd.SamplingParams(logprobs=value) for value in (False, True, 3)}
    assert [params.num_top_logprobs for params in found.values()] == [0, 0, 3]
    assert sd.SamplingParams(logprobs=0).logprobs is True, "as in vLLM"
    assert sd.SamplingParams(logprobs=np.int64(2), prompt_logprobs=np.int64(1)).num_top_logprobs == 2


def test_each_text_of_a_prompt_has_a_seed():
    last = sd.SamplingParams(n=3, seed=2**63 - 2).choices()
    assert [params.seed for params in last] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [params.seed for params in sd.SamplingParams(n=2).choices()] == [None, None]


def test_texts_of_a_generation_config():
    given = GenerationConfig(do_sample=True, num_return_sequences=3)
    assert sd.SamplingParams.from_generation_config(given).n == 3


def test_biases_words_and_ids_of_every_form():
    function = max
    params = sd.SamplingParams(
        logit_bias={"5": 1, np.int64(7): np.float32(0.5)}, allowed_token_ids=np.array([3, 4]), bad_words="word",
        logits_processors=function,
    )  # fmt: skip
    assert params.logit_bias == {5: 1, 7: 0.5}
    assert (params.allowed_token_ids, params.bad_words, params.logits_processors) == ((3, 4), ("word",), (function,))
    assert sd.SamplingParams(bad_words=[[1, 2], "x", range(3)]).bad_words == ((1, 2), "x", (0, 1, 2))
    none = sd.SamplingParams(logit_bias=None, bad_words=None, logits_processors=None)
    assert none == sd.SamplingParams()
    assert hash(params) == hash(replace(params, logit_bias={}))


@pytest.mark.parametrize("key", ["a", 1.5, None, True, "-1", "9" * 30], ids=repr)
def test_keys_of_biases_are_token_ids(key):
    with pytest.raises(InvalidParamsError, match="logit_bias has the key"):
        sd.SamplingParams(logit_bias={key: 1.0})


@pytest.mark.parametrize(
    ("name", "most", "one_more"),
    [
        ("logit_bias", dict.fromkeys(range(16_384), 1.0), dict.fromkeys(range(16_385), 1.0)),
        ("bad_words", ["a"] * 4096, ["a"] * 4097),
        ("bad_words", ["a" * 65_536], ["a" * 65_536, [1]]),
    ],
    ids=["biases", "words", "characters"],
)
def test_what_a_request_restricts_has_a_limit(name, most, one_more):
    sd.SamplingParams(**{name: most})
    with pytest.raises(InvalidParamsError, match=f"{name}=.*expected at most") as caught:
        sd.SamplingParams(**{name: one_more})
    assert len(str(caught.value)) < 1000


def test_restrictions_of_a_generation_config():
    given = GenerationConfig(
        min_new_tokens=3, bad_words_ids=[[4], [5, 6]], suppress_tokens=[7], sequence_bias={(8,): 1.5}, max_new_tokens=9
    )
    assert sd.SamplingParams.from_generation_config(given) == sd.SamplingParams(
        max_new_tokens=9, min_tokens=3, bad_words=[[4], [5, 6], [7]], logit_bias={8: 1.5}
    )
    given = GenerationConfig(sequence_bias={(8, 9): 1.5}, no_repeat_ngram_size=2)
    params = sd.SamplingParams.from_generation_config(given)
    names = [type(processor).__name__ for processor in params.logits_processors]
    assert names == ["SequenceBiasLogitsProcessor", "NoRepeatNGramLogitsProcessor"]


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_what_must_be_a_list_is_not_one_element(name):
    with pytest.raises(InvalidParamsError, match=f"{name}=None: expected a list, an empty one for none"):
        sd.SamplingParams(**{name: None})


@pytest.mark.parametrize(
    ("name", "most", "message"),
    [
        ("stop", [f"s{i}" for i in range(1024)], "1025 strings; expected at most 1024"),
        ("stop", ["a" * 16_000, "b" * 384], "16385 characters together; expected at most 16384"),
        ("stop_token_ids", list(range(16_384)), "16385 token ids; expected at most 16384"),
    ],
    ids=["strings", "characters", "token ids"],
)
def test_stops_have_a_limit_and_its_message_is_short(name, most, message):
    assert len(getattr(sd.SamplingParams(**{name: most}), name)) == len(most)
    with pytest.raises(InvalidParamsError, match=rf"{name}=\(.*{message}") as caught:
        sd.SamplingParams(**{name: [*most, most[0][:1] if name == "stop" else 0]})
    assert len(str(caught.value)) < 1000


def test_a_wrong_stop_among_many_has_a_short_message():
    with pytest.raises(InvalidParamsError, match="expected non-empty strings") as caught:
        sd.SamplingParams(stop=[*["END"] * 100_000, ""])
    assert len(str(caught.value)) < 1000


# The ends of every range, which are inside.
@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 1}, {"temperature": 0}, {"top_k": 0}, {"top_k": 50}, {"top_p": 1}, {"top_p": 1e-9},
        {"min_p": 0}, {"min_p": 1.0}, {"repetition_penalty": 1}, {"seed": -1}, {"seed": None}, {"seed": 2**63 - 1},
        {"temperature": 0.7}, {"repetition_penalty": 0.5},
        {"stop_token_ids": [0, 5]}, {"stop_token_ids": range(3)}, {"ignore_eos": True},
        {"logprobs": True}, {"stop": ("END", "\n\n", " ")},
    ],
    ids=str,
)  # fmt: skip
def test_params_in_range(values):
    params = sd.SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items() if name != "stop_token_ids")
    assert isinstance(params.stop_token_ids, tuple), "a tuple, whatever was passed"


def test_scalars_of_numpy_are_numbers():
    params = sd.SamplingParams(
        max_new_tokens=np.int64(3), temperature=np.float64(0.5), stop_token_ids=np.array([2]), logprobs=np.True_
    )
    assert params == sd.SamplingParams(max_new_tokens=3, temperature=0.5, stop_token_ids=(2,), logprobs=True)
    assert {type(params.max_new_tokens), type(params.temperature), type(params.logprobs)} == {int, float, bool}
    config = sd.EngineConfig(max_batch_size=np.int32(3), num_draft_tokens=np.int64(0), deterministic=np.False_)
    assert config == sd.EngineConfig(max_batch_size=3, num_draft_tokens=0, deterministic=False)


def test_greedy_generation_config():
    given = GenerationConfig(max_new_tokens=7, do_sample=False)
    assert sd.SamplingParams.from_generation_config(given) == sd.SamplingParams(max_new_tokens=7)


@pytest.mark.filterwarnings("ignore")  # transformers warns of sampling settings in a greedy config
def test_greedy_generation_config_ignores_the_temperature():
    given = GenerationConfig(do_sample=False, temperature=0.7, top_k=50, top_p=0.9)
    params = sd.SamplingParams.from_generation_config(given)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 50, 0.9)


@pytest.mark.parametrize("stop_strings", ["END", ["END"], ["END", "STOP"]], ids=str)
def test_stop_strings_of_a_generation_config(stop_strings):
    given = GenerationConfig(stop_strings=stop_strings, do_sample=False)
    want = ("END",) if isinstance(stop_strings, str) else tuple(stop_strings)
    assert sd.SamplingParams.from_generation_config(given) == sd.SamplingParams(stop=want)


def test_one_stop_string_is_not_its_letters():
    assert sd.SamplingParams(stop="END").stop == ("END",)


class TargetOfTwenty:
    vocab_size, max_positions, eos_token_ids = 20, None, frozenset({19})


@pytest.mark.parametrize(("eos", "stop_ids"), [(None, {19}), (3, {3}), ([3, 4], {3, 4})], ids=str)
def test_eos_of_a_generation_config_replaces_the_targets(eos, stop_ids):
    params = sd.SamplingParams.from_generation_config(GenerationConfig(eos_token_id=eos, do_sample=False))
    assert RequestBuilder(TargetOfTwenty(), None).build(0, [1, 2], params).stop_ids == stop_ids


@pytest.mark.parametrize(
    ("eos", "ids"),
    [(None, ()), (3, (3,)), ([3, 4], (3, 4)), ((3,), (3,)), (torch.tensor(3), (3,)), (torch.tensor([3, 4]), (3, 4)),
     (np.int64(3), (3,)), ([np.int64(3)], (3,)), (-1, ()), ([3, -1], (3,))],
    ids=repr,
)  # fmt: skip
def test_every_kind_of_eos_of_a_generation_config(eos, ids):
    """Of a request and of a model; a negative one, with which some callers switch EOS off, stops nothing."""
    config, model = GenerationConfig(), tiny_model("llama")
    config.eos_token_id = model.generation_config.eos_token_id = eos
    params = sd.SamplingParams.from_generation_config(config)
    assert (params.stop_token_ids, params.ignore_eos) == (ids, eos is not None)
    found = eos_token_ids(model)
    assert found == set(ids)
    assert all(type(each) is int for each in found)


# `stop_token_ids` come on top of the target's EOS, unless that is to be ignored.
@pytest.mark.parametrize(("ignore_eos", "stop_ids"), [(False, {5, 19}), (True, {5})])
def test_stop_token_ids_add_to_eos(ignore_eos, stop_ids):
    params = sd.SamplingParams(stop_token_ids=(5,), ignore_eos=ignore_eos)
    assert RequestBuilder(TargetOfTwenty(), None).build(0, [1, 2], params).stop_ids == stop_ids


# Each changes which tokens come out, and has no counterpart here.
@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 4), ("max_length", 30), ("forced_eos_token_id", 3), ("begin_suppress_tokens", [2]),
     ("guidance_scale", 1.5)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_generation_config_with_a_field_unknown_here_is_refused(name, value):
    with pytest.raises(NotYetSupportedError, match=f"GenerationConfig sets .*{name}.*unset"):
        sd.SamplingParams.from_generation_config(GenerationConfig(**{name: value}))


def test_generation_config_of_a_model_is_understood():
    # ids of special tokens and the like say nothing about which tokens come out
    given = GenerationConfig.from_model_config(GPT2Config())
    assert sd.SamplingParams.from_generation_config(given).stop_token_ids == (GPT2Config().eos_token_id,)


def test_params_from_what_callers_pass():
    params = sd.SamplingParams(max_new_tokens=3)
    assert as_sampling_params(params) is params
    assert as_sampling_params(None) == sd.SamplingParams()
    assert as_sampling_params(GenerationConfig(max_new_tokens=3)) == params
    with pytest.raises(InvalidParamsError, match=r"params is a dict; expected SamplingParams, .* or None"):
        as_sampling_params({"max_new_tokens": 3})


# Just outside each range, and the types that a comparison would let slip through.
BAD_CONFIG = [
    ("max_batch_size", 0), ("max_batch_size", 2.0), ("max_batch_size", True), ("max_batch_size", None),
    ("num_draft_tokens", -1), ("num_draft_tokens", "5"), ("num_draft_tokens", NAN), ("num_draft_tokens", "Auto"),
    ("num_draft_tokens", True), ("num_draft_tokens", None), ("max_wait_steps", -1),
    ("page_size", 0), ("page_size", True), ("kv_cache_tokens", 0), ("kv_cache_tokens", 1e6),
    ("window_size", 7), ("window_size", 41), ("window_size", 16.0), ("window_size", "16"), ("dtype", "int8"),
    ("dtype", torch.int8), ("dtype", torch.float64), ("dtype", "torch.float32"), ("device", "warp-drive"),
    ("device", "meta"), ("device", 10**30), ("device", True),
    ("dtype", ["float32"]), ("dtype", float), ("method", 5), ("method", ["exspec"]), ("backend", None),
    ("backend", ["cpp"]), ("window_size", True), ("page_size", 10**30), ("max_batch_size", 10**30),
    ("num_draft_tokens", 10**30), ("num_draft_tokens", ["auto"]),
    *((name, value) for name in ("deterministic", "enforce_eager") for value in ("false", 0, 1, None, NAN)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_CONFIG, ids=[f"{n}-{v!r}" for n, v in BAD_CONFIG])
def test_config_out_of_range(name, value):
    with pytest.raises(ConfigError) as caught:
        sd.EngineConfig(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "expected" in str(caught.value).lower()


# The ends of every range, which are inside: for a batch of 8 and 4 steps of waiting a window of 8 to 40.
@pytest.mark.parametrize(
    ("name", "value"),
    [("max_batch_size", 1), ("num_draft_tokens", 0), ("num_draft_tokens", "auto"), ("max_wait_steps", 0),
     ("page_size", 1), ("kv_cache_tokens", 1), ("window_size", 8), ("window_size", 40)],
)  # fmt: skip
def test_config_in_range(name, value):
    assert getattr(sd.EngineConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("float32", torch.float32), ("fp32", torch.float32), ("float16", torch.float16), ("fp16", torch.float16),
     ("bfloat16", torch.bfloat16), ("bf16", torch.bfloat16), (torch.bfloat16, torch.bfloat16), (None, None)],
    ids=str,
)  # fmt: skip
def test_dtype_names(given, dtype):
    assert sd.EngineConfig(dtype=given).dtype is dtype


def test_unknown_dtype_lists_the_known():
    with pytest.raises(ConfigError, match=r"dtype='fp8': expected one of float32, fp32, .*bf16"):
        sd.EngineConfig(dtype="fp8")


def test_device_by_name_or_object():
    assert sd.EngineConfig(device="cpu").device == sd.EngineConfig(device=torch.device("cpu")).device


def test_keywords_make_the_same_config():
    keywords = {"method": "eqspec", "max_batch_size": 3, "dtype": "bf16"}
    assert sd.EngineConfig.from_keywords(keywords) == sd.EngineConfig(**keywords)
    assert sd.EngineConfig.from_keywords({}) == sd.EngineConfig()


# One letter off, another library's name for it, and a name like no other.
@pytest.mark.parametrize(
    ("keyword", "suggestion"),
    [("num_draft_token", "num_draft_tokens"), ("batch_size", "max_batch_size"), ("xyzzy", None)],
)
def test_unknown_keyword_is_an_error_and_suggests(keyword, suggestion):
    with pytest.raises(ConfigError) as caught:
        sd.EngineConfig.from_keywords({keyword: 4})
    message = str(caught.value)
    assert f"unknown keyword {keyword!r}" in message
    assert (f"Did you mean {suggestion}?" in message) if suggestion else ("Did you mean" not in message)
    assert all(field.name in message for field in fields(sd.EngineConfig)), "lists the known"


def test_public_calls_refuse_unknown_keywords_before_loading_anything():
    for call in (lambda: sd.generate("no/such-model", None, ["Hi"], num_draft=4),
                 lambda: sd.Engine("no/such-model", None, num_draft=4)):  # fmt: skip
        with pytest.raises(ConfigError, match="unknown keyword 'num_draft'"):
            call()
    with pytest.raises(ConfigError, match="either an EngineConfig or keywords"):
        sd.Engine("no/such-model", None, sd.EngineConfig(), num_draft_tokens=4)


def test_recommended_sampling_is_what_the_generation_config_sets():
    """No default of transformers, such as its top_k of 50, and nothing that is not for sampling."""
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, repetition_penalty=1.05, eos_token_id=[1, 2])
    assert recommended_sampling(config) == {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}
    assert recommended_sampling(GenerationConfig(do_sample=True, top_k=20)) == {"top_k": 20}
    assert recommended_sampling(GenerationConfig(do_sample=True)) == {}
    assert recommended_sampling(GenerationConfig(temperature=0.6, top_k=-1)) == {"temperature": 0.6, "top_k": 0}
    assert recommended_sampling(None) == {}
