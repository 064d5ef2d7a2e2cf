"""The response bodies of OpenAI's API, from outputs and chunks of the engine; without HTTP."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec_fast.results import GenerationOutput, StreamChunk
from specdec_fast.server.protocol import ChatBody, CompletionBody, RequestBody
from specdec_fast.server.tool_calls.choosing import CallReading
from specdec_fast.server.tool_calls.formats import ToolCall, ToolFormat
from specdec_fast.server.tool_calls.reading import reader_of

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_INCOMPLETE = "\ufffd"
_TEXT = "\0"  # marks the place of a text; no name has a NUL character
_TOKEN = -1  # marks the place of token ids


@dataclass
class _Choice:
    num_tokens: int = 0
    text_offset: int = 0  # characters of its tokens' texts, one by one, with the echoed prompt
    has_begun: bool = False
    # the last token whose text was made for log-probabilities, and that text alone; None before the first
    newest: tuple[int, str] | None = None
    # JSON of its later events around the text, and around the token ids if they are shown; None before them
    parts: list[str] | None = None


class Answer(ABC):
    """Makes the bodies of one request's answer: one whole body, or events of a stream.

    ``request_id`` makes the ``id`` of the answer, with the prefix that OpenAI gives to this kind.
    """

    kind: str
    event_kind: str
    id_prefix: str
    has_prompt_per_choice: bool  # where the prompt's ids are shown: in every choice, or beside the choices

    def __init__(self, body: RequestBody, request_id: str, model: str, tokenizer: Any | None) -> None:
        self.body = body
        self._tokenizer = tokenizer
        self._num_each = body.n or 1
        self._choices: dict[int, _Choice] = {}
        self._head = {
            "id": f"{self.id_prefix}-{request_id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._event_head = self._head | {"object": self.event_kind}
        self._ids = bool(body.return_token_ids)

    def read_calls(self, reading: CallReading) -> None:
        """Read calls of functions in the texts, from now on, if the body asks for it."""
        # only chats have tools
        return None

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """Return the body of an answer from the outputs of all choices; raise the error of the first that failed."""
        choices = []
        for index, output in enumerate(outputs):
            output.raise_for_error()
            choice = self._choice(index, output.text or "", output.token_ids, output.logprobs, output.prompt_ids)
            choices.append(choice | {"finish_reason": output.finish_reason})
        num_prompt_tokens = sum(len(output.prompt_ids) for output in outputs[:: self._num_each])
        num_tokens = sum(len(output.token_ids) for output in outputs)
        shown = self._prompt_ids(outputs[0].prompt_ids, in_choice=False)
        return {**self._head, **shown, "choices": choices, "usage": _usage(num_prompt_tokens, num_tokens)}

    def event(self, index: int, chunk: StreamChunk, prompt_ids: list[int]) -> dict[str, Any] | None:
        """Return an event of choice ``index`` for a chunk without an error; None if the chunk has nothing to show."""
        state = self._choices.setdefault(index, _Choice())
        is_empty = not (chunk.text or chunk.finish_reason or self._ids or chunk.logprobs)
        if is_empty:
            state.num_tokens += len(chunk.token_ids)
            return None
        shown = {} if state.has_begun else self._prompt_ids(prompt_ids, in_choice=False)
        choice = self._choice(index, chunk.text or "", chunk.token_ids, chunk.logprobs, prompt_ids, is_event=True)
        choices = [choice | {"finish_reason": chunk.finish_reason}]
        body: dict[str, Any] = {**self._event_head, **shown, "choices": choices}
        return body | ({"usage": None} if self.body.includes_usage else {})

    def event_json(self, index: int, chunk: StreamChunk, prompt_ids: list[int]) -> str | None:
        """Return ``event`` as JSON in ASCII. Most events differ in text and ids only; the rest is made once."""
        state = self._choices.get(index)
        if state is None or not (state.has_begun and chunk.text) or chunk.finish_reason or chunk.logprobs is not None:
            event = self.event(index, chunk, prompt_ids)
            return None if event is None else json.dumps(event)
        if state.parts is None:
            marked = json.dumps(self.event(index, StreamChunk(index, [_TOKEN], _TEXT), prompt_ids))
            state.num_tokens -= 1
            before, rest = marked.split(json.dumps(_TEXT))
            state.parts = [before, *rest.split(json.dumps([_TOKEN]))]
        state.num_tokens += len(chunk.token_ids)
        before, *after = state.parts
        return before + json.dumps(chunk.text) + json.dumps(chunk.token_ids).join(after)

    def usage_event(self, prompt_lengths: Sequence[int]) -> dict[str, Any]:
        """Return the last event of a stream with ``include_usage``, from the lengths of all choices' prompts."""
        num_tokens = sum(choice.num_tokens for choice in self._choices.values())
        return {**self._event_head, "choices": [], "usage": _usage(sum(prompt_lengths[:: self._num_each]), num_tokens)}

    def _choice(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        logprobs: list[float] | None,
        prompt_ids: list[int],
        is_event: bool = False,
    ) -> dict[str, Any]:
        state = self._choices.setdefault(index, _Choice())
        is_first = not state.has_begun
        state.has_begun = True
        state.num_tokens += len(token_ids)
        if is_first:
            echoed = self._echo(index, prompt_ids)
            text = echoed + text
            state.text_offset = len(echoed)
        choice = {"index": index, **self._content(text, is_first, is_event)}
        choice["logprobs"] = None if logprobs is None else self._logprobs(token_ids, logprobs, state)
        if self._ids:
            choice |= {"token_ids": token_ids} | (self._prompt_ids(prompt_ids, in_choice=True) if is_first else {})
        return choice

    def _prompt_ids(self, prompt_ids: list[int], in_choice: bool) -> dict[str, list[int]]:
        return {"prompt_token_ids": prompt_ids} if self._ids and in_choice == self.has_prompt_per_choice else {}

    def _echo(self, index: int, prompt_ids: list[int]) -> str:
        return ""

    @abstractmethod
    def _content(self, text: str, is_first: bool, is_event: bool) -> dict[str, Any]:
        """Return the part of a choice that has its text."""

    @abstractmethod
    def _logprobs(self, token_ids: list[int], logprobs: list[float], state: _Choice) -> dict[str, Any]:
        """Return the part of a choice that has log-probabilities."""

    def _token_texts(self, token_ids: list[int], state: _Choice) -> list[str]:
        """Return the texts of a choice's next tokens, which join to its text but for incomplete characters.

        Some tokenizers, such as Llama-2's, remove the space before a first token; so each is decoded behind another.
        """
        if self._tokenizer is None:
            return [f"token_id:{token}" for token in token_ids]
        texts = []
        for token in token_ids:
            text = alone = str(self._tokenizer.decode([token]))
            if state.newest is not None:
                before = state.newest[1]
                both = str(self._tokenizer.decode([state.newest[0], token]))
                if both.startswith(before) and _INCOMPLETE not in before + alone:
                    text = both[len(before) :]
            texts.append(text)
            state.newest = (token, alone)
        return texts


