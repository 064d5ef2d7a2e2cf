"""Bodies of OpenAI's API: what becomes of each field, what is refused, and how errors are shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

import specdec_fast as sd
from specdec_fast.sampling_params import OPENAI_DEFAULTS
from specdec_fast.server.problems import problem_of, validation_problem
from specdec_fast.server.protocol import ChatBody, CompletionBody
from specdec_fast.server.unsupported import UNSUPPORTED

HELLO = [{"role": "user", "content": "Hello"}]
DEFAULTS = replace(OPENAI_DEFAULTS, max_new_tokens=99)


def completion(**fields):
    return CompletionBody.model_validate({"prompt": "Hi", **fields})


def chat(**fields):
    return ChatBody.model_validate({"messages": HELLO, **fields})


def refusal(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return validation_problem(caught.value.errors())


def test_every_field_reaches_the_engine():
    body = completion(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"7": -100, "8": 2.5},
        allowed_token_ids=[3, 7],
        bad_words=["x", [3, 4]],
        min_tokens=2,
        seed=4,
        stop=["a", "b"],
        stop_token_ids=[3],
        ignore_eos=True,
        num_draft_tokens=2,
        logprobs=0,
        add_special_tokens=False,
    )
    ((prompt, params),) = body.requests(DEFAULTS)
    assert prompt == "Hi"
    assert params == sd.SamplingParams(
        max_new_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={7: -100, 8: 2.5},
        allowed_token_ids=(3, 7),
        bad_words=("x", (3, 4)),
        min_tokens=2,
        seed=4,
        stop=("a", "b"),
        stop_token_ids=(3,),
        ignore_eos=True,
        num_draft_tokens=2,
        logprobs=True,
    )
    assert body.prompt_options() == {"add_special_tokens": False}


def test_defaults_are_those_of_the_api():
    for body, most in ((completion(), 16), (chat(), 99)):
        ((_, params),) = body.requests(DEFAULTS)
        assert params == sd.SamplingParams(max_new_tokens=most, temperature=1.0)
        assert body.prompt_options() == {}
    assert completion(temperature=0, stop="x", top_k=-1).requests(DEFAULTS)[0][1] == sd.SamplingParams(
        max_new_tokens=16, stop=("x",)
    )


def test_a_body_replaces_only_the_defaults_that_it_names():
    defaults = sd.SamplingParams(50, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    assert chat().requests(defaults)[0][1] == defaults
    assert completion().requests(defaults)[0][1] == replace(defaults, max_new_tokens=16)
    body = chat(temperature=0, top_k=-1, top_p=None, repetition_penalty=1)
    assert body.requests(defaults)[0][1] == sd.SamplingParams(50, top_p=0.95)


def test_null_is_the_default():
    fields = [name for name in CompletionBody.model_fields if name not in ("prompt",)]
    assert completion(**dict.fromkeys([*fields, *UNSUPPORTED])).requests(DEFAULTS) == completion().requests(DEFAULTS)
    fields = [name for name in ChatBody.model_fields if name != "messages"]
    assert chat(**dict.fromkeys([*fields, *UNSUPPORTED])).requests(DEFAULTS) == chat().requests(DEFAULTS)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_of_every_kind(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


def test_choices_have_seeds_of_their_own():
    requests = completion(prompt=[[1], [2]], n=3, seed=10).requests(DEFAULTS)
    assert [prompt for prompt, _ in requests] == [[1]] * 3 + [[2]] * 3
    assert [params.seed for _, params in requests] == [10, 11, 12] * 2
    assert [params.seed for _, params in completion(n=2).requests(DEFAULTS)] == [None, None]
    last = completion(prompt=[1], n=3, seed=2**63 - 2).requests(DEFAULTS)
    assert [params.seed for _, params in last] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_log_probabilities_of_the_prompt_are_computed_where_they_are_shown():
    cases = [
        ({"echo": True}, False, None),
        ({"logprobs": 0}, True, None),
        ({"logprobs": 3}, 3, None),
        ({"logprobs": 3, "echo": True}, 3, 3),
        ({"logprobs": 0, "echo": True}, True, 0),
        ({"logprobs": 1, "echo": True, "prompt_logprobs": 4}, 1, 4),
        ({"prompt_logprobs": 2}, False, 2),
        ({"echo": True, "max_tokens": 0}, False, 0),
        ({"echo": True, "max_tokens": 0, "logprobs": 2}, 2, 2),
    ]
    for fields, logprobs, prompt_logprobs in cases:
        ((_, params),) = completion(**fields).requests(DEFAULTS)
        assert (params.logprobs, params.prompt_logprobs) == (logprobs, prompt_logprobs), fields
        assert type(params.logprobs) is type(logprobs)
    ((_, params),) = chat(logprobs=True, top_logprobs=4, prompt_logprobs=1, priority=7).requests(DEFAULTS)
    assert (params.logprobs, params.prompt_logprobs, params.priority) == (4, 1, 7)
    with pytest.raises(sd.InvalidParamsError, match="priority="):
        chat(priority=2**63).requests(DEFAULTS)


def test_the_number_of_choices_is_that_of_the_body():
    defaults = replace(DEFAULTS, n=3, priority=2)
    assert [(params.n, params.priority) for _, params in completion(n=2).requests(defaults)] == [(1, 2)] * 2


def test_chat_fields():
    options = {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": False, "continue_final_message": True}
    body = chat(max_completion_tokens=5, max_tokens=9, logprobs=True, top_logprobs=0, **options)
    assert body.requests(DEFAULTS) == [(HELLO, sd.SamplingParams(max_new_tokens=5, temperature=1.0, logprobs=True))]
    assert body.prompt_options() == options
    assert chat(max_tokens=9).requests(DEFAULTS)[0][1].max_new_tokens == 9


def test_unknown_fields_are_ignored_and_unsupported_ones_refused():
    harmless = {"some_new_field": {"a": 1}, "user": "me", "metadata": {}, "store": True, "parallel_tool_calls": False}
    harmless |= {"mirostat_tau": 3.0, "guided_decoding_backend": "xgrammar"}  # of fields that are not there
    assert completion(**harmless).requests(DEFAULTS) == completion().requests(DEFAULTS)
    for name, neutral in UNSUPPORTED.items():
        for value in neutral:
            completion(**{name: value})
        problem = refusal(CompletionBody, {"prompt": "Hi", name: {"another": "value"}})
        assert (problem.status, problem.param, "not supported" in problem.message) == (400, name, True)


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (CompletionBody, {}, "prompt", "required"),
        (CompletionBody, {"prompt": 5}, "prompt", "valid string, or Input should be a valid list"),
        (CompletionBody, {"prompt": []}, "prompt", "empty"),
        (CompletionBody, {"prompt": ["a", 1]}, "prompt", "valid string"),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt", "valid integer"),
        (CompletionBody, {"prompt": [True]}, "prompt", "valid"),
        (CompletionBody, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "'5': .*valid integer"),
        (CompletionBody, {"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        (
            CompletionBody,
            {"prompt": "a", "max_tokens": 0},
            "max_tokens",
            "the answer would be empty; expected 1 or more",
        ),
        (ChatBody, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CompletionBody, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        (CompletionBody, {"prompt": "a", "n": 3, "best_of": 5}, "best_of", "not supported; use n"),
        (CompletionBody, {"prompt": "a", "n": 129}, "n", "less than or equal to 128"),
        (CompletionBody, {"prompt": "a", "temperature": math.nan}, "temperature", "finite"),
        (CompletionBody, {"prompt": "a", "logprobs": -1}, "logprobs", "greater than or equal to 0"),
        (CompletionBody, {"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        (CompletionBody, {"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
        (CompletionBody, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        (CompletionBody, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        (CompletionBody, {"prompt": "a", "priority": "high"}, "priority", "valid integer"),
        (ChatBody, {"messages": HELLO, "priority": 1.5}, "priority", "valid integer"),
        (CompletionBody, {"prompt": "a", "stream": 1}, "stream", "valid boolean"),
        (CompletionBody, {"prompt": "a", "stream_options": {}}, "stream_options", "stream=true"),
        (
            CompletionBody,
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            "stream_options",
            "continuous_usage_stats is not supported",
        ),
        (CompletionBody, {"prompt": "a", "stop": [1]}, "stop", "valid string"),
        (CompletionBody, [1], None, "not a JSON object"),
        (ChatBody, {"messages": []}, "messages", "at least 1"),
        (ChatBody, {"messages": ["Hi"]}, "messages", r"messages\.0: 'Hi'"),
        (ChatBody, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "only for requests with logprobs=true"),
        (
            ChatBody,
            {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "less than or equal to 20",
        ),
        (ChatBody, {"messages": HELLO, "logprobs": 3}, "logprobs", "valid boolean"),
        (ChatBody, {"messages": HELLO, "functions": [{}]}, "functions", "not supported"),
        (ChatBody, {"messages": HELLO, "tools": [{}]}, "tools", "expected"),
        (ChatBody, {"messages": HELLO, "echo": True}, "echo", "not supported in a chat"),
    ],
)
def test_refusals_name_the_field(kind, body, param, message):
    problem = refusal(kind, body)
    assert (problem.status, problem.type, problem.param) == (400, "invalid_request_error", param)
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem.message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprob_token_ids", [1, 2]),
        ("moderation", {"model": "omni-moderation-latest"}),
        ("repetition_detection", {"max_pattern_size": 4}),
        ("return_prompt_text", True),
        ("return_tokens_as_token_ids", True),
        ("spaces_between_special_tokens", False),
        ("structural_tag", "{}"),
        ("reasoning", {"effort": "low"}),
        ("reasoning_format", "none"),
        ("watermarking", True),
        ("regex", "yes|no"),
        ("ebnf", "root ::= 'yes'"),
        ("json_schema", {}),
        ("grammar", 'root ::= "yes"'),
        ("lora_path", "adapter"),
        ("lora_request", {"lora_name": "adapter"}),
        ("mirostat", 2),
        ("typical_p", 0.9),
        ("min_new_tokens", 5),
        ("n_predict", -1),
        ("cache_salt", "abc"),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("custom_logit_processor", "{}"),
        ("stop_regex", "a+"),
    ],
)
def test_fields_that_would_change_the_answer_are_not_ignored(name, value):
    """Of other servers, and newer ones of OpenAI; ignoring one would answer another request."""
    problem = refusal(ChatBody, {"messages": HELLO, name: value})
    assert (problem.status, problem.param) == (400, name)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens: this field is not supported; use max_tokens."),
        ({"n_predict": 5}, "use max_tokens"),
        ({"repeat_penalty": 1.1}, "use repetition_penalty"),
        ({"enable_thinking": False}, "put it into chat_template_kwargs"),
        ({"chat_template": "x"}, "--chat-template"),
        ({"functions": [{}]}, 'use tools, or send function_call="none"'),
        ({"guided_json": {}}, "use structured_outputs, with json"),
    ],
)
def test_a_refusal_names_the_field_that_is_served(fields, advice):
    assert advice in refusal(ChatBody, {"messages": HELLO, **fields}).message


def test_functions_that_are_not_to_be_called_change_nothing():
    """They are not shown to the model, which could not be kept from calling them."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = chat(tools=tools, tool_choice="none", functions=tools, function_call="none")
    assert body.requests(DEFAULTS) == chat().requests(DEFAULTS)
    assert body.prompt_options() == {}
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        assert chat(tools=tools, **choice).prompt_options() == {"tools": tools}


