"""How likely the j-th draft token is to be accepted if those before it are, from what was accepted lately."""

from __future__ import annotations

from collections.abc import Mapping

_PRIOR = 0.95  # optimistic: acceptance can be observed only by drafting
_PRIOR_TOKENS = 4.0
_WINDOW = 64.0  # draft tokens that are remembered: 5% standard error, and a change is followed in as many
_LEAST_KEPT = 0.5  # of the past per update: large batches fill the window in a step
_CHANGE = 3.0  # standard deviations (of a count, plus 1) between what was accepted and what was expected
_KEPT_AFTER_CHANGE = 0.25
_NEIGHBOUR_TOKENS = 16.0  # weight of the estimate one position before: deep positions are rarely tried
_NEIGHBOUR_ASKED = 1.0  # the same of the share that is proposed, which varies less: a drafter may have a largest depth

# How many drafts there were, by the numbers of tokens asked for, proposed and accepted.
DraftCounts = Mapping[tuple[int, int, int], int]


class Acceptance:
    """Counts accepted and tried draft tokens per position; older counts fade.

    A token counts as tried if all before it were accepted, so ``accepted / tried`` is the maximum-likelihood estimate
    of its conditional probability. Each position's estimate is shrunk to the one before it.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        none = [0.0] * (max_draft_tokens - 1)
        self._accepted = [_PRIOR * _PRIOR_TOKENS, *none]
        self._tried = [_PRIOR_TOKENS, *none]
        self._proposed = [1.0, *none]
        self._asked = [1.0, *none]

    @property
    def num_tried(self) -> float:
        """Draft tokens that the estimates rest on."""
        return sum(self._tried)

    @property
    def average(self) -> float:
        """Accepted over tried, at all positions together."""
        return sum(self._accepted) / max(sum(self._tried), 1e-9)

    def expected_tokens(self) -> list[float]:
        """Return ``[max_draft_tokens + 1]``: tokens that a sequence is expected to emit in a step, by K.

        With acceptance a at every position, ``(1 - a^(K + 1)) / (1 - a)`` (Leviathan et al., arXiv 2211.17192,
        section 3.1). A position counts only as often as the drafter proposes a token there.
        """
        tokens = [1.0]
        total = 1.0
        reached = 1.0
        before = self.average
        share = 1.0
        weight = 0.0
        counts = zip(self._accepted, self._tried, self._proposed, self._asked, strict=True)
        for accepted, tried, proposed, asked in counts:
            before = (accepted + _NEIGHBOUR_TOKENS * before) / (tried + _NEIGHBOUR_TOKENS)
            reached *= before
            share = (proposed + weight * share) / (asked + weight)
            weight = _NEIGHBOUR_ASKED
            total += share * reached
            tokens.append(total)
        return tokens

    def surprise(self, drafts: DraftCounts) -> tuple[float, int]:
        """Return how far what was accepted is from what was expected, in standard deviations, and how many were tried.

        The deviation is that of a count plus 1, because what is expected is an estimate, too.
        """
        num_accepted = num_tried = 0
        for (_, proposed, accepted), num in drafts.items():
            num_accepted += num * accepted
            num_tried += num * min(accepted + 1, proposed)
        expected = self.average
        deviation = (1 + num_tried * expected * (1 - expected)) ** 0.5
        return abs(num_accepted - num_tried * expected) / deviation, num_tried

    def add(self, drafts: DraftCounts) -> None:
        """Add drafts."""
        surprise, num_tried = self.surprise(drafts)
        keep = _KEPT_AFTER_CHANGE if surprise > _CHANGE else max(_LEAST_KEPT, 1 - num_tried / _WINDOW)
        ends = [[0, 0, 0, 0] for _ in range(len(self._tried) + 1)]  # by number: drafts that accepted so many, ...
        for (asked, proposed, accepted), num in drafts.items():
            ends[accepted][0] += num
            ends[min(accepted + 1, proposed)][1] += num
            ends[proposed][2] += num
            ends[asked][3] += num
        accepted = tried = proposed = asked = 0  # drafts of at least j + 1 tokens
        for j in range(len(self._tried) - 1, -1, -1):
            a, t, p, d = ends[j + 1]
            accepted = accepted + a
            tried = tried + t
            proposed = proposed + p
            asked = asked + d
            self._accepted[j] = keep * self._accepted[j] + accepted
            self._tried[j] = keep * self._tried[j] + tried
            self._proposed[j] = keep * self._proposed[j] + proposed
            self._asked[j] = keep * self._asked[j] + asked

    def fade(self, keep: float) -> None:
        """Weigh all counts so far by ``keep``."""
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
        self._proposed = [keep * count for count in self._proposed]
        self._asked = [keep * count for count in self._asked]
