"""Errors as OpenAI's API shows them: a status, and an object with message, type, param and code; without HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_fast.errors import (
    ConfigError,
    DeadlineExceededError,
    DetokenizationError,
    EngineClosedError,
    EngineOverloadedError,
    GrammarError,
    InvalidLogitsError,
    InvalidParamsError,
    LogitsProcessorError,
    MissingChatTemplateError,
    NotYetSupportedError,
    PromptTooLongError,
    RequestCancelledError,
    RequestError,
    RequestMemoryError,
    StepError,
    TokenMaskError,
    UnknownTokenError,
)

INVALID = "invalid_request_error"
_LONGEST_INPUT = 80  # characters of a wrong value that a message repeats
_NAMES = {"max_new_tokens": "max_tokens"}  # names of SamplingParams that differ from the API's

# The first class that fits; status, type and code.
_KINDS: tuple[tuple[tuple[type[Exception], ...], int, str, str | None], ...] = (
    ((EngineOverloadedError,), 429, "rate_limit_error", "rate_limit_exceeded"),
    ((EngineClosedError, RequestCancelledError), 503, "service_unavailable_error", "engine_closed"),
    ((DeadlineExceededError,), 504, "timeout_error", "deadline_exceeded"),
    ((PromptTooLongError,), 400, INVALID, "context_length_exceeded"),
    (
        (StepError, RequestMemoryError, InvalidLogitsError, DetokenizationError, LogitsProcessorError, TokenMaskError),
        500,
        "server_error",
        None,
    ),
    ((RequestError, ConfigError, InvalidParamsError, NotYetSupportedError), 400, INVALID, None),
)


# What a client can do differs from what a caller of the library can do.
_NO_CHAT_TEMPLATE = (
    "the tokenizer has no chat template, so the model cannot be sent messages; start specdec-fast with --chat-template "
    "FILE, or send a prompt to /v1/completions."
)


@dataclass(frozen=True)
class Problem:
    """Why a request is not answered."""

    status: int  # the status of HTTP
    message: str  # for a person
    type: str = INVALID  # the kind of error
    param: str | None = None  # the field that is wrong, if it is known
    code: str | None = None  # for a program

    def body(self) -> dict[str, Any]:
        """Return the body of the response, or of a stream's last event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def problem_of(error: Exception) -> Problem:
    """Return what a client may know of an exception; one that is not the library's own shows nothing of itself."""
    for kinds, status, type_, code in _KINDS:
        if isinstance(error, kinds):
            if isinstance(error, (StepError, RequestMemoryError)):  # the message repeats one of the model's code
                return Problem(status, "the step that served this request failed; see the server's log.", type_)
            if isinstance(error, MissingChatTemplateError):
                return Problem(status, _NO_CHAT_TEMPLATE, type_, "messages", code)
            is_named = isinstance(error, (InvalidParamsError, UnknownTokenError))
            name = re.match(r"(\w+)(=|: | has the key )", str(error)) if is_named else None
            if isinstance(error, GrammarError):
                name = re.match(r"(\w+)", str(error))  # the field of the API; a place in it may follow
            param = name and _NAMES.get(name[1], name[1])
            return Problem(status, str(error), type_, param, code)
    return Problem(500, "the server failed; see its log.", "server_error")


def unknown_model(name: str, known: Sequence[str]) -> Problem:
    """Return the problem of a request for another model."""
    message = f"the model {name!r} does not exist; expected one of {', '.join(map(repr, known))}."
    return Problem(404, message, INVALID, "model", "model_not_found")


def validation_problem(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """Return the problem of a body that pydantic refused; FastAPI's errors have ``"body"`` before each place."""
    first = errors[0]
    if "param" in first.get("ctx", {}):
        return Problem(400, f"{first['msg']}.", param=first["ctx"]["param"])
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    places = [[str(part) for part in error["loc"] if part != "body"] for error in errors]
    if not places[0]:
        return Problem(400, "the body is not a JSON object; send one with the content type application/json.")
    param = places[0][0]
    same = [error["msg"] for error, place in zip(errors, places, strict=True) if place[:1] == [param]]
    value = "" if first["type"] == "missing" else f"{first['input']!r:.{_LONGEST_INPUT}}: "
    place = ".".join(places[0]) if len(same) == 1 else param  # a union has an error of every kind that it may be
    return Problem(400, f"{place}: {value}{', or '.join(dict.fromkeys(same))}.", param=param)
