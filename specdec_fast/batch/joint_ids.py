"""The ids of a draft model whose vocabulary is not the target's, joined with those of the target."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class JointIds(NamedTuple):
    """One numbering of the tokens of a target and of a draft model.

    A draft token that the target has, too, has the target's id, because noise, masks and penalties belong to the
    target's ids. Every other draft token has an id behind them.
    """

    joint_ids: Tensor  # [draft_vocab_size] int64, the joint id of each draft id; all differ
    draft_ids: Tensor  # [num_ids] int64, the draft id of each joint id; 0 for those of the target alone
    num_ids: int  # joint ids
    num_target_ids: int  # the joint ids of the target come first
