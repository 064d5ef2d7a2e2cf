"""What verification found: the target's logits at every row, and which draft tokens it accepts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.device_copy import to_device, to_host


@dataclass(frozen=True)
class Verification:
    """What one forward of the target gave. On a GPU it is only queued until ``emissions`` waits for it.

    Attributes:
        counts: rows of each of ``B`` sequences, its draft tokens plus one; ``T`` in all.
        logits: ``[T, vocab_size]``, the target's.
        results: what ``verify_chain`` found, target's tokens ``[T]``, accepted draft tokens ``[B]`` and next tokens
            ``[B]``; or the emissions themselves.
        forward_seconds: of the forward alone, on the host's clock.
        accept_seconds: of choosing and accepting, as far as it is done already.
        hidden_states: ``[T, taps, H]``, the target's; None without taps.

    """

    counts: list[int]
    logits: Tensor
    results: Many[Tensor] | list[list[int]]
    forward_seconds: float
    accept_seconds: float
    hidden_states: Tensor | None = None

    def emissions(self) -> list[list[int]]:
        """Return each sequence's accepted draft tokens and its next token, ``INVALID_TOKEN`` after NaN logits."""
        if isinstance(self.results, list):
            return self.results
        target_tokens, num_accepted, next_tokens = to_host(self.results)
        emissions, first_row = [], 0
        for count, accepted, next_token in zip(self.counts, num_accepted, next_tokens, strict=True):
            emissions.append([*target_tokens[first_row : first_row + accepted], next_token])
            first_row += count
        return emissions


def interleaved(last: list[int], draft_tokens: Tensor, num_draft_tokens: list[int], vocab_size: int) -> Tensor:
    """Return each sequence's last committed token followed by its draft tokens: ``[T]`` ids on the drafts' device."""
    first = to_device(last, draft_tokens.device)
    # Ids outside the vocabulary are clamped: they are rejected anyway, but would index past the embedding.
    drafted = draft_tokens.clamp(0, vocab_size - 1)
    if min(num_draft_tokens) == max(num_draft_tokens):
        return torch.cat([first[:, None], drafted.view(len(last), -1)], dim=1).flatten()
    pairs = zip(first.split(1), drafted.split(num_draft_tokens), strict=True)
    return torch.cat([piece for pair in pairs for piece in pair])
