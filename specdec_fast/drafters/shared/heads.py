"""What drafters of heads over the input of the target's output layer share: one static tree for every sequence."""

from __future__ import annotations

import reprlib
from abc import abstractmethod
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext, TreeDrafter
from specdec_fast.drafters.draft import Draft
from specdec_fast.drafters.shared.ranked import drawn_ranks
from specdec_fast.errors import ConfigError
from specdec_fast.models.hidden_states import FINAL
from specdec_fast.ops import Ops
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.drafting import chosen_tokens
from specdec_fast.trees.static import StaticTree, chain


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
    _device: torch.device

    def _set_tree(self, context: DrafterContext, choices: Many[tuple[int, ...]], num_heads: int, num_ids: int) -> None:
        """Choose the tree; the arguments are those of ``_static_tree``."""
        self.tree = _static_tree(context, choices, num_heads, num_ids)
        is_chain = len(self.tree.choices) == len(self.tree.num_ranks)
        self.max_nodes = 0 if is_chain else len(self.tree.choices)
        self._num_heads = num_heads

    def describe(self) -> dict[str, Any]:
        return {"num_heads": self._num_heads, "draft_tree": [list(choice) for choice in self.tree.choices]}

    @torch.inference_mode()
    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        # As many heads run as the deepest tree has levels, each once for all sequences.
        chosen = [i for i, limit in enumerate(limits) if limit]
        depth = min(max(limits), len(self.tree.num_ranks))
        tokens = self._ranked([sequences[i] for i in chosen], depth)
        picked = {i: self._picked(min(limits[i], depth), node_limits[i]) for i in chosen}
        return _picked_draft(tokens, picked, len(sequences))

    @abstractmethod
    def _ranked(self, sequences: list[Sequence], depth: int) -> Tensor:
        """Return ``[B, width]`` int64: the likeliest tokens at each depth up to ``depth``, of depth 1 first."""

    @abstractmethod
    def _picked(self, depth: int, num_nodes: int) -> tuple[list[int], list[int]]:
        """Return the places in ``width`` of the tokens of a tree's first nodes, and their parents."""


def _static_tree(context: DrafterContext, choices: Many[tuple[int, ...]], num_heads: int, num_ids: int) -> StaticTree:
    """Return the tree of the settings, or else that of the drafter, as far as its heads reach.

    Args:
        context: the settings (``draft_tree``), and the target: one that verifies no trees gets a chain.
        choices: the drafter's own.
        num_heads: largest depth.
        num_ids: number of ids that a head can propose.

    Raises:
        ConfigError: ``draft_tree`` has a node beyond the last head or id, or all nodes of the drafter's own tree are.
    """
    wanted = context.config.draft_tree
    if wanted == "chain" or (wanted is None and context.target.why_no_trees() is not None):
        return StaticTree(chain(num_heads))
    if isinstance(wanted, tuple):
        choices = wanted
    kept = [choice for choice in choices if len(choice) <= num_heads and max(choice) < num_ids]
    if isinstance(wanted, tuple) and len(kept) < len(choices):
        beyond = next(choice for choice in choices if choice not in kept)
        raise ConfigError(
            f"draft_tree has the node {list(beyond)}, but the checkpoint has {num_heads} heads of {num_ids} ids."
        )
    if not kept:
        raise ConfigError(
            f"the checkpoint's tree begins with the node {reprlib.repr(list(choices[0]))}, and none of its nodes is "
            f"within its {num_heads} heads of {num_ids} ids; correct it, or pass draft_tree."
        )
    return StaticTree(StaticTree(kept).choices[:wanted]) if isinstance(wanted, int) else StaticTree(kept)


def ranked_tokens(
    ops: Ops,
    logits: Tensor,
    num_ranks: int,
    sampling: Sampling | None,
    previous: Tensor | None,
    target_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> Tensor:
    """Rank each row's tokens: by logit, or by the rule and the noise by which the target will choose (``drawn_ranks``).

    Args:
        ops, logits, num_ranks, previous, target_ids, vocab_size: as those of ``drawn_ranks``.
        sampling: how each row's token is chosen; None: all greedily.

    Returns:
        ``[N, num_ranks]`` int64, different ids of the target in each row.
    """
    if sampling is None:
        if num_ranks == 1:
            best = chosen_tokens(ops, logits, logits.shape[1], None, previous)[:, None]
        else:
            best = logits.topk(num_ranks, dim=-1).indices
        return best if target_ids is None else target_ids[best]
    return drawn_ranks(ops, logits, num_ranks, sampling, previous, target_ids, vocab_size)[0]


def _picked_draft(tokens: Tensor, picked: dict[int, tuple[list[int], list[int]]], num_sequences: int) -> Draft:
    """Return the trees whose nodes are among ranked tokens.

    Args:
        tokens: ``[members, width]`` int64, the tokens of each sequence that drafts.
        picked: for each of them, by its index in the batch and in batch order: the place of every node among its
            ``width`` tokens, and the parents as in ``Draft.parents``.
        num_sequences: of the batch.
    """
    counts = [0] * num_sequences
    places = []
    parents = []
    for row, (i, (of_tree, above)) in enumerate(picked.items()):
        places += [row * tokens.shape[1] + place for place in of_tree]
        parents += above
        counts[i] = len(of_tree)
    chosen = tokens.flatten()[to_device(places, tokens.device)]
    return Draft(chosen, counts, torch.tensor(parents, dtype=torch.int32, device="cpu"))
