"""The end of a step: log-probabilities of the emitted tokens, and the commit of each sequence."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Many
from itertools import islice

from torch import Tensor

from specdec_fast.device_copy import to_device
from specdec_fast.engine.step import Step
from specdec_fast.errors import InvalidLogitsError
from specdec_fast.ops import INVALID_TOKEN
from specdec_fast.request.sequence import Sequence


def logprobs_of(
    batch: Many[Sequence], accepted_rows: Many[Many[int]], emissions: Many[list[int]], logits: Tensor
) -> list[list[float] | None]:
    """Return the log-probabilities of emitted tokens for the sequences that request them, in one transfer.

    Args:
        batch: ``B`` sequences.
        accepted_rows: rows of ``logits`` of each sequence. Token i of an emission was chosen at its row i.
        emissions: tokens of each sequence, from ``Verification.outcome``.
        logits: ``[T, vocab_size]``, the target's.

    Returns:
        Per sequence one value per token of its emission except ``INVALID_TOKEN``; None for a sequence that does not
        request them.

    """
    if all(sequence.logprobs is None for sequence in batch):
        return [None] * len(batch)
    rows: list[int] = []
    tokens: list[int] = []
    lengths: list[int | None] = []
    for sequence, own, emission in zip(batch, accepted_rows, emissions, strict=True):
        length = None
        if sequence.logprobs is not None:
            length = len(emission) - (emission[-1] == INVALID_TOKEN)
            rows += own[:length]
            tokens += emission[:length]
        lengths.append(length)
    values = iter(token_logprobs(logits, rows, tokens))
    return [None if length is None else list(islice(values, length)) for length in lengths]


def token_logprobs(logits: Tensor, rows: list[int], tokens: list[int]) -> list[float]:
    """Return the log-probability of ``tokens[i]`` at row ``rows[i]``.

    Args:
        logits: ``[T, vocab_size]``, of any float dtype; the sum over the vocabulary is computed in float32.
        rows: ``R`` rows of ``logits``.
        tokens: ``R`` token ids.

    Returns:
        ``R`` values of float32.

    """
    index = to_device([*rows, *tokens], logits.device).view(2, -1)
    logprobs = logits[index[0]].float().log_softmax(dim=-1)  # [R, vocab_size]
    return logprobs.gather(1, index[1, :, None])[:, 0].tolist()


def commit_emissions(
    step: Step, emissions: Many[list[int]], logprobs: Many[list[float] | None], live: Container[int]
) -> list[tuple[Sequence, list[int]]]:
    """Commit the emissions of a step.

    Args:
        step: of ``B`` sequences.
        emissions: tokens of each sequence, from ``Verification.outcome``.
        logprobs: of each sequence, from ``logprobs_of``.
        live: ids of the requests that have not been cancelled; the others stay as they are.

    Returns:
        The sequences that have not been cancelled, with the tokens that each emitted.

    """
    drafted = zip(step.draft.num_draft_tokens, step.depths, strict=True)
    return [
        (sequence, commit_emission(sequence, *counts, emission, values))
        for sequence, counts, emission, values in zip(step.batch, drafted, emissions, logprobs, strict=True)
        if sequence.request_id in live
    ]


def commit_emission(
    sequence: Sequence, num_draft_tokens: int, depth: int, emission: list[int], logprobs: list[float] | None
) -> list[int]:
    """Commit the emission of one sequence; a row of NaN logits ends the request after the tokens before it.

    Args:
        sequence: the sequence that emits.
        num_draft_tokens: number of its draft tokens verified in this step.
        depth: of its draft; of a chain, the number of its tokens.
        emission: its tokens, from ``Verification.outcome``.
        logprobs: its log-probabilities, from ``logprobs_of``.

    Returns:
        The committed tokens.

    """
    num_accepted, valid = len(emission) - 1, emission[-1] != INVALID_TOKEN
    emission = emission if valid else emission[:-1]
    tokens = sequence.append_emission(num_draft_tokens, num_accepted, emission, logprobs, depth) if emission else []
    if not valid and sequence.finish_reason is None:
        sequence.fail(
            InvalidLogitsError(
                f"the target's logits after {sequence.length} tokens hold a NaN, so no token can be chosen; check "
                "its weights, or load it in a wider dtype."
            )
        )
    return tokens
