"""DSpark's Markov heads: a bias on the logits that depends on the token before, of low rank.

With e = w1[previous token] and h the drafter's hidden state of the row, the bias is w2 of

* vanilla: e;
* gated: sigmoid(gate([h; e])) * e;
* rnn: tanh(o), where (z, c, o) = joint([s; e; h]) and the state s, 0 at first, becomes
  sigmoid(z) * s + (1 - sigmoid(z)) * tanh(c).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from specdec_fast.ops import Ops

_PREFIX = "markov_head."


class MarkovHead:
    """A Markov head on one device.

    Args:
        kind: one of ``dflash_config.MARKOV_HEADS``.
        weights: of the checkpoint, by name, placed.
        ops: computes the linears.

    """

    def __init__(self, kind: str, weights: dict[str, Tensor], ops: Ops) -> None:
        self._kind = kind
        self._ops = ops
        self._own = {name.removeprefix(_PREFIX): w for name, w in weights.items() if name.startswith(_PREFIX)}

    def weights(self) -> list[Tensor]:
        """Return its tensors."""
        return list(self._own.values())

    def bias(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias on the logits of the next row of each sequence.

        Args:
            previous: ``[N]`` int64, the token before, as the target's id.
            hidden: ``[N, H]`` of the row.
            state: ``[N, rank]``, what the row before returned; None at first.

        Returns:
            ``[N, draft_vocab_size]``, and the state for the next row, None if the head has none.

        """
        embedded = embedding(previous, self._own["markov_w1.weight"])
        if self._kind == "gated":
            embedded = self._linear("gate_proj", torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded
        elif self._kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            gate, candidate, output = self._linear("joint_proj", torch.cat([state, embedded, hidden], dim=-1)).chunk(
                3, dim=-1
            )
            gate = gate.sigmoid()
            embedded = output.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return self._linear("markov_w2", embedded), state

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        result: Tensor = self._ops.linear(rows, self._own[f"{name}.weight"], self._own.get(f"{name}.bias"))
        return result
