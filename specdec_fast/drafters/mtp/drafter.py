"""The ``"mtp"`` drafter: the multi-token prediction layer that a target's own checkpoint carries."""

from __future__ import annotations

from typing import Any

import torch

from specdec_fast.drafters.base import DrafterContext
from specdec_fast.drafters.mtp.checkpoint import read_mtp
from specdec_fast.drafters.mtp.model import MtpModel
from specdec_fast.drafters.shared.chain_drafter import ChainDrafter
from specdec_fast.errors import ConfigError
from specdec_fast.models.hidden_states import FINAL
from specdec_fast.runner.model_memory import estimated_row_bytes
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS


class MtpDrafter(ChainDrafter):
    """Proposes a chain of K tokens: the first MTP layer of a checkpoint predicts each of them.

    ``source`` is the folder of a checkpoint with an MTP layer for this target; None: the target's checkpoint.

    Raises:
        ConfigError: there is no MTP layer, or it does not fit the target.
        NotYetSupportedError: the layer is quantised, or the target has sliding windows, or its class cannot be made
            with one layer.
    """

    taps = (FINAL,)
    model: MtpModel

    def __init__(self, context: DrafterContext, source: str | None = None) -> None:
        target = context.target
        self._source = source
        if source is None and not target.path:
            raise ConfigError(
                f"draft='mtp' reads the target's own checkpoint, but this {target.name} was made in memory; pass "
                "'mtp:FOLDER'."
            )
        weights = read_mtp(source or target.path, target.hf.num_layers)
        self._described = {"mtp_format": weights.format.name, "num_mtp_layers": weights.num_layers}
        with torch.inference_mode():
            model = MtpModel(weights, target, context.config.page_size)
        super().__init__(model, context)

    @property
    def name(self) -> str:
        return "mtp" if self._source is None else f"mtp:{self._source}"

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._described}

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        ragged = self.model.ragged
        itemsize = ragged.layout.dtype.itemsize
        rows = max(prefill_rows or MAX_PREFILL_ROWS, num_sequences * (num_draft_tokens + 1))
        forward = self.rows.step_bytes(rows, num_sequences) or rows * estimated_row_bytes(ragged.model, itemsize)
        return forward + self._kept_bytes(num_sequences, rows) + num_sequences * ragged.vocab_size * itemsize


def holds_mtp(folder: object) -> bool:
    """Return False: the folder of a checkpoint with an MTP layer names the model, if no ``mtp:`` is before it."""
    return False
