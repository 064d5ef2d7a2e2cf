"""Trees while a graph drafts them, without the host: which rows their forwards have, and what these rows see.

The host grows the same trees afterwards, from the children that were named (``trees/growing.py``). Here the shapes of
all tensors are known in advance, so that a graph can record what happens. ``B`` is the number of trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.device_copy import to_device
from specdec_fast.trees.parents import ROOT
from specdec_fast.trees.rows import TREE_MASK_BITS
from specdec_fast.trees.static import StaticTree


class Frontier(NamedTuple):
    """The nodes whose children are wanted next, ``F`` of each tree.

    Attributes:
        parents: ``[B, F]`` int64, the place of each one's parent in the frontier before.
        ranks: ``[B, F]`` int64, which child of its parent each is, from 0 on.
        exists: ``[B, F]`` bool; the others are places without a node.

    """

    parents: Tensor
    ranks: Tensor
    exists: Tensor


class Growth(ABC):
    """Chooses frontiers. An object serves one drafting."""

    @abstractmethod
    def frontier(self, log_probs: Tensor) -> Frontier | None:
        """Return the next frontier; None if no node of any tree has children.

        Args:
            log_probs: ``[B, F, R]`` float64, of the children that were named of each node of the last frontier under
                their parents. Minus infinity and NaN leave a child out.

        """


class BestGrowth(Growth):
    """The frontiers of trees that keep the best ``max_nodes`` children; see ``GrowingTree``."""

    def __init__(self, max_nodes: int, width: int) -> None:
        self._max_nodes = max_nodes
        self._width = width
        self._scores: Tensor | None = None  # [B, nodes], of all children that were named
        self._frontier_scores: Tensor | None = None  # [B, F]

    def frontier(self, log_probs: Tensor) -> Frontier:
        num_ranks = log_probs.shape[2]
        values = torch.where(log_probs > float("-inf"), log_probs.clamp(max=0.0), float("-inf"))
        if self._frontier_scores is not None:
            values = values + self._frontier_scores[:, :, None]
        new = values.flatten(1)
        scores = new if self._scores is None else torch.cat([self._scores, new], dim=1)
        first = scores.shape[1] - new.shape[1]
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self._max_nodes]
        has_children = (best >= first) & (scores.gather(1, best) > float("-inf"))
        # The first nodes that have children, in order; where there are fewer, nodes that have none.
        order = (~has_children).to(torch.int8).argsort(dim=1, stable=True)[:, : self._width]
        exists = has_children.gather(1, order)
        chosen = best.gather(1, order)
        self._scores = scores
        self._frontier_scores = torch.where(exists, scores.gather(1, chosen), float("-inf"))
        children = (chosen - first).clamp(min=0)
        return Frontier(children // num_ranks, children % num_ranks, exists)


class StaticLevel(NamedTuple):
    """The nodes of a static tree at one depth that have children, in the order of the choices.

    Attributes:
        nodes: of the tree.
        parents: ``[F]`` int64 on the device, the place of each one's parent in the level above.
        ranks: ``[F]`` int64 on the device, of each one's token.

    """

    nodes: list[int]
    parents: Tensor
    ranks: Tensor


def static_levels(shape: StaticTree, device: torch.device) -> list[StaticLevel]:
    """Return the levels of a static tree below the root, as long as there are nodes with children."""
    levels = []
    nodes = [ROOT]
    while below := shape.level_below(nodes):
        parents = to_device([nodes.index(shape.parents[node]) for node in below], device)
        levels.append(StaticLevel(below, parents, to_device([shape.ranks[node] for node in below], device)))
        nodes = below
    return levels


class StaticGrowth(Growth):
    """The frontiers of a static tree: its levels, whose tensors must stay where they are while graphs read them."""

    def __init__(self, levels: list[StaticLevel]) -> None:
        self._levels = iter(levels)

    def frontier(self, log_probs: Tensor) -> Frontier | None:
        level = next(self._levels, None)
        if level is None:
            return None
        parents = level.parents.expand(len(log_probs), -1)
        return Frontier(parents, level.ranks.expand(len(log_probs), -1), torch.ones_like(parents, dtype=torch.bool))


class DraftRows:
    """The rows of the next forward of ``B`` trees: the root of each, and the nodes that were in a frontier.

    A tree has at most ``most_rows`` rows. If there are more, the rows above the frontier are kept, and the others are
    left out; those of places without a node may be among them.

    Args:
        tokens: ``[B]`` int64, of the roots.
        inputs: ``[B, H]``, what the roots' rows take besides.
        most_rows: the largest number of rows of a tree.

    Attributes:
        tokens: ``[B, n]`` int64.
        depths: ``[B, n]`` int64, of each row, 0 for a root.
        inputs: ``[B, n, H]``.
        frontier: ``[B, F]`` int64, the rows of the frontier.

    """

    def __init__(self, tokens: Tensor, inputs: Tensor, most_rows: int) -> None:
        self._most_rows = most_rows
        self.tokens = tokens[:, None]
        self.depths = torch.zeros_like(self.tokens)
        self.inputs = inputs[:, None]
        self.frontier = torch.zeros_like(self.tokens)
        self._above = torch.ones_like(self.tokens, dtype=torch.bool)[:, None]  # [B, n, n]: j is row i, or above it

    def add(self, frontier: Frontier, tokens: Tensor, results: Tensor) -> None:
        """Add the nodes of the next frontier.

        Args:
            frontier: ``F`` nodes of each tree.
            tokens: ``[B, F]`` int64, of these nodes.
            results: ``[B, n, H]``, of all rows of the last forward: what the rows below them take.

        """
        batch_size, num_before = self.tokens.shape
        count = tokens.shape[1]
        parents = self.frontier.gather(1, frontier.parents)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.depths = torch.cat([self.depths, self.depths.gather(1, parents) + 1], dim=1)
        self.inputs = torch.cat([self.inputs, _rows_of(results, parents)], dim=1)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch_size, -1, -1)
        above = torch.cat([_rows_of(self._above, parents), own], dim=2)
        before = torch.cat([self._above, own.new_zeros(batch_size, num_before, count)], dim=2)
        self._above = torch.cat([before, above], dim=1)
        self.frontier = torch.arange(num_before, num_before + count, device=tokens.device).expand(batch_size, -1)
        if num_before + count > self._most_rows:
            self._leave_out((above & frontier.exists[:, :, None]).any(dim=1))

    def mask(self) -> Tensor:
        """Return the tree mask of the rows, ``[B * n, words]`` int32; see ``PagedBatch.tree_mask``."""
        num_rows = self.tokens.shape[1]
        num_words = -(-num_rows // TREE_MASK_BITS)
        bits = torch.nn.functional.pad(self._above, (0, num_words * TREE_MASK_BITS - num_rows))
        places = torch.arange(TREE_MASK_BITS, device=bits.device)
        words = (bits.unflatten(2, (num_words, TREE_MASK_BITS)).long() << places).sum(dim=3)
        return words.to(torch.int32).flatten(0, 1)

    def _leave_out(self, needed: Tensor) -> None:
        """Keep ``most_rows`` rows, those that are ``needed`` (``[B, n]`` bool) first."""
        kept = (~needed).to(torch.int8).argsort(dim=1, stable=True)[:, : self._most_rows]
        places = (needed.cumsum(dim=1) - 1).clamp(0, self._most_rows - 1)
        self.frontier = places.gather(1, self.frontier)
        self.tokens = self.tokens.gather(1, kept)
        self.depths = self.depths.gather(1, kept)
        self.inputs = _rows_of(self.inputs, kept)
        self._above = _rows_of(_rows_of(self._above, kept).mT, kept).mT


def _rows_of(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows ``[B, m, size]`` of ``[B, n, size]`` at ``places [B, m]``."""
    return rows.gather(1, places[:, :, None].expand(-1, -1, rows.shape[2]))
