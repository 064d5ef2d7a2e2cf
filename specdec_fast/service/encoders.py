"""Encodes prompts apart from the event loops and the steps; short ones do not wait for long ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, TypeVar

from specdec_fast.engine.input import RequestBuilder
from specdec_fast.errors import ConfigError, EngineClosedError
from specdec_fast.request.prompt_options import PromptOptions
from specdec_fast.request.prompt_size import SHORT, size_of
from specdec_fast.request.prompts import as_prompt_list
from specdec_fast.request.sequence import Sequence
from specdec_fast.sampling_params import as_sampling_params
from specdec_fast.structured_outputs.compiling import MOST_PROCESSES

CLOSED = "the engine has been closed; make another one."
_Result = TypeVar("_Result")


class UnreadPrompt:
    """One prompt and its parameters before the prompt is encoded.

    The seed of a request without one is drawn here, so that it does not depend on which prompt is encoded first. Raises
    InvalidParamsError, ConfigError or NotYetSupportedError if a parameter or a keyword (of PromptOptions) is wrong.

    Attributes:
        num_choices: number of texts of the prompt, ``n``.
    """

    def __init__(self, builder: RequestBuilder, prompt: Any, params: Any, keywords: dict[str, Any]) -> None:
        self._builder = builder
        self._params = as_sampling_params(params)
        self.num_choices = self._params.n
        self._options = PromptOptions.from_keywords(keywords)
        self._seeds = builder.seeds(self._params)
        # The caller may append its next message before the prompt is encoded.
        self._prompt = prompt.copy() if isinstance(prompt, list) else prompt
        self.size = size_of(self._prompt, self._options)  # about how much work the prompt is (``size_of``)

    def read(self, may_compile: bool) -> list[Sequence]:
        """Encode the prompt; return the sequence of each text, which has failed if the prompt is wrong.

        Raises ConfigError unless it is one prompt, and NotCompiledError if its grammar has to be compiled, unless
        ``may_compile`` is true.
        """
        prompts = as_prompt_list(self._prompt) or [self._prompt]
        if len(prompts) != 1:
            raise ConfigError(f"{len(prompts)} prompts in one request; expected one.")
        return list(self._builder.build_choices(0, prompts[0], self._params, self._options, self._seeds, may_compile))


class Encoders:
    """Threads: one encodes short prompts only, so a short one never waits for one that takes seconds.

    One takes long prompts, and as many as grammars can be compiled at once take requests that need one. All use the
    same tokenizer. Tokenizers in Rust encode in several threads at once, and Engine's callers do so, too.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "specdec_fast-encoder")
        self._long = ThreadPoolExecutor(1, "specdec_fast-long-encoder")
        self._compiling = ThreadPoolExecutor(MOST_PROCESSES, "specdec_fast-compiling-encoder")
        self._lock = Lock()  # so that `close` sees every job that was accepted
        self._jobs: set[Future[Any]] = set()
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a function is running or waits."""
        return bool(self._jobs)

    def submit(
        self, function: Callable[..., _Result], *args: Any, size: int = 0, may_compile: bool = False
    ) -> Future[_Result]:
        """Call ``function(*args, may_compile)`` soon, in a thread for compiling, or in that for prompts of this size.

        Raises EngineClosedError after ``close``.
        """
        executor = self._short if size <= SHORT else self._long
        if may_compile:
            executor = self._compiling
        with self._lock:
            if self._is_closed:
                raise EngineClosedError(CLOSED)
            job = executor.submit(function, *args, may_compile)
            self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def close(self, seconds: float) -> None:
        """Cancel what waits, and end the threads; wait so many seconds for what is running, which nothing can end."""
        with self._lock:
            self._is_closed = True
        for executor in (self._short, self._long, self._compiling):
            executor.shutdown(wait=False, cancel_futures=True)
        if not wait(self._jobs.copy(), seconds).not_done:
            for executor in (self._short, self._long, self._compiling):
                executor.shutdown()
