"""Graphs by kind: when one is recorded, and when all of them are destroyed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor

from specdec_fast.freed_memory import is_out_of_memory
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.graphs.buckets import GraphLimits
from specdec_fast.runner.graphs.capture import Capture, Captured, Run
from specdec_fast.runner.graphs.inputs import Inputs

# Per store. All go at once (``CudaCapture``), so there is room for every kind that a service needs: with contexts up to
# 12,000 positions and 32 sequences, greedy and sampled, 178 kinds besides those of prefills. They share the memory of
# their intermediate results.
MOST_GRAPHS = 512


class GraphSpec(NamedTuple):
    """What a graph reads and computes.

    Attributes:
        inputs: of its bucket.
        own: see ``Recorded``.
        run: the call that is recorded. It is not kept, because it may hold the page pool.

    """

    inputs: Inputs
    own: Tensor | None
    run: Run


class Recorded(NamedTuple):
    """A graph.

    Attributes:
        inputs: of its bucket.
        own: a tensor that each replay reads besides, or writes; None: there is none. It lies outside of the graphs'
            memory, in which another graph would overwrite it.
        captured: what runs it again, and its results.

    """

    inputs: Inputs
    own: Tensor | None
    captured: Captured


class GraphStore:
    """Records each graph when a batch needs it for the second time.

    The first time, the caller runs the batch without a graph, because shapes that occur once, as at the end of a run,
    are not worth recording. Graphs contain the addresses of one page pool and of its state slots; for another pool, and
    after its state slots have grown, they are recorded again.
    All graphs are destroyed together: see ``CudaCapture``.

    Args:
        capture: records what a call does.
        limits: the sizes of the largest buckets.
        why_not: the reason why there can be no graphs.
        is_sharded: whether other processes record the same graphs.

    Attributes:
        why_not: the same, or why one could not be recorded; None if there can be graphs.
        asked: kinds of graphs that a batch has needed before; the next one of such a kind is recorded.

    """

    def __init__(
        self, capture: Capture, limits: GraphLimits, why_not: str | None = None, is_sharded: bool = False
    ) -> None:
        self._capture = capture
        self._limits = limits
        self._is_sharded = is_sharded
        self.why_not = why_not
        self._graphs: dict[Hashable, Recorded] = {}
        self.asked: set[Hashable] = set()
        # No reference to the pool itself, so that its memory is free before another pool is allocated.
        self._pool: Callable[[], PagePool | None] = lambda: None
        self._num_growths = 0  # of the pool's state slots

    @property
    def num_captured(self) -> int:
        """The number of graphs now."""
        return len(self._graphs)

    def has_loop(self, num_forwards: int) -> bool:
        """Return whether drafting loops of so many forwards are recorded."""
        return self.why_not is None and num_forwards == self._limits.num_forwards

    def clear(self) -> None:
        """Destroy all graphs, for example because weights have moved."""
        self._graphs.clear()

    def _graph(
        self,
        kind: Hashable,
        pool: PagePool,
        prepare: Callable[[], GraphSpec],
        fill: Callable[[Inputs, Tensor | None], None],
    ) -> Recorded | None:
        """Return the graph of a kind with its inputs filled, recorded now if it is asked for again; or None."""
        num_growths = 0 if pool.states is None else pool.states.num_growths
        if self._pool() is not pool or self._num_growths != num_growths:
            self._graphs.clear()
            self._pool = weakref.ref(pool)
            self._num_growths = num_growths
        graph = self._graphs.get(kind)
        if graph is not None:
            fill(graph.inputs, graph.own)
        elif kind in self.asked:
            graph = self._recorded(prepare, fill)
            if graph is not None:
                self._graphs[kind] = graph
        self.asked.add(kind)
        return graph

    def _recorded(
        self, prepare: Callable[[], GraphSpec], fill: Callable[[Inputs, Tensor | None], None]
    ) -> Recorded | None:
        """Record a graph on the batch that needs it, which is computed several times meanwhile.

        KV entries are the same each time. A state would advance each time, so the batch has scratch states meanwhile.
        """
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.clear()
        inputs, own, run = prepare()
        fill(inputs, own)
        recurrent = inputs.batch.recurrent
        if recurrent is not None:
            recurrent.slots.zero_()
        try:
            recorded = Recorded(inputs, own, self._capture(run))
        except Exception as error:  # a model's own code may raise anything; PyTorch then runs its forwards
            self._graphs.clear()
            if self._is_sharded and is_out_of_memory(error):  # the other processes may have memory, and record it
                raise
            self.why_not = f"{type(error).__name__}: {error}"
            return None
        if recurrent is not None:
            fill(inputs, own)
        return recorded
