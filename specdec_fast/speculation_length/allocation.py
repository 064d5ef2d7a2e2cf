"""The choice: draft tokens per sequence that make the expected tokens per second of the next step largest.

In loops: between two forwards, which leave the caches cold, a NumPy call takes as long as thirty rounds of a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt
from operator import itemgetter
from typing import NamedTuple

Rows = Sequence[Sequence[float]]  # [B, most]


class Costs(NamedTuple):
    """Seconds of a step of ``B`` sequences of at most ``most`` draft tokens each.

    Attributes:
        verify: ``[B * most + 1]``, of a step with so many draft tokens in all, without drafting.
        draft: ``[B + 1]``, of a drafting forward for so many sequences.
        entry: ``[B]``, for each token that a sequence emits, if it is drafted for at all: the price of taking it in,
            spread over the tokens that it has yet to emit.
        once: of a step in which anything is drafted, besides its forwards.
        weights: ``[B]``, of a token of each sequence, 1 on average; none if all count the same.

    """

    verify: Sequence[float]
    draft: Sequence[float]
    entry: Sequence[float]
    once: float = 0.0
    weights: Sequence[float] = ()


class Allocation(NamedTuple):
    """What was chosen, and the rule behind it, which holds for other sequences as long as costs are the same.

    Attributes:
        lengths: draft tokens per sequence.
        depth: the most that any gets.
        least_gain: that a token needs in order to be taken, by those that were taken and by what one more row costs.
        speed: tokens per second expected of these lengths.
        plain_speed: of no draft tokens.

    """

    lengths: list[int]
    depth: int
    least_gain: float
    speed: float
    plain_speed: float

    def lengths_of(self, probabilities: Rows, entry: Sequence[float]) -> list[int]:
        """Apply the rule to ``B`` other sequences: ``[B, most]``, ``[B]``."""
        gains = marginal_gains(probabilities, entry, self.plain_speed)
        return [sum(gain >= self.least_gain for gain in row[: self.depth]) for row in gains]


NOTHING = Allocation([], 0, 0.0, 0.0, 0.0)


def marginal_gains(probabilities: Rows, entry: Sequence[float], plain_speed: float) -> Rows:
    """Return ``[B, most]``: tokens expected of each draft token, less what could be emitted in its sequence's entry.

    A sequence that pays for catching up emits all its tokens later.
    """
    if not any(entry):
        return probabilities
    firsts = [row[0] - plain_speed * each * (1 + row[0]) for row, each in zip(probabilities, entry, strict=True)]
    return [[min(first, p) for p in row] for first, row in zip(firsts, probabilities, strict=True)]


def tail_weights(remaining: Sequence[int], one: float, others: float) -> list[float]:
    """Return ``[B]``: what a token of each sequence counts where nobody takes the place of one that has ended.

    Steps are taken until the last sequence has ended. A token less to come of that one saves a whole step of its own,
    one of any other but its row in a step that is taken anyway. Which will be the last is guessed from the tokens to
    come, which draft tokens reduce by chance: differences within twice the root of their number tell little.

    Args:
        remaining: ``[B]``, tokens that each has yet to emit, two sequences or more.
        one: seconds of a plain step of one sequence.
        others: of what a plain step of all takes more than that.

    """
    row = others / (len(remaining) - 1)
    most = max(remaining)
    spread = 2 * (1 + sqrt(most))
    chances = [exp((tokens - most) / spread) for tokens in remaining]
    last = max(one - row, 0.0) / sum(chances)
    weights = [row + last * chance for chance in chances]
    mean = sum(weights) / len(weights)
    return [weight / mean for weight in weights]


def allocate(probabilities: Rows, caps: Sequence[int], costs: Costs, share_proposed: float = 1.0) -> Allocation:
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
    num, entry = len(probabilities), costs.entry
    plain_speed = num / costs.verify[0]
    if costs.weights:
        probabilities = [[weight * p for p in row] for weight, row in zip(costs.weights, probabilities, strict=True)]
    gain = marginal_gains(probabilities, entry, plain_speed)
    # By places, so that of equals the earlier place comes first, as it must in its own sequence.
    found = [(gain[i][place], place, i) for place in range(max(caps)) for i in range(num) if place < caps[i]]
    order = sorted(found, key=itemgetter(0), reverse=True)
    tokens: list[tuple[int, float, float]] = []  # place, tokens expected, seconds of drafting
    num_at_place = [0] * max(caps)
    for _, place, i in order:
        # The n-th token of its place makes that place's forward one row larger, whatever is taken of other places.
        num_at_place[place] = nth = num_at_place[place] + 1
        gained = probabilities[i][place] * share_proposed
        catching_up = entry[i] * (gained if place else 1 + gained)
        tokens.append((place, gained, costs.draft[nth] - costs.draft[nth - 1] + catching_up))
    verify = costs.verify
    if share_proposed < 1:
        verify = [verify[round(rows * share_proposed)] for rows in range(len(order) + 1)]
    best, depth, num_taken = plain_speed, 0, 0
    for places in range(1, len(num_at_place) + 1):
        emitted, drafting, taken = float(num), costs.once, 0
        for place, gained, seconds in tokens:
            if place < places:
                emitted += gained
                drafting += seconds
                taken += 1
                speed = emitted / (verify[taken] + drafting)
                if speed > best:
                    best, depth, num_taken = speed, places, taken
    lengths = [0] * num
    if not depth:
        return Allocation(lengths, 0, 0.0, plain_speed, plain_speed)
    chosen = [token for token in order if token[1] < depth][:num_taken]
    for _, _, i in chosen:
        lengths[i] += 1
    least_gain = min(chosen[-1][0], best * _seconds_per_row(costs))
    return Allocation(lengths, depth, least_gain, best, plain_speed)


def _seconds_per_row(costs: Costs) -> float:
    verify = (costs.verify[-1] - costs.verify[0]) / (len(costs.verify) - 1)
    return verify + (costs.draft[-1] - costs.draft[1]) / max(1, len(costs.draft) - 2)
