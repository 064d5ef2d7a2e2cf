"""The chains of a drafter over hidden states as graphs: all forwards and choices of a step in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.kv_cache.forward_layout import HostLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.graphs.buckets import Bucket, size_of
from specdec_fast.runner.graphs.inputs import Inputs
from specdec_fast.runner.graphs.phases import ChainParts, chain_loop
from specdec_fast.runner.graphs.store import GraphSpec, GraphStore


class _Kind(NamedTuple):
    bucket: Bucket
    samples: bool


class ChainGraphs(GraphStore):
    """The graphs of one drafter. The limits name K: chains of fewer tokens have no graph."""

    @torch.inference_mode()
    def draft(
        self,
        parts: ChainParts,
        layout: HostLayout,
        token_ids: list[int],
        features: Tensor,
        sampling: Mapping[str, np.ndarray],
        pool: PagePool,
    ) -> Tensor | None:
        """Compute rows of features, then one more row of each sequence per forward.

        Args:
            parts: of the drafter, the same in every call. What they read, besides their arguments and the pages, must
                stay where it is.
            layout: of the first forward, ``B`` sequences, with block tables for the rows of all forwards.
            token_ids: of its ``T`` rows.
            features: ``[T, taps, H]``, the target's hidden states for these rows.
            sampling: of ``sampling_columns``; empty: all sequences are greedy.
            pool: the pages.

        Returns:
            ``[B, K]`` int64, the tokens chosen after each forward; read them before the drafter's next step. None if
            there is no graph for the batch.

        """
        num_forwards = self._limits.num_forwards
        if not self.has_loop(num_forwards):
            return None
        bucket = self._limits.bucket(size_of(layout), pool.page_size, pool.row_padding, num_forwards)
        if bucket is None:
            return None
        kind = _Kind(bucket, bool(sampling))

        def spec() -> GraphSpec:
            inputs = Inputs(bucket, pool.page_size, pool.layout.device)
            own = features.new_zeros(bucket.num_rows, *features.shape[1:])
            rules = inputs.sampling if kind.samples else None
            run = partial(chain_loop, parts, inputs, own, rules, num_forwards, pool.page_size)
            return GraphSpec(inputs, own, run)

        def fill(inputs: Inputs, own: Tensor | None) -> None:
            inputs.send(layout, token_ids, sampling, is_verified=False)
            assert own is not None
            own[: len(features)].copy_(features)
            own[len(features) :].zero_()

        graph = self._graph(kind, pool, spec, fill)
        if graph is None:
            return None
        graph.captured.replay()
        return graph.captured.output[0][: len(layout.end)]
