"""How many tokens a sequence emits in a step, by K, from what was accepted lately."""

from __future__ import annotations

from collections.abc import Iterable

_PRIOR = 0.7  # acceptance before the first draft; counts for one token
_WINDOW = 64.0  # draft tokens that are remembered: 5% standard error


class Acceptance:
    """The share of draft tokens that were accepted, of those whose predecessors were; older ones fade."""

    def __init__(self) -> None:
        self._accepted = _PRIOR
        self._tried = 1.0

    def add(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Add drafts, each as the numbers of tokens asked for and accepted."""
        for asked, accepted in drafts:
            tried = min(accepted + 1, asked)
            keep = max(0.0, 1 - tried / _WINDOW)
            self._accepted = keep * self._accepted + min(accepted, asked)
            self._tried = keep * self._tried + tried

    def expected_tokens(self, max_draft_tokens: int) -> list[float]:
        """Return ``[max_draft_tokens + 1]``: tokens that a sequence is expected to emit in a step, by K.

        They are ``1 + a + ... + a^K`` (Leviathan et al., arXiv 2211.17192, section 3.1).
        """
        rate = self._accepted / max(self._tried, 1e-9)
        return [sum(rate**position for position in range(k + 1)) for k in range(max_draft_tokens + 1)]
