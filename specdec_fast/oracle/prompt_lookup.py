"""Prompt lookup: a scan that follows its definition. The drafter ``"ngram"`` keeps an index instead."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_NGRAM = 3


def prompt_lookup(token_ids: Sequence[int], num_draft_tokens: int) -> list[int]:
    """Return up to ``num_draft_tokens`` tokens that followed the latest earlier copy of the last n tokens.

    n is the largest of 3, 2, 1 for which an earlier copy exists; without any, nothing is proposed. An earlier copy
    begins before the last n tokens begin, and may overlap them. After prompt lookup decoding
    (github.com/apoorvumang/prompt-lookup-decoding), with the latest copy instead of the first.
    """
    tokens = list(token_ids)
    for n in range(_LONGEST_NGRAM, 0, -1):
        start_of_ending = len(tokens) - n
        copies = [start for start in range(start_of_ending) if tokens[start : start + n] == tokens[start_of_ending:]]
        if copies:
            follows = copies[-1] + n
            return tokens[follows : follows + num_draft_tokens]
    return []
