"""Every field of SamplingParams can be sent over HTTP, in batch files and on the command line, or a reason is named."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
from transformers import GenerationConfig

import specdec_fast as sd
from specdec_fast.cli import build_parser
from specdec_fast.generation_configs import FROM_GENERATION_CONFIG, renamed
from specdec_fast.server.protocol import ChatBody, CompletionBody

FIELDS = [field.name for field in fields(sd.SamplingParams)]
# Bodies of requests are the lines of batch files as well.
BODY_NAMES = {"max_new_tokens": "max_tokens"}
NOT_IN_BODIES = {
    "logits_processors": "functions of Python",
    "reasoning": "the server's option --reasoning-parser; a chat may limit it (thinking_token_budget)",
}
OPTIONS = {"bad_words": "bad_word", "structured_outputs": "json_schema"}
NOT_IN_OPTIONS = {
    "logits_processors": "functions of Python",
    "stop_token_ids": "texts of a file end at EOS and at strings",
    "ignore_eos": "texts of a file end at EOS and at strings",
    "skip_special_tokens": "records have the token ids",
    "include_stop_str_in_output": "records have the token ids",
    "num_draft_tokens": "the engine's option has this name",
    "priority": "all texts of a file are decoded",
}
NOT_IN_CONFIGS = {
    "presence_penalty", "frequency_penalty", "allowed_token_ids", "seed", "logprobs", "num_draft_tokens",
    "prompt_logprobs", "priority", "skip_special_tokens", "structured_outputs", "reasoning",
    "include_stop_str_in_output",
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_bodies(name):
    for body in (CompletionBody, ChatBody):
        assert (BODY_NAMES.get(name, name) in body.model_fields) == (name not in NOT_IN_BODIES)


@pytest.mark.parametrize("name", FIELDS)
def test_options_of_generate(name):
    parser = build_parser(["generate"])
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    options = {action.dest for action in commands.choices["generate"]._actions}
    if name not in NOT_IN_OPTIONS:
        assert OPTIONS.get(name, name) in options


def test_generation_configs():
    given = {
        "max_new_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5,
        "stop_strings": ["x"], "num_return_sequences": 2, "min_new_tokens": 3, "bad_words_ids": [[5]],
        "suppress_tokens": [6], "sequence_bias": [[[7], 1.0]], "no_repeat_ngram_size": 2,
    }  # fmt: skip
    assert set(given) == set(FROM_GENERATION_CONFIG)
    ours = set(renamed(given))
    assert ours | NOT_IN_CONFIGS | {"stop_token_ids", "ignore_eos"} == set(FIELDS)  # eos_token_id sets the last two
    params = sd.SamplingParams.from_generation_config(GenerationConfig(do_sample=True, eos_token_id=8, **given))
    plain = sd.SamplingParams()
    assert all(getattr(params, name) != getattr(plain, name) for name in ours | {"stop_token_ids", "ignore_eos"})
