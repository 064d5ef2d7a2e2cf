"""A model's forwards as graphs: recorded once per bucket of shapes, then launched in one piece.

A forward of few rows is a thousand small kernels, and the host takes longer to launch each than the device to run it. A
graph is launched in one piece, but only on the shapes and addresses with which it was recorded. So rows, sequences and
pages are rounded up to a *bucket*, and every bucket has *inputs* of its own, into which a batch is copied. The rest of
a bucket is rows of additional sequences on the scratch page, like the padding of a RowPadding.

The numbers that a launch takes from a batch (``max_seqlen_q``, ``max_seqlen_k``) are the bucket's bounds. They add
programs to a grid that find nothing to do; no row's bits depend on them. If a batch is larger than any bucket, the
caller runs it without a graph. Not yet run on a GPU: in the tests, repeated calls take the place of graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.cuda_graphs.buckets import Bucket, Inputs, Limits
from specdec_fast.cuda_graphs.capture import Capture, Captured
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import Watch, hooked_class

MOST_GRAPHS = 64  # per model; a graph of a large model holds some megabytes besides its logits

Forward = Callable[[RaggedBatch, PagePool, Tensor | None, Tensor | None], Tensor]
Choose = Callable[[Tensor, int], Tensor]


class _Graph(NamedTuple):
    inputs: Inputs
    captured: Captured
    hidden_states: Tensor | None  # of every row of the bucket, written by each replay


class Graphs:
    """The graphs of one model. Each is recorded when a batch needs its bucket for the second time.

    The first time, the caller runs the batch without a graph, because shapes that occur once, as at the end of a run,
    are not worth recording. Graphs contain the addresses of one page pool and of the weights. For another pool, or if
    weights move, they are recorded again. All graphs are destroyed together: see ``CudaCapture``.

    Args:
        model: the model whose forwards are recorded.
        forward: runs one forward, operation by operation, and writes hidden states into its last argument.
        capture: records what a call does.
        limits: the sizes of the largest buckets.
        choose: chooses tokens ``[N]`` from logits ``[N, V]``, with ids below a number, without waiting for the device.

    Attributes:
        why_not: the reason why the model cannot have graphs; None if it can.

    """

    def __init__(self, model: nn.Module, forward: Forward, capture: Capture, limits: Limits, choose: Choose) -> None:
        self._model, self._forward, self._capture, self._limits = model, forward, capture, limits
        self._choose = choose
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._asked: set[tuple[Bucket, int]] = set()
        # No reference to the pool itself, so that its memory is free before another pool is allocated.
        self._pool: Callable[[], PagePool | None] = lambda: None
        self._watch, self.why_not = Watch(model, ()), _why_not(model)

    @property
    def num_captured(self) -> int:
        """The number of graphs now."""
        return len(self._graphs)

    def expect_same_weights(self) -> None:
        """Destroy the graphs if the model has changed since they were recorded in a way that they do not see."""
        if self._watch.change() is not None:
            self._graphs.clear()
            self._watch, self.why_not = Watch(self._model, ()), _why_not(self._model)

    def forward(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None = None
    ) -> Tensor | None:
        """Do what ``RaggedModel.forward`` does, or return None if there is no graph for the batch.

        The caller must read the logits before the model's next forward, which may overwrite them.
        """
        graph = self._graph(batch, pool, 1, None, hidden_states)
        if graph is None:
            return None
        logits = _run(graph, batch)
        if hidden_states is not None and graph.hidden_states is not None:
            hidden_states.copy_(graph.hidden_states[: len(hidden_states)])
        return logits[: batch.token_ids.shape[0]] if logit_rows is None else logits[logit_rows]

    def draft(self, batch: RaggedBatch, num_forwards: int, pool: PagePool, vocab_size: int) -> Tensor | None:
        """Compute a batch, then one more row of each sequence per forward, on the token chosen before.

        Args:
            batch: ``B`` sequences, whose pages suffice for the rows of all forwards.
            num_forwards: number of forwards, ``K``.
            pool: the pool of these pages.
            vocab_size: chosen ids are below it.

        Returns:
            ``[K, B]`` int64, the tokens chosen after each forward; None if there is no graph for the batch.

        """
        graph = (
            self._graph(batch, pool, num_forwards, vocab_size) if num_forwards == self._limits.num_forwards else None
        )
        return None if graph is None else _run(graph, batch)[:, : batch.cu_seqlens.shape[0] - 1].clone()

    def _graph(
        self,
        batch: RaggedBatch,
        pool: PagePool,
        num_forwards: int,
        vocab_size: int | None,
        hidden_states: Tensor | None = None,
    ) -> _Graph | None:
        bucket = None
        if self.why_not is None:
            bucket = self._limits.bucket(batch, pool.page_size, pool.row_padding, num_forwards)
        if bucket is None:
            return None
        if self._pool() is not pool:
            self._graphs.clear()
            self._pool = weakref.ref(pool)
        shape = (bucket, num_forwards)
        key = (*shape, vocab_size, hidden_states is not None)
        if key not in self._graphs and shape in self._asked:
            graph = self._recorded(bucket, num_forwards, vocab_size, batch, pool, hidden_states)
            if graph is not None:
                self._graphs[key] = graph
        self._asked.add(shape)
        return self._graphs.get(key)

    @torch.inference_mode()
    def _recorded(
        self,
        bucket: Bucket,
        num_forwards: int,
        vocab_size: int | None,
        batch: RaggedBatch,
        pool: PagePool,
        hidden_states: Tensor | None,
    ) -> _Graph | None:
        """Record a graph on the batch that needs it; computing it several times gives the same result each time."""
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.clear()
        inputs = Inputs(bucket, pool.page_size, batch.token_ids.device)
        inputs.fill(batch)
        own = None  # outside of the graphs' memory, in which another graph would overwrite it
        if hidden_states is not None:
            own = hidden_states.new_empty(len(inputs.batch.token_ids), *hidden_states.shape[1:])

        def run() -> Tensor:
            if vocab_size is None:
                return self._forward(inputs.batch, pool, None, own)
            return self._draft(inputs.batch, bucket, num_forwards, pool, vocab_size)

        try:
            captured = self._capture(run)
        except Exception as error:  # a model's own code may raise anything; PyTorch then runs its forwards
            self._graphs.clear()
            self.why_not = f"{type(error).__name__}: {error}"
            return None
        return _Graph(inputs, captured, own)

    def _draft(self, first: RaggedBatch, bucket: Bucket, num_forwards: int, pool: PagePool, vocab_size: int) -> Tensor:
        """Run the forwards of a drafting step, laid out on the device; return ``[K, one_each]`` tokens."""
        last_rows = (first.cu_seqlens_q[1 : bucket.one_each + 1] - 1).long()
        tokens = self._choose(self._forward(first, pool, last_rows, None), vocab_size)
        chosen = [tokens]
        for ahead in range(num_forwards - 1):
            rows = _one_row_each(first, tokens, ahead, pool.page_size)
            tokens = self._choose(self._forward(rows, pool, None, None), vocab_size)
            chosen.append(tokens)
        return torch.stack(chosen)


def _why_not(model: nn.Module) -> str | None:
    hooked = hooked_class(model)
    return None if hooked is None else f"a {hooked} has forward hooks, which a graph would not call"


def _one_row_each(first: RaggedBatch, token_ids: Tensor, ahead: int, page_size: int) -> RaggedBatch:
    """Lay out one row per sequence, ``ahead`` positions after the next one of the batch: ``token_ids [N]``.

    As ``forward_layout.decode_batches`` does, but on the device. Sequences of padding rows stay in the scratch page.
    """
    num_rows = token_ids.shape[0]
    positions, table = first.seqused_k[:num_rows] + ahead, first.block_table[:num_rows]
    pages = table.gather(1, (positions // page_size).long()[:, None])[:, 0]
    cu_seqlens = torch.arange(num_rows + 1, dtype=torch.int32, device=token_ids.device)
    return replace(
        first,
        token_ids=token_ids,
        positions=positions.long(),
        slot_mapping=pages * page_size + positions % page_size,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens=cu_seqlens,
        seqused_k=positions + 1,
        block_table=table,
        most_rows=1,
        max_seqlen_q=1,
    )


@torch.inference_mode()
def _run(graph: _Graph, batch: RaggedBatch) -> Tensor:
    graph.inputs.fill(batch)
    graph.captured.replay()
    return graph.captured.output


def described(graphs: Graphs | None) -> dict[str, Any]:
    """Return the entries of ``describe()`` about a model's graphs."""
    return {
        "graphs": graphs is not None and graphs.why_not is None,
        "graphs_captured": 0 if graphs is None else graphs.num_captured,
        "why_no_graphs": None if graphs is None else graphs.why_not,
    }
