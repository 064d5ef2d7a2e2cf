"""The response bodies of OpenAI's API, from outputs and chunks of the engine; without HTTP."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from specdec_fast.results import GenerationOutput, StreamChunk
from specdec_fast.server.answer_format import AnswerFormat
from specdec_fast.server.protocol import ChatBody, CompletionBody, RequestBody
from specdec_fast.server.reading import AnswerPart, AnswerReader
from specdec_fast.server.tool_calls.formats import ToolCall

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_INCOMPLETE = "\ufffd"
_TEXT = "\0"  # marks the place of a text; no name has a NUL character
_TOKEN = -1  # marks the place of token ids


@dataclass
class _Choice:
    num_tokens: int = 0
    echoed: int = 0  # characters of the echoed prompt
    # characters of its tokens' texts, one by one, with the echoed prompt; None before the first
    text_offset: int | None = None
    has_begun: bool = False
    newest: int | None = None  # the last token whose text was made for log-probabilities; None before the first
    # JSON of its later events around the text, and around the token ids if they are shown; None before them
    parts: list[str] | None = None


class _ScoredToken(NamedTuple):
    token: int
    text: str
    logprob: float | None  # None of a prompt's first token
    likely: list[tuple[str, float]]  # texts and log-probabilities of the most likely tokens at its place


_Part = GenerationOutput | StreamChunk  # what an answer is made of: a whole output, or a chunk
_Tops = Sequence[dict[int, float] | None]


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
        # Prompts, and the likely tokens at their places, repeat the same tokens.
        self._decoded_texts: dict[tuple[int, ...], str] = {}
        self._echoed_tokens: dict[int, bool] = {}

    def read_as(self, answer_format: AnswerFormat) -> None:
        """Read the texts from now on as a model writes them in chats."""
        # completions are continued texts
        return None

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """Return the body of an answer from the outputs of all choices; raise the error of the first that failed."""
        choices = []
        for index, output in enumerate(outputs):
            output.raise_for_error()
            choice = self._choice(index, output, output.prompt_ids)
            choices.append(choice | {"finish_reason": output.finish_reason})
        prompts = [(len(output.prompt_ids), output.num_cached_tokens) for output in outputs]
        shown = self._of_prompt(outputs[0], outputs[0].prompt_ids, in_choice=False)
        return {**self._head, **shown, "choices": choices, "usage": self._usage(prompts)}

    def event(self, index: int, chunk: StreamChunk, prompt_ids: list[int]) -> dict[str, Any] | None:
        """Return an event of choice ``index`` for a chunk without an error; None if the chunk has nothing to show."""
        state = self._choices.setdefault(index, _Choice())
        has_scores = bool(chunk.logprobs) or chunk.prompt_logprobs is not None
        is_empty = not (chunk.text or chunk.finish_reason or self._ids or has_scores)
        if is_empty:
            state.num_tokens += len(chunk.token_ids)
            return None
        shown = {} if state.has_begun else self._of_prompt(chunk, prompt_ids, in_choice=False)
        choice = self._choice(index, chunk, prompt_ids, is_event=True)
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

    def usage_event(self, prompts: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the last event of a stream with ``include_usage``.

        ``prompts`` has, for every choice, the tokens of its prompt and those that were found in the prefix cache.
        """
        return {**self._event_head, "choices": [], "usage": self._usage(prompts)}

    def _usage(self, prompts: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the usage; of each prompt the first choice counts."""
        num_prompt_tokens = sum(length for length, _ in prompts[:: self._num_each])
        num_cached_tokens = sum(cached for _, cached in prompts[:: self._num_each])
        num_tokens = sum(choice.num_tokens for choice in self._choices.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }

    def _choice(self, index: int, part: _Part, prompt_ids: list[int], is_event: bool = False) -> dict[str, Any]:
        state = self._choices.setdefault(index, _Choice())
        is_first = not state.has_begun
        state.has_begun = True
        state.num_tokens += len(part.token_ids)
        text = part.text or ""
        if is_first:
            echoed = self._echo(index, prompt_ids)
            text = echoed + text
            state.echoed = len(echoed)
        choice = {"index": index, **self._content(text, is_first, is_event)}
        choice["logprobs"] = None if part.logprobs is None else self._logprobs(part, prompt_ids, state, is_first)
        if self._ids:
            choice["token_ids"] = part.token_ids
        return choice | (self._of_prompt(part, prompt_ids, in_choice=True) if is_first else {})

    def _of_prompt(self, part: _Part, prompt_ids: list[int], in_choice: bool) -> dict[str, Any]:
        """Return what is shown of a prompt in every choice, or beside the choices."""
        if in_choice != self.has_prompt_per_choice:
            return {}
        shown: dict[str, Any] = {"prompt_token_ids": prompt_ids} if self._ids else {}
        if self.body.prompt_logprobs is not None and part.prompt_logprobs is not None:
            shown["prompt_logprobs"] = self._prompt_scores(part, prompt_ids, self.body.prompt_logprobs)
        return shown

    def _prompt_scores(self, part: _Part, prompt_ids: list[int], num_top: int) -> list[dict[str, Any] | None]:
        """Return vLLM's ``prompt_logprobs``: of every place its token and the most likely ones, by id."""
        state = _Choice()
        found: list[dict[str, Any] | None] = []
        for place, token in enumerate(prompt_ids):
            logprob = (part.prompt_logprobs or [])[place]
            entries = None
            if logprob is not None:
                tops = part.prompt_top_logprobs
                top = [] if tops is None else list((tops[place] or {}).items())[:num_top]
                ranked = {token: (logprob, (part.prompt_ranks or [])[place])}
                ranked |= {each: (value, rank) for rank, (each, value) in enumerate(top, start=1)}
                entries = {
                    str(each): {
                        "logprob": max(value, _LEAST_LOGPROB),
                        "rank": rank,
                        "decoded_token": self._token_text(each, state),
                    }
                    for each, (value, rank) in ranked.items()
                }
            self._token_texts([token], state)
            found.append(entries)
        return found

    def _echo(self, index: int, prompt_ids: list[int]) -> str:
        return ""

    @abstractmethod
    def _content(self, text: str, is_first: bool, is_event: bool) -> dict[str, Any]:
        """Return the part of a choice that has its text."""

    @abstractmethod
    def _logprobs(self, part: _Part, prompt_ids: list[int], state: _Choice, is_first: bool) -> dict[str, Any]:
        """Return the part of a choice that has log-probabilities."""

    def _scored_tokens(
        self, token_ids: list[int], logprobs: Sequence[float | None], tops: _Tops | None, state: _Choice
    ) -> list[_ScoredToken]:
        """Return a choice's next tokens with their texts and those of the most likely tokens at their places."""
        num_top = self.body.num_top_logprobs
        found = []
        for place, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            top = list(((tops[place] if tops else None) or {}).items())[:num_top]
            likely = [(self._token_text(each, state), max(value, _LEAST_LOGPROB)) for each, value in top]
            (text,) = self._token_texts([token], state)
            found.append(_ScoredToken(token, text, None if logprob is None else max(logprob, _LEAST_LOGPROB), likely))
        return found

    def _token_texts(self, token_ids: list[int], state: _Choice) -> list[str]:
        """Return the texts of a choice's next tokens, which join to its text but for incomplete characters."""
        texts = []
        for token in token_ids:
            texts.append(self._token_text(token, state))
            state.newest = token
        return texts

    def _token_text(self, token: int, state: _Choice) -> str:
        """Return the text of a token that is, or might be, the next one of a choice.

        Some tokenizers, such as Llama-2's, remove the space before a first token; so each is decoded behind another.
        """
        if self._tokenizer is None:
            return f"token_id:{token}"
        alone = self._decoded(token)
        if state.newest is None:
            return alone
        before = self._decoded(state.newest)
        both = self._decoded(state.newest, token)
        return both[len(before) :] if both.startswith(before) and _INCOMPLETE not in before + alone else alone

    def _decoded(self, *token_ids: int) -> str:
        text = self._decoded_texts.get(token_ids)
        if text is None:
            assert self._tokenizer is not None
            text = self._decoded_texts[token_ids] = str(self._tokenizer.decode(list(token_ids)))
        return text


class CompletionAnswer(Answer):
    """The answer of ``/v1/completions``."""

    kind = event_kind = "text_completion"
    id_prefix = "cmpl"
    has_prompt_per_choice = True
    body: CompletionBody

    def _is_echoed(self, token: int) -> bool:
        """Return whether the text of a prompt has that of one of its tokens, as it has not that of special tokens."""
        if token not in self._echoed_tokens:
            is_special = False
            if self._tokenizer is not None and self._decoded(token):
                is_special = not self._tokenizer.decode([token], skip_special_tokens=True)
            self._echoed_tokens[token] = not is_special
        return self._echoed_tokens[token]

    def _echo(self, index: int, prompt_ids: list[int]) -> str:
        prompt = self.body.prompts[index // self._num_each] if self.body.echo else ""
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else str(self._tokenizer.decode(prompt_ids, skip_special_tokens=True))

    def _content(self, text: str, is_first: bool, is_event: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, part: _Part, prompt_ids: list[int], state: _Choice, is_first: bool) -> dict[str, Any]:
        scored: list[_ScoredToken] = []
        offsets: list[int] = []
        if is_first and self.body.echo and part.prompt_logprobs is not None:
            scored = self._scored_tokens(prompt_ids, part.prompt_logprobs, part.prompt_top_logprobs, state)
            state.newest = None  # because the texts of emitted tokens join to the text behind the echoed one
            offset = 0
            for token in scored:
                offsets.append(min(offset, state.echoed))
                offset += len(token.text) if self._is_echoed(token.token) else 0
        emitted = self._scored_tokens(part.token_ids, part.logprobs or [], part.top_logprobs, state)
        offset = state.echoed if state.text_offset is None else state.text_offset
        for token in emitted:
            offsets.append(offset)
            offset += len(token.text)
        state.text_offset = offset
        scored += emitted
        return {
            "tokens": [token.text for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [_top_logprobs(token) for token in scored] if self.body.logprobs else None,
            "text_offset": offsets,
        }


def _top_logprobs(token: _ScoredToken) -> dict[str, float] | None:
    """Return OpenAI's entry of one place: log-probabilities by text, that of the token included; None without any.

    Where several tokens have one text, the most likely one counts.
    """
    if token.logprob is None:
        return None
    entries: dict[str, float] = {}
    for text, logprob in [*token.likely, (token.text, token.logprob)]:
        entries.setdefault(text, logprob)
    return entries


class ChatAnswer(Answer):
    """The answer of ``/v1/chat/completions``."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    has_prompt_per_choice = False  # as in vLLM; all choices of a chat have one prompt
    body: ChatBody
    _format: AnswerFormat | None = None  # None: all text is content

    def read_as(self, answer_format: AnswerFormat) -> None:
        if answer_format.reasoning is not None or self.body.reads_calls(answer_format.calls):
            self._format = answer_format
            self._readers: dict[int, AnswerReader] = {}

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        body = super().whole(outputs)
        if self._format is None:
            return body
        for index, (choice, output) in enumerate(zip(body["choices"], outputs, strict=True)):
            message = choice["message"]
            part = self._reader(index, output.prompt_ids).add(message["content"], output.token_ids, is_last=True)
            calls = self._shown_calls(part.calls, 0)
            message |= self._shown_reasoning(part) | ({"tool_calls": calls} if calls else {})
            message["content"] = part.content if part.content or not (calls or part.reasoning) else None
            choice["finish_reason"] = _reason(choice["finish_reason"], bool(calls))
        return body | {"usage": self._with_reasoning(body["usage"])}

    def event(self, index: int, chunk: StreamChunk, prompt_ids: list[int]) -> dict[str, Any] | None:
        if self._format is None:
            return super().event(index, chunk, prompt_ids)
        reader = self._reader(index, prompt_ids)
        num_before = reader.num_calls
        part = reader.add(chunk.text or "", chunk.token_ids, is_last=chunk.finish_reason is not None)
        calls = self._shown_calls(part.calls, num_before)
        reasoning = self._shown_reasoning(part)
        # A chunk with calls or reasoning has something to show, although it may have no content.
        has_more = bool(calls or reasoning)
        shown = replace(chunk, text=part.content, finish_reason=chunk.finish_reason or ("stop" if has_more else None))
        event = super().event(index, shown, prompt_ids)
        if event is not None:
            choice = event["choices"][0]
            choice["finish_reason"] = _reason(chunk.finish_reason, reader.num_calls > 0)
            choice["delta"] |= reasoning
            if calls:
                numbered = [{"index": num_before + place, **call} for place, call in enumerate(calls)]
                choice["delta"]["tool_calls"] = numbered
        return event

    def event_json(self, index: int, chunk: StreamChunk, prompt_ids: list[int]) -> str | None:
        if self._format is None or self._reader(index, prompt_ids).is_plain:
            return super().event_json(index, chunk, prompt_ids)
        event = self.event(index, chunk, prompt_ids)
        return None if event is None else json.dumps(event)

    def usage_event(self, prompts: Sequence[tuple[int, int]]) -> dict[str, Any]:
        event = super().usage_event(prompts)
        return event | {"usage": self._with_reasoning(event["usage"])}

    def _reader(self, index: int, prompt_ids: list[int]) -> AnswerReader:
        """Return the reader of choice ``index``."""
        assert self._format is not None
        if index not in self._readers:
            reads_calls = self.body.reads_calls(self._format.calls)
            is_continued = bool(self.body.continue_final_message)
            tools = () if self.body.tool_use is None else self.body.tool_use.tools
            self._readers[index] = AnswerReader(
                self._format,
                self._tokenizer,
                prompt_ids,
                tools=tools,
                reads_calls=reads_calls,
                is_continued=is_continued,
            )
        return self._readers[index]

    def _shown_reasoning(self, part: AnswerPart) -> dict[str, str]:
        """Return the fields of a message that have reasoning: with vLLM's name, and with that of most clients."""
        is_shown = part.reasoning and self.body.include_reasoning is not False
        return dict.fromkeys(("reasoning", "reasoning_content"), part.reasoning) if is_shown else {}

    def _with_reasoning(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return a usage with the tokens of reasoning, where it is known how the model marks it."""
        if self._format is None or self._format.reasoning is None:
            return usage
        num_tokens = sum(reader.num_reasoning_tokens for reader in self._readers.values())
        return usage | {"completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _shown_calls(self, calls: list[ToolCall], num_before: int) -> list[dict[str, Any]]:
        """Return calls as the API shows them, no more than the body allows."""
        use = self.body.tool_use
        if use is not None and use.most is not None:
            calls = calls[: max(0, use.most - num_before)]
        if not calls:
            return []
        assert self._format is not None
        assert self._format.calls is not None
        return [
            {
                "id": call.id or self._format.calls.call_id(uuid.uuid4().hex),
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

    def _logprobs(self, part: _Part, prompt_ids: list[int], state: _Choice, is_first: bool) -> dict[str, Any]:
        content = []
        for token in self._scored_tokens(part.token_ids, part.logprobs or [], part.top_logprobs, state):
            top = [_chat_logprob(*each) for each in token.likely]
            content.append(_chat_logprob(token.text, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


def _chat_logprob(text: str, logprob: float | None) -> dict[str, Any]:
    # The text of a part of a character does not say which bytes it has.
    code = None if _INCOMPLETE in text else list(text.encode(errors="replace"))
    return {"token": text, "logprob": logprob, "bytes": code}


def _reason(finish_reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason
