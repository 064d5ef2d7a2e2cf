"""What the trainer trains: a module that drafts from every position of a text at once, and parts of such modules."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig

Drafts = list[tuple[Tensor, slice | Tensor]]  # see ``DrafterModule.drafts``


class DrafterModule(nn.Module, ABC):
    """A drafter as a module that can be trained; its parameters lie on one device."""

    @abstractmethod
    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        """Draft ``num_steps`` tokens from every position.

        Args:
            features: ``[B, L, feature_size]``, the target's taps at every position, side by side.
            token_ids: ``[B, L]`` int64.
            num_steps: at least 1, and less than L.

        Returns:
            Per step k, logits ``[B, L - 1 - k, draft_vocab_size]``: row i for the token at position ``i + 2 + k``.

        """

    def output_layers(self) -> list[nn.Module]:
        """Return the layers whose outputs are logits: each row of their weights belongs to one id."""
        return [layer for name, layer in self.named_modules() if name.rpartition(".")[2] == "lm_head"]

    def drafts(self, features: Tensor, token_ids: Tensor, num_steps: int) -> Drafts:
        """Draft as ``unroll`` does, from every position or from some that the module chooses.

        Returns:
            Per step, logits ``[B, N, draft_vocab_size]``, and which ``N`` of the ``L`` positions choose their tokens.

        """
        logits = self.unroll(features, token_ids, num_steps)
        return [(drafted, slice(step + 1, None)) for step, drafted in enumerate(logits)]


class MLP(nn.Module):
    """The gated MLP of a layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return ``[..., hidden_size]``."""
        output: Tensor = self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``; it begins as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Apply the block to ``[..., H]``."""
        output: Tensor = rows + silu(self.linear(rows))
        return output
