"""The request bodies of OpenAI's API, as prompts and parameters of the engine; without HTTP.

Pydantic checks a body as it is, without conversions (the string "5" is not a number). A field that would change the
answer, and that this library does not serve, is refused (``unsupported``). Others are ignored if unknown, as in vLLM.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.types import FailFast
from pydantic_core import PydanticCustomError

from specdec_fast.errors import InvalidParamsError
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.server.answer_format import AnswerFormat
from specdec_fast.server.constraints import ToolChoice, constraint_of, tool_choice_of
from specdec_fast.server.tool_calls.formats import ToolFormat
from specdec_fast.server.unsupported import UNSUPPORTED, first_unsupported
from specdec_fast.structured_outputs.reasoning import MOST_REASONING_TOKENS, Reasoning

_logger = logging.getLogger("specdec_fast.server")
_MOST_CHOICES = 128  # of one prompt, as in OpenAI's API
_COMPLETION_TOKENS = 16  # OpenAI's default for completions
_NO_BUDGET = -1  # of reasoning, as in vLLM
# Variables by which chat templates switch reasoning on and off: of Qwen, GLM and others; of DeepSeek and Granite.
_REASONING_SWITCHES = ("enable_thinking", "thinking")
_MOST_TOP_LOGPROBS = 20  # most likely tokens at one place, as in OpenAI's chats and in vLLM


class _FirstError(FailFast):
    """A list of wrong items costs one error, not one each; hashable, so that ``|`` can join types that have it."""

    __hash__ = object.__hash__


TokenIds = Annotated[list[int], _FirstError()]
Strings = Annotated[list[str], _FirstError()]
Words = Annotated[list[str | TokenIds], _FirstError()]
Prompts = str | TokenIds | Strings | Annotated[list[TokenIds], _FirstError()]


def _refuse(field: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{param}: {reason}", {"param": field, "reason": reason})


class StreamOptions(BaseModel):
    """What a stream contains besides the tokens."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


