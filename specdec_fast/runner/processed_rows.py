"""The logits of a verification after the logits processors of its requests."""

from __future__ import annotations

from itertools import accumulate
from math import inf, nan

from torch import Tensor

from specdec_fast.device_copy import to_device
from specdec_fast.errors import LogitsProcessorError, NoAllowedTokenError, RequestError
from specdec_fast.request.logits_processors import processed_row
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.verification import StepPlan


def processed_logits(plan: StepPlan, logits: Tensor) -> tuple[Tensor, dict[int, RequestError]]:
    """Let logits processors change the rows of their sequences.

    Args:
        plan: the rows of a verification.
        logits: ``[T, vocab_size]``, which stay as they are.

    Returns:
        The logits from which tokens are chosen, ``[T, vocab_size]`` float32; and by row, why nothing can be chosen
        there: these rows are NaN. A request ends with that error only if its tokens reach the row.
    """
    changed = logits.float().clone()
    is_nan = logits.isnan().any(dim=1).tolist()
    failures: dict[int, RequestError] = {}
    called: list[int] = []
    starts = accumulate(plan.counts, initial=0)
    for b, (sequence, start) in enumerate(zip(plan.sequences, starts, strict=False)):
        if not sequence.params.logits_processors:
            continue
        for row, path in enumerate(_paths(plan, b, start - b), start=start):
            if is_nan[row]:
                continue
            try:
                changed[row] = processed_row(sequence.params.logits_processors, path, changed[row].clone())
                called.append(row)
            except LogitsProcessorError as error:
                changed[row] = nan
                failures[row] = error
    results = changed[to_device(called, changed.device)]
    for row, has_nan, best in zip(
        called, results.isnan().any(dim=1).tolist(), results.amax(dim=1).tolist(), strict=True
    ):
        if has_nan:
            failures[row] = LogitsProcessorError("the logits processors returned a NaN; expected numbers.")
        elif best == -inf:
            failures[row] = NoAllowedTokenError("the logits processors left no token: every logit is -inf.")
        changed[row] = nan if row in failures else changed[row]
    return changed, failures


def _paths(plan: StepPlan, b: int, first: int) -> list[list[int]]:
    """Return the tokens that each row of sequence ``b`` follows; its draft tokens are those from ``first`` on."""
    sequence: Sequence = plan.sequences[b]
    drafted = plan.drafted[first : first + plan.num_draft_tokens[b]]
    parents = range(-1, len(drafted) - 1) if plan.parents is None else plan.parents[first:].tolist()
    paths = [sequence.token_ids]
    for token, parent in zip(drafted, parents, strict=False):
        paths.append([*paths[parent + 1], token])
    return paths
