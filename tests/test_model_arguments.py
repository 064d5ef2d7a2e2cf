"""How a KV cache is passed to the forwards of different versions of ``transformers``, and of wrappers around them."""

from __future__ import annotations

import functools
import inspect
import warnings

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

import specdec_fast as sd
from specdec_fast import oracle
from specdec_fast.model_arguments import cache_argument
from support.models import tiny_model


class Old(torch.nn.Module):
    def forward(self, input_ids, past_key_values=None, **kwargs): ...


class New(torch.nn.Module):
    def forward(self, input_ids, cache=None, **kwargs): ...


class Both(torch.nn.Module):
    def forward(self, input_ids, cache=None, past_key_values=None): ...


class Neither(torch.nn.Module):
    def forward(self, *args, **kwargs): ...


class WrapsNew(New):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_the_forward_names_its_cache():
    names = {cls: cache_argument(cls()) for cls in (Old, New, Both, Neither, WrapsNew)}
    old = "past_key_values"
    assert names == {Old: old, New: "cache", Both: old, Neither: old, WrapsNew: "cache"}


@pytest.mark.parametrize("wraps", [False, True])
def test_a_replaced_forward_takes_what_the_replaced_one_took(wraps):
    model = New()
    original = model.forward

    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    model.forward = functools.wraps(original)(forward) if wraps else forward
    assert cache_argument(model) == "cache"


def test_a_decorator_of_transformers_does_not_hide_the_name():
    name = cache_argument(tiny_model("llama"))
    assert name in inspect.signature(LlamaForCausalLM.forward).parameters


@pytest.fixture
def log(caplog):
    """What ``transformers`` logs, which its loggers do not pass on."""
    logger = logging.get_logger("transformers")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logging.set_verbosity(verbosity)


def test_calls_of_this_library_pass_no_deprecated_argument(log):
    """Neither a warning nor a line in the log, from PyTorch's forwards, programs and the oracle."""
    model, prompts = tiny_model("llama"), [[5, 6, 7], [8, 9]]
    params = sd.SamplingParams(max_new_tokens=3)
    stop = oracle.StopRule(3, frozenset())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for eager in (False, True):
            outputs = sd.generate(model, "ngram", prompts, params, enforce_eager=eager)
            assert [output.error for output in outputs] == [None, None]
        assert oracle.eqspec(model, None, prompts, stop).outputs == [output.token_ids for output in outputs]
        assert oracle.autoregressive(model, prompts[0], 3) == outputs[0].token_ids
    assert not [message for message in log.messages if "deprecated" in message]
