"""Which steps the core may launch before the host has read the tokens of the step before.

The tokens of a plain step are on the device when the next step needs them, and where its rows lie does not depend on
them. So the core launches it behind the first, and the device does not wait while the host reads tokens, commits them
and lays out rows (vLLM calls this asynchronous scheduling). If a sequence turns out to have ended, its row of the
following step is dropped.
"""

from __future__ import annotations

from collections.abc import Container

from specdec_fast.engine.step import Step
from specdec_fast.request.sequence import Sequence


def knows_next_rows(step: Step, live: Container[int]) -> bool:
    """Return whether the host knows all of the next step but its tokens.

    A step with draft tokens cannot be followed: how many are accepted decides where the next rows begin. ``live`` has
    the ids of the requests that have neither ended nor been cancelled.
    """
    return not any(step.limits) and all(s.request_id in live and _may_follow(s) for s in step.batch)


def _may_follow(sequence: Sequence) -> bool:
    """Whether its next row needs only the token of the present step, and no one reads the present logits later.

    A graph writes the logits of every step to the same memory; log-probabilities are read from them.
    """
    params = sequence.params
    reads_tokens = sequence.edits_logits or params.logits_processors
    return sequence.num_remaining > 1 and not reads_tokens and sequence.logprobs is None
