"""The HTTP application: OpenAI's API over an AsyncEngine, ``/health`` and ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from specdec_fast.config import expect_at_least, expect_seconds
from specdec_fast.errors import ConfigError, GrammarError
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import OPENAI_DEFAULTS, SamplingParams
from specdec_fast.server.answer_format import AnswerFormat
from specdec_fast.server.answers import Answer, ChatAnswer, CompletionAnswer
from specdec_fast.server.gate import Gate
from specdec_fast.server.http import (
    EventStream,
    in_pieces,
    json_response,
    merged,
    problem_response,
    unless_disconnected,
)
from specdec_fast.server.metrics import CONTENT_TYPE, Metrics
from specdec_fast.server.problems import Problem, problem_of, unknown_model, validation_problem
from specdec_fast.server.protocol import ChatBody, CompletionBody, RequestBody
from specdec_fast.service import AsyncEngine, AsyncStream

_logger = logging.getLogger("specdec_fast.server")
_WARM_UP_TOKENS = 8
_CLIENT_GONE = 499  # as nginx logs it; the client has closed the connection


def create_app(  # noqa: PLR0913  # options that are given by name
    engine: AsyncEngine,
    *,
    model_names: Sequence[str] = (),
    api_key: str | None = None,
    timeout: float | None = None,
    default_params: SamplingParams = OPENAI_DEFAULTS,
    stream_interval: int = 1,
    max_request_bytes: int = 4 << 20,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> FastAPI:
    """Return an application that serves an engine; it can run by itself or be mounted in another one.

    The caller keeps the engine and closes it. From then on requests are refused with status 503.

    Args:
        engine: decodes the requests.
        model_names: names by which requests may call the model; by default the target's.
        api_key: the key that requests must send, except for ``/health`` and ``/metrics``; None: no key.
        timeout: seconds after which a request ends with status 504; None: no limit.
        default_params: values of the fields that a request leaves out; ``max_new_tokens`` is that of chats.
        stream_interval: least number of tokens in an event of a stream, except the first and the last event. With a
            larger number the server sends fewer events, and clients see a text later.
        max_request_bytes: largest size of a request's body.
        tool_call_parser: how the model writes calls of functions, a name of ``server/tool_calls/formats/``; None: as
            the tokenizer's chat template shows.
        reasoning_parser: how it marks reasoning, a name of ``structured_outputs/reasoning.py``; ``"none"`` leaves it in
            the content; None: as the tokenizer's chat template shows.

    Raises:
        ConfigError: a limit is out of range, the key is empty, or an argument has a wrong type.
    """
    if api_key == "":
        raise ConfigError("the API key is empty, so it would protect nothing; pass a key, or None for no key.")
    if not isinstance(default_params, SamplingParams):
        raise ConfigError(f"default_params is a {type(default_params).__name__}; expected SamplingParams.")
    expect_at_least("max_request_bytes", max_request_bytes, 1)
    expect_at_least("stream_interval", stream_interval, 1)
    if timeout is not None:
        expect_seconds("timeout", timeout)
    answer_format = AnswerFormat(
        engine.engine.tokenizer,
        engine.engine.target.eos_token_ids,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    api = _Api(engine, _checked_names(model_names, engine), timeout, default_params, stream_interval, answer_format)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await api.begin_warm_up()
        yield

    app = FastAPI(title="specdec_fast", lifespan=lifespan)
    app.add_middleware(
        Gate, api_key=api_key, max_request_bytes=max_request_bytes, on_response=api.metrics.count_response
    )
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_routes(app, api)
    return app


def _add_routes(app: FastAPI, api: _Api) -> None:
    routes = (
        ("POST", "/v1/completions", api.completions),
        ("POST", "/v1/chat/completions", api.chat_completions),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("GET", "/health", api.health),
        ("GET", "/metrics", api.show_metrics),
    )
    for method, path, function in routes:
        app.add_api_route(path, function, methods=[method], response_model=None)
        if method == "GET":
            app.add_api_route(path, function, methods=["HEAD"], response_model=None, include_in_schema=False)


def _checked_names(names: Sequence[str], engine: AsyncEngine) -> tuple[str, ...]:
    """Return the names of the model: those given, or the target's. Raises ConfigError for one string."""
    if isinstance(names, str):
        raise ConfigError(f"model_names={names!r} is one string; expected a list of names: [{names!r}].")
    return tuple(names) or (str(engine.engine.describe()["target"]),)


async def _on_invalid_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(validation_problem(error.errors()))


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, (ValueError, RecursionError)):  # FastAPI's own message does not say what it cannot parse
        return problem_response(Problem(error.status_code, f"the body is not JSON that can be read: {cause}."))
    return problem_response(Problem(error.status_code, str(error.detail)))


