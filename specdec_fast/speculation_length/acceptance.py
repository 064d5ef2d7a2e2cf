"""How likely the j-th draft token is to be accepted if those before it are, from what was accepted lately."""

from __future__ import annotations

from itertools import accumulate

_PRIOR, _PRIOR_TOKENS = 0.95, 4.0  # optimistic: acceptance can be observed only by drafting
_WINDOW = 64.0  # draft tokens that are remembered: 5% standard error, and a change is followed in as many
_LEAST_KEPT = 0.5  # of the past per update: large batches fill the window in a step
_CHANGE = 3.0  # standard deviations (of a count, plus 1) between what was accepted and what was expected
_KEPT_AFTER_CHANGE = 0.25
_NEIGHBOUR_TOKENS = 16.0  # weight of the estimate one position before: deep positions are rarely tried
_NEIGHBOUR_ASKED = 1.0  # the same of the share that is proposed, which varies less: a drafter may have a largest depth


class Acceptance:
    """Counts accepted and tried draft tokens per position; older counts fade.

    A token counts as tried if all before it were accepted, so ``accepted / tried`` is the maximum-likelihood estimate
    of its conditional probability. Each position's estimate is shrunk to the one before it.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._accepted, self._tried = [0.0] * max_draft_tokens, [0.0] * max_draft_tokens
        self._accepted[0], self._tried[0] = _PRIOR * _PRIOR_TOKENS, _PRIOR_TOKENS
        self._proposed, self._asked = [0.0] * max_draft_tokens, [0.0] * max_draft_tokens
        self._proposed[0] = self._asked[0] = 1.0

    @property
    def num_tried(self) -> float:
        """Draft tokens that the estimates rest on."""
        return sum(self._tried)

    @property
    def average(self) -> float:
        """Accepted over tried, at all positions together."""
        return sum(self._accepted) / max(self.num_tried, 1e-9)

    def expected_tokens(self) -> list[float]:
        """Return ``[max_draft_tokens + 1]``: tokens that a sequence is expected to emit in a step, by K.

        With acceptance a at every position, ``(1 - a^(K + 1)) / (1 - a)`` (Leviathan et al., arXiv 2211.17192,
        section 3.1). A position counts only as often as the drafter proposes a token there.
        """
        tokens, reached, before, share = [1.0], 1.0, self.average, 1.0
        counts = zip(self._accepted, self._tried, self._proposed, self._asked, strict=True)
        for j, (accepted, tried, proposed, asked) in enumerate(counts):
            before = (accepted + _NEIGHBOUR_TOKENS * before) / (tried + _NEIGHBOUR_TOKENS)
            reached *= before
            weight = _NEIGHBOUR_ASKED if j else 0.0
            share = (proposed + weight * share) / (asked + weight)
            tokens.append(tokens[-1] + share * reached)
        return tokens

    def add(self, accepted: list[int], rejected: list[int], asked: list[int], proposed: list[int]) -> None:
        """Add steps.

        Args:
            accepted: ``[max_draft_tokens + 1]``, how many sequences accepted so many draft tokens.
            rejected: of them, those whose next draft token was rejected.
            asked: as ``accepted``, how many sequences were asked so many draft tokens for.
            proposed: how many of them got so many.

        """
        reached = _at_least(accepted)
        tried = [count + lost for count, lost in zip(reached, rejected, strict=False)]
        expected, num = self.average, sum(tried)
        has_changed = abs(sum(reached) - num * expected) > _CHANGE * (1 + num * expected * (1 - expected)) ** 0.5
        keep = _KEPT_AFTER_CHANGE if has_changed else max(_LEAST_KEPT, 1 - num / _WINDOW)
        self._accepted = [keep * old + new for old, new in zip(self._accepted, reached, strict=True)]
        self._tried = [keep * old + new for old, new in zip(self._tried, tried, strict=True)]
        self._asked = [keep * old + new for old, new in zip(self._asked, _at_least(asked), strict=True)]
        self._proposed = [keep * old + new for old, new in zip(self._proposed, _at_least(proposed), strict=True)]

    def fade(self, keep: float) -> None:
        """Weigh all counts so far by ``keep``."""
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
        self._proposed = [keep * count for count in self._proposed]
        self._asked = [keep * count for count in self._asked]


def _at_least(counts: list[int]) -> list[int]:
    """Return how many have at least 1, 2 and so on, from how many have 0, 1 and so on."""
    return list(accumulate(reversed(counts[1:])))[::-1]