def _with_both_names(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has the name of vLLM's API and that of others, because templates read either."""
    given = message.get("reasoning_content") or message.get("reasoning")
    return {**message, "reasoning": given, "reasoning_content": given} if isinstance(given, str) else message


class RequestBody(BaseModel):
    """The fields that completions and chat share; those from ``top_k`` on are vLLM's, but for ``num_draft_tokens`` and
    OpenAI's ``presence_penalty``, ``frequency_penalty`` and ``logit_bias``.

    A higher ``priority`` is served first, unlike vLLM's.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=_MOST_CHOICES)
    stop: str | Strings | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | Annotated[list[Any], Field(max_length=0)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    num_draft_tokens: int | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=_MOST_TOP_LOGPROBS)
    priority: int | None = None
    return_token_ids: bool | None = False
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> RequestBody:
        unknown = self.model_extra or {}
        if (refused := first_unsupported(unknown)) is not None:
            raise _refuse(*refused)
        if ignored := unknown.keys() - UNSUPPORTED.keys():
            _logger.debug("fields of a request that are ignored: %s", ", ".join(sorted(ignored)))
        if self.stream_options is not None and not self.stream:
            raise _refuse("stream_options", "only for requests with stream=true")
        if self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise _refuse("stream_options", "continuous_usage_stats is not supported; the last event has the usage")
        self._check_own()
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    @abstractmethod
    def prompts(self) -> list[Any]:
        """The prompts, as ``AsyncEngine.generate`` expects each."""

    @property
    def num_choices(self) -> int:
        """How many requests of the engine the body asks for: ``n`` for every prompt."""
        return len(self.prompts) * (self.n or 1)

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int | None:
        """How many of the most likely tokens the answer has at each of its tokens; None: no log-probabilities."""

    def prompt_options(self) -> dict[str, Any]:
        """Return how the engine makes token ids of a prompt, as keywords of ``AsyncEngine.generate``."""
        return {} if self.add_special_tokens is None else {"add_special_tokens": self.add_special_tokens}

    def requests(self, defaults: SamplingParams) -> list[tuple[Any, SamplingParams]]:
        """Return what the engine decodes: for every prompt ``n`` choices, in the order of their indices.

        Choice i of a prompt samples with ``seed + i``, so a choice does not depend on the other prompts. ``defaults``
        has the values of fields that the body leaves out. Raises InvalidParamsError if a parameter is out of range.
        """
        params = self._sampling_params(defaults)
        n = self.n or 1
        return [(prompt, params.with_seed_offset(i)) for prompt in self.prompts for i in range(n)]

    @property
    def tool_use(self) -> ToolChoice | None:
        """Which functions the answer may call; None: none."""
        return None

    @property
    def constraining_field(self) -> str:
        """The field that says what the answer must follow."""
        if self.structured_outputs is None and self.response_format is not None:
            return "response_format"
        return "structured_outputs" if self.structured_outputs is not None or self.tool_use is None else "tools"

    def constrained(
        self, requests: list[tuple[Any, SamplingParams]], answer_format: AnswerFormat
    ) -> list[tuple[Any, SamplingParams]]:
        """Return requests whose answers follow what the body asks for.

        Args:
            requests: of ``requests``.
            answer_format: how the model writes answers.

        Raises:
            GrammarError: what is asked for is wrong.
            InvalidParamsError: it depends on how the model writes, and that is not known.
        """
        changes = self._constraints(answer_format)
        return [(prompt, replace(params, **changes)) for prompt, params in requests] if changes else requests

    def _constraints(self, answer_format: AnswerFormat) -> dict[str, Any]:
        """Return the parameters that ``constrained`` sets, with its errors."""
        asked = constraint_of(self.response_format, self.structured_outputs, None, None)
        return {} if asked is None else {"structured_outputs": asked}

    @abstractmethod
    def _check_own(self) -> None:
        """Raise the error of a field that only this kind of request has."""

    @abstractmethod
    def _max_tokens(self, default: int) -> int:
        """Return the limit of an answer."""

    def _prompt_logprobs(self) -> int | None:
        """Return how many of the most likely tokens are wanted at each prompt token; None: no log-probabilities."""
        return self.prompt_logprobs

    def _sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # -1 keeps all tokens, as in vLLM
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias or None,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "min_tokens": self.min_tokens,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "num_draft_tokens": self.num_draft_tokens,
            "priority": self.priority,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        num_top = self.num_top_logprobs
        return replace(
            defaults,
            max_new_tokens=self._max_tokens(defaults.max_new_tokens),
            logprobs=False if num_top is None else num_top,
            prompt_logprobs=self._prompt_logprobs(),
            n=1,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )


class CompletionBody(RequestBody):
    """The body of ``/v1/completions``."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=_MOST_TOP_LOGPROBS)

    @property
    def prompts(self) -> list[Any]:
        """Texts, or lists of token ids."""
        prompt = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)

    @property
    def num_top_logprobs(self) -> int | None:
        """What ``logprobs`` says."""
        return self.logprobs

    def _check_own(self) -> None:
        if not self.prompt:
            raise _refuse("prompt", "it is empty; expected at least one character, token id or prompt")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise _refuse("max_tokens", "it is 0, so the answer would be empty; expected 1 or more, or echo=true")

    def _prompt_logprobs(self) -> int | None:
        """Return what is wanted for ``prompt_logprobs`` or for the echo; without new tokens the prompt is scored."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None, 0 if self.max_tokens == 0 else None]
        return max((count for count in wanted if count is not None), default=None)

    def _max_tokens(self, default: int) -> int:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ChatBody(RequestBody):
    """The body of ``/v1/chat/completions``; the engine checks the messages."""

    messages: Annotated[list[dict[str, Any]], _FirstError()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=_MOST_TOP_LOGPROBS)
    echo: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[dict[str, Any]], _FirstError()] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = True
    thinking_token_budget: int | None = Field(None, ge=-1, le=MOST_REASONING_TOKENS)
    _tool_use: ToolChoice | None = PrivateAttr(None)

    @property
    def prompts(self) -> list[Any]:
        return [[_with_both_names(message) for message in self.messages]]

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt_options(self) -> dict[str, Any]:
        names = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        options = {name: getattr(self, name) for name in names} | {"tools": self.tools if self.tool_use else None}
        if self.reasoning_effort is not None:
            switches = dict.fromkeys(_REASONING_SWITCHES, self.reasoning_effort != "none")
            given = self.chat_template_kwargs or {}
            options["chat_template_kwargs"] = {"reasoning_effort": self.reasoning_effort, **switches, **given}
        return super().prompt_options() | {name: value for name, value in options.items() if value is not None}

    @property
    def tool_use(self) -> ToolChoice | None:
        return self._tool_use

    def _constraints(self, answer_format: AnswerFormat) -> dict[str, Any]:
        calls = answer_format.calls
        if self.tool_use is not None and calls is None:
            raise InvalidParamsError(
                f"tools={[tool.name for tool in self.tool_use.tools]!r:.80}: the chat template shows no known format "
                "of calls; start the server with --tool-call-parser, or send tool_choice='none'."
            )
        if self.reasoning_effort is not None and not any(
            name in answer_format.template for name in ("reasoning_effort", *_REASONING_SWITCHES)
        ):
            raise InvalidParamsError(
                f"reasoning_effort={self.reasoning_effort!r}: the chat template reads neither it nor "
                f"{' nor '.join(_REASONING_SWITCHES)}; leave it out, or send what it reads in chat_template_kwargs."
            )
        asked = constraint_of(self.response_format, self.structured_outputs, self.tool_use, calls)
        changes: dict[str, Any] = {} if asked is None else {"structured_outputs": asked}
        if (reasoning := self._reasoning(answer_format)) is not None:
            changes["reasoning"] = reasoning
        reads_special_tokens = calls is not None and calls.has_special_tokens and self.reads_calls(calls)
        if reads_special_tokens or answer_format.has_special_marks:
            changes["skip_special_tokens"] = False
        return changes

    def _reasoning(self, answer_format: AnswerFormat) -> Reasoning | None:
        """Return how the answer may begin with reasoning, and how long that may be."""
        budget = self.thinking_token_budget
        if budget is None or budget == _NO_BUDGET:
            return answer_format.reasoning
        if answer_format.reasoning is None:
            raise InvalidParamsError(
                f"thinking_token_budget={budget}: it is not known how the model marks its reasoning; start the server "
                "with --reasoning-parser, or leave it out."
            )
        return replace(answer_format.reasoning, max_tokens=budget)

    def reads_calls(self, calls: ToolFormat | None) -> bool:
        """Return whether the answer is read as text with calls, which the model writes in this format."""
        return calls is not None and (self.tool_use is not None or calls.reads_every_answer)

    def _check_own(self) -> None:
        self._tool_use = tool_choice_of(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.top_logprobs and not self.logprobs:
            raise _refuse("top_logprobs", "only for requests with logprobs=true")
        if self.echo:  # vLLM repeats the last message before an answer of the same role
            raise _refuse("echo", "not supported in a chat; leave it out")

    def _max_tokens(self, default: int) -> int:
        given = (limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None)
        return next(given, default)
