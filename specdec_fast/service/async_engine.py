"""The asynchronous engine: ``await generate``, ``async for chunk in stream``, and limits that hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from os import PathLike
from time import monotonic
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig, as_config, expect_at_least, expect_seconds
from specdec_fast.drafters import Drafter
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.output import score_of
from specdec_fast.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineClosedError,
    InvalidParamsError,
    RequestCancelledError,
)
from specdec_fast.results import GenerationOutput, ScoreOutput
from specdec_fast.sampling_params import as_plain, scoring_params
from specdec_fast.service.encoders import CLOSED, Encoders, UnreadPrompt
from specdec_fast.service.receivers import Receiver
from specdec_fast.service.requests import LiveRequests, ServedRequest, positions_of
from specdec_fast.service.statistics import Observer, ServiceStats
from specdec_fast.service.streams import AsyncStream
from specdec_fast.service.worker import NOT_ENCODED, Worker
from specdec_fast.structured_outputs.compiling import NotCompiledError

_PREFILL_TOKENS = 512  # of a step, unless the caller's config says otherwise
_CHECK_SECONDS = 0.01  # between two looks at whether requests have ended, while the engine is being closed
_ENCODERS_SECONDS = 1.0  # for which closing waits for a prompt that is being encoded


class AsyncEngine:
    """An engine for event loops: requests join and leave between steps, and a worker thread runs the model.

    Every output has the tokens and the log-probability bits of ``Engine.generate``, whatever other requests are
    decoded. A request that is refused raises an error before any work. One that later fails, is cancelled by its id, or
    passes its deadline ends with ``finish_reason="error"`` and the typed error in ``.error``, and keeps its tokens.

    Several event loops may use one instance. Other threads may call its ``engine`` at the same time.

    Args:
        target: the model that verifies, as for ``Engine``.
        draft: the drafter, as for ``Engine``.
        config: as for ``Engine``, but ``prefix_cache`` is on unless it is False; without a config,
            ``max_prefill_tokens`` is 512.
        tokenizer: as for ``Engine``.
        draft_tokenizer: as for ``Engine``.
        max_waiting: largest number of requests that wait, besides those that fit into the window (``window_size``).
        kv_token_budget: largest number of KV positions (prompt and ``max_new_tokens``) of all requests together,
            running and waiting; None: no limit besides ``max_waiting``.
        **keywords: fields of the config, instead of ``config``.

    Attributes:
        engine: the synchronous engine that runs the steps.

    Raises:
        ConfigError: a limit is out of range; and what ``Engine`` raises.
    """

    def __init__(
        self,
        target: str | PathLike[str] | PreTrainedModel,
        draft: str | PathLike[str] | PreTrainedModel | Drafter | None,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        draft_tokenizer: Any | None = None,
        max_waiting: int = 256,
        kv_token_budget: int | None = None,
        **keywords: Any,
    ) -> None:
        max_waiting = as_plain(max_waiting)
        kv_token_budget = as_plain(kv_token_budget)
        expect_at_least("max_waiting", max_waiting, 0)
        if kv_token_budget is not None:
            expect_at_least("kv_token_budget", kv_token_budget, 1)
        if config is None:
            keywords.setdefault("max_prefill_tokens", _PREFILL_TOKENS)
        config = as_config(config, keywords).for_service()
        self.engine = Engine(target, draft, config, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)
        if self.engine.target.needs_same_calls:
            raise ConfigError(
                "the target is sharded over processes, and requests would reach an AsyncEngine in each at different "
                "times; pass the target's name with tp_size=N, or use Engine and make the same calls in every process."
            )
        core = self.engine.core
        self._builder = self.engine.request_builder()
        self._live = LiveRequests(core.scheduler.max_resident + max_waiting, kv_token_budget)
        self._worker = Worker(self.engine, self._live)
        self._encoders = Encoders()
        self._is_closed = False

    @property
    def max_requests(self) -> int:
        """The number of requests that may run or wait at once: the window and ``max_waiting``."""
        return self._live.most_requests

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._is_closed

    @property
    def failure(self) -> Exception | None:
        """See ``Engine.failure``."""
        return self.engine.failure

    @property
    def is_encoding(self) -> bool:
        """Whether a prompt is being encoded, or waits for that; its thread may outlive ``close``."""
        return self._encoders.is_busy

    def stats(self) -> ServiceStats:
        """Return the present requests and KV pages, and the counts of all requests so far; any thread may call."""
        return self._worker.stats()

    def sync_weights(self) -> None:
        """See ``Engine.sync_weights``; any thread may call, with or without an event loop."""
        self.engine.sync_weights()

    def add_observer(self, observer: Observer) -> None:
        """Call a function with the RequestRecord of every request that was served and has ended.

        Args:
            observer: called soon after the end, in a thread of the engine or of the caller that dropped the request;
                must return at once. What it raises is logged by the logger ``specdec_fast.service``.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(observer):
            raise ConfigError(f"observer is a {type(observer).__name__}; expected a function of one RequestRecord.")
        self._worker.observers.append(observer)

    async def generate(
        self,
        prompt: Any,
        params: Any = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        **prompt_options: Any,
    ) -> GenerationOutput:
        """Decode one prompt. Cancelling the task cancels the request.

        Args:
            prompt: a string, a list of token ids, a list of messages, or the result of a tokenizer.
            params: SamplingParams or a transformers GenerationConfig, for one text (``n`` is 1); None is greedy.
            request_id: a name for ``cancel``; None makes one.
            timeout: seconds from now after which the request ends with a DeadlineExceededError.
            **prompt_options: fields of PromptOptions.

        Returns:
            The output; ``index`` is 0.

        Raises:
            EngineOverloadedError: ``max_waiting`` or ``kv_token_budget`` is reached.
            EngineClosedError: the engine has been closed.
            RequestError, InvalidParamsError, ConfigError: the prompt, the parameters or another argument are wrong.
            RequestCancelledError, DeadlineExceededError: it was cancelled, or too late, before its prompt was encoded.
            ForkedProcessError: the engine was made in the process that this one was forked from.
        """
        unread = UnreadPrompt(self._builder, prompt, params, prompt_options)
        if unread.num_choices != 1:
            raise InvalidParamsError(
                f"n={unread.num_choices}: generate returns one text; use generate_choices, or stream, which serve n."
            )
        (output,) = await self._outputs(unread, request_id, timeout)
        return output

    async def generate_choices(
        self,
        prompt: Any,
        params: Any = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        **prompt_options: Any,
    ) -> list[GenerationOutput]:
        """Decode the ``n`` texts of one prompt, and return their outputs in the order of their ``choice``.

        The prompt is encoded once, and the texts share its KV pages unless ``prefix_cache`` is off. They are accepted
        or refused together, each counts as a request in the limits, and ``cancel`` ends all that have not ended. Other
        arguments and errors are those of ``generate``; InvalidParamsError also if ``n`` is larger than
        ``max_requests``.
        """
        unread = UnreadPrompt(self._builder, prompt, params, prompt_options)
        return await self._outputs(unread, request_id, timeout)

    async def score(
        self,
        prompt: Any,
        *,
        top_logprobs: int = 0,
        priority: int = 0,
        request_id: str | None = None,
        timeout: float | None = None,
        **prompt_options: Any,
    ) -> ScoreOutput:
        """Return the log-probabilities of a text's tokens; see ``Engine.score``.

        Other arguments and errors are those of ``generate``.
        """
        params = scoring_params(top_logprobs, priority)
        return score_of(await self.generate(prompt, params, request_id=request_id, timeout=timeout, **prompt_options))

    def stream(
        self,
        prompt: Any,
        params: Any = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        **prompt_options: Any,
    ) -> AsyncStream:
        """Decode one prompt, beginning now, and return its chunks for ``async for``.

        The arguments are those of ``generate_choices``: chunks of ``n`` texts come in any order, each with its
        ``choice``. A full queue, a closed engine and wrong parameters raise here; a wrong prompt raises when the first
        chunk is read. Call it where an event loop runs.
        """
        unread = UnreadPrompt(self._builder, prompt, params, prompt_options)
        return AsyncStream(self._accept(unread, request_id, timeout, is_stream=True), self._worker)

    async def expect_budget(
        self, requests: Iterable[tuple[Any, Any, int]], *, timeout: float | None = None, **prompt_options: Any
    ) -> None:
        """Check that requests which are sent together fit into ``kv_token_budget`` together, if there is one.

        Args:
            requests: prompts, the parameters of each, and how often each is sent.
            timeout: seconds from now within which the prompts must have been encoded.
            **prompt_options: fields of PromptOptions.

        Raises:
            KVCacheTooSmallError: they do not fit, so sending them again later would not help.
            DeadlineExceededError: ``timeout`` has passed.
            EngineClosedError, RequestError, ConfigError: as ``generate``.
        """
        self.engine.process.expect_this()
        if self._live.most_positions is None:
            return
        unread = [(UnreadPrompt(self._builder, prompt, params, prompt_options), n) for prompt, params, n in requests]

        def count(may_compile: bool) -> int:
            return sum(n * prompt.num_choices * positions_of(prompt.read(may_compile)) for prompt, n in unread)

        size = sum(prompt.size for prompt, _ in unread)
        deadline = None if timeout is None else monotonic() + timeout

        async def counted(may_compile: bool) -> int:
            job = asyncio.wrap_future(self._encoders.submit(count, size=size, may_compile=may_compile))
            try:
                await asyncio.wait([job], timeout=None if deadline is None else deadline - monotonic())
                if not job.done():
                    raise DeadlineExceededError(NOT_ENCODED)
                if job.cancelled():
                    raise EngineClosedError(CLOSED)
                return job.result()
            finally:
                job.cancel()

        try:
            num_positions = await counted(may_compile=False)
        except NotCompiledError:
            num_positions = await counted(may_compile=True)
        self._live.expect_budget(num_positions, "the requests need, together,")

    def cancel(self, request_id: str) -> bool:
        """For any thread: end a request before the next step (RequestCancelledError); return whether there was one."""
        requests = self._live.find(request_id)
        if requests:
            self._worker.end(requests, RequestCancelledError("the request was cancelled; its tokens are kept."))
        return bool(requests)

    async def close(self, finish_within: float = 0.0) -> None:
        """Refuse further requests, let the others finish for a while, cancel the rest, and end the threads.

        This takes at most ``finish_within`` seconds, one step, and a second if a prompt is being encoded. A prompt that
        takes longer to encode keeps its thread, and so the process, until it is encoded (``is_encoding``).

        Args:
            finish_within: seconds for which requests may go on; what is left then ends with a RequestCancelledError.

        Raises:
            ConfigError: ``finish_within`` is no number from 0 on; the engine stays open.
        """
        finish_within = as_plain(finish_within)
        expect_seconds("finish_within", finish_within, or_zero=True)
        self._is_closed = True
        deadline = monotonic() + finish_within
        while self._live and monotonic() < deadline:
            await asyncio.sleep(_CHECK_SECONDS)
        error = RequestCancelledError("the engine was closed before the request ended; its tokens are kept.")
        self._worker.end(self._live.all(), error)
        await asyncio.to_thread(self._encoders.close, _ENCODERS_SECONDS)
        self._worker.end(self._live.all(), error)  # those that another event loop has sent meanwhile
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _outputs(
        self, unread: UnreadPrompt, request_id: str | None, timeout: float | None
    ) -> list[GenerationOutput]:
        requests = self._accept(unread, request_id, timeout, is_stream=False)
        try:
            found: list[GenerationOutput] = [await requests[0].receiver.get() for _ in requests]
        except BaseException:
            for request in requests:
                self._worker.drop(request)
            raise
        return sorted(found, key=lambda output: output.choice)

    def _accept(
        self, unread: UnreadPrompt, request_id: str | None, timeout: float | None, *, is_stream: bool
    ) -> list[ServedRequest]:
        self.engine.process.expect_this()
        if self._is_closed:
            raise EngineClosedError(CLOSED)
        if request_id is not None and not isinstance(request_id, str):
            raise ConfigError(f"request_id={request_id!r}: expected a string, or None.")
        timeout = as_plain(timeout)
        if timeout is not None:
            expect_seconds("timeout", timeout)
        deadline = None if timeout is None else monotonic() + timeout
        receiver = Receiver(asyncio.get_running_loop())
        requests = [ServedRequest(receiver, is_stream, deadline, choice) for choice in range(unread.num_choices)]
        self._live.enter(requests, request_id)
        try:
            self._encoders.submit(self._start, requests, unread, size=unread.size)
        except EngineClosedError:  # another event loop has just closed the engine
            for request in requests:
                self._live.leave(request)
            raise
        if timeout is not None:
            for request in requests:
                self._worker.refuse_after(timeout, request)
        return requests

    def _start(self, requests: list[ServedRequest], unread: UnreadPrompt, may_compile: bool) -> None:
        """Encode a prompt and hand its texts to the worker, or refuse them; in a thread of the encoders.

        A grammar that has to be compiled is left to a thread for that, so that other prompts need not wait.
        """
        try:
            if all(request.is_dropped for request in requests):
                for request in requests:
                    self._live.leave(request)
                return
            try:
                sequences = unread.read(may_compile)
            except NotCompiledError:
                self._encoders.submit(self._start, requests, unread, may_compile=True)
                return
            num_positions = positions_of(sequences)  # raises what is wrong with the prompt
            self.engine.core.expect_room(sequences[0])
            self._live.charge(requests, num_positions)
            for request, sequence in zip(requests, sequences, strict=True):
                self._worker.start(request, sequence)
        except Exception as error:
            for request in requests:
                self._worker.refuse(request, error)
