"""The ``"ngram"`` drafter: prompt lookup, no second model."""

from __future__ import annotations

from collections import defaultdict

from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import Drafter, DrafterContext
from specdec_fast.drafters.draft import Draft
from specdec_fast.request.sequence import Sequence

NGRAM_SIZES = (3, 2, 1)


class NgramDrafter(Drafter):
    """Proposes the tokens that followed the latest earlier copy of a sequence's last tokens.

    Each sequence has an index of its n-grams, built at its first proposal and extended by its new tokens at each
    later one. So a step costs the number of new tokens, whatever the length. The index holds at most three entries
    per token and is dropped when the sequence is released.
    """

    def __init__(self, context: DrafterContext) -> None:
        self._device = context.device
        self.indexes: defaultdict[Sequence, NgramIndex] = defaultdict(NgramIndex)

    @property
    def name(self) -> str:
        return "ngram"

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        proposals = [
            self.indexes[sequence].propose(sequence.token_ids, limit) if limit else []
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        token_ids = [token for proposal in proposals for token in proposal]
        return Draft(to_device(token_ids, self._device), [len(proposal) for proposal in proposals])

    def prepare(self, num_tokens: int, page_size: int) -> None:
        # An interrupted run may have left some.
        self.indexes.clear()

    def release(self, sequence: Sequence) -> None:
        self.indexes.pop(sequence, None)


class NgramIndex:
    """The latest position of each n-gram in one growing list of tokens; ``oracle/prompt_lookup.py`` defines the result.

    A table per n maps an n-gram to the position behind its latest copy. The n-gram at the end of the list is added
    only once a further token follows it, so a look-up finds earlier copies only.
    """

    def __init__(self) -> None:
        self.tables: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in NGRAM_SIZES}
        self._num_tokens = 0  # length of the list at the last look-up

    def propose(self, token_ids: list[int], num_draft_tokens: int) -> list[int]:
        """Return up to ``num_draft_tokens`` tokens that followed the latest earlier copy of the last n tokens.

        The longest n that has an earlier copy counts, from 3 down to 1. ``token_ids`` is the list of the last call,
        with any number of tokens appended.
        """
        self._add_ngrams(token_ids)
        for n, table in self.tables.items():
            follows = table.get(tuple(token_ids[-n:]))
            if follows is not None:
                return token_ids[follows : follows + num_draft_tokens]
        return []

    def _add_ngrams(self, token_ids: list[int]) -> None:
        stop = len(token_ids)
        for n, table in self.tables.items():
            first = max(n, self._num_tokens)  # the first position with a new n-gram before it
            if first < stop:
                columns = [token_ids[first - n + i : stop - n + i] for i in range(n)]
                table.update(zip(zip(*columns, strict=True), range(first, stop), strict=True))
        self._num_tokens = stop
