"""The same K for every sequence and step."""

from __future__ import annotations

from specdec_fast.request.sequence import Sequence
from specdec_fast.speculation_length.base import LengthPolicy


class FixedLength(LengthPolicy):
    """Gives every sequence K draft tokens, fewer where fewer tokens may still come; 0 decodes plainly."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.max_draft_tokens = num_draft_tokens

    def limits(self, batch: list[Sequence]) -> list[int]:
        k = self.max_draft_tokens
        return [min(k, sequence.num_remaining - 1) for sequence in batch]