def test_continuous_usage_changes_nothing_without_usage():
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert not completion(stream=True, stream_options=options).includes_usage


def test_a_long_list_of_wrong_items_costs_few_errors():
    for prompt in ([{}] * 50_000, [[]] * 50_000 + [{}], [["a"]] * 50_000):
        with pytest.raises(ValidationError) as caught:
            CompletionBody.model_validate({"prompt": prompt})
        assert caught.value.error_count() <= 4
        assert len(validation_problem(caught.value.errors()).message) < 300


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (sd.EngineOverloadedError("full"), 429, None, "rate_limit_exceeded"),
        (sd.EngineClosedError("closed"), 503, None, "engine_closed"),
        (sd.RequestCancelledError("cancelled"), 503, None, "engine_closed"),
        (sd.DeadlineExceededError("late"), 504, None, "deadline_exceeded"),
        (sd.PromptTooLongError("long"), 400, None, "context_length_exceeded"),
        (sd.KVCacheTooSmallError("small"), 400, None, None),
        (sd.InvalidPromptError("wrong"), 400, None, None),
        (sd.ConfigError("wrong"), 400, None, None),
        (sd.InvalidParamsError("top_p=2: expected"), 400, "top_p", None),
        (sd.InvalidParamsError("max_new_tokens=0: expected"), 400, "max_tokens", None),
        (sd.InvalidLogitsError("NaN"), 500, None, None),
        (sd.TokenMaskError("a mask"), 500, None, None),
        (sd.NoAllowedTokenError("none"), 400, None, None),
        (sd.UnknownTokenError("bad_words: token id 5"), 400, "bad_words", None),
        (sd.InvalidParamsError("logit_bias has the key 'x'"), 400, "logit_bias", None),
        (sd.StepError("a secret"), 500, None, None),
        (sd.RequestMemoryError("a secret"), 500, None, None),
        (ZeroDivisionError("a secret"), 500, None, None),
    ],
)
def test_every_error_has_its_status(error, status, param, code):
    problem = problem_of(error)
    assert (problem.status, problem.param, problem.code) == (status, param, code)
    assert "secret" not in json.dumps(problem.body())
    assert set(problem.body()["error"]) == {"message", "type", "param", "code"}
