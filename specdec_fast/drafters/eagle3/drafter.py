"""The ``"eagle3"`` drafter: a layer over the target's hidden states (Li et al., arXiv 2503.01840).

How rows belong to positions: see ``chain_drafter.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import Sampling, sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext
from specdec_fast.drafters.draft import Draft, draft_of_trees
from specdec_fast.drafters.eagle3.model import Eagle3Model, load_eagle3
from specdec_fast.drafters.eagle3.tree import Eagle3Trees, LastRows, TreeLimit, trees_of
from specdec_fast.drafters.shared.chain_drafter import ChainDrafter
from specdec_fast.drafters.shared.queued_features import tokens_after
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.program.executors import DraftedTrees, Projection, TokenChoice
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS
from specdec_fast.runner.row_module import RowModule
from specdec_fast.trees.growing import TreeNodes


class Eagle3Drafter(ChainDrafter):
    """Proposes what one or more layers over the target's hidden states predict: a chain of K tokens, or a tree.

    Where no tree may have all its nodes, it proposes chains, which take fewer rows to draft.

    Raises:
        ConfigError, VocabularyMismatchError: the checkpoint cannot be read, or was made for another target; or
            ``draft_tree`` has a node beyond the last id.
        NotYetSupportedError: ``draft_tree`` is a tree, and the target verifies chains only.
    """

    settings = ("tap_layers", "draft_tree")
    model: Eagle3Model

    def __init__(self, context: DrafterContext, folder: str) -> None:
        self._folder = folder
        config = context.config
        with torch.inference_mode():
            model = load_eagle3(Path(folder), context.target, config.tap_layers)
        super().__init__(model, context, model.target_ids)
        self.taps = model.taps
        # A program projects within the call that drafts; where there is no such call, PyTorch projects.
        is_eager = self.rows.program is None
        self._projection = RowModule(model.projection_function(), model.ops, config.page_size, is_eager)
        self._trees = trees_of(self.model, self.rows, context)
        self.max_nodes = 0 if self._trees is None else self._trees.max_nodes
        self.has_scores = self._trees is not None and not self._trees.is_static

    @property
    def name(self) -> str:
        return f"eagle3:{self._folder}"

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "tap_layers": self.taps,
            "draft_vocab_size": self.model.config.draft_vocab_size,
            "draft_tree": "chain" if self._trees is None else self._trees.described,
        }

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        model = self.model
        itemsize = self.model.layout.dtype.itemsize
        verified = num_sequences * (num_draft_tokens + 1)
        widths = model.config.draft_vocab_size + (0 if model.target_ids is None else model.vocab_size)
        rows = max(prefill_rows or MAX_PREFILL_ROWS, verified)
        forward = self.rows.step_bytes(rows, num_sequences) or rows * model.row_bytes
        forward += self._projection.step_bytes(rows, rows) or 0
        logits = num_sequences * widths * itemsize
        if self._trees is not None and self.max_nodes <= num_draft_tokens:  # else, if memory counts, it drafts chains
            logits = self._trees.logits_bytes(num_sequences, widths * itemsize, itemsize)
        return forward + self._kept_bytes(num_sequences, rows) + logits

    @torch.inference_mode()
    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        if self._trees is None or all(most < self.max_nodes for most in node_limits if most):
            return self.propose(sequences, limits)
        chosen = [i for i, limit in enumerate(limits) if limit]
        drafting = [sequences[i] for i in chosen]
        within = [TreeLimit(limits[i], min(node_limits[i], self.max_nodes)) for i in chosen]
        if sum(map(self.num_queued, drafting)) > self._most_rows:
            self._catch_up(drafting)
        if self._in_one_call(drafting):
            drafted = self._trees_of_program(self._trees, drafting, within)
            counts = dict(zip(chosen, drafted.counts, strict=True))
            every_count = [counts.get(i, 0) for i in range(len(sequences))]
            return Draft(drafted.token_ids, every_count, drafted.parents, drafted.scores if self.has_scores else None)
        queued = self._queued_rows(drafting)
        features = self._take_hidden_states(queued)
        trees = self._trees_of_graph(self._trees, queued, features, within)
        if trees is None:
            trees = self._trees.draft(self._pool(), drafting, within, self._last_rows(queued, features))
        nodes = dict(zip(chosen, trees, strict=True))
        return draft_of_trees([nodes.get(i) for i in range(len(sequences))], self._device, self.has_scores)

    def _trees_of_program(self, trees: Eagle3Trees, sequences: list[Sequence], limits: list[TreeLimit]) -> DraftedTrees:
        rows = self._queued_rows(sequences)
        token_ids = tokens_after(rows)
        inputs = self._take_inputs(rows)
        choice = self._choice(sampling_of(sequences, self._device))
        return self.rows.draft_trees(self._pool(), rows, token_ids, inputs, trees.rules(limits), choice)

    def _trees_of_graph(
        self, trees: Eagle3Trees, queued: list[Rows], features: Tensor, limits: list[TreeLimit]
    ) -> list[TreeNodes] | None:
        """Return the trees that one graph drafts; None if there is none for these sequences.

        A sequence whose tree has fewer levels than others' has as many forwards; see ``GraphRunner.draft``.
        """
        num_forwards = max(limit.depth for limit in limits)
        batch = self._batch_of_graph(queued, features, num_forwards, [limit.num_nodes + 1 for limit in limits])
        if self.graphs is None or batch is None:
            return None
        named = self.graphs.draft_trees(trees.graph_parts(self._projected, self._forward), batch)
        return None if named is None else trees.grown(named, limits)

    def _last_rows(self, queued: list[Rows], features: Tensor) -> LastRows:
        batch = lay_out(self._pool(), queued, to_device(tokens_after(queued), self._device))
        inputs = self._projected(features)
        logits, hidden = self.rows(self._pool(), batch, inputs, batch.last_rows)
        return LastRows(inputs[batch.last_rows], hidden[batch.last_rows], logits)

    def _projected(self, hidden_states: Tensor) -> Tensor:
        return self.model.project(hidden_states)

    def _take_inputs(self, queued: list[Rows]) -> Tensor | Projection:
        # the call of a program projects them as well
        pieces = self._take_pieces(queued)
        program = self._projection.program
        if program is None or pieces[0].dtype != self.model.layout.dtype:
            return self._projected(torch.cat(pieces))
        return Projection(program, pieces)

    def _choice(self, sampling: Sampling | None) -> TokenChoice:
        model = self.model
        if model.target_ids is None:
            return TokenChoice(model.vocab_size, sampling)
        return TokenChoice(len(model.target_ids), sampling, model.target_ids, model.vocab_size)
