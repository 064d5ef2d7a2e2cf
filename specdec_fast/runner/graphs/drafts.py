"""The drafting of a drafter over hidden states as graphs: all forwards and choices of a step in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.kv_cache.forward_layout import HostLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.graphs.buckets import Bucket, size_of
from specdec_fast.runner.graphs.inputs import Inputs
from specdec_fast.runner.graphs.phases import ChainParts, chain_loop
from specdec_fast.runner.graphs.store import GraphSpec, GraphStore
from specdec_fast.runner.graphs.trees import TreeParts, tree_loop


class _Kind(NamedTuple):
    bucket: Bucket
    samples: bool
    has_trees: bool


# What a graph computes, of a bucket's inputs, features ``[num_rows, taps, H]``, and how sequences choose.
_Loop = Callable[[Inputs, Tensor, Sampling | None], tuple[Tensor, ...]]


class DraftBatch(NamedTuple):
    """The first forward of a drafting, over the rows with new features.

    Attributes:
        layout: of ``T`` rows of ``B`` sequences, with block tables for all positions that are drafted.
        token_ids: of the rows.
        features: ``[T, taps, H]``, the target's hidden states for the rows.
        sampling: of ``sampling_columns``; empty: all sequences are greedy.
        pool: the pages.

    """

    layout: HostLayout
    token_ids: list[int]
    features: Tensor
    sampling: Mapping[str, np.ndarray]
    pool: PagePool


class DraftGraphs(GraphStore):
    """The graphs of one drafter. The limits name K: shorter chains and lower trees have no graph.

    The parts of a drafter must be the same in every call. What they read, besides their arguments and the pages, must
    stay where it is.
    """

    @torch.inference_mode()
    def draft(self, parts: ChainParts, batch: DraftBatch) -> Tensor | None:
        """Compute the rows, then one more row of each sequence per forward.

        Returns:
            ``[B, K]`` int64, the tokens chosen after each forward; read them before the drafter's next step. None if
            there is no graph for the batch.

        """
        count = self._limits.num_forwards

        def loop(inputs: Inputs, features: Tensor, sampling: Sampling | None) -> tuple[Tensor, ...]:
            return chain_loop(parts, inputs, features, sampling, count, batch.pool.page_size)

        found = self._drafted(batch, loop, num_positions=count, has_trees=False)
        return None if found is None else found[0]

    @torch.inference_mode()
    def draft_trees(self, parts: TreeParts, batch: DraftBatch) -> tuple[Tensor, ...] | None:
        """Compute the rows, then one forward per level of the trees.

        Returns:
            What ``tree_loop`` does, for ``B`` sequences; read it before the drafter's next step. None if there is no
            graph for the batch.

        """
        depth = min(self._limits.num_forwards, parts.max_nodes)

        def loop(inputs: Inputs, features: Tensor, sampling: Sampling | None) -> tuple[Tensor, ...]:
            return tree_loop(parts, inputs, features, sampling, depth, batch.pool.page_size)

        return self._drafted(batch, loop, num_positions=parts.max_nodes + 1, has_trees=True)

    def _drafted(
        self, batch: DraftBatch, loop: _Loop, num_positions: int, has_trees: bool
    ) -> tuple[Tensor, ...] | None:
        """Return the results of a graph for ``B`` sequences, which need ``num_positions`` from their last rows on."""
        (layout, token_ids, features, columns, pool) = batch
        if not self.has_loop(self._limits.num_forwards):
            return None
        bucket = self._limits.bucket(size_of(layout), pool.page_size, pool.row_padding, num_positions)
        if bucket is None:
            return None
        kind = _Kind(bucket, bool(columns), has_trees)

        def spec() -> GraphSpec:
            inputs = Inputs(bucket, pool.page_size, pool.layout.device)
            own = features.new_zeros(bucket.num_rows, *features.shape[1:])
            return GraphSpec(inputs, own, partial(loop, inputs, own, inputs.sampling if kind.samples else None))

        def fill(inputs: Inputs, own: Tensor | None) -> None:
            inputs.send(layout, columns, token_ids=token_ids)
            assert own is not None
            own[: len(features)].copy_(features)
            own[len(features) :].zero_()

        graph = self._graph(kind, pool, spec, fill)
        if graph is None:
            return None
        graph.captured.replay()
        return tuple(part[: len(layout.end)] for part in graph.captured.output)
