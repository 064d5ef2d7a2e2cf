"""Steps of a model as CUDA graphs, each launched in one piece; what has no graph runs forward by forward."""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.kv_cache.forward_layout import lay_out_on_host, take_back
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.drafting import DraftPlan, first_tokens, laid_out_loop
from specdec_fast.runner.eager import EagerRunner, ModelParts
from specdec_fast.runner.graphs.graphs import Graphs
from specdec_fast.runner.verification import StepPlan, Verification


class GraphRunner(EagerRunner):
    """Runs a model's steps by graphs.

    Args:
        model: for what has no graph.
        graphs: of the model.
        max_positions: number of positions that the model can serve; None: any number.

    """

    def __init__(self, model: ModelParts, graphs: Graphs, max_positions: int | None) -> None:
        super().__init__(model)
        self._graphs = graphs
        self._max_positions = max_positions

    def compute(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None
    ) -> Tensor:
        logits = self._graphs.forward(batch, pool, logit_rows, hidden_states)
        return super().compute(batch, pool, logit_rows, hidden_states) if logits is None else logits

    def verify(self, pool: PagePool, plan: StepPlan) -> Verification:
        if plan.edits_logits or plan.has_processors or plan.has_prompts:  # a graph has none of these
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
        return Verification(
            counts=plan.counts,
            logits=logits,
            results=results,
            forward_seconds=perf_counter() - started,
            accept_seconds=0.0,
            hidden_states=plan.hidden_states,
        )

    def draft(self, pool: PagePool, plan: DraftPlan) -> Tensor:
        # A sequence that gets fewer tokens than others, as at the end of its text, has as many forwards. Those that it
        # does not need write their KV entries into the scratch page.
        if plan.joint is not None:  # a graph chooses among the ids of its model
            return super().draft(pool, plan)
        counts = plan.num_draft_tokens
        num_forwards = max(counts)
        longest = max(row.start + row.count for row in plan.rows) + num_forwards - 1
        fits = self._max_positions is None or longest <= self._max_positions
        laid_out = laid_out_loop(pool, plan.rows, counts) if fits and self._graphs.has_loop(num_forwards) else None
        if laid_out is not None:
            layout, columns = laid_out
            chosen = self._graphs.draft(layout, plan.token_ids, num_forwards, columns, pool, plan.num_choosable)
            if chosen is not None:
                return first_tokens(chosen, counts)
            take_back(pool, layout)
        return super().draft(pool, plan)
