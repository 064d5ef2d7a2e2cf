"""From sequences to what the caller gets: whole outputs, or chunks as steps emit them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from specdec_fast.sequence import Sequence
from specdec_fast.text import Detokenizer
from specdec_fast.types import GenerationOutput, StreamChunk

Steps = Generator[tuple[Sequence, list[int]], None, None]  # what a step emitted, sequence by sequence


def output_of(sequence: Sequence, tokenizer: Any | None) -> GenerationOutput:
    """Make the output of a sequence that has ended."""
    emitted_ids = sequence.emitted_ids
    if sequence.stop_strings is not None:
        text: str | None = sequence.stop_strings.take(last=True)
    else:
        text = Detokenizer(tokenizer).add(emitted_ids, last=True) if tokenizer else None
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


def chunks_of(sequences: list[Sequence], tokenizer: Any | None, steps: Steps) -> Iterator[StreamChunk]:
    """Make a chunk of everything ``steps`` yields; closing the iterator closes ``steps``."""
    detokenizers = [Detokenizer(tokenizer) if tokenizer else None for _ in sequences]
    with closing(steps):
        for sequence, tokens in steps:
            reason, detokenizer = sequence.finish_reason, detokenizers[sequence.index]
            last = reason is not None
            if sequence.stop_strings is not None:
                text: str | None = sequence.stop_strings.take(last)
            else:
                text = detokenizer.add(tokens, last) if detokenizer else None
            logprobs = sequence.logprobs
            if logprobs is not None:
                logprobs = logprobs[len(logprobs) - len(tokens) :]
            yield StreamChunk(sequence.index, tokens, text, reason, sequence.error, logprobs)