class _Api:
    def __init__(
        self,
        engine: AsyncEngine,
        names: tuple[str, ...],
        timeout: float | None,
        default_params: SamplingParams,
        stream_interval: int,
        answer_format: AnswerFormat,
    ) -> None:
        self._engine = engine
        self._answer_format = answer_format
        self._names = names
        self._timeout = timeout
        self._default_params = default_params
        self._stream_interval = stream_interval
        self._created = int(time.time())
        self._warm_up: asyncio.Task[None] | None = None
        self.metrics = Metrics(engine, names[0])

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue texts or token ids."""
        return await self._answer(body, request, CompletionAnswer)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Answer messages."""
        return await self._answer(body, request, ChatAnswer)

    async def models(self) -> Response:
        """List the names of the model."""
        return json_response({"object": "list", "data": [self._card(name) for name in self._names]})

    async def model(self, name: str) -> Response:
        """Describe the model under one of its names."""
        return json_response(self._card(name)) if name in self._names else self._unknown(name)

    async def health(self) -> Response:
        """Say whether requests are served: 200, or 503: the engine is not warm yet, closes, or has failed."""
        if self._engine.is_closed:
            return json_response({"status": "closing"}, 503)
        if self._engine.failure is not None:
            return json_response({"status": f"failed: {self._engine.failure}"}, 503)
        warm_up = self.begin_warm_up()  # a mounted application has no start of its own
        if not warm_up.done():
            return json_response({"status": "warming up"}, 503)
        if (error := warm_up.exception()) is not None:
            _logger.error("the warm-up failed", exc_info=error)
            self._warm_up = None  # the next look at /health tries again
            return json_response({"status": "the warm-up failed; see the server's log"}, 503)
        return json_response({"status": "ok"})

    async def show_metrics(self) -> Response:
        """Show the metrics to Prometheus."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    def begin_warm_up(self) -> asyncio.Task[None]:
        """Return the task that makes the engine warm, after creating it if there is none."""
        if self._warm_up is None:
            self._warm_up = asyncio.create_task(self._decode_some())
        return self._warm_up

    async def _decode_some(self) -> None:
        """Decode a few tokens, so that the first request finds memory and kernels ready."""
        params = SamplingParams(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        (output,) = await asyncio.to_thread(self._engine.engine.generate, [[0]], params, progress=False)
        output.raise_for_error()

    async def _answer(self, body: RequestBody, request: Request, kind: type[Answer]) -> Response:
        name = body.model or self._names[0]
        if name not in self._names:
            return self._unknown(name)
        answer = kind(body, request.state.request_id, name, self._engine.engine.tokenizer)
        try:
            if body.num_choices > self._engine.max_requests:  # a body of 4 MiB may ask for a hundred million
                message = f"{body.num_choices} choices in one request; the server takes {self._engine.max_requests}."
                return problem_response(Problem(400, message))
            requests = body.constrained(body.requests(self._default_params), self._answer_format)
            answer.read_as(self._answer_format)
            if len(requests) > 1:  # choices that never fit together would be answered with 429 again and again
                prompts = [(*each, body.n or 1) for each in requests[:: body.n or 1]]
                await self._engine.expect_budget(prompts, timeout=self._timeout, **body.prompt_options())
            if body.stream:
                return await self._stream(answer, requests)
            return await self._whole(answer, requests, request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            return problem_response(_problem_for(body, error))

    async def _whole(self, answer: Answer, requests: list[tuple[Any, SamplingParams]], request: Request) -> Response:
        outputs = await unless_disconnected(request.receive, self._generate(answer, requests))
        if any(output.prompt_logprobs is not None for output in outputs):  # of thousands of tokens, perhaps
            return json_response(await asyncio.to_thread(answer.whole, outputs))
        return json_response(answer.whole(outputs))

    async def _generate(self, answer: Answer, requests: list[tuple[Any, SamplingParams]]) -> list[GenerationOutput]:
        options = {"timeout": self._timeout, **answer.body.prompt_options()}
        tasks = [asyncio.ensure_future(self._engine.generate(*each, **options)) for each in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(self, answer: Answer, requests: list[tuple[Any, SamplingParams]]) -> Response:
        """Begin to decode all choices; if one is refused, the others are cancelled."""
        options = {"timeout": self._timeout, **answer.body.prompt_options()}
        streams: list[AsyncStream] = []
        try:
            for each in requests:
                streams.append(self._engine.stream(*each, **options))
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        chunks = merged(streams)
        if self._stream_interval > 1:
            chunks = in_pieces(chunks, self._stream_interval)
        return EventStream(answer, streams, chunks, partial(_problem_for, answer.body))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "specdec_fast"}
        return card | {"root": self._names[0], "max_model_len": self._engine.engine.target.max_positions}

    def _unknown(self, name: str) -> Response:
        return problem_response(unknown_model(name, self._names))


def _problem_for(body: RequestBody, error: Exception) -> Problem:
    """Return what a client may know of an error of its request."""
    problem = _logged_problem(error)
    if isinstance(error, GrammarError) and problem.param == "structured_outputs":
        return replace(problem, param=body.constraining_field)
    return problem


def _logged_problem(error: Exception) -> Problem:
    """Return what a client may know of an error; what is not the client's fault goes to the log."""
    problem = problem_of(error)
    if problem.status == 500:
        _logger.error("a request failed", exc_info=error)
    return problem