class CompletionAnswer(Answer):
    """The answer of ``/v1/completions``."""

    kind = event_kind = "text_completion"
    id_prefix = "cmpl"
    has_prompt_per_choice = True
    body: CompletionBody

    def _echo(self, index: int, prompt_ids: list[int]) -> str:
        prompt = self.body.prompts[index // self._num_each] if self.body.echo else ""
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else str(self._tokenizer.decode(prompt_ids, skip_special_tokens=True))

    def _content(self, text: str, is_first: bool, is_event: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, token_ids: list[int], logprobs: list[float], state: _Choice) -> dict[str, Any]:
        texts = self._token_texts(token_ids, state)
        offsets = []
        for text in texts:
            offsets.append(state.text_offset)
            state.text_offset += len(text)
        values = [max(value, _LEAST_LOGPROB) for value in logprobs]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


class ChatAnswer(Answer):
    """The answer of ``/v1/chat/completions``."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    has_prompt_per_choice = False  # as in vLLM; all choices of a chat have one prompt
    body: ChatBody
    _format: ToolFormat | None = None
    _ends: Collection[str] = ()

    def read_calls(self, reading: CallReading) -> None:
        if self.body.reads_calls(reading.format):
            self._format = reading.format
            self._ends = reading.ends
            self._readers: dict[int, Any] = {}

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        body = super().whole(outputs)
        if self._format is None:
            return body
        for choice in body["choices"]:
            reader = reader_of(self._format, self._ends)
            content, calls = reader.add(choice["message"]["content"], is_last=True)
            if calls := self._shown_calls(calls, 0):
                choice["message"]["tool_calls"] = calls
            choice["message"]["content"] = content if content or not calls else None
            choice["finish_reason"] = _reason(choice["finish_reason"], bool(calls))
        return body

    def event(self, index: int, chunk: StreamChunk, prompt_ids: list[int]) -> dict[str, Any] | None:
        if self._format is None:
            return super().event(index, chunk, prompt_ids)
        reader = self._readers.setdefault(index, reader_of(self._format, self._ends))
        num_before = reader.num_calls
        content, found = reader.add(chunk.text or "", is_last=chunk.finish_reason is not None)
        calls = self._shown_calls(found, num_before)
        # A chunk with calls has something to show, although it may have no text.
        shown = replace(chunk, text=content, finish_reason=chunk.finish_reason or ("stop" if calls else None))
        event = super().event(index, shown, prompt_ids)
        if event is not None:
            choice = event["choices"][0]
            choice["finish_reason"] = _reason(chunk.finish_reason, reader.num_calls > 0)
            if calls:
                numbered = [{"index": num_before + place, **call} for place, call in enumerate(calls)]
                choice["delta"]["tool_calls"] = numbered
        return event

    def event_json(self, index: int, chunk: StreamChunk, prompt_ids: list[int]) -> str | None:
        if self._format is None:
            return super().event_json(index, chunk, prompt_ids)
        event = self.event(index, chunk, prompt_ids)
        return None if event is None else json.dumps(event)

    def _shown_calls(self, calls: list[ToolCall], num_before: int) -> list[dict[str, Any]]:
        """Return calls as the API shows them, no more than the body allows."""
        assert self._format is not None
        use = self.body.tool_use
        if use is not None and use.most is not None:
            calls = calls[: max(0, use.most - num_before)]
        return [
            {
                "id": self._format.call_id(uuid.uuid4().hex),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _content(self, text: str, is_first: bool, is_event: bool) -> dict[str, Any]:
        if not is_event:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text} if is_first or text else {}}

    def _logprobs(self, token_ids: list[int], logprobs: list[float], state: _Choice) -> dict[str, Any]:
        content = []
        for text, value in zip(self._token_texts(token_ids, state), logprobs, strict=True):
            # The text of a part of a character does not say which bytes it has.
            code = None if _INCOMPLETE in text else list(text.encode(errors="replace"))
            entry = {"token": text, "logprob": max(value, _LEAST_LOGPROB), "bytes": code, "top_logprobs": []}
            content.append(entry)
        return {"content": content, "refusal": None}


def _reason(finish_reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason


def _usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
