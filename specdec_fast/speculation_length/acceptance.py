"""How many tokens a sequence emits in a step, by K, from what was accepted lately."""

from __future__ import annotations

from collections.abc import Iterable

_PRIOR = 0.9  # optimistic: acceptance can be observed only by drafting
_PRIOR_TOKENS = 2.0
_WINDOW = 64.0  # draft tokens that are remembered: 5% standard error
_LEAST_KEPT = 0.5  # of the past per step: large batches fill the window in a step
_NEIGHBOUR_TOKENS = 16.0  # weight of the estimate one position before: deep positions are rarely tried


class Acceptance:
    """Counts accepted and tried draft tokens per position; older counts fade.

    A token that was asked for counts as tried if all before it were accepted, whether the drafter proposed it or not.
    So ``accepted / tried`` is the maximum-likelihood estimate of its conditional probability. Each position's estimate
    is shrunk to the one before it.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        none = [0.0] * (max_draft_tokens - 1)
        self._accepted = [_PRIOR * _PRIOR_TOKENS, *none]
        self._tried = [_PRIOR_TOKENS, *none]

    def expected_tokens(self) -> list[float]:
        """Return ``[max_draft_tokens + 1]``: tokens that a sequence is expected to emit in a step, by K.

        With acceptance a at every position, ``(1 - a^(K + 1)) / (1 - a)`` (Leviathan et al., arXiv 2211.17192,
        section 3.1).
        """
        tokens = [1.0]
        reached = 1.0
        before = sum(self._accepted) / max(sum(self._tried), 1e-9)
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            before = (accepted + _NEIGHBOUR_TOKENS * before) / (tried + _NEIGHBOUR_TOKENS)
            reached *= before
            tokens.append(tokens[-1] + reached)
        return tokens

    def add(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Add drafts, each as the numbers of tokens asked for and accepted."""
        drafts = [(asked, min(accepted, asked)) for asked, accepted in drafts if asked]
        num_tried = sum(min(accepted + 1, asked) for asked, accepted in drafts)
        self.fade(max(_LEAST_KEPT, 1 - num_tried / _WINDOW))
        for asked, accepted in drafts:
            for position in range(accepted):
                self._accepted[position] += 1
                self._tried[position] += 1
            if accepted < asked:
                self._tried[accepted] += 1

    def fade(self, keep: float) -> None:
        """Weigh all counts so far by ``keep``."""
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
