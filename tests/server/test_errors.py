"""The HTTP application answers errors as OpenAI does, of wrong requests and of its own failures."""

from __future__ import annotations

import asyncio

import pytest

from specdec_fast.server.app import create_app
from specdec_fast.server.protocol import RequestBody
from support.asgi import fetch, served

HI = {"prompt": "Hi"}


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        (b'{"prompt": "Hi"', 400, None, "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', 400, None, "not JSON that can be read"),
        (b'{"prompt": "\\ud800"}', 400, None, "cannot encode"),
        (b"[" * 100_000, 400, None, "not JSON that can be read"),
        (b"", 400, None, "not a JSON object"),
        (b"5", 400, None, "not a JSON object"),
        ({"prompt": "Hi", "model": "gpt-4"}, 404, "model", "'gpt-4' does not exist; expected one of 'demo'"),
        ({"prompt": "Hi", "temperature": "hot"}, 400, "temperature", "'hot': .*valid number"),
        ({"prompt": "Hi", "temperature": -1}, 400, "temperature", "expected 0"),
        ({"prompt": "Hi", "top_p": 0}, 400, "top_p", "expected"),
        ({"prompt": "Hi", "stop": [""]}, 400, "stop", "non-empty"),
        ({"prompt": "Hi", "stop": ["a"] * 1025}, 400, "stop", "1025 strings; expected at most 1024"),
        ({"prompt": "Hi", "seed": 2**63}, 400, "seed", "expected an integer"),
        ({"prompt": "Hi", "presence_penalty": 2.5}, 400, "presence_penalty", "from -2 to 2"),
        ({"prompt": "Hi", "frequency_penalty": "1"}, 400, "frequency_penalty", "valid number"),
        ({"prompt": "Hi", "logit_bias": {"x": 1}}, 400, "logit_bias", "has the key 'x'; expected token ids"),
        ({"prompt": "Hi", "logit_bias": {"10000000": 1}}, 400, "logit_bias", "outside the target's vocabulary"),
        ({"prompt": "Hi", "logit_bias": [1]}, 400, "logit_bias", "logit_bias: .*at most 0 items"),
        ({"prompt": "Hi", "allowed_token_ids": []}, 400, "allowed_token_ids", "at least one token id"),
        ({"prompt": "Hi", "allowed_token_ids": [10**7]}, 400, "allowed_token_ids", "outside the target's vocabulary"),
        ({"prompt": "Hi", "bad_words": [""]}, 400, "bad_words", "non-empty strings"),
        ({"prompt": "Hi", "bad_words": "a"}, 400, "bad_words", "valid list"),
        ({"prompt": "Hi", "min_tokens": 17}, 400, "min_tokens", "to max_new_tokens, 16"),
        ({"prompt": "Hi", "logits_processors": ["a.b"]}, 400, "logits_processors", "not supported"),
        ({"prompt": "Hi", "num_draft_tokens": 50}, 400, None, "drafts at most 5"),
        ({"prompt": [10**9]}, 400, None, "outside the target's vocabulary"),
        ({"prompt": [[]]}, 400, None, "no tokens"),
        ({"prompt": "word " * 5000}, 400, None, "can serve 512 positions"),
        ({"prompt": ["Hi"] * 300, "n": 2}, 400, None, "600 choices in one request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_get_openais_errors(app, body, status, param, message, stream):
    if isinstance(body, dict):
        body = body | {"stream": stream}
    (exchange,) = served(app, ("/v1/completions", body))
    error = exchange.json["error"]
    assert (exchange.status, error["type"], error["param"]) == (status, "invalid_request_error", param)
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])


def test_too_many_choices_are_refused_before_any_is_made(app, monkeypatch):
    monkeypatch.setattr(RequestBody, "requests", None)
    (exchange,) = served(app, ("/v1/completions", {"prompt": ["a"] * 10_000, "n": 32}))
    assert exchange.status == 400
    assert "320000 choices in one request; the server takes" in exchange.json["error"]["message"]


def test_the_answer_to_a_chat_without_a_template_names_the_option_of_the_server(make_engine, chat_tokens, monkeypatch):
    """Not to pass ``chat_template``, which the server refuses."""
    monkeypatch.setattr(chat_tokens, "chat_template", None)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    (exchange,) = served(create_app(make_engine()), ("/v1/chat/completions", body))
    error = exchange.json["error"]
    assert (exchange.status, error["type"]) == (400, "invalid_request_error")
    assert "the tokenizer has no chat template" in error["message"]
    assert "--chat-template FILE" in error["message"]
    assert "chat_template=" not in error["message"]


def test_wrong_messages_get_openais_errors(app):
    wrong = (
        [{"role": "user"}],
        [{"role": "error", "content": "x"}],
        [{"role": "user", "content": [{"type": "image"}]}],
    )
    for exchange in served(app, *(("/v1/chat/completions", {"messages": messages}) for messages in wrong)):
        assert exchange.status == 400
        assert exchange.json["error"]["type"] == "invalid_request_error"


def test_paths_and_methods_that_do_not_exist(app):
    missing, method = served(app, ("/v1/embeddings", {}), ("/v1/completions", None))
    assert (missing.status, method.status) == (404, 405)
    assert missing.json["error"]["message"] == "Not Found"
    assert method.json["error"]["message"] == "Method Not Allowed"


def test_the_model_failing_is_the_servers_fault(make_engine, monkeypatch, caplog):
    engine = make_engine()
    app = create_app(engine)
    asyncio.run(fetch(app, "/v1/completions", HI))

    def fail(*args):
        raise ZeroDivisionError("a secret of the model")

    monkeypatch.setattr(engine.engine.target, "verify_step", fail)
    plain, stream = served(app, ("/v1/completions", HI), ("/v1/completions", HI | {"stream": True}))
    for exchange in (plain, stream):
        assert (exchange.status, exchange.json["error"]["type"]) == (500, "server_error")
        assert "secret" not in exchange.body.decode()
    assert "a secret of the model" in caplog.text


def test_an_unexpected_failure_is_a_response_too(engine, monkeypatch, caplog):
    app = create_app(engine)

    def fail(*args, **options):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(engine, "generate", fail)
    (exchange,) = served(app, ("/v1/completions", HI))
    assert (exchange.status, "secret" in exchange.body.decode()) == (500, False)
    assert "x-request-id" in exchange.headers
    assert "a secret" in caplog.text
