"""DSpark's confidence head: how likely the target accepts a draft token, if it accepts those before it.

With h the drafter's hidden state of the row and e = w1[previous token], the probability is sigmoid(proj([h; e])), or
sigmoid(proj(h)) if the head does not read the Markov head's embedding (arXiv 2607.05147).
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, logsigmoid

_PREFIX = "confidence_head.proj."
_MARKOV_EMBEDDING = "markov_head.markov_w1.weight"


class ConfidenceHead:
    """A confidence head on one device; it computes in fp32.

    Args:
        weights: of the checkpoint, by name, placed.
        with_markov: whether it reads the Markov head's embedding of the token before.

    """

    def __init__(self, weights: dict[str, Tensor], with_markov: bool) -> None:
        self._weight = weights[f"{_PREFIX}weight"].float()
        bias = weights.get(f"{_PREFIX}bias")
        self._bias = None if bias is None else bias.float()
        self._embedding = weights[_MARKOV_EMBEDDING] if with_markov else None

    def weights(self) -> list[Tensor]:
        """Return its own tensors."""
        return [tensor for tensor in (self._weight, self._bias) if tensor is not None]

    def scores(self, hidden: Tensor, previous: Tensor, counts: list[int]) -> Tensor:
        """Return the logarithm of the probability that each token and all before it are accepted (``Draft.scores``).

        Args:
            hidden: ``[N, H]`` of the rows that drafted, sequence after sequence.
            previous: ``[N]`` int64, the token before each draft token, as the target's id.
            counts: number of draft tokens of each sequence; their sum is ``N``.

        Returns:
            ``[N]`` fp32 on the CPU. A NaN counts as certain rejection.

        """
        rows = hidden.float()
        if self._embedding is not None:
            rows = torch.cat([rows, embedding(previous, self._embedding).float()], dim=-1)
        each = torch.nan_to_num(logsigmoid(linear(rows, self._weight, self._bias)).flatten(), nan=float("-inf"))
        summed = [score for own in each.cpu().split(counts) for score in accumulate(own.tolist())]
        return torch.tensor(summed, dtype=torch.float32, device="cpu")
