"""The ``"clover"`` drafter: heads that know the tokens before theirs (Xiao et al., arXiv 2405.00263).

Row i of the augmenting block is made of the input of the target's output layer at position i; the row that chose a
sequence's newest token yields h_0. Head 1 adds the newest token to it and predicts the next one. Head i adds the token
that head i - 1 proposed, so every node of a tree has an h of its own, and each depth is one forward over the nodes that
have children. The block's KV entries are made of true features only; nothing in them is provisional.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.drafters.base import DrafterContext
from specdec_fast.drafters.clover.model import CloverModel, load_clover
from specdec_fast.drafters.shared.heads import HeadsDrafter, ranked_tokens
from specdec_fast.drafters.shared.ranked import masked_logits
from specdec_fast.drafters.shared.tapped import TappedDrafter
from specdec_fast.kv_cache.forward_layout import batch_without_pages
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_masks import UNREAD
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS
from specdec_fast.runner.row_module import RowModule
from specdec_fast.trees.static import Shape, StaticTree

_DEFAULT_TREE = ((0,), (0, 0), (0, 0, 0), (1,))


class CloverDrafter(TappedDrafter, HeadsDrafter):
    """Proposes a tree of what successive heads predict, or a chain.

    Raises:
        ConfigError, VocabularyMismatchError: the checkpoint cannot be read, or was made for another target.
    """

    model: CloverModel

    def __init__(self, context: DrafterContext, folder: str) -> None:
        self._folder = folder
        with torch.inference_mode():
            model = load_clover(Path(folder), context.target)
        super().__init__(model, context)
        config = model.config
        settings = context.config
        functions = model.row_functions()
        self._heads = [RowModule(each, model.ops, settings.page_size, settings.enforce_eager) for each in functions]
        self._no_rows = torch.empty(0, dtype=torch.int64, device=self._device)
        self._set_tree(context, config.choices or _DEFAULT_TREE, config.num_heads, model.vocab_size)
        self._levels = _Levels(self.tree, context.device)

    @property
    def name(self) -> str:
        return f"clover:{self._folder}"

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "forward_program": all(head.has_program for head in self._heads),
            "why_no_program": next((head.why_no_program for head in self._heads if not head.has_program), None),
        }

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        model = self.model
        itemsize = model.layout.dtype.itemsize
        rows = max(prefill_rows or MAX_PREFILL_ROWS, num_sequences * (num_draft_tokens + 1))
        level = num_sequences * self._levels.widest * (8 * model.hidden_size + 3 * model.vocab_size)
        forward = self._heads[0].step_bytes(rows, num_sequences) or rows * model.row_bytes
        return forward + self._kept_bytes(num_sequences, rows) + level * itemsize

    def _compute(self, rows: list[Rows]) -> None:
        self._heads[0](self._pool(), *self._take_batch(rows), self._no_rows)

    def _picked(self, depth: int, num_nodes: int) -> tuple[list[int], list[int]]:
        return self._levels.picked(depth, num_nodes)

    def _ranked(self, sequences: list[Sequence], depth: int) -> Tensor:
        # At each depth, the likeliest tokens behind each of the nodes that have children.
        model = self.model
        num_sequences = len(sequences)
        if sum(map(self.num_queued, sequences)) > self._most_rows:
            self._catch_up(sequences)
        batch, hidden = self._take_batch(self._queued_rows(sequences))
        last = batch.last_rows if batch.most_rows > 1 else None
        ranked: list[Tensor] = []
        for head, level in enumerate(self._levels.levels[:depth]):
            if ranked:
                hidden = hidden.unflatten(0, (num_sequences, -1))[:, level.origins].flatten(0, 1)
                batch = batch_without_pages(ranked[-1][:, level.places].flatten())
                last = None
            logits, hidden = self._heads[head](self._pool(), batch, hidden, last)
            tokens = batch.token_ids
            if last is not None:
                hidden = hidden[last]
                tokens = tokens[last]
            owners = [sequence for sequence in sequences for _ in range(level.num_nodes)]
            sampling = sampling_of(owners, self._device, ahead=head)
            logits = masked_logits(logits, owners, [[UNREAD] * head] * len(owners))
            best = ranked_tokens(model.ops, logits, level.num_ranks, sampling, tokens)
            ranked.append(best.view(num_sequences, -1))
        return torch.cat(ranked, dim=1)


class _Level(NamedTuple):
    """The nodes of one depth that have children; the root is that of the first level."""

    num_nodes: int  # their number, n
    num_ranks: int  # number of tokens that are ranked behind each
    origins: Tensor  # [n] int64, the parent of each among the nodes of the level before
    places: Tensor  # [n] int64, its token among those ranked there


class _Levels:
    """A static tree, level by level, and where its nodes' tokens stand among those of all levels."""

    def __init__(self, tree: StaticTree, device: torch.device) -> None:
        self._tree = tree
        self.levels: list[_Level] = []
        self._first: list[int] = []  # the place of each level's first token
        self._index: dict[tuple[int, ...], int] = {}  # of each node that has children, among those of its level
        self.widest = 1
        width = 0
        before: list[tuple[int, ...]] = []
        for depth, num_ranks in enumerate(tree.num_ranks):
            paths = sorted({choice[:-1] for choice in tree.choices if len(choice) == depth + 1})
            self._index |= {path: i for i, path in enumerate(paths)}
            origins = [before.index(path[:-1]) for path in paths if path]
            places = [o * tree.num_ranks[depth - 1] + path[-1] for o, path in zip(origins, paths, strict=False)]
            index = torch.tensor([origins, places], dtype=torch.int64, device=device)
            self.levels.append(_Level(len(paths), num_ranks, index[0], index[1]))
            self._first.append(width)
            width += len(paths) * num_ranks
            self.widest = max(self.widest, len(paths))
            before = paths
        self.picked = cache(self._picked)

    def _picked(self, depth: int, num_nodes: int) -> tuple[list[int], list[int]]:
        """Return the places of the tokens of a tree's first nodes (``StaticTree.within``), and their parents."""
        shape = self._tree.within(depth, num_nodes)
        places = []
        for path in _paths(shape):
            level = len(path) - 1
            places.append(self._first[level] + self._index[path[:-1]] * self._tree.num_ranks[level] + path[-1])
        return places, shape.parents


def _paths(shape: Shape) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for rank, parent in zip(shape.ranks, shape.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths
