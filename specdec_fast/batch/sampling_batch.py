"""How each sequence of a batch chooses its tokens: ``Sampling``, made from requests and read by ``verify_chain``."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specdec_fast.device_copy import all_to_device
from specdec_fast.request.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each of ``B`` sequences chooses its tokens; see ``ops/verify_chain.py`` for the rule."""

    temperatures: Tensor  # [B] float64; 0 is greedy, and the filters then have no effect
    top_k: Tensor  # [B] int32; 0 keeps all tokens
    top_p: Tensor  # [B] float64 in (0, 1]; 1 keeps all tokens
    min_p: Tensor  # [B] float64 in [0, 1]; 0 keeps all tokens
    repetition_penalties: Tensor  # [B] float64; 1 does not change the logits
    seeds: Tensor  # [B] int64, the key of each sequence's noise
    # [B] int64, the position of the token that a sequence's first row chooses; a row at depth j (row j of a chain)
    # chooses the token at positions[b] + j
    positions: Tensor
    # [N] int64, committed tokens of the sequences that have a repetition penalty, sequence after sequence;
    # sequences without a penalty may have none
    seen_ids: Tensor
    cu_seen: Tensor  # [B + 1] int32, the index of each sequence's first seen_ids, and their number


def sampling_of(batch: Many[Sequence], device: torch.device, ahead: int = 0) -> Sampling | None:
    """Describe how each of ``B`` sequences chooses the token ``ahead`` positions after its next; None: all greedily."""
    if not any(sequence.samples for sequence in batch):
        return None
    seen = [s.token_ids if s.params.repetition_penalty != 1 else [] for s in batch]
    columns = sampling_columns(batch, ahead) | {
        "repetition_penalties": np.array([s.params.repetition_penalty for s in batch], np.float64),
        "seen_ids": np.array([token for own in seen for token in own], np.int64),
        "cu_seen": np.array(list(accumulate(map(len, seen), initial=0)), np.int32),
    }
    on_device = all_to_device(list(columns.values()), device)
    return Sampling(**dict(zip(columns, on_device, strict=True)))


def sampling_columns(batch: Many[Sequence], ahead: int = 0) -> dict[str, np.ndarray]:
    """Return the attributes of a ``Sampling`` without repetition penalties that have one number per sequence."""
    params = [sequence.params for sequence in batch]
    return {
        "temperatures": np.array([p.temperature for p in params], np.float64),
        "top_k": np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float64),
        "min_p": np.array([p.min_p for p in params], np.float64),
        "seeds": np.array([s.seed or 0 for s in batch], np.int64),
        "positions": np.array([s.length + ahead for s in batch], np.int64),
    }


def after(sampling: Sampling, token_ids: Tensor) -> Sampling:
    """Return ``sampling`` for the next position, after one of ``token_ids`` ``[B]`` was appended to each sequence."""
    positions = sampling.positions + 1
    if not sampling.seen_ids.numel():
        return replace(sampling, positions=positions)
    batch_size = len(token_ids)
    num_seen = sampling.seen_ids.numel()
    places = torch.arange(max(batch_size + 1, num_seen), device=token_ids.device)
    cu_seen = sampling.cu_seen + places[: batch_size + 1].int()
    owner = torch.repeat_interleave(places[:batch_size], sampling.cu_seen.diff().long(), output_size=num_seen)
    seen_ids = torch.empty(num_seen + batch_size, dtype=torch.int64, device=token_ids.device)
    seen_ids[places[:num_seen] + owner] = sampling.seen_ids
    seen_ids[cu_seen[1:].long() - 1] = token_ids
    return replace(sampling, positions=positions, seen_ids=seen_ids, cu_seen=cu_seen)


def addresses_of(sampling: Sampling | None) -> list[int]:
    """Return the addresses that ``sampling_at`` in csrc/bindings.h expects; none for greedy decoding."""
    return [] if sampling is None else [getattr(sampling, field.name).data_ptr() for field in fields(sampling)]
