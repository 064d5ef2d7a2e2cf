"""What the trainer trains: a module that drafts from every position of a text at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

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
