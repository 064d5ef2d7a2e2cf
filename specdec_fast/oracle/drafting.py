"""The oracle's two ways to propose tokens for the rows of a dense batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specdec_fast.oracle.dense import DenseModel
from specdec_fast.oracle.prompt_lookup import prompt_lookup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILLER = 0  # fills a row that proposes fewer tokens than others; counted, never recognised by its value


class DenseDrafter(Protocol):
    """Proposes up to K tokens per row; its own KV, if it has any, is in ``model``."""

    @property
    def model(self) -> DenseModel | None:
        """The draft model's dense KV, if it has one."""

    def draft(self, rows: list[list[int]], padding: Tensor, num_draft_tokens: int) -> tuple[Tensor, list[int]]:
        """Return draft tokens ``[B, K]``, and the number of proposals in each row."""


class DenseModelDrafter:
    """Greedy continuation by a draft model.

    The model computes the last two columns of every row, then one column per further draft token. If a row has one
    token only, the first of the two columns is padding, which the mask hides.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = DenseModel(model, lag=2)

    def draft(self, rows: list[list[int]], padding: Tensor, num_draft_tokens: int) -> tuple[Tensor, list[int]]:
        """Run the draft model ``num_draft_tokens`` times."""
        num_fed = max(map(len, rows)) - self.model.num_columns
        token_ids = torch.tensor([([_FILLER] * num_fed + row)[-num_fed:] for row in rows], device=self.model.device)
        drafted = []
        for _ in range(num_draft_tokens):
            token_ids = self.model.feed(token_ids, padding)[:, -1:].argmax(dim=-1)  # [B, 1]
            drafted.append(token_ids)
        return torch.cat(drafted, dim=1), [num_draft_tokens] * len(rows)


class DenseNgramDrafter:
    """Prompt lookup. It has no model, so it has no KV to realign."""

    model = None

    def draft(self, rows: list[list[int]], padding: Tensor, num_draft_tokens: int) -> tuple[Tensor, list[int]]:
        """Look up every row's last tokens in the row itself."""
        proposals = [prompt_lookup(row, num_draft_tokens) for row in rows]
        filled = [proposal + [_FILLER] * (num_draft_tokens - len(proposal)) for proposal in proposals]
        return torch.tensor(filled, device=padding.device), [len(proposal) for proposal in proposals]


def make_dense_drafter(draft: PreTrainedModel | None) -> DenseDrafter:
    """Make a drafter of the model ``draft``, or of prompt lookup if it is None."""
    return DenseNgramDrafter() if draft is None else DenseModelDrafter(draft)
