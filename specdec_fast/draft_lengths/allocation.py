"""The choice: draft tokens per sequence that make the expected tokens per second of the next step largest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Costs(NamedTuple):
    """Seconds of a step of ``B`` sequences of at most ``most`` draft tokens each.

    Attributes:
        verify: ``[B * most + 1]``, of a step with so many draft tokens in all, without drafting.
        draft: ``[B + 1]``, of a drafting forward for so many sequences.
        entry: ``[B]``, once for each sequence that is drafted for at all.

    """

    verify: np.ndarray
    draft: np.ndarray
    entry: np.ndarray


class Allocation(NamedTuple):
    """Draft tokens per sequence, and the tokens per second expected of them and of none."""

    lengths: list[int]
    speed: float
    plain_speed: float


def allocate(probabilities: np.ndarray, caps: np.ndarray, costs: Costs, share_proposed: float = 1.0) -> Allocation:
    """Choose K of every sequence.

    A step emits one token per sequence, and draft token j of sequence i with the probability that it and all before it
    are accepted (Leviathan et al., arXiv 2211.17192, section 3.1; expected tokens over expected seconds as "goodput"
    in Liu et al., arXiv 2406.14066). For every depth m, tokens of places 1 to m are taken in the order of that
    probability; of all such selections, one per depth and number of tokens, the best is returned. Every uniform K is
    among them, so it is never worse than the best of these.

    Args:
        probabilities: ``[B, most]``, not rising along a sequence.
        caps: ``[B]`` ints, the most that each may get.
        costs: of what is chosen.
        share_proposed: of the draft tokens asked for, those the drafter is expected to propose.

    """
    num, most = probabilities.shape
    plain_speed = num / float(costs.verify[0])
    # Entering costs tokens at the speed there is anyway; whoever pays it comes later, with all its tokens.
    worth = probabilities * share_proposed
    worth[:, 0] -= plain_speed * costs.entry
    np.minimum.accumulate(worth, axis=1, out=worth)
    allowed = (np.arange(most)[:, None] < caps).ravel()  # place-major, so that equals keep the order of their places
    order = np.argsort(-worth.T.ravel(), kind="stable")
    order = order[allowed[order]]
    if not len(order):
        return Allocation([0] * num, plain_speed, plain_speed)
    place, sequence = np.divmod(order, num)
    at_place = place == np.arange(most)[:, None]  # [most, S]
    # The n-th token of its place makes that place's forward one row larger, whatever is taken of other places.
    nth = at_place.cumsum(axis=1)[place, np.arange(len(order))]
    seconds = costs.draft[nth] - costs.draft[nth - 1] + np.where(place == 0, costs.entry[sequence], 0.0)
    within = np.logical_or.accumulate(at_place, axis=0)  # [most, S]: of depth m or less
    gained = (within * (probabilities[sequence, place] * share_proposed)).cumsum(axis=1)
    rows = within.cumsum(axis=1)
    if share_proposed < 1:
        rows = np.rint(rows * share_proposed).astype(np.int64)
    speeds = (num + gained) / (costs.verify[rows] + (within * seconds).cumsum(axis=1))
    depth, last = divmod(int(speeds.argmax()), len(order))
    if speeds[depth, last] <= plain_speed:
        return Allocation([0] * num, plain_speed, plain_speed)
    taken = sequence[: last + 1][within[depth, : last + 1]]
    return Allocation(np.bincount(taken, minlength=num).tolist(), float(speeds[depth, last]), plain_speed)
