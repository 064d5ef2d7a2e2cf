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
class Adjustments:
    """What is added to the logits of ``B`` sequences, and subtracted from them."""

    presence_penalties: Tensor  # [B] float64, subtracted once from the logit of every emitted token
    frequency_penalties: Tensor  # [B] float64, subtracted as often as a token was emitted
    num_prompt: Tensor  # [B] int32; as many of a sequence's first seen_ids are its prompt, and do not count
    bias_ids: Tensor  # [M] int64, sequence after sequence; those of a sequence differ
    bias_values: Tensor  # [M] float64, added to the logits of these tokens
    cu_bias: Tensor  # [B + 1] int32, the index of each sequence's first bias_ids, and their number


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
    # [N] int64, committed tokens of the sequences that have a penalty, sequence after sequence; sequences without one
    # may have none
    seen_ids: Tensor
    cu_seen: Tensor  # [B + 1] int32, the index of each sequence's first seen_ids, and their number
    adjustments: Adjustments | None = None  # None: no sequence has any
    # [T, ceil(vocab_size / 32)] int32, of each row: bit i % 32 of word i // 32 is set if token i may be chosen
    # (``request/token_masks.py``); None: every token may be chosen in every row
    allowed: Tensor | None = None


def sampling_of(
    batch: Many[Sequence], device: torch.device, ahead: int = 0, allowed: np.ndarray | None = None
) -> Sampling | None:
    """Describe how each of ``B`` sequences chooses the token ``ahead`` positions after its next; None: all greedily.

    ``allowed`` has the mask of every row, if a sequence has one: ``[T, words]`` int32.
    """
    if not any(sequence.samples for sequence in batch):
        return None
    seen = [s.token_ids if s.params.has_penalty else [] for s in batch]
    columns = sampling_columns(batch, ahead) | {
        "repetition_penalties": np.array([s.params.repetition_penalty for s in batch], np.float64),
        "seen_ids": np.array([token for own in seen for token in own], np.int64),
        "cu_seen": np.array(list(accumulate(map(len, seen), initial=0)), np.int32),
    }
    added = _adjustment_columns(batch) if any(s.params.adds_to_logits for s in batch) else {}
    masks = {} if allowed is None else {"allowed": allowed}
    arrays = columns | added | masks
    on_device = dict(zip(arrays, all_to_device(list(arrays.values()), device), strict=True))
    adjustments = Adjustments(**{name: on_device.pop(name) for name in added}) if added else None
    return Sampling(**on_device, adjustments=adjustments)


def _adjustment_columns(batch: Many[Sequence]) -> dict[str, np.ndarray]:
    params = [sequence.params for sequence in batch]
    biases = [p.logit_bias for p in params]
    return {
        "presence_penalties": np.array([p.presence_penalty for p in params], np.float64),
        "frequency_penalties": np.array([p.frequency_penalty for p in params], np.float64),
        "num_prompt": np.array([s.prompt_length if s.params.has_penalty else 0 for s in batch], np.int32),
        "bias_ids": np.array([token for own in biases for token in own], np.int64),
        "bias_values": np.array([value for own in biases for value in own.values()], np.float64),
        "cu_bias": np.array(list(accumulate(map(len, biases), initial=0)), np.int32),
    }


def sampling_columns(batch: Many[Sequence], ahead: int = 0) -> dict[str, np.ndarray]:
    """Return the attributes of a ``Sampling`` of sequences without ``edits_logits`` that have one number for each."""
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
    if sampling is None:
        return []
    addresses = [getattr(sampling, name).data_ptr() for name in _PLAIN]
    adjustments = sampling.adjustments
    addresses += [0 if adjustments is None else getattr(adjustments, name).data_ptr() for name in _ADJUSTED]
    return [*addresses, 0 if sampling.allowed is None else sampling.allowed.data_ptr()]


_PLAIN = [field.name for field in fields(Sampling) if field.name not in ("adjustments", "allowed")]
_ADJUSTED = [field.name for field in fields(Adjustments)]
