"""Makes the caller's outputs from sequences: whole outputs, or chunks as steps emit them."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from specdec_fast.engine.step import StepOutput
from specdec_fast.errors import ConfigError
from specdec_fast.request.detokenizer import Detokenizer, detokenizer_of
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import GenerationOutput, ScoreOutput, StreamChunk

Outputs = Generator[StepOutput, None, None]  # the outputs of all steps, in order


def output_of(sequence: Sequence, tokenizer: Any | None) -> GenerationOutput:
    """Return the output of a sequence that has ended."""
    emitted_ids = sequence.emitted_ids
    if sequence.stop_strings is not None:
        text: str | None = sequence.stop_strings.take(last=True)
    else:
        text = None if tokenizer is None else _text(sequence, _detokenizer(sequence, tokenizer), emitted_ids, True)
    return GenerationOutput(
        index=sequence.index,
        prompt_ids=sequence.token_ids[: sequence.prompt_length],
        token_ids=emitted_ids,
        text=text,
        finish_reason=sequence.finish_reason or "length",
        stats=sequence.stats,
        error=sequence.error,
        logprobs=sequence.logprobs,
        seed=sequence.seed,
        choice=sequence.choice,
        top_logprobs=sequence.top_logprobs,
        **_prompt_scores(sequence),
        num_cached_tokens=sequence.num_cached_tokens,
    )


def score_of(output: GenerationOutput) -> ScoreOutput:
    """Return what an output says of its prompt, whose ``prompt_logprobs`` were requested."""
    logprobs = [each for each in output.prompt_logprobs or [] if each is not None]
    ranks = [each for each in output.prompt_ranks or [] if each is not None]
    tops = output.prompt_top_logprobs
    top_logprobs = None if tops is None else [each for each in tops if each is not None]
    return ScoreOutput(
        index=output.index,
        token_ids=output.prompt_ids,
        logprobs=logprobs,
        ranks=ranks,
        top_logprobs=top_logprobs,
        error=output.error,
    )


def _prompt_scores(sequence: Sequence) -> dict[str, Any]:
    """Return the fields of an output that have the scores of the prompt, if these were requested."""
    scores = sequence.prompt_scores
    if scores is None:
        return {}
    first = [None] if sequence.prompt_length else []
    found: dict[str, Any] = {"prompt_logprobs": first + scores.logprobs, "prompt_ranks": first + scores.ranks}
    if sequence.params.prompt_logprobs:
        found["prompt_top_logprobs"] = first + scores.top_logprobs
    return found


def outputs_of(tokenizer: Any | None, outputs: Outputs) -> Generator[GenerationOutput, None, None]:
    """Yield the output of every sequence that has ended; closing the iterator closes ``outputs``."""
    with closing(outputs):
        for output in outputs:
            if output.finish_reason is not None:
                yield output_of(output.request, tokenizer)


class ChunkMaker:
    """Makes the chunks of one sequence; they add up to its output, also if they are made after later steps."""

    def __init__(self, sequence: Sequence, tokenizer: Any | None) -> None:
        self._sequence = sequence
        has_text = tokenizer is not None and sequence.stop_strings is None
        self._detokenizer = _detokenizer(sequence, tokenizer) if has_text else None
        self._num_tokens = 0  # in chunks that have been made
        self._has_begun = False

    def make(self, output: StepOutput) -> StreamChunk:
        """Make the chunk of one step's output; the last one has whatever a failed step has left."""
        sequence = self._sequence
        start = self._num_tokens
        is_last = output.finish_reason is not None
        tokens = sequence.emitted_ids[start:] if is_last else output.token_ids
        self._num_tokens += len(tokens)
        if sequence.stop_strings is not None:
            text: str | None = sequence.stop_strings.take(is_last)
        else:
            text = None if self._detokenizer is None else _text(sequence, self._detokenizer, tokens, is_last)
        stop = start + len(tokens)
        of_prompt = {} if self._has_begun else _prompt_scores(sequence)
        self._has_begun = True
        return StreamChunk(
            index=sequence.index,
            token_ids=tokens,
            text=text,
            finish_reason=sequence.finish_reason if is_last else None,
            error=sequence.error if is_last else None,
            logprobs=None if sequence.logprobs is None else sequence.logprobs[start:stop],
            choice=sequence.choice,
            top_logprobs=None if sequence.top_logprobs is None else sequence.top_logprobs[start:stop],
            **of_prompt,
        )


def chunks_of(sequences: list[Sequence], tokenizer: Any | None, outputs: Outputs) -> Generator[StreamChunk, None, None]:
    """Yield one chunk per output; closing the iterator closes ``outputs``."""
    makers = {sequence: ChunkMaker(sequence, tokenizer) for sequence in sequences}
    with closing(outputs):
        for output in outputs:
            yield makers[output.request].make(output)


def _detokenizer(sequence: Sequence, tokenizer: Any) -> Detokenizer:
    return detokenizer_of(tokenizer, sequence.params, sequence.stop_ids)


def _text(sequence: Sequence, detokenizer: Detokenizer, tokens: list[int], is_last: bool) -> str:
    """Return the text that ``tokens`` make final; fail a sequence at its end if its tokens could not be decoded."""
    text = detokenizer.add(tokens, is_last)
    if is_last and detokenizer.error is not None and sequence.error is None:
        sequence.fail(detokenizer.error)
    return text


class Progress:
    """A tqdm bar over requests, with tokens per second beside it: if ``show``; None: if stderr is a terminal.

    Raises ConfigError if ``show`` is neither a bool nor None.
    """

    def __init__(self, num_requests: int, show: bool | None) -> None:
        if not isinstance(show, bool) and show is not None:
            raise ConfigError(f"progress={show!r}: expected True, False or None.")
        stderr = sys.stderr  # None in a process without a console; or the caller's own, which may have `write` only
        is_open = stderr is not None and not getattr(stderr, "closed", False)
        is_terminal = is_open and hasattr(stderr, "isatty") and stderr.isatty()
        shown = is_terminal if show is None else is_open and show
        self.is_shown = bool(shown)
        self._bar = tqdm(total=num_requests, desc="generate", unit="request", disable=not shown)
        self._num_tokens = 0

    def update(self, num_tokens: int, finished: bool) -> None:
        """Count the tokens that one sequence emitted, and the sequence itself when it has ended."""
        self._num_tokens += num_tokens
        if finished and not self._bar.disable:
            elapsed = self._bar.format_dict["elapsed"]
            self._bar.set_postfix_str(f"{self._num_tokens / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
