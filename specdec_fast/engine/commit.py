"""The end of a step: what each sequence emits, with which log-probabilities, and its commitment."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import islice

from torch import Tensor

from specdec_fast.device_copy import to_device
from specdec_fast.errors import InvalidLogitsError
from specdec_fast.ops import INVALID_TOKEN
from specdec_fast.request.sequence import Sequence


def logprobs_of(
    batch: Many[Sequence], counts: Many[int], emissions: Many[list[int]], logits: Tensor
) -> list[list[float] | None]:
    """Look up the log-probabilities of what is emitted, for the sequences that ask; all in one transfer.

    Args:
        batch: ``B`` sequences.
        counts: rows of each; ``T`` in all. Token i of an emission was chosen at its sequence's row i.
        emissions: of each, from ``Verification.emissions``.
        logits: ``[T, vocab_size]``, as the target made them.

    Returns:
        Per sequence one value per token of its emission, none for ``INVALID_TOKEN``; None where nobody asks.

    """
    if all(sequence.logprobs is None for sequence in batch):
        return [None] * len(batch)
    rows: list[int] = []
    tokens: list[int] = []
    lengths: list[int | None] = []
    first_row = 0
    for sequence, count, emission in zip(batch, counts, emissions, strict=True):
        length = None
        if sequence.logprobs is not None:
            length = len(emission) - (emission[-1] == INVALID_TOKEN)
            rows += range(first_row, first_row + length)
            tokens += emission[:length]
        lengths.append(length)
        first_row += count
    values = iter(token_logprobs(logits, rows, tokens))
    return [None if length is None else list(islice(values, length)) for length in lengths]


def token_logprobs(logits: Tensor, rows: list[int], tokens: list[int]) -> list[float]:
    """Return the log-probability of ``tokens[i]`` at row ``rows[i]``, each row by itself.

    Args:
        logits: ``[T, vocab_size]``, of any float dtype; the sum over the vocabulary is taken in float32.
        rows: ``R`` rows of ``logits``.
        tokens: ``R`` token ids.

    Returns:
        ``R`` values of float32.

    """
    index = to_device([*rows, *tokens], logits.device).view(2, -1)
    logprobs = logits[index[0]].float().log_softmax(dim=-1)  # [R, vocab_size]
    return logprobs.gather(1, index[1, :, None])[:, 0].tolist()


def commit(sequence: Sequence, num_draft_tokens: int, emission: list[int], logprobs: list[float] | None) -> list[int]:
    """Commit what one sequence emits; a row of NaN logits ends the request after the tokens before it.

    Args:
        sequence: whose step it was.
        num_draft_tokens: draft tokens verified in it.
        emission: from ``Verification.emissions``.
        logprobs: from ``logprobs_of``.

    Returns:
        The tokens committed.

    """
    num_accepted, valid = len(emission) - 1, emission[-1] != INVALID_TOKEN
    emission = emission if valid else emission[:-1]
    tokens = sequence.commit(num_draft_tokens, num_accepted, emission, logprobs) if emission else []
    if not valid and sequence.finish_reason is None:
        sequence.fail(
            InvalidLogitsError(
                f"the target's logits after {sequence.length} tokens hold a NaN, so no token can be chosen; check "
                "its weights, or load it in a wider dtype."
            )
        )
    return tokens
