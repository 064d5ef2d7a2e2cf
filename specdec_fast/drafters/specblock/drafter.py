"""The ``"specblock"`` drafter: blocks of several tokens, one or two calls a step (Shi et al., arXiv 2605.07243).

The block of position i is made of the target's feature at position i and of the token at i + 1. A sequence of n tokens
has features of positions 0 to n - 2, so the block of position n - 2 drafts the first K tokens behind it. If deeper
trees are wanted, one block each follows the best nodes of that tree in a second call, for all sequences at once.

A position has K KV entries, one per slot. Slot k of position i stands at place ``K * i + k`` of the sequence's pages,
so a chain sees all slots of earlier positions, and those of its block so far. The second call computes the last true
block again, as the root of a tree whose branches are the new blocks: a block that follows a token of slot k sees slots
0 to k of it.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext, TreeDrafter
from specdec_fast.drafters.draft import Draft, draft_of_trees
from specdec_fast.drafters.shared.queued_features import tokens_after
from specdec_fast.drafters.shared.tapped import TappedDrafter
from specdec_fast.drafters.specblock.candidates import Candidates
from specdec_fast.drafters.specblock.checkpoint import weight_table
from specdec_fast.drafters.specblock.model import SpecBlockModel, load_specblock
from specdec_fast.drafters.specblock.rows import BlockRows
from specdec_fast.drafters.specblock.tree import BEAM, BlockTree
from specdec_fast.errors import ConfigError, DrafterError
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS
from specdec_fast.trees.parents import ROOT
from specdec_fast.trees.rows import rows_of_trees


class SpecBlockDrafter(TappedDrafter, TreeDrafter):
    """Proposes a tree of what blocks over the target's hidden states predict, or a chain.

    For a request that samples, candidates are ranked by the target's own rule, with the noise with which the target
    will choose the token of that position; see ``HeadsDrafter``.

    Raises:
        ConfigError, VocabularyMismatchError: the checkpoint cannot be read, or was made for another target.
        NotYetSupportedError: ``draft_tree`` is a number of nodes, and the target verifies chains only.
    """

    settings = ("tap_layers", "draft_tree")
    num_rewritten = 1  # the root of the second call
    model: SpecBlockModel

    def __init__(self, context: DrafterContext, folder: str) -> None:
        self._folder = folder
        self._target = context.target
        wanted = context.config.draft_tree
        if isinstance(wanted, tuple):
            raise ConfigError(
                "a SpecBlock drafter makes a tree of its own in each step; pass draft_tree='chain', a number of nodes, "
                "or None."
            )
        with torch.inference_mode():
            model = load_specblock(Path(folder), context.target, context.config.tap_layers)
        self.taps = model.taps
        self._num_slots = model.num_slots
        super().__init__(model, context)
        if isinstance(wanted, int):
            context.target.expect_trees()
        self._is_chain = wanted == "chain" or context.target.why_no_trees() is not None
        # The second call is a forward over a tree, whatever is drafted, so it needs attention that serves trees.
        self._most_depth = None if context.target.ops.has_trees("paged_attention") else self._num_slots
        num_nodes = wanted if isinstance(wanted, int) else model.config.tree_nodes
        self.max_nodes = 0 if self._is_chain else num_nodes
        self._candidates = Candidates(model, self._device)
        self.rows = BlockRows(model, context.config.page_size, context.config.enforce_eager)

    def replace_weights(self, weights: dict[str, Tensor]) -> None:
        """Take other weights, of the same shapes. They change drafts, and no output.

        Raises:
            ConfigError: a weight is missing or has another shape; all are needed, with the names of checkpoints.
            DrafterError: a sequence is admitted; its KV entries are of the present weights.
        """
        if self.num_admitted:
            raise DrafterError(
                f"{self.num_admitted} sequences are admitted; replace the weights when no call of the engine is open."
            )
        config = self.model.config
        taps = self.model.taps
        weight_table(config, len(taps)).check(config.folder, weights)
        with torch.inference_mode():
            self.model.assign(SpecBlockModel(config, weights, self._target, taps))

    @property
    def name(self) -> str:
        return f"specblock:{self._folder}"

    def describe(self) -> dict[str, Any]:
        return {
            "tap_layers": self.taps,
            "num_slots": self._num_slots,
            "draft_tree": "chain" if self._is_chain else f"up to {self.max_nodes} nodes",
            "draft_vocab_size": self.model.config.draft_vocab_size,
            "forward_program": self.rows.why_no_program is None,
            "why_no_program": self.rows.why_no_program,
        }

    @property
    def bytes_per_token(self) -> int:  # a position has an entry per slot
        return self._num_slots * super().bytes_per_token

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        model = self.model
        itemsize = self.model.layout.dtype.itemsize
        # Blocks with logits. Where memory is counted, a tree has as many nodes as a chain, so the second call expands
        # no more.
        ends = num_sequences * (min(BEAM, num_draft_tokens) if num_draft_tokens > self._num_slots else 1)
        verified = num_sequences * num_draft_tokens
        blocks = max((prefill_rows or MAX_PREFILL_ROWS) // self._num_slots, verified, num_sequences + ends)
        ranked = model.ranked_bytes + (0 if model.target_ids is None else model.vocab_size * itemsize)
        forward = self.rows.step_bytes(self._num_slots * blocks, self._num_slots * ends)
        return forward + self._num_slots * ends * ranked + self._kept_bytes(num_sequences, blocks)

    def limit_prefill(self, max_prefill_tokens: int | None) -> None:
        super().limit_prefill(max_prefill_tokens)
        self._most_rows = max(1, self._most_rows // self._num_slots)  # blocks, each of a feature

    def prepare(self, num_tokens: int, page_size: int) -> None:
        super().prepare(self._num_slots * num_tokens, self._num_slots * page_size)

    def grow(self, num_tokens: int) -> None:
        super().grow(self._num_slots * num_tokens)

    @torch.inference_mode()
    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        trees = {i: self._new_tree(limit, node_limits[i]) for i, limit in enumerate(limits) if limit}
        self._first_call([sequences[i] for i in trees], list(trees.values()))
        return draft_of_trees([trees[i].nodes() if i in trees else None for i in range(len(sequences))], self._device)

    def _new_tree(self, limit: int, node_limit: int) -> BlockTree:
        """Return an empty tree; one that is no deeper than a block is not expanded."""
        limit = limit if self._most_depth is None else min(limit, self._most_depth)
        return BlockTree(node_limit, limit, self._is_chain, continues=limit <= self._num_slots)

    def _projected(self, hidden_states: Tensor) -> Tensor:
        return self.model.project(hidden_states)

    def _compute(self, rows: list[Rows]) -> None:
        self._computed(rows, None)

    def _computed(self, rows: list[Rows], wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the blocks of ``N`` queued features, and the logits of the slots ``wanted`` (None: no slots).

        Return conditions ``[N, H]``, hidden states ``[N, K, H]``, and logits.
        """
        conditions = self._take_features(rows)
        k = self._num_slots
        bases = [start + i for _, start, count, _ in rows for i in range(count)]
        blocks = [Rows(owner, k * start, k * count) for owner, start, count, _ in rows]
        return conditions, *self.rows(self._pool(), blocks, conditions, bases, tokens_after(rows), wanted)

    def _slots_of(self, blocks: list[int]) -> Tensor:
        k = self._num_slots
        return to_device([k * block + slot for block in blocks for slot in range(k)], self._device)

    def _first_call(self, drafting: list[Sequence], trees: list[BlockTree]) -> None:
        """Compute the blocks with new features, and draft from the last of each sequence."""
        if sum(map(self.num_queued, drafting)) > max(self._most_rows, 2 * len(drafting)):
            self._catch_up(drafting)
        queued = self._queued_rows(drafting)
        ends = [end - 1 for end in accumulate(span.count for span in queued)]
        conditions, hidden, logits = self._computed(queued, self._slots_of(ends))
        if len(hidden) > len(drafting):
            last = to_device(ends, self._device)
            conditions = conditions[last]
            hidden = hidden[last]
        slots = self._candidates.of(hidden, logits, drafting, [0] * len(drafting), [s.token_ids[-1] for s in drafting])
        for tree, block in zip(trees, slots, strict=True):
            tree.add_block(ROOT, block)
        expanded = [tree.to_expand(BEAM) if tree.max_depth > self._num_slots else [] for tree in trees]
        if any(expanded):
            self._second_call(drafting, trees, expanded, conditions, hidden)

    def _second_call(
        self,
        drafting: list[Sequence],
        trees: list[BlockTree],
        expanded: list[list[int]],
        conditions: Tensor,
        hidden: Tensor,
    ) -> None:
        """Draft a block behind each node of ``expanded``.

        Args:
            drafting: ``B`` sequences.
            trees: of each, after the first call.
            expanded: of each, nodes of its first block.
            conditions: ``[B, H]``, those of the last true blocks.
            hidden: ``[B, K, H]``, their results.
        """
        k = self._num_slots
        new = []
        spans: list[Rows] = []
        bases: list[int] = []
        tokens: list[int] = []
        sources: list[int] = []  # of each block, the row of ``states`` that it is made of
        parents: list[int] = []
        states = torch.cat([conditions, hidden.flatten(0, 1)])
        for i, (sequence, nodes) in enumerate(zip(drafting, expanded, strict=True)):
            if not nodes:
                continue
            spans.append(Rows(sequence, k * (sequence.length - 2), k * (1 + len(nodes))))
            tree = trees[i]
            bases += [sequence.length - 2] * (1 + len(nodes))
            tokens += [sequence.token_ids[-1], *map(tree.token, nodes)]
            sources += [i, *(len(drafting) + k * i + tree.depth(node) - 1 for node in nodes)]
            # Node j of a tree is its row j + 1: the last true block is the chain of rows 0 to K - 1.
            parents += range(-1, k - 2)
            for place, node in enumerate(nodes, start=1):
                parents += [tree.depth(node) - 2, *range(k * place - 1, k * place + k - 2)]
                new.append((i, node, len(bases) - 1 - len(nodes) + place))
        counts = [span.count - 1 for span in spans]
        inputs = states[to_device(sources, self._device)]
        ends = [block for _, _, block in new]
        wanted = self._slots_of(ends)
        above = rows_of_trees(parents, counts)
        results, logits = self.rows(self._pool(), spans, inputs, bases, tokens, wanted, above)
        behind = results[to_device(ends, self._device)]
        owners = [drafting[i] for i, _, _ in new]
        depths = [trees[i].depth(node) for i, node, _ in new]
        slots = self._candidates.of(behind, logits, owners, depths, [trees[i].token(node) for i, node, _ in new])
        for (i, node, _), block in zip(new, slots, strict=True):
            trees[i].add_block(node, block)
