"""What drafters of heads over the input of the target's output layer share: one static tree for every sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from specdec_fast.drafters.base import Draft, DrafterContext, TreeDrafter
from specdec_fast.drafters.shared.static_trees import empty_draft, num_nodes_of, picked_draft, static_tree
from specdec_fast.models.hidden_states import FINAL
from specdec_fast.request.sequence import Sequence


class HeadsDrafter(TreeDrafter):
    """Proposes a tree of the tokens that several heads find likeliest, or a chain: head i chooses those of depth i.

    For a request that samples, a head's tokens are ranked by the target's own rule, with the noise with which the
    target will choose the token of that position. The first one is what the target would choose with the head's logits,
    and each further one is what it would choose without those before it.

    Attributes:
        tree: what is proposed; cut to the limits of a step.
    """

    settings = ("draft_tree",)

    taps = (FINAL,)

    def _set_tree(self, context: DrafterContext, choices: Many[tuple[int, ...]], num_heads: int, num_ids: int) -> None:
        """Choose the tree; the arguments are those of ``static_tree``."""
        self.tree = static_tree(context, choices, num_heads, num_ids)
        self.max_nodes = num_nodes_of(self.tree)
        self._num_heads = num_heads

    def describe(self) -> dict[str, Any]:
        return {"num_heads": self._num_heads, "draft_tree": [list(choice) for choice in self.tree.choices]}

    @torch.inference_mode()
    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        # As many heads run as the deepest tree has levels, each once for all sequences.
        chosen = [i for i, sequence in enumerate(sequences) if limits[i] and self._is_complete(sequence)]
        if not chosen:
            return empty_draft(len(sequences))
        depth = min(max(limits[i] for i in chosen), len(self.tree.num_ranks))
        tokens = self._ranked([sequences[i] for i in chosen], depth)
        picked = {i: self._picked(min(limits[i], depth), node_limits[i]) for i in chosen}
        return picked_draft(tokens, picked, len(sequences), tokens.device)

    @abstractmethod
    def _is_complete(self, sequence: Sequence) -> bool:
        """Return whether the hidden state that chose the newest token is known."""

    @abstractmethod
    def _ranked(self, sequences: list[Sequence], depth: int) -> Tensor:
        """Return ``[B, width]`` int64: the likeliest tokens at each depth up to ``depth``, of depth 1 first."""

    @abstractmethod
    def _picked(self, depth: int, num_nodes: int) -> tuple[list[int], list[int]]:
        """Return the places in ``width`` of the tokens of a tree's first nodes, and their parents."""
