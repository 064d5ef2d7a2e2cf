"""A drafter over hidden states that drafts chains row by row: each row takes the result for the row before.

Row i of a sequence is made of the target's feature at position i and of the token at position i + 1, and its logits
choose the token at i + 2. A sequence of n tokens has features of positions 0 to n - 2. So its first draft token comes
from row n - 2, which is true. The rows behind it are provisional: they are made of the drafter's own hidden states.
Features of accepted tokens arrive after the step, and the next proposal overwrites the provisional rows with true ones.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.batch.sampling_batch import Sampling, sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext
from specdec_fast.drafters.draft import Draft
from specdec_fast.drafters.shared.queued_features import tokens_after
from specdec_fast.drafters.shared.tapped import LearnedModel, TappedDrafter
from specdec_fast.program import RowFunction
from specdec_fast.program.executors import Projection, TokenChoice
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.drafting import draft_on_pages, first_tokens, laid_out_loop
from specdec_fast.runner.graphs.buckets import GraphLimits
from specdec_fast.runner.graphs.capture import capture_for
from specdec_fast.runner.graphs.drafts import DraftBatch, DraftGraphs
from specdec_fast.runner.graphs.graphs import described
from specdec_fast.runner.graphs.phases import ChainParts
from specdec_fast.runner.row_module import RowModule


class ChainModel(LearnedModel, Protocol):
    """What the model of a ``ChainDrafter`` has."""

    def layers_function(self) -> RowFunction:
        """Return its layers: from a feature, or the result for the row before, to logits and the row's result."""


class ChainDrafter(TappedDrafter):
    """Drafts a chain of K tokens: one forward over the rows with new features, then one row per further token.

    On a CPU one call of a program drafts a whole step, if no sequence edits logits. On a GPU the step is one graph if,
    besides, some sequence gets K tokens.

    Attributes:
        rows: computes rows, without waiting for the device.
        drafts_in_one_call: whether a call of a program drafts a whole step, where no request edits logits.
        graphs: of its steps; None on a device without graphs.
    """

    def __init__(self, model: ChainModel, context: DrafterContext, target_ids: Tensor | None = None) -> None:
        super().__init__(model, context, target_ids)
        config = context.config
        self.rows = RowModule(model.layers_function(), self._ops, config.page_size, config.enforce_eager)
        self.drafts_in_one_call = self.rows.program is not None
        self._no_rows = torch.empty(0, dtype=torch.int64, device=self._device)
        capture = capture_for(context.device)
        most = config.most_draft_tokens
        limits = GraphLimits(config.max_batch_size, most + 1, most)
        self._addresses: list[int] = []  # of the weights that graphs read
        self.graphs = None if capture is None or config.enforce_eager else DraftGraphs(capture, limits)

    def prepare(self, num_tokens: int, page_size: int) -> None:
        if self.graphs is not None:  # a graph reads weights where they were
            addresses = [weight.data_ptr() for weight in self.weights()]
            if addresses != self._addresses:
                self.graphs.clear()
            self._addresses = addresses
        super().prepare(num_tokens, page_size)

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        # The first steps record the graphs; steps are measured as they come.
        return None if self.graphs is not None else super().forward_seconds(row_counts)

    def describe(self) -> dict[str, Any]:
        return {
            **described(self.graphs),
            "forward_program": self.rows.has_program,
            "why_no_program": self.rows.why_no_program,
        }

    def _compute(self, rows: list[Rows]) -> None:
        self.rows(self._pool(), *self._take_batch(rows), self._no_rows)

    def _forward(self, batch: RaggedBatch, inputs: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute ``T`` rows, and write their KV entries.

        Args:
            batch: the rows; the token of a row at position i is that of position i + 1.
            inputs: ``[T, H]``, a feature, or the result for the row before.
            wanted: ``[R]`` int64, the rows whose logits are wanted; None: all.

        Returns:
            Logits ``[R, ids]``, and what the next row takes, ``[T, H]``.
        """
        return self.rows(self._pool(), batch, inputs, wanted)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        drafting = {sequence: limit for sequence, limit in zip(sequences, limits, strict=True) if limit}
        most = max(self._most_rows, sum(drafting.values()) + len(drafting))
        if sum(map(self.num_queued, drafting)) > most:
            self._catch_up(list(drafting))
        return Draft(self._chains(drafting), list(limits))

    def _chains(self, drafting: dict[Sequence, int]) -> Tensor:
        """Return the draft tokens ``[sum(limits)]``, sequence after sequence."""
        members = list(drafting)
        counts = list(drafting.values())
        queued = self._queued_rows(members)
        if self._in_one_call(members):
            choice = self._choice(sampling_of(members, self._device))
            inputs = self._take_inputs(queued)
            return self.rows.draft(self._pool(), queued, tokens_after(queued), inputs, counts, choice)
        features = self._take_hidden_states(queued)
        of_graph = self._by_graph(queued, features, counts)
        if of_graph is not None:
            return first_tokens(of_graph, counts)
        tokens = to_device(tokens_after(queued), self._device)
        hidden = self._projected(features)
        return draft_on_pages(self._pool(), queued, tokens, hidden, counts, self._forward, self._next_tokens)

    def _in_one_call(self, sequences: list[Sequence]) -> bool:
        return self.drafts_in_one_call and not any(s.edits_logits for s in sequences)

    def _take_inputs(self, queued: list[Rows]) -> Tensor | Projection:
        """Remove the queued features of some sequences, and return them as a call of the program takes them."""
        return self._take_features(queued)

    def _choice(self, sampling: Sampling | None) -> TokenChoice:
        return TokenChoice(self._vocab_size, sampling)

    def _by_graph(self, queued: list[Rows], features: Tensor, counts: list[int]) -> Tensor | None:
        """Return the tokens ``[B, K]`` that one graph chooses; None if there is none for these sequences.

        A sequence that gets fewer tokens than others has as many forwards; see ``GraphRunner.draft``.
        """
        batch = self._batch_of_graph(queued, features, max(counts), counts)
        if self.graphs is None or batch is None:
            return None
        return self.graphs.draft(ChainParts(self._projected, self._forward, self._next_tokens), batch)

    def _batch_of_graph(
        self, queued: list[Rows], features: Tensor, num_forwards: int, num_positions: list[int]
    ) -> DraftBatch | None:
        """Lay out a drafting for a graph, with pages for ``num_positions`` from the last row of each sequence on.

        None if a loop of so many forwards has no graph, or a sequence edits logits.
        """
        if self.graphs is None or not self.graphs.has_loop(num_forwards):
            return None
        laid_out = laid_out_loop(self._pool(), queued, num_positions)
        if laid_out is None:
            return None
        layout, columns = laid_out
        return DraftBatch(layout, tokens_after(queued), features, columns, self._pool())
