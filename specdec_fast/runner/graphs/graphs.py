"""A model's forwards as graphs: recorded once per bucket of shapes, then launched in one piece.

A forward of few rows is a thousand small kernels, and the host takes longer to launch each than the device to run it. A
graph is launched in one piece, but only on the shapes and addresses with which it was recorded. So rows, sequences and
pages are rounded up to a *bucket*, and every bucket has *inputs* of its own, into which a batch is copied.

A phase of a step is one graph: a verification with the target's choices and what it accepts, or a drafting loop with
its forwards and choices, greedy or sampled. A forward that is neither, such as a prefill of few rows, has a graph of
the forward alone.

The numbers that a launch takes from a batch (``max_seqlen_q``, ``max_seqlen_k``) are the bucket's bounds. They add
programs to a grid that find nothing to do; no row's bits depend on them. If a batch is larger than any bucket, the
caller runs it without a graph. In the tests, repeated calls take the place of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.device_copy import Joined
from specdec_fast.kv_cache.forward_layout import HostLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import Watch, hooked_class
from specdec_fast.runner.graphs.buckets import BatchSize, Bucket, GraphLimits, size_of
from specdec_fast.runner.graphs.capture import Capture, Run
from specdec_fast.runner.graphs.inputs import Inputs
from specdec_fast.runner.graphs.phases import Choices, drafting_loop, verification
from specdec_fast.runner.graphs.store import GraphSpec, GraphStore, Recorded
from specdec_fast.trees.rows import TreeRows

Forward = Callable[[RaggedBatch, PagePool, Tensor | None, Tensor | None], Tensor]


class _Kind(NamedTuple):
    """What a graph computes on the inputs of a bucket."""

    bucket: Bucket
    phase: str  # "forward", "prompt", "verify" or "draft"
    num_forwards: int = 1
    vocab_size: int = 0  # of the ids that are drafted
    samples: bool = False
    keeps_hidden: bool = False
    has_trees: bool = False


class Graphs(GraphStore):
    """The graphs of one model. They contain the addresses of its weights; if these move, they are recorded again.

    Args:
        model: the model whose forwards are recorded.
        forward: runs one forward, operation by operation, and writes hidden states into its last argument.
        capture: records what a call does.
        limits: the sizes of the largest buckets.
        choices: how tokens are chosen.
        why_not: why the model cannot have graphs; None: its code decides.
        is_sharded: whether other processes record and replay the same graphs.

    Attributes:
        why_not: the reason why the model cannot have graphs; None if it can.

    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        capture: Capture,
        limits: GraphLimits,
        choices: Choices,
        why_not: str | None = None,
        is_sharded: bool = False,
    ) -> None:
        super().__init__(capture, limits, why_not or _why_not(model), is_sharded)
        self._never = why_not
        self._model = model
        self._forward = forward
        self._choices = choices
        self._watch = Watch(model, ())

    def change(self) -> str | None:
        """Return how the model has changed since they were recorded in a way that they do not see; None: it has not."""
        return self._watch.change()

    def record_again(self) -> None:
        """Destroy the graphs of a model that has changed."""
        self._graphs.clear()
        self._watch = Watch(self._model, ())
        self.why_not = self._never or _why_not(self._model)

    @torch.inference_mode()
    def forward(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None = None
    ) -> Tensor | None:
        """Do what ``RaggedModel.forward`` does, or return None if there is no graph for the batch.

        The caller must read the logits before the model's next forward, which may overwrite them.
        """
        bucket = None if batch.tree_mask is not None else self._bucket(size_of(batch), pool)
        if bucket is None:
            return self._prompt(batch, pool, logit_rows, hidden_states)
        kind = _Kind(bucket, "forward", keeps_hidden=hidden_states is not None)
        graph = self._graph_of(kind, pool, hidden_states, lambda inputs: inputs.fill(batch))
        if graph is None:
            return None
        (logits,) = _replayed(graph, hidden_states)
        return logits[: batch.token_ids.shape[0]] if logit_rows is None else logits[logit_rows]

    def _prompt(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None
    ) -> Tensor | None:
        """Compute a forward with few rows of prompts; None if there is no graph for it.

        States of recurrent layers would have to be put back after recording, so such models have none.
        """
        if logit_rows is None:
            return None
        if self.why_not is not None or batch.tree_mask is not None or pool.states is not None:
            return None
        wanted = logit_rows
        bucket = self._limits.prompt_bucket(size_of(batch), len(wanted), pool.page_size, pool.row_padding)
        if bucket is None:
            return None

        def fill(inputs: Inputs) -> None:
            inputs.fill(batch)
            inputs.logit_rows[: len(wanted)].copy_(wanted)
            inputs.logit_rows[len(wanted) :].zero_()

        kind = _Kind(bucket, "prompt", keeps_hidden=hidden_states is not None)
        graph = self._graph_of(kind, pool, hidden_states, fill)
        return None if graph is None else _replayed(graph, hidden_states)[0][: len(wanted)]

    @torch.inference_mode()
    def verify(
        self,
        layout: HostLayout,
        last: list[int] | Tensor,
        draft_tokens: Tensor,
        sampling: Mapping[str, np.ndarray],
        pool: PagePool,
        hidden_states: Tensor | None,
        trees: TreeRows | None = None,
    ) -> tuple[Tensor, Joined] | None:
        """Compute the rows of a verification, and what is accepted.

        Args:
            layout: of ``T`` rows of ``B`` sequences.
            last: the last token of each sequence. A tensor ``[B]`` int64 on the device: no row has a draft token.
            draft_tokens: ``[T - B]`` int64 on the device, sequence after sequence.
            sampling: of ``sampling_columns``; empty: all sequences are greedy.
            pool: the pages.
            hidden_states: memory for the taps of every row; None without taps.
            trees: the shape of the rows, if they are trees of draft tokens; None: chains.

        Returns:
            The logits ``[T, V]``, and the results of ``verify_chain``. Read both, or queue their copies, before the
            model's next forward. None if there is no graph for the batch.

        """
        has_trees = trees is not None
        if (bucket := self._bucket(size_of(layout), pool, has_trees=has_trees)) is None:
            return None

        first_ids, drafted = (None, last) if isinstance(last, Tensor) else (last, draft_tokens)

        def fill(inputs: Inputs) -> None:
            inputs.send(layout, sampling, first_ids=first_ids, trees=trees)
            inputs.drafted[: len(drafted)].copy_(drafted)

        kind = _Kind(
            bucket,
            "verify",
            samples=bool(sampling),
            keeps_hidden=hidden_states is not None,
            has_trees=has_trees,
        )
        graph = self._graph_of(kind, pool, hidden_states, fill)
        if graph is None:
            return None
        logits, found = _replayed(graph, hidden_states)
        num_rows = len(layout.positions)
        batch_size = len(last)
        rows = bucket.num_rows
        places = bucket.num_sequences
        sizes = ((0, num_rows), (rows, batch_size), (rows + places, batch_size), (rows + 2 * places, num_rows))
        parts = tuple(slice(start, start + count) for start, count in sizes[: 4 if has_trees else 3])
        return logits[:num_rows], Joined(found, parts)

    @torch.inference_mode()
    def draft(
        self,
        layout: HostLayout,
        token_ids: list[int],
        num_forwards: int,
        sampling: Mapping[str, np.ndarray],
        pool: PagePool,
        vocab_size: int,
    ) -> Tensor | None:
        """Compute rows, then one more row of each sequence per forward, on the token chosen before.

        Args:
            layout: of the first forward, ``B`` sequences, with block tables for the rows of all forwards.
            token_ids: of its rows.
            num_forwards: number of forwards, ``K``.
            sampling: of ``sampling_columns``; empty: all sequences are greedy.
            pool: the pages.
            vocab_size: chosen ids are below it.

        Returns:
            ``[B, K]`` int64, the tokens chosen after each forward; read them before the model's next forward. None if
            there is no graph for the batch.

        """
        if not self.has_loop(num_forwards):
            return None
        if (bucket := self._bucket(size_of(layout), pool, num_forwards)) is None:
            return None
        kind = _Kind(bucket, "draft", num_forwards=num_forwards, vocab_size=vocab_size, samples=bool(sampling))
        graph = self._graph_of(kind, pool, None, lambda inputs: inputs.send(layout, sampling, token_ids=token_ids))
        return None if graph is None else _replayed(graph, None)[0][: len(layout.end)]

    def _bucket(
        self, size: BatchSize, pool: PagePool, num_positions: int = 1, has_trees: bool = False
    ) -> Bucket | None:
        if self.why_not is not None:
            return None
        return self._limits.bucket(size, pool.page_size, pool.row_padding, num_positions, has_trees)

    def _graph_of(
        self, kind: _Kind, pool: PagePool, hidden_states: Tensor | None, fill: Callable[[Inputs], None]
    ) -> Recorded | None:
        """Return the graph of a kind with its inputs filled, or None; ``hidden_states`` are like those it writes."""

        def spec() -> GraphSpec:
            has_states = pool.states is not None
            inputs = Inputs(kind.bucket, pool.page_size, pool.layout.device, kind.has_trees, has_states)
            own = None
            if hidden_states is not None:
                own = hidden_states.new_empty(len(inputs.batch.token_ids), *hidden_states.shape[1:])
            return GraphSpec(inputs, own, self._run_of(kind, inputs, pool, own))

        return self._graph(kind, pool, spec, lambda inputs, _: fill(inputs))

    def _run_of(self, kind: _Kind, inputs: Inputs, pool: PagePool, hidden_states: Tensor | None) -> Run:
        """Return the call that is recorded."""
        sampling = inputs.sampling if kind.samples else None
        if kind.phase == "forward":
            return lambda: (self._forward(inputs.batch, pool, None, hidden_states),)
        if kind.phase == "prompt":
            return lambda: (self._forward(inputs.batch, pool, inputs.logit_rows, hidden_states),)
        if kind.phase == "verify":

            def forward(batch: RaggedBatch) -> Tensor:
                return self._forward(batch, pool, None, hidden_states)

            return partial(verification, forward, inputs, sampling, self._choices)

        def last_logits(batch: RaggedBatch, _: None, rows: Tensor | None) -> tuple[Tensor, None]:
            return self._forward(batch, pool, rows, None), None

        def choose(logits: Tensor, sampling: Sampling | None, tokens: Tensor, one_each: Tensor) -> Tensor:
            return self._choices.choose(logits, kind.vocab_size, sampling, tokens, one_each)

        return partial(drafting_loop, last_logits, inputs, sampling, choose, kind.num_forwards, pool.page_size)


def _why_not(model: nn.Module) -> str | None:
    hooked = hooked_class(model)
    return None if hooked is None else f"a {hooked} has forward hooks, which a graph would not call"


def _replayed(graph: Recorded, hidden_states: Tensor | None) -> tuple[Tensor, ...]:
    graph.captured.replay()
    if hidden_states is not None and graph.own is not None:
        hidden_states.copy_(graph.own[: len(hidden_states)])
    return graph.captured.output


def described(graphs: GraphStore | None) -> dict[str, Any]:
    """Return the entries of ``describe()`` about a model's graphs."""
    return {
        "graphs": graphs is not None and graphs.why_not is None,
        "graphs_captured": 0 if graphs is None else graphs.num_captured,
        "why_no_graphs": None if graphs is None else graphs.why_not,
    }
