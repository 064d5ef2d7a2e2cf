"""The parts of an EAGLE-3 drafter that forward programs compute: its layers, and the projection of features."""

from __future__ import annotations

from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.eagle3.model import Eagle3Model
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.program import RowFunction


def layers_of(model: Eagle3Model) -> RowFunction:
    """Return ``forward`` and ``logits`` as one function: a row takes a feature, or the result for the row before."""

    def run(
        ops: Ops, pool: PagePool, batch: RaggedBatch, hidden: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        own = model if ops is model.ops else model.recorded_with(ops)
        hidden = own.forward(batch, pool, hidden)
        return own.logits(hidden if wanted is None else hidden[wanted]), hidden

    return RowFunction(run, model.layout, model.hidden_size, model.hidden_size)


def projection_of(model: Eagle3Model) -> RowFunction:
    """Return ``project`` as a function: a row takes the target's hidden states, and its logits are the feature."""

    def run(ops: Ops, pool: PagePool, batch: RaggedBatch, taps: Tensor, wanted: Tensor | None) -> tuple[Tensor, None]:
        own = model if ops is model.ops else model.recorded_with(ops)
        chosen = taps if wanted is None else taps[wanted]
        return own.project(chosen.unflatten(1, (len(model.taps), -1))), None

    nothing = KVLayout((), (), model.layout.dtype, model.layout.device)
    return RowFunction(run, nothing, len(model.taps) * model.config.target_hidden_size)
