"""The heads of DSpark (arXiv 2607.05147): the Markov head and the confidence head."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, logsigmoid

from specdec_fast.drafters.shared.layers import Weights, without_prefix
from specdec_fast.ops import Ops


class MarkovHead(Weights):
    """A bias on the logits that depends on the token before, of low rank, on one device.

    With e = w1[previous token] and h the drafter's hidden state of the row, the bias is w2 of

    * vanilla: e;
    * gated: sigmoid(gate([h; e])) * e;
    * rnn: tanh(o), where (z, c, o) = joint([s; e; h]) and the state s, 0 at first, becomes
      sigmoid(z) * s + (1 - sigmoid(z)) * tanh(c).
    """

    def __init__(self, kind: str, weights: dict[str, Tensor], ops: Ops) -> None:
        self._kind = kind
        self._ops = ops
        self._by_name = without_prefix(weights, "markov_head.")

    def tensors(self) -> list[Tensor]:
        return list(self._by_name.values())

    def bias(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias on the logits of the next row of each sequence.

        Args:
            previous: ``[N]`` int64, the token before, as the target's id.
            hidden: ``[N, H]`` of the row.
            state: ``[N, rank]``, what the row before returned; None at first.

        Returns:
            ``[N, draft_vocab_size]``, and the state for the next row, None if the head has none.
        """
        embedded = embedding(previous, self._by_name["markov_w1.weight"])
        if self._kind == "gated":
            embedded = self._linear("gate_proj", torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded
        elif self._kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            rows = torch.cat([state, embedded, hidden], dim=-1)
            gate, candidate, output = self._linear("joint_proj", rows).chunk(3, dim=-1)
            gate = gate.sigmoid()
            embedded = output.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return self._linear("markov_w2", embedded), state

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        result: Tensor = self._ops.linear(rows, self._by_name[f"{name}.weight"], self._by_name.get(f"{name}.bias"))
        return result


class ConfidenceHead(Weights):
    """How likely the target accepts a draft token, if it accepts those before it; on one device, in fp32.

    With h the drafter's hidden state of the row and e = w1[previous token], the probability is sigmoid(proj([h; e])),
    or sigmoid(proj(h)) if the head does not read the Markov head's embedding.
    """

    def __init__(self, weights: dict[str, Tensor], with_markov: bool) -> None:
        self._weight = weights["confidence_head.proj.weight"].float()
        bias = weights.get("confidence_head.proj.bias")
        self._bias = None if bias is None else bias.float()
        self._embedding = weights["markov_head.markov_w1.weight"] if with_markov else None

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
        summed = [score for of_sequence in each.cpu().split(counts) for score in accumulate(of_sequence.tolist())]
        return torch.tensor(summed, dtype=torch.float32, device="cpu")
