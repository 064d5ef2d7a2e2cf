"""A K policy that pauses drafting for so long that a drafter cannot queue all features, and what must come of it."""

from __future__ import annotations

from unittest.mock import patch

import specdec_fast as sd

_FIRST, _PAUSED, _K = 6, 70, 5
_PROMPTS = [[1, 2, 3], [(7 * i) % 90 for i in range(20)]]
_PARAMS = [
    sd.SamplingParams(max_new_tokens=110, logprobs=True),
    sd.SamplingParams(max_new_tokens=110, logprobs=True, temperature=0.8, top_k=20, seed=3),
]


class Pausing(sd.LengthPolicy):
    """K is 5 for 6 steps, 0 for 70, and 5 again.

    Attributes:
        drafter: one that reads hidden states; set before the first step.
        drafted: number of draft tokens before, in and after the pause.
        queued: per step of the pause, the most features that wait for one sequence.

    """

    max_draft_tokens = _K

    def __init__(self):
        self.drafter, self.drafted, self.queued, self.num_steps = None, [0, 0, 0], [], 0

    @property
    def _part(self):
        return (self.num_steps >= _FIRST) + (self.num_steps >= _FIRST + _PAUSED)

    def limits(self, batch):
        if self._part == 1:
            self.queued.append(max(self.drafter.num_queued(s) for s in batch))
        return [min(0 if self._part == 1 else _K, sequence.num_remaining - 1) for sequence in batch]

    def observe(self, step):
        self.drafted[self._part] += sum(step.num_draft_tokens)
        self.num_steps += 1


def expect_pause_and_resumption(target, draft, most_queued, **config):
    """Check outputs, drafts and queued features of a run with ``Pausing``; ``most_queued`` may wait for a sequence."""
    plain, policy = sd.Engine(target, None).generate(_PROMPTS, _PARAMS), Pausing()
    engine = sd.Engine(target, draft, num_draft_tokens=policy, **config)
    policy.drafter = engine.core.drafting.drafter
    with patch("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0):
        found = engine.generate(_PROMPTS, _PARAMS)
    assert [(o.token_ids, o.logprobs) for o in found] == [(o.token_ids, o.logprobs) for o in plain]
    before, paused, after = policy.drafted
    assert before > 0
    assert paused == 0
    assert after > 0
    assert len(policy.queued) == _PAUSED
    # Rejected rows of the last step that drafted count as well, so a few less may wait.
    assert most_queued - 16 <= max(policy.queued) <= most_queued, "features wait while nothing is drafted"
    assert policy.queued[-1] < most_queued // 2, "too many were computed at once"
    assert engine.drafter.num_admitted == 0
