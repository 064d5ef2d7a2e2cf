"""Prompt lookup: draft what followed the last time the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NGRAM = 3


def prompt_lookup(token_ids: Sequence[int], num_draft_tokens: int) -> list[int]:
    """Return up to ``num_draft_tokens`` tokens that followed the latest earlier copy of the last n tokens.

    n is the largest of 3, 2, 1 that has an earlier copy; without one, nothing is proposed. After prompt lookup
    decoding (github.com/apoorvumang/prompt-lookup-decoding), with the latest copy instead of the first.
    """
    length = len(token_ids)
    for n in range(min(MAX_NGRAM, length - 1), 0, -1):
        ending = token_ids[length - n :]
        for start in range(length - n - 1, -1, -1):
            if token_ids[start] == ending[0] and token_ids[start : start + n] == ending:
                return list(token_ids[start + n : start + n + num_draft_tokens])
    return []
