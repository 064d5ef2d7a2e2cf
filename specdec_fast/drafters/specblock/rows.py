"""The forward of a SpecBlock drafter: one program per layer, because a slot of a layer reads its neighbour of another.

A program computes each row from that row alone, and from KV entries. Between two layers every slot takes the result of
the slot before it, which PyTorch puts beside its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.specblock.model import SpecBlockModel
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.runner.row_module import RowModule
from specdec_fast.trees.rows import TreeRows


class BlockRows:
    """Computes blocks, by forward programs or by PyTorch.

    Args:
        model: its layers.
        page_size: of the programs' probes.
        enforce_eager: whether PyTorch must run all layers.
    """

    def __init__(self, model: SpecBlockModel, page_size: int, enforce_eager: bool) -> None:
        self._model = model
        self._device = model.layout.device
        functions = model.row_functions()
        self._layers = [RowModule(function, model.ops, page_size, enforce_eager) for function in functions]
        self._no_rows = torch.empty(0, dtype=torch.int64, device=self._device)

    @property
    def why_no_program(self) -> str | None:
        """The reason why PyTorch runs a layer; None if programs run all."""
        return next((layer.why_no_program for layer in self._layers if not layer.has_program), None)

    def step_bytes(self, num_slots: int, num_logit_rows: int) -> int:
        """Return the memory of a forward of so many slots, besides weights, KV entries and logits."""
        own = [layer.step_bytes(num_slots, num_logit_rows) for layer in self._layers]
        return max(num_slots * self._model.row_bytes if each is None else each for each in own)

    def __call__(
        self,
        pool: PagePool,
        blocks: list[Rows],
        conditions: Tensor,
        bases: list[int],
        token_ids: list[int],
        wanted: Tensor | None,
        trees: TreeRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute ``N`` blocks, and write the KV entries of their slots.

        Args:
            pool: the drafter's pages.
            blocks: spans of slots, ``K`` per block.
            conditions: ``[N, H]``, from ``project``, or the hidden state of the slot that drafted the block's token.
            bases: the position of each block.
            token_ids: the token of each block.
            wanted: ``[R]`` int64, the slots whose logits are wanted; None: no slots.
            trees: shapes of the spans; None: chains.

        Returns:
            Hidden states ``[N, K, H]`` of all slots, and logits ``[R, draft_vocab_size]``.
        """
        model = self._model
        k = self._model.num_slots
        tokens = to_device([token for token in token_ids for _ in range(k)], self._device)
        batch = lay_out(pool, blocks, tokens, trees=trees)
        factors = model.factors(to_device(bases, self._device), batch.max_seqlen_k)
        inputs = model.first_inputs(conditions, factors)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            logit_rows = self._no_rows if index < last or wanted is None else wanted
            logits, hidden = layer(pool, batch, inputs, logit_rows)
            if index < last:
                inputs = model.next_inputs(hidden, factors)
        return hidden.view(-1, k, model.hidden_size), logits
