"""Launchers of the C++ ops: from checked tensors to addresses, sizes and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast import _C  # after torch, whose OpenMP runtime it shares

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # DType in csrc/verify_chain.h


def verify_chain(logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``csrc/verify_chain.cpp``; the contract is the oracle's."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    batch_size = cu_seqlens.numel() - 1
    target_tokens = torch.empty_like(token_ids)
    num_accepted = torch.empty(batch_size, dtype=torch.int32)
    next_tokens = torch.empty(batch_size, dtype=torch.int64)
    _C.verify_chain(
        logits.data_ptr(),
        _DTYPE_CODES[logits.dtype],
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
        token_ids.data_ptr(),
        cu_seqlens.data_ptr(),
        batch_size,
        target_tokens.data_ptr(),
        num_accepted.data_ptr(),
        next_tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return target_tokens, num_accepted, next_tokens
