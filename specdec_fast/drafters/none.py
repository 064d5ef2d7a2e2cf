"""No drafter: plain decoding in the same engine."""

from __future__ import annotations

import torch

from specdec_fast.drafters.base import Draft, Drafter, DrafterContext
from specdec_fast.request.sequence import Sequence


class NoDrafter(Drafter):
    """Proposes nothing, so that every step emits the one token the target chooses."""

    def __init__(self, context: DrafterContext) -> None:
        self._no_tokens = torch.empty(0, dtype=torch.int64, device=context.device)

    @property
    def name(self) -> str:
        """The drafter's name in reports."""
        return "none"

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Propose no token for any sequence."""
        return Draft(self._no_tokens, [0] * len(sequences))
