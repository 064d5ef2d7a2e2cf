"""Makes the caller's outputs from sequences: whole outputs, or chunks as steps emit them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from specdec_fast.engine.step import StepOutput
from specdec_fast.request.detokenizer import Detokenizer
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import GenerationOutput, StreamChunk

Outputs = Generator[StepOutput, None, None]  # the outputs of all steps, in order


def output_of(sequence: Sequence, tokenizer: Any | None) -> GenerationOutput:
    """Return the output of a sequence that has ended."""
    emitted_ids = sequence.emitted_ids
    if sequence.stop_strings is not None:
        text: str | None = sequence.stop_strings.take(last=True)
    else:
        text = _text(sequence, Detokenizer(tokenizer), emitted_ids) if tokenizer is not None else None
    return GenerationOutput(
        sequence.index,
        sequence.token_ids[: sequence.prompt_length],
        emitted_ids,
        text,
        sequence.finish_reason or "length",
        sequence.stats,
        sequence.error,
        sequence.logprobs,
        sequence.seed,
    )


def chunks_of(sequences: list[Sequence], tokenizer: Any | None, outputs: Outputs) -> Iterator[StreamChunk]:
    """Yield one chunk per output; closing the iterator closes ``outputs``."""
    detokenizers = [None if tokenizer is None else Detokenizer(tokenizer) for _ in sequences]
    with closing(outputs):
        for sequence, tokens, finish_reason in outputs:
            detokenizer = detokenizers[sequence.index]
            if sequence.stop_strings is not None:
                text: str | None = sequence.stop_strings.take(finish_reason is not None)
            else:
                text = _text(sequence, detokenizer, tokens) if detokenizer is not None else None
            logprobs = sequence.logprobs
            if logprobs is not None:
                logprobs = logprobs[len(logprobs) - len(tokens) :]
            yield StreamChunk(sequence.index, tokens, text, sequence.finish_reason, sequence.error, logprobs)


def _text(sequence: Sequence, detokenizer: Detokenizer, tokens: list[int]) -> str:
    """Return the text that ``tokens`` make final; fail a sequence at its end if its tokens could not be decoded."""
    last = sequence.finish_reason is not None
    text = detokenizer.add(tokens, last)
    if last and detokenizer.error is not None and sequence.error is None:
        sequence.fail(detokenizer.error)
    return text
