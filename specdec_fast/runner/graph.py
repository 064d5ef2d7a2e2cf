"""Steps of a model as CUDA graphs, each launched in one piece; what has no graph runs forward by forward."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import Tensor

from specdec_fast.batch.joint_ids import JointIds
from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.kv_cache.forward_layout import lay_out_on_host, take_back
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.drafting import first_tokens, laid_out_loop
from specdec_fast.runner.eager import EagerRunner
from specdec_fast.runner.graphs.graphs import Graphs
from specdec_fast.runner.verification import StepPlan, Verification


class GraphRunner(EagerRunner):
    """Runs a model's steps by graphs.

    Args:
        graphs: of the model.
        max_positions: number of positions that the model can serve; None: any number.
        *eager: the arguments of ``EagerRunner``, for what has no graph.

    """

    def __init__(self, graphs: Graphs, max_positions: int | None, *eager: Any) -> None:
        super().__init__(*eager)
        self._graphs = graphs
        self._max_positions = max_positions

    def compute(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None
    ) -> Tensor:
        """Replay the graph of the batch's shape, if there is one."""
        logits = self._graphs.forward(batch, pool, logit_rows, hidden_states)
        return super().compute(batch, pool, logit_rows, hidden_states) if logits is None else logits

    def verify(self, pool: PagePool, plan: StepPlan) -> Verification:
        """Replay the graph of a whole verification; there is none with edited logits or with rows of prompts."""
        if plan.edits_logits or plan.has_processors or plan.has_prompts:
            return super().verify(pool, plan)
        started = perf_counter()
        layout = lay_out_on_host(pool, plan.rows)
        columns = plan.sampling_columns()
        last = plan.last_tokens if plan.unread is None else plan.unread
        found = self._graphs.verify(layout, last, plan.draft_tokens, columns, pool, plan.hidden_states, plan.trees)
        if found is None:
            take_back(pool, layout)
            return super().verify(pool, plan)
        logits, results = found
        return Verification(plan.counts, logits, results, perf_counter() - started, 0.0, plan.hidden_states)

    def draft(
        self,
        pool: PagePool,
        rows: list[Rows],
        token_ids: list[int],
        num_draft_tokens: list[int],
        vocab_size: int,
        joint: JointIds | None = None,
    ) -> Tensor:
        """Replay the graph of a whole drafting loop, if there is one for these sequences.

        A sequence that gets fewer tokens than others, as at the end of its text, has as many forwards. Those that it
        does not need write their KV entries into the scratch page.
        """
        if joint is not None:  # a graph chooses among the ids of its model
            return super().draft(pool, rows, token_ids, num_draft_tokens, vocab_size, joint)
        num_forwards = max(num_draft_tokens)
        longest = max(row.start + row.count for row in rows) + num_forwards - 1
        fits = self._max_positions is None or longest <= self._max_positions
        laid_out = laid_out_loop(pool, rows, num_draft_tokens) if fits and self._graphs.has_loop(num_forwards) else None
        if laid_out is not None:
            layout, columns = laid_out
            chosen = self._graphs.draft(layout, token_ids, num_forwards, columns, pool, vocab_size)
            if chosen is not None:
                return first_tokens(chosen, num_draft_tokens)
            take_back(pool, layout)
        return super().draft(pool, rows, token_ids, num_draft_tokens, vocab_size, joint)
