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
        once: of a step in which anything is drafted, besides its forwards.

    """

    verify: np.ndarray
    draft: np.ndarray
    entry: np.ndarray
    once: float = 0.0


class Allocation(NamedTuple):
    """What was chosen, and the rule behind it, which holds for other sequences as long as costs are the same.

    Attributes:
        lengths: draft tokens per sequence.
        depth: the most that any gets.
        least_worth: that a token needs in order to be taken, by those that were taken and by what one more row costs.
        speed: tokens per second expected of these lengths.
        plain_speed: of no draft tokens.

    """

    lengths: list[int]
    depth: int
    least_worth: float
    speed: float
    plain_speed: float

    def lengths_of(self, probabilities: np.ndarray, entry: np.ndarray) -> list[int]:
        """Apply the rule to ``B`` other sequences: ``[B, most]``, ``[B]``."""
        worth = worth_of(probabilities, entry, self.plain_speed)[:, : self.depth]
        return (worth >= self.least_worth).sum(axis=1).tolist()


NOTHING = Allocation([], 0, 0.0, 0.0, 0.0)


def worth_of(probabilities: np.ndarray, entry: np.ndarray, plain_speed: float) -> np.ndarray:
    """Return ``[B, most]``: tokens expected of each draft token, less what could be emitted in its sequence's entry.

    Whoever pays for entering comes later, with all its tokens.
    """
    worth = probabilities.copy()
    worth[:, 0] -= plain_speed * entry
    return np.minimum.accumulate(worth, axis=1, out=worth)


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
    worth = worth_of(probabilities, costs.entry, plain_speed).T.ravel()
    allowed = (np.arange(most)[:, None] < caps).ravel()  # place-major, so that equals keep the order of their places
    order = np.argsort(-worth, kind="stable")
    order = order[allowed[order]]
    nothing = Allocation([0] * num, 0, 0.0, plain_speed, plain_speed)
    if not len(order):
        return nothing
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
    speeds = (num + gained) / (costs.verify[rows] + costs.once + (within * seconds).cumsum(axis=1))
    depth, last = divmod(int(speeds.argmax()), len(order))
    if speeds[depth, last] <= plain_speed:
        return nothing
    taken = within[depth, : last + 1]
    lengths = np.bincount(sequence[: last + 1][taken], minlength=num).tolist()
    best = float(speeds[depth, last])
    least_worth = min(float(worth[order[: last + 1][taken][-1]]), best * _seconds_per_row(costs))
    return Allocation(lengths, depth + 1, least_worth, best, plain_speed)


def _seconds_per_row(costs: Costs) -> float:
    verify = (costs.verify[-1] - costs.verify[0]) / (len(costs.verify) - 1)
    return float(verify + (costs.draft[-1] - costs.draft[1]) / max(1, len(costs.draft) - 2))
