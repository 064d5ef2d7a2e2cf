"""The dynamic tree of SpecBlock: the chains of blocks, and their alternatives (Shi et al., arXiv 2605.07243)."""

from __future__ import annotations

from collections.abc import Sequence as Many
from math import exp, inf
from typing import NamedTuple

ROOT = -1  # the last committed token
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


class Node(NamedTuple):
    """A node to expand: its place in the tree, its token and its depth, from 1 on."""

    place: int
    token_id: int
    depth: int


class BlockTree:
    """The tree of one sequence while it is drafted.

    A node's score is the sum of the log-probabilities on its path. Blocks behind different nodes may draft the same
    token after the same path: those are one node, with the better score. A node never scores above its parent, so the
    best nodes contain the parents of each.

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
        self._max_nodes = max_nodes
        self.max_depth = max_depth
        self._is_chain = is_chain
        self._continues = continues
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._depths: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def add_block(self, parent: int, slots: Many[Slot]) -> None:
        """Add the candidates of a block that follows ``parent``: a chain of the best of each slot, and alternatives."""
        lowest = self._lowest_kept()
        score, depth = (0.0, 0) if parent == ROOT else (self._scores[parent], self._depths[parent])
        branches = not self._is_chain
        alternatives = []
        slots = slots[: self.max_depth - depth]
        for k, slot in enumerate(slots):
            if k > 0 and slot.rank_class == _BEYOND:
                branches = False
            width = _width(slot, parent == ROOT and k == 0) if branches else 1
            best = ROOT
            for rank, (token, value) in enumerate(zip(slot.token_ids[:width], slot.log_probs, strict=False)):
                total = score + min(value, 0.0)
                if not total > lowest:  # a NaN is not above either
                    break
                node = self._add(parent, token, total, depth + k + 1)
                best = node if rank == 0 else best
                if rank > 0 and self._continues:
                    alternatives.append((node, k))
            if best == ROOT:
                break
            parent = best
            score = self._scores[best]
        for node, k in alternatives:
            above = node
            for slot in slots[k + 1 :]:
                total = self._scores[above] + min(slot.log_probs[0], 0.0)
                if not total > lowest:
                    break
                above = self._add(above, slot.token_ids[0], total, self._depths[above] + 1)

    def to_expand(self, most: int) -> list[Node]:
        """Return the best nodes that may have children, the best first; of a chain, its end."""
        nodes = [node for node in self._best() if self._depths[node] < self.max_depth]
        chosen = nodes[-1:] if self._is_chain else nodes[:most]
        return [Node(node, self._tokens[node], self._depths[node]) for node in chosen]

    def nodes(self) -> tuple[list[int], list[int]]:
        """Return tokens and parents (``Draft.parents``) of the best nodes, depth first, the best child first."""
        children: dict[int, list[int]] = {}
        for node in self._best():
            children.setdefault(self._parents[node], []).append(node)
        tokens: list[int] = []
        parents: list[int] = []
        to_visit = [(node, ROOT) for node in reversed(children.get(ROOT, ()))]
        while to_visit:
            node, place = to_visit.pop()
            to_visit += [(child, len(tokens)) for child in reversed(children.get(node, ()))]
            tokens.append(self._tokens[node])
            parents.append(place)
        return tokens, parents

    def _add(self, parent: int, token: int, score: float, depth: int) -> int:
        node = self._places.setdefault((parent, token), len(self._tokens))
        if node == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._scores.append(score)
            self._depths.append(depth)
        else:
            self._scores[node] = max(self._scores[node], score)
        return node

    def _best(self) -> list[int]:
        """Return the nodes that are kept, the best first; of equal scores the earlier node, so a parent first."""
        return sorted(range(len(self._tokens)), key=lambda node: (-self._scores[node], node))[: self._max_nodes]

    def _lowest_kept(self) -> float:
        """Return the score that a new node must exceed to be kept."""
        if len(self._tokens) < self._max_nodes:
            return -inf
        return sorted(self._scores, reverse=True)[self._max_nodes - 1]


def _width(slot: Slot, is_first: bool) -> int:
    """Return the number of candidates of a slot; the first slot of a tree branches whatever the rank head says."""
    probability = exp(min(slot.log_probs[0], 0.0))
    widest = BEAM if is_first else max(1, _WIDTHS[slot.rank_class])
    narrowed = _NARROWED_FIRST if is_first else _NARROWED
    return next((min(most, widest) for least, most in narrowed if probability >= least), widest)
