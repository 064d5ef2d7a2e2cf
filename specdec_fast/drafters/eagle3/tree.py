"""How an EAGLE-3 drafter drafts trees: one forward per level, over the frontier and the nodes above it.

A row sees the committed context and its own ancestors, as rows of a verification do: a forward has the last true row of
each sequence as the root of its tree, and then nodes (``rows_of_trees``). Their entries are provisional. The rows of a
tree have consecutive slots, so the nodes above a frontier are computed again with it, in the slots of nodes that were
dropped: a tree never takes more slots than it has nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.device_copy import all_to_host, to_device
from specdec_fast.drafters.base import DrafterContext
from specdec_fast.drafters.eagle3.model import Eagle3Model
from specdec_fast.drafters.shared import ranked
from specdec_fast.drafters.shared.ranked import TokenRanker
from specdec_fast.errors import ConfigError
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.program.executors import TreeRules
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.graphs.phases import LoopForward
from specdec_fast.runner.graphs.tree_growth import BestGrowth, Growth, StaticGrowth, static_levels
from specdec_fast.runner.graphs.trees import TreeParts
from specdec_fast.runner.row_module import RowModule
from specdec_fast.trees.growing import GrowingTree, TreeNodes
from specdec_fast.trees.parents import ROOT
from specdec_fast.trees.rows import rows_of_trees
from specdec_fast.trees.static import StaticTree

# Nodes of a frontier, and children named for each of them. With trees of 16 nodes, 8 had no more accepted tokens than 4
# for greedy requests, and 3.42 a step instead of 3.35 for sampled ones (bundled drafter). EAGLE-2 has 10 for 60 nodes.
WIDTH = 4


@dataclass
class _Growing:
    """A tree in the making."""

    sequence: Sequence  # that it follows
    tree: GrowingTree  # its nodes so far
    depth: int  # the largest depth
    source: int  # the row of the states of which the last true row was made
    made: dict[int, int]  # rows of the states with the results of the root and of the nodes that were a frontier


class TreeLimit(NamedTuple):
    """What one tree may have."""

    depth: int  # the largest depth, at least 1
    num_nodes: int  # the largest number of nodes, at least 1


class LastRows(NamedTuple):
    """The last true row of each of ``B`` sequences, the root of its tree.

    Attributes:
        inputs: ``[B, H]``, the features that they were made of.
        hidden: ``[B, H]``, their results.
        logits: ``[B, draft_vocab_size]``.
    """

    inputs: Tensor
    hidden: Tensor
    logits: Tensor


def trees_of(model: Eagle3Model, rows: RowModule, context: DrafterContext) -> Eagle3Trees | None:
    """Return what drafts the trees of ``EngineConfig.draft_tree``; None for chains.

    Raises:
        ConfigError: a node has a rank beyond the drafter's last id.
        NotYetSupportedError: the target verifies chains only.
    """
    wanted = context.config.draft_tree
    num_ids = model.config.draft_vocab_size
    if wanted is None or isinstance(wanted, str):
        return None
    if isinstance(wanted, tuple) and (beyond := [choice for choice in wanted if max(choice) >= num_ids]):
        raise ConfigError(f"draft_tree has the node {list(beyond[0])}, but the checkpoint has {num_ids} ids.")
    context.target.expect_trees()
    return Eagle3Trees(model, rows, wanted)


class Eagle3Trees:
    """Drafts trees with one model.

    Args:
        model: gives the vocabularies.
        rows: computes the rows.
        tree: rank paths of a static tree; or the number of nodes of trees that follow the drafter's confidence.

    Attributes:
        max_nodes: the largest number of nodes.
        is_static: whether all trees have one shape.
    """

    def __init__(self, model: Eagle3Model, rows: RowModule, tree: int | tuple[tuple[int, ...], ...]) -> None:
        self._rows = rows
        self._shape = None if isinstance(tree, int) else StaticTree(tree)
        self.is_static = self._shape is not None
        self.max_nodes = tree if isinstance(tree, int) else len(tree)
        # Of a static tree, for graphs.
        self._levels = [] if self._shape is None else static_levels(self._shape, model.layout.device)
        self._ranker = TokenRanker(model.ops, model.vocab_size, model.target_ids)

    @property
    def described(self) -> int | list[list[int]]:
        """The tree for ``Engine.describe()``."""
        return self.max_nodes if self._shape is None else [list(choice) for choice in self._shape.choices]

    def logits_bytes(self, num_sequences: int, row_bytes: int, itemsize: int) -> int:
        """Return the memory of the logits of all frontiers and of their ranking.

        Args:
            num_sequences: of a step.
            row_bytes: of a row of the drafter's logits, and of one of the target's ids if they are others.
            itemsize: of a logit.
        """
        num_rows = num_sequences * min(self._width, self.max_nodes)
        if self._rows.program is None:  # the ranker's two copies in fp32
            return num_rows * row_bytes * (5 if itemsize < 4 else 3)
        # One row in fp32, and two in fp64 of a row that samples, for each thread.
        scratch = min(torch.get_num_threads(), num_rows) * (row_bytes // itemsize) * (4 + 2 * 8 + itemsize)
        return num_rows * row_bytes + scratch

    def rules(self, limits: list[TreeLimit]) -> TreeRules:
        """Return the rules of these trees for a program that drafts them; ``limits`` as in ``draft``."""
        shape = self._shape
        return TreeRules(
            [limit.depth for limit in limits],
            [limit.num_nodes for limit in limits],
            self._width,
            [] if shape is None else shape.parents,
            [] if shape is None else shape.ranks,
            ranked.GREEDY_TEMPERATURE,
        )

    def draft(
        self, pool: PagePool, sequences: list[Sequence], limits: list[TreeLimit], last: LastRows
    ) -> list[TreeNodes]:
        """Draft one tree per sequence, with PyTorch in control.

        ``RowModule.draft_trees`` drafts the same trees in a call of a program, and a graph of ``graph_parts`` where
        every sequence may have all nodes.

        Args:
            pool: the drafter's pages.
            sequences: ``B`` sequences, all of whose true rows have been computed.
            limits: of each tree.
            last: of each sequence.
        """
        states = torch.cat([last.inputs, last.hidden])
        logits = last.logits
        batch_size = len(sequences)
        trees = [
            _Growing(sequence, GrowingTree(num_nodes, self._width, self._shape), depth, i, {ROOT: batch_size + i})
            for i, (sequence, (depth, num_nodes)) in enumerate(zip(sequences, limits, strict=True))
        ]
        growing = trees
        for depth in range(max(limit.depth for limit in limits)):
            self._add_children(growing, logits, depth)
            growing = [each for each in growing if each.depth > depth + 1 and each.tree.frontier]
            if not growing:
                break
            logits, hidden = self._forward(pool, growing, states)
            new = [(each, node) for each in growing for node in each.tree.frontier]
            for place, (each, node) in enumerate(new, start=len(states)):
                each.made[node] = place
            states = torch.cat([states, hidden])
        return [each.tree.nodes() for each in trees]

    def graph_parts(self, project: Callable[[Tensor], Tensor], forward: LoopForward) -> TreeParts:
        """Return what a graph needs to draft the trees that ``draft`` does.

        Args:
            project: from the target's hidden states to features.
            forward: computes rows.
        """
        shape = self._shape
        width = self._width

        def rank(logits: Tensor, sampling: Sampling | None, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            return self._ranker.ranks(logits, self._num_ranks(depth), sampling, tokens)

        def growth() -> Growth:
            return BestGrowth(self.max_nodes, width) if shape is None else StaticGrowth(self._levels)

        return TreeParts(project, forward, rank, growth, self.max_nodes)

    def grown(self, named: tuple[Tensor, ...], limits: list[TreeLimit]) -> list[TreeNodes]:
        """Grow the trees of ``B`` sequences from the children that a graph named.

        The graph grows trees of ``max_nodes`` nodes. If fewer are allowed, the best of these are kept.

        Args:
            named: of ``tree_loop``.
            limits: as in ``draft``.
        """
        parts = [part.tolist() for part in all_to_host(named)]
        levels = list(zip(parts[::2], parts[1::2], strict=True))
        trees = []
        for i, (depth, num_nodes) in enumerate(limits):
            tree = GrowingTree(self.max_nodes, self._width, self._shape)
            for level, (ids, log_probs) in enumerate(levels[:depth]):
                rows = list(range(len(tree.frontier)))
                if level and self._levels:  # nodes whose logits have a NaN may be missing
                    rows = [self._levels[level - 1].nodes.index(tree.place(node)) for node in tree.frontier]
                tree.add_children([ids[i][row] for row in rows], [log_probs[i][row] for row in rows])
            tree.max_nodes = num_nodes
            trees.append(tree.nodes())
        return trees

    def _num_ranks(self, depth: int) -> int:
        return WIDTH if self._shape is None else self._shape.num_ranks[depth]

    @property
    def _width(self) -> int:
        return WIDTH if self._shape is None else self.max_nodes

    def _add_children(self, growing: list[_Growing], logits: Tensor, depth: int) -> None:
        """Add children to the nodes of all frontiers, which have the rows of ``logits``."""
        owners = []
        previous = []
        paths = []
        ends = [0]
        for each in growing:
            owners += [each.sequence] * len(each.tree.frontier)
            previous += [_token(each, node) for node in each.tree.frontier]
            paths += [each.tree.path(node) for node in each.tree.frontier]
            ends.append(len(previous))
        ranked = self._ranker(logits, owners, previous, depth, self._num_ranks(depth), paths)
        for each, (start, stop) in zip(growing, pairwise(ends), strict=True):
            each.tree.add_children(ranked.token_ids[start:stop], ranked.log_probs[start:stop])

    def _forward(self, pool: PagePool, growing: list[_Growing], states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the frontiers; return logits and results of their nodes."""
        spans: list[Rows] = []
        tokens: list[int] = []
        sources = []
        parents = []
        counts = []
        wanted = []
        for each in growing:
            tree = each.tree
            sequence = each.sequence
            nodes, above = tree.frontier_rows()
            rows = {node: row for row, node in enumerate(nodes, start=len(tokens) + 1)}
            wanted += [rows[node] for node in tree.frontier]
            spans.append(Rows(sequence, sequence.length - 2, len(nodes) + 1))
            sources += [each.source, *(each.made[tree.parent(node)] for node in nodes)]
            tokens += [_token(each, node) for node in (ROOT, *nodes)]
            parents += above
            counts.append(len(nodes))
        device = states.device
        batch = lay_out(pool, spans, to_device(tokens, device), trees=rows_of_trees(parents, counts))
        of_frontiers = to_device(wanted, device)
        logits, hidden = self._rows(pool, batch, states[to_device(sources, device)], of_frontiers)
        return logits, hidden[of_frontiers]


def _token(each: _Growing, node: int) -> int:
    return each.sequence.token_ids[-1] if node == ROOT else each.tree.token(node)
