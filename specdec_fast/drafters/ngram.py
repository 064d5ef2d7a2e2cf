"""The ``"ngram"`` drafter: prompt lookup, no second model."""

from __future__ import annotations

from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import Draft, Drafter, DrafterContext
from specdec_fast.oracle.prompt_lookup import prompt_lookup
from specdec_fast.request.sequence import Sequence


class NgramDrafter(Drafter):
    """Proposes what followed the latest earlier copy of a sequence's last tokens; nothing where there is none."""

    def __init__(self, context: DrafterContext) -> None:
        self._device = context.device

    @property
    def name(self) -> str:
        """What reports call it."""
        return "ngram"

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Look every sequence's ending up in its own committed tokens."""
        proposals = [
            prompt_lookup(sequence.token_ids, limit) if limit else []
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        token_ids = [token for proposal in proposals for token in proposal]
        return Draft(to_device(token_ids, self._device), [len(proposal) for proposal in proposals])
