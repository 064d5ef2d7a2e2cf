"""The bitmasks of a verification: one row of words for each of its rows, made on the host along the paths of drafts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from specdec_fast.errors import RequestError, TokenMaskError
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_masks import ALL_ALLOWED, UNREAD, num_words


class MaskRows(NamedTuple):
    """The bitmasks of ``T`` rows."""

    words: np.ndarray  # [T, ceil(vocab_size / 32)] int32, see ``request/token_masks.py``
    failures: dict[int, RequestError]  # by row: why nothing may be chosen there, if a mask raised


def masks_read_tokens(sequences: Many[Sequence]) -> bool:
    """Return whether the masks of some sequence depend on its tokens, drafted ones included, as a grammar's do."""
    return any(sequence.masks is not None and sequence.masks.reads_tokens for sequence in sequences)


def mask_rows(
    sequences: Many[Sequence],
    drafted: Many[int] | None,
    num_draft_tokens: Many[int],
    parents: Many[int] | None,
    vocab_size: int,
) -> MaskRows | None:
    """Make the bitmasks of a verification, whose rows are those of ``StepPlan``.

    If a mask raises, nothing is allowed in the rows of its sequence, so that sequence alone ends with an error.

    Args:
        sequences: ``B`` sequences.
        drafted: ``[T - B]``, the draft tokens, sequence after sequence; None if no mask reads them.
        num_draft_tokens: of each sequence.
        parents: ``[T - B]``, see ``Draft.parents``; None: chains.
        vocab_size: number of ids.

    Returns:
        The rows; None if no sequence has a mask.
    """
    if all(sequence.masks is None for sequence in sequences):
        return None
    counts = [count + 1 for count in num_draft_tokens]
    words = np.full((sum(counts), num_words(vocab_size)), ALL_ALLOWED, np.int32)
    failures: dict[int, RequestError] = {}
    starts = accumulate(counts, initial=0)
    for b, (sequence, start) in enumerate(zip(sequences, starts, strict=False)):
        if sequence.masks is None:
            continue
        count = num_draft_tokens[b]
        own = slice(start - b, start - b + count)
        tokens = [UNREAD] * count if drafted is None else drafted[own]
        above = range(-1, count - 1) if parents is None else parents[own]
        rows = words[start : start + count + 1]
        try:
            sequence.masks.fill_rows(sequence.emitted_ids, tokens, above, rows)
        except Exception as error:
            rows[:] = 0
            failure = TokenMaskError(f"what restricts this request's tokens failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            failures |= dict.fromkeys(range(start, start + count + 1), failure)
    return MaskRows(words, failures)


def rows_for_drafts(sequences: Many[Sequence], paths: Many[Many[int]]) -> np.ndarray | None:
    """Make the bitmasks of a drafter's rows, as far as they are known.

    Args:
        sequences: of each of ``N`` rows.
        paths: the draft tokens in front of each row, ``UNREAD`` where they are not known.

    Returns:
        ``[N, words]`` int32; None if no sequence has a mask.
    """
    masks = [sequence.masks for sequence in sequences]
    vocab_size = next((own.vocab_size for own in masks if own is not None), None)
    if vocab_size is None:
        return None
    words = np.full((len(masks), num_words(vocab_size)), ALL_ALLOWED, np.int32)
    for row, (own, sequence, path) in enumerate(zip(masks, sequences, paths, strict=True)):
        if own is not None:
            words[row] = own.row_behind(sequence.emitted_ids, path)
    return words
