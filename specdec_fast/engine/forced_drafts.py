"""Draft tokens that need no drafter: what a request's grammar forces."""

from __future__ import annotations

from dataclasses import replace

import torch

from specdec_fast.device_copy import to_device
from specdec_fast.drafters import Draft
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.mask_rows import masks_read_tokens


def forced_tokens(sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
    """Return the tokens that must follow each sequence, at most its limit; none where nothing is forced."""
    return [
        s.masks.completed(s.emitted_ids, [], limit) if s.masks is not None and limit else []
        for s, limit in zip(sequences, limits, strict=True)
    ]


def limits_with_forced(sequences: list[Sequence], limits: list[int], most: int) -> list[int]:
    """Return limits on draft tokens that leave room for forced ones: at most ``most``, and the request's own limit."""
    if not most or not masks_read_tokens(sequences):
        return limits
    own = [most if s.params.num_draft_tokens is None else s.params.num_draft_tokens for s in sequences]
    room = [min(most, k, s.num_remaining - 1) for s, k in zip(sequences, own, strict=True)]
    forced = forced_tokens(sequences, room)
    return [max(limit, len(tokens)) for limit, tokens in zip(limits, forced, strict=True)]


def limits_of_drafter(limits: list[int], forced: list[list[int]]) -> list[int]:
    """Return how many tokens the drafter is asked for: none for a sequence with as many forced tokens as may be."""
    return [0 if len(tokens) >= limit else limit for limit, tokens in zip(limits, forced, strict=True)]


def completed(
    draft: Draft, sequences: list[Sequence], limits: list[int], forced: list[list[int]]
) -> tuple[Draft, list[int]]:
    """Let the chains of sequences with masks end in what is forced.

    A chain is cut where a token may not be chosen, and goes on with what must follow there. A sequence without a draft
    gets what is forced. Trees stay as they are.

    Args:
        draft: the drafter's, checked.
        sequences: ``B`` sequences.
        limits: the largest number of tokens of each chain.
        forced: what ``forced_tokens`` returned.

    Returns:
        The draft, without ``parents`` if it consists of chains, and the depth of each sequence's draft.
    """
    tokens = draft.tokens_by_sequence()
    parents = [list(above) for above in draft.parents_by_sequence()]
    scores = draft.scores_by_sequence()
    for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
        num_drafted = len(tokens[i])
        if sequence.masks is None or parents[i] != list(range(-1, num_drafted - 1)):
            continue
        tokens[i] = sequence.masks.completed(sequence.emitted_ids, tokens[i], limit) if num_drafted else forced[i]
        parents[i] = list(range(-1, len(tokens[i]) - 1))
        if scores is not None:  # what is forced is as certain as what it follows
            kept = scores[i][: len(tokens[i])]
            scores[i] = kept + (kept[-1:] or [0.0]) * (len(tokens[i]) - len(kept))
    whole = Draft(
        to_device([token for each in tokens for token in each], draft.token_ids.device),
        list(map(len, tokens)),
        None if draft.parents is None else _joined(parents, torch.int32),
        None if scores is None else _joined(scores, torch.float32),
    )
    depths = whole.depths()
    return (replace(whole, parents=None) if depths == whole.num_draft_tokens else whole), depths


def _joined(lists: list[list[int]] | list[list[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype, device="cpu")
