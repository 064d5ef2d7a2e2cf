"""One forward of a program of launches: its batch, and the buffers that are in use."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.program.plan.ir import INPUTS, TAPS, Linear, Plan


class DeviceForward:
    """One forward: its batch, and its buffers. Raises ValueError if inputs have another size than the plan's."""

    def __init__(
        self,
        plan: Plan,
        batch: RaggedBatch,
        pool: PagePool,
        logit_rows: Tensor | None,
        hidden_states: Tensor | None,
        inputs: Tensor | None = None,
    ) -> None:
        self._plan = plan
        self.batch = batch
        self.pool = pool
        self.logit_rows = logit_rows
        self._hidden_states = hidden_states
        self.num_rows = batch.token_ids.shape[0]
        self.num_logit_rows = self.num_rows if logit_rows is None else logit_rows.shape[0]
        self.memory: dict[int, Tensor] = {}
        num_bytes = 0 if inputs is None else inputs.nbytes
        expected = self.num_rows * plan.input_bytes
        if num_bytes != expected:
            raise ValueError(f"{self.num_rows} rows take {expected} bytes besides their tokens, not {num_bytes}.")
        if inputs is not None:
            rows = inputs.reshape(self.num_rows, -1).contiguous()
            self.memory |= {b: rows for b, placed in enumerate(plan.buffers) if placed.place == INPUTS}

    def write(self, buffer: int, num_rows: int, dtype: torch.dtype) -> None:
        """Make memory for a buffer, unless an earlier launch has written another part of it."""
        placed = self._plan.buffers[buffer]
        if buffer in self.memory:
            return
        device = self.batch.token_ids.device
        if placed.place != TAPS:
            self.memory[buffer] = torch.empty(num_rows, placed.row_bytes // dtype.itemsize, dtype=dtype, device=device)
            return
        if self._hidden_states is None:
            self._hidden_states = torch.empty(num_rows, placed.row_bytes, dtype=torch.uint8, device=device)
        taps = self._hidden_states.flatten(1).view(dtype)
        self.memory[buffer] = taps[:, placed.offset // dtype.itemsize :]

    def vectors(self, step: Linear) -> Tensor:
        """Return the input of a linear, ``[T * num_vectors, in_features]``."""
        in_features = step.weight.shape[1]
        rows = self.memory[step.source]
        return rows[:, step.offset : step.offset + step.num_vectors * in_features].reshape(-1, in_features)

    def count(self, step: Linear) -> int:
        """Return the number of rows of a linear."""
        return len(self.memory[step.source])

    def tensor(self, source: int | Tensor | str) -> Tensor:
        """Return what a kernel calls by ``RowKernel.tensors``."""
        if isinstance(source, Tensor):
            return source
        if isinstance(source, int):
            return self.memory[source]
        kind, _, layer = source.partition(" ")
        rows = self.logit_rows
        if layer:
            keys, values = self.pool.layers[int(layer)]
            return keys if kind == "keys" else values
        if kind == "logit_rows":
            return torch.arange(self.num_rows, device=self.batch.token_ids.device) if rows is None else rows
        tensor: Tensor = getattr(self.batch, kind)
        return tensor
