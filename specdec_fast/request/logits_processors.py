"""Calls of a request's logits processors: one row at a time, with the tokens that it follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from specdec_fast.errors import LogitsProcessorError


def processed_row(processors: tuple[Callable[..., Any], ...], token_ids: list[int], logits: Tensor) -> Tensor:
    """Return what processors make of a row's logits.

    Args:
        processors: called one after the other.
        token_ids: that the row follows; every processor gets a copy.
        logits: ``[vocab_size]`` float32, which they may change.

    Returns:
        ``[vocab_size]`` float32 on the same device.

    Raises:
        LogitsProcessorError: a processor raised an exception, or returned anything but such a tensor.
    """
    row = logits
    for processor in processors:
        name = _name_of(processor)
        try:
            result = _called(processor, token_ids, row)
        except Exception as error:
            raise LogitsProcessorError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(result, Tensor) or result.shape != logits.shape or not result.is_floating_point():
            kind = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise LogitsProcessorError(f"{name} returned {kind}; expected logits of shape {list(logits.shape)}.")
        row = result.detach().to(logits.device, torch.float32)
    return row


def _called(processor: Callable[..., Any], token_ids: list[int], logits: Tensor) -> Any:
    if not isinstance(processor, (LogitsProcessor, LogitsProcessorList)):
        return processor(list(token_ids), logits)
    result = processor(torch.tensor([token_ids], dtype=torch.int64, device=logits.device), logits[None])
    return result[0] if isinstance(result, Tensor) and result.shape[:1] == (1,) else result


def _name_of(processor: object) -> str:
    name = getattr(processor, "__qualname__", None) or type(processor).__qualname__
    return f"the logits processor {name!r}"
