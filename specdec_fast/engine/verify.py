"""Verification: one forward of the target over every sequence's last token and draft, and what it accepts of them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.device_copy import to_device, to_host
from specdec_fast.drafters import Draft
from specdec_fast.kv_cache.forward_layout import lay_out, spans_of
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.hf_model import RaggedModel
from specdec_fast.request.sequence import Sequence


@dataclass(frozen=True)
class Verification:
    """What a step's forward gave. On a GPU it is only queued until ``emissions`` waits for it.

    Attributes:
        counts: rows of each of ``B`` sequences, its draft tokens plus one; ``T`` in all.
        logits: ``[T, vocab_size]``, the target's.
        results: what ``verify_chain`` found, target's tokens ``[T]``, accepted draft tokens ``[B]`` and next tokens
            ``[B]``; or the emissions themselves.
        forward_seconds: of the forward alone, on the host's clock.
        accept_seconds: of choosing and accepting, as far as it is done already.

    """

    counts: list[int]
    logits: Tensor
    results: Many[Tensor] | list[list[int]]
    forward_seconds: float
    accept_seconds: float = 0.0

    def emissions(self) -> list[list[int]]:
        """Return each sequence's accepted draft tokens and its next token, ``INVALID_TOKEN`` after NaN logits."""
        if isinstance(self.results, list):
            return self.results
        target_tokens, num_accepted, next_tokens = to_host(self.results)
        emissions, first_row = [], 0
        for count, accepted, next_token in zip(self.counts, num_accepted, next_tokens, strict=True):
            emissions.append([*target_tokens[first_row : first_row + accepted], next_token])
            first_row += count
        return emissions


def verify(target: RaggedModel, pool: PagePool, batch: list[Sequence], draft: Draft) -> Verification:
    """Compute the target's logits at every sequence's last committed token and draft tokens, and choose from them.

    Args:
        target: whose tokens are wanted.
        pool: its pages.
        batch: ``B`` sequences.
        draft: what is to be verified, checked before.

    """
    counts = [count + 1 for count in draft.num_draft_tokens]
    rows = [Rows(s, s.target_kv_length, count) for s, count in zip(batch, counts, strict=True)]
    last = [s.token_ids[-1] for s in batch]
    sampling = sampling_of(batch, target.layout.device)
    if target.has_fused_step:
        assert target.program is not None
        before = target.program.seconds
        drafted = draft.token_ids.to(target.layout.device)
        logits, emissions, accept_seconds = target.program.verify(spans_of(pool, rows), last, drafted, sampling)
        return Verification(counts, logits, emissions, target.program.seconds - before, accept_seconds)
    token_ids = interleaved(last, draft, target)
    ragged = lay_out(pool, rows, token_ids)
    started = perf_counter()
    logits = target.forward(ragged, pool)
    computed = perf_counter()
    ops = target.ops.unchecked or target.ops
    results = ops.verify_chain(logits, token_ids, ragged.cu_seqlens, sampling)
    return Verification(counts, logits, results, computed - started, perf_counter() - computed)


def interleaved(last: list[int], draft: Draft, target: RaggedModel) -> Tensor:
    """Return each sequence's last committed token followed by its draft tokens: ``[T]`` ids on the target's device."""
    counts = draft.num_draft_tokens
    first = to_device(last, target.layout.device)
    # Ids outside the vocabulary are clamped: they are rejected anyway, but would index past the embedding.
    drafted = draft.token_ids.to(first.device, non_blocking=True).clamp(0, target.vocab_size - 1)
    if min(counts) == max(counts):
        return torch.cat([first[:, None], drafted.view(len(last), -1)], dim=1).flatten()
    pairs = zip(first.split(1), drafted.split(counts), strict=True)
    return torch.cat([piece for pair in pairs for piece in pair])
