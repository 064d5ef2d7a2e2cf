"""How far a quantised model is from the model as it was loaded: divergence of distributions, agreement of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Quality:
    """Of all positions of some texts, each with the tokens before it given.

    Attributes:
        dtype: name of the dtype of both models.
        quantization: how the weights are quantised.
        num_positions: positions that were compared.
        mean_kl: mean divergence ``sum p log(p / q)`` in nats; ``p`` is the distribution of the model as loaded, ``q``
            that of the quantised one.
        largest_kl: the largest divergence of a position.
        top1: share of positions at which both models have the same likeliest token.
    """

    dtype: str
    quantization: str
    num_positions: int
    mean_kl: float
    largest_kl: float
    top1: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@torch.inference_mode()
def quality_of(
    quantised: PreTrainedModel, loaded: PreTrainedModel, texts: Sequence[Sequence[int]], dtype: str, quantization: str
) -> Quality:
    """Compare two models of one vocabulary on texts of token ids, at every position."""
    divergences: list[Tensor] = []
    agreements: list[Tensor] = []
    for text in texts:
        token_ids = torch.tensor([list(text)], device=loaded.device)
        expected, found = (model(input_ids=token_ids).logits[0].double() for model in (loaded, quantised))
        p = expected.log_softmax(dim=-1)
        q = found.log_softmax(dim=-1)
        divergences.append(torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(dim=-1))
        agreements.append(expected.argmax(dim=-1) == found.argmax(dim=-1))
    kl = torch.cat(divergences)
    top1 = torch.cat(agreements).double().mean()
    return Quality(
        dtype=dtype,
        quantization=quantization,
        num_positions=len(kl),
        mean_kl=float(kl.mean()),
        largest_kl=float(kl.max()),
        top1=float(top1),
    )
