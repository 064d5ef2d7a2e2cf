"""From the requests of a batch to the ``Sampling`` that ``verify_chain`` reads."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import accumulate

import torch

from specdec_fast.ragged import Sampling
from specdec_fast.sequence import Sequence
from specdec_fast.transfers import to_device


def sampling_of(batch: Many[Sequence], device: torch.device, ahead: int = 0) -> Sampling | None:
    """Describe how each of ``B`` sequences chooses the token ``ahead`` of its next; None if all are greedy."""
    if not any(sequence.samples for sequence in batch):
        return None
    params = [sequence.params for sequence in batch]
    seen = [s.token_ids if s.params.repetition_penalty != 1 else [] for s in batch]

    def column(values: Many[float], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, device, dtype)

    return Sampling(
        temperatures=column([p.temperature for p in params], torch.float64),
        top_k=column([min(p.top_k, 2**31 - 1) for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float64),
        repetition_penalties=column([p.repetition_penalty for p in params], torch.float64),
        seeds=column([s.seed or 0 for s in batch], torch.int64),
        positions=column([s.length + ahead for s in batch], torch.int64),
        seen_ids=column([token for own in seen for token in own], torch.int64),
        cu_seen=column(list(accumulate(map(len, seen), initial=0)), torch.int32),
    )


def after(sampling: Sampling, token_ids: torch.Tensor) -> Sampling:
    """Return ``sampling`` one position on, every sequence having been fed one of ``token_ids`` ``[B]``."""
    positions = sampling.positions + 1
    if not sampling.seen_ids.numel():
        return replace(sampling, positions=positions)
    batch_size, num_seen = len(token_ids), sampling.seen_ids.numel()
    places = torch.arange(max(batch_size + 1, num_seen), device=token_ids.device)
    cu_seen = sampling.cu_seen + places[: batch_size + 1].int()
    owner = torch.repeat_interleave(places[:batch_size], sampling.cu_seen.diff().long(), output_size=num_seen)
    seen_ids = torch.empty(num_seen + batch_size, dtype=torch.int64, device=token_ids.device)
    seen_ids[places[:num_seen] + owner] = sampling.seen_ids
    seen_ids[cu_seen[1:].long() - 1] = token_ids
    return replace(sampling, positions=positions, seen_ids=seen_ids, cu_seen=cu_seen)
