"""The dynamic tree of SpecBlock: the chains of blocks, and their alternatives (Shi et al., arXiv 2605.07243)."""

from __future__ import annotations

from collections.abc import Sequence as Many
from math import exp, inf
from typing import NamedTuple

from specdec_fast.trees.growing import GrowingTree
from specdec_fast.trees.parents import ROOT

BEAM = 10  # nodes that the second call expands, and candidates of the first slot
_WIDTHS = (2, 4, 10, 0)  # candidates of a slot, the best one included, by the class that the rank head predicts
_BEYOND = 3  # the class of a slot behind which nothing branches
# Narrower slots where the best candidate is likely: (its probability, candidates), of the first slot and of the others.
_NARROWED_FIRST = ((0.9, 3), (0.8, 5), (0.6, 8))
_NARROWED = ((0.95, 2), (0.85, 3))


class Slot(NamedTuple):
    """What a slot drafts.

    Attributes:
        token_ids: the best candidates, falling; different ones.
        log_probs: of each.
        rank_class: how far down the target's token is expected, from ``SpecBlockModel.rank_classes``.
    """

    token_ids: Many[int]
    log_probs: Many[float]
    rank_class: int


class BlockTree(GrowingTree):
    """The tree of one sequence while it is drafted.

    Blocks behind different nodes may draft the same token after the same path: those are one node, with the better
    score.

    Args:
        max_nodes: the largest number of nodes that are proposed.
        max_depth: the largest depth.
        is_chain: whether slots have no alternatives.
        continues: whether the candidates of the slots behind an alternative are used behind it too. These slots were
            not conditioned on the alternative, but without a second call there are no other candidates.

    Attributes:
        max_depth: as passed.
    """

    def __init__(self, max_nodes: int, max_depth: int, is_chain: bool = False, continues: bool = False) -> None:
        super().__init__(max_nodes)
        self.max_depth = max_depth
        self._is_chain = is_chain
        self._continues = continues

    def add_block(self, parent: int, slots: Many[Slot]) -> None:
        """Add the candidates of a block that follows ``parent``: a chain of the best of each slot, and alternatives."""
        best = self.best()
        lowest = self.score(best[-1]) if len(best) == self.max_nodes else -inf
        is_first = parent == ROOT
        branches = not self._is_chain
        alternatives: list[tuple[int, int]] = []  # a node, and the slot behind it
        slots = slots[: self.max_depth - self.depth(parent)]
        for k, slot in enumerate(slots):
            if k > 0 and slot.rank_class == _BEYOND:
                branches = False
            added = self._add_slot(parent, slot, _width(slot, is_first and k == 0) if branches else 1, lowest)
            if not added:
                break
            parent = added[0]
            alternatives += [(node, k + 1) for node in added[1:]]
        for node, k in alternatives if self._continues else ():
            added = [node]
            for slot in slots[k:]:
                added = self._add_slot(added[0], slot, 1, lowest)
                if not added:
                    break

    def to_expand(self, most: int) -> list[int]:
        """Return the best nodes that may have children, the best first; of a chain, its end."""
        nodes = [node for node in self.best() if self.depth(node) < self.max_depth]
        return nodes[-1:] if self._is_chain else nodes[:most]

    def _add_slot(self, parent: int, slot: Slot, width: int, lowest: float) -> list[int]:
        """Add the first candidates of a slot as children, as far as their scores are above ``lowest``."""
        added = []
        for token, value in zip(slot.token_ids[:width], slot.log_probs, strict=False):
            score = self.score(parent) + min(value, 0.0)
            if not score > lowest:  # a NaN is not above either
                break
            added.append(self.add(parent, token, score))
        return added


def _width(slot: Slot, is_first: bool) -> int:
    """Return the number of candidates of a slot; the first slot of a tree branches whatever the rank head says."""
    probability = exp(min(slot.log_probs[0], 0.0))
    widest = BEAM if is_first else max(1, _WIDTHS[slot.rank_class])
    narrowed = _NARROWED_FIRST if is_first else _NARROWED
    return next((min(most, widest) for least, most in narrowed if probability >= least), widest)
