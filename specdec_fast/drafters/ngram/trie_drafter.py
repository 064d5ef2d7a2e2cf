"""The ``"ngram-trie"`` drafter: prompt lookup of several copies, whose continuations are one tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from specdec_fast.drafters.base import DrafterContext, TreeDrafter
from specdec_fast.drafters.draft import Draft, draft_of_trees
from specdec_fast.drafters.ngram.drafter import NGRAM_SIZES
from specdec_fast.request.sequence import Sequence
from specdec_fast.trees.growing import merged

_MOST_COPIES = 16  # whose continuations are merged: a frequent token has hundreds


class NgramTrieDrafter(TreeDrafter):
    """Proposes what followed the earlier copies of a sequence's last tokens, merged into one tree.

    Copies of the last three tokens count before copies of the last two and of the last one, and later copies before
    earlier ones. So the first branch is what ``"ngram"`` proposes, and the tree has further branches where that may be
    wrong. Each sequence has an index, built at its first proposal and extended by its new tokens at each later one.

    ``max_nodes`` is the largest number of nodes of a tree; every node costs a row of the verification.
    """

    def __init__(self, context: DrafterContext, max_nodes: int = 16) -> None:
        self.max_nodes = max_nodes
        self._device = context.device
        self.indexes: defaultdict[Sequence, CopyIndex] = defaultdict(CopyIndex)

    @property
    def name(self) -> str:
        return "ngram-trie"

    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        trees = []
        for sequence, depth, num_nodes in zip(sequences, limits, node_limits, strict=True):
            copies = self.indexes[sequence].continuations(sequence.token_ids, depth) if depth else []
            trees.append(merged(copies, num_nodes))
        return draft_of_trees(trees, self._device)

    def prepare(self, num_tokens: int, page_size: int) -> None:
        # An interrupted run may have left some.
        self.indexes.clear()

    def release(self, sequence: Sequence) -> None:
        self.indexes.pop(sequence, None)


class CopyIndex:
    """The positions behind every copy of each n-gram in one growing list of tokens.

    The n-gram at the end of the list is added only once a further token follows it, so a look-up finds earlier copies
    only. The index holds three positions per token.
    """

    def __init__(self) -> None:
        self._tables: dict[int, dict[tuple[int, ...], list[int]]] = {n: {} for n in NGRAM_SIZES}
        self._num_tokens = 0  # length of the list at the last look-up

    def continuations(self, token_ids: list[int], num_tokens: int) -> list[list[int]]:
        """Return up to ``num_tokens`` tokens behind each earlier copy of the last n tokens, the likeliest first.

        Copies of more tokens come first, and of as many tokens the later ones; 16 copies at most. ``token_ids`` is the
        list of the last call, with any number of tokens appended.
        """
        self._add_ngrams(token_ids)
        return [token_ids[follows : follows + num_tokens] for follows in islice(self._copies(token_ids), _MOST_COPIES)]

    def _copies(self, token_ids: list[int]) -> Iterator[int]:
        """Yield the position behind each copy; a copy of three tokens is one of two as well, and counts once."""
        longer: set[int] = set()
        for n, table in self._tables.items():
            for follows in reversed(table.get(tuple(token_ids[-n:]), ())):
                if follows not in longer:
                    longer.add(follows)
                    yield follows

    def _add_ngrams(self, token_ids: list[int]) -> None:
        stop = len(token_ids)
        for n, table in self._tables.items():
            for follows in range(max(n, self._num_tokens), stop):
                table.setdefault(tuple(token_ids[follows - n : follows]), []).append(follows)
        self._num_tokens = stop
