"""What drafters of static trees share: which tree they propose, and how a row's tokens are ranked."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import Draft, DrafterContext
from specdec_fast.drafters.shared.ranked import drawn_ranks
from specdec_fast.errors import ConfigError
from specdec_fast.ops import Ops
from specdec_fast.runner.drafting import chosen_tokens
from specdec_fast.trees.static import StaticTree, chain


def static_tree(context: DrafterContext, choices: Many[tuple[int, ...]], num_heads: int, num_ids: int) -> StaticTree:
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


def num_nodes_of(tree: StaticTree) -> int:
    """Return ``Drafter.max_nodes`` for a tree: 0 for a chain."""
    return 0 if len(tree.choices) == len(tree.num_ranks) else len(tree.choices)


def ranked_tokens(
    ops: Ops,
    logits: Tensor,
    num_ranks: int,
    fed: Tensor | None,
    sampling: Sampling | None,
    ids: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Rank each row's tokens: by logit, or by the rule and the noise by which the target will choose (``drawn_ranks``).

    Args:
        ops, logits, num_ranks, fed: as those of ``drawn_ranks``.
        sampling: how each row's token is chosen; None: all greedily.
        ids: ``own_ids`` of ``drawn_ranks``.

    Returns:
        ``[N, num_ranks]`` int64, different ids of the target in each row.
    """
    if sampling is None:
        if num_ranks == 1:
            best = chosen_tokens(ops, logits, logits.shape[1], None, fed)[:, None]
        else:
            best = logits.topk(num_ranks, dim=-1).indices
        return best if ids is None else ids[0][best]
    return drawn_ranks(ops, logits, num_ranks, sampling, fed, ids)[0]


def empty_draft(num_sequences: int) -> Draft:
    """Return the draft of a step in which nothing is proposed."""
    return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), [0] * num_sequences)


def picked_draft(
    tokens: Tensor, picked: dict[int, tuple[list[int], list[int]]], num_sequences: int, device: torch.device
) -> Draft:
    """Return the trees whose nodes are found among ranked tokens.

    Args:
        tokens: ``[members, width]`` int64, the tokens of each sequence that drafts.
        picked: for each of them, by its index in the batch and in batch order: the place of every node among its
            ``width`` tokens, and the parents as in ``Draft.parents``.
        num_sequences: of the batch.
        device: of the tokens.
    """
    counts = [0] * num_sequences
    places = []
    parents = []
    for row, (i, (own, shape)) in enumerate(picked.items()):
        places += [row * tokens.shape[1] + place for place in own]
        parents += shape
        counts[i] = len(own)
    return Draft(
        tokens.flatten()[to_device(places, device)], counts, torch.tensor(parents, dtype=torch.int32, device="cpu")
    )
