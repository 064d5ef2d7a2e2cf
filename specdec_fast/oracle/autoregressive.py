"""Plain greedy decoding, one prompt at a time: the definition of the correct output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

from specdec_fast.model_arguments import cache_argument
from specdec_fast.request.stopping import cut_emission

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def autoregressive(
    target: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Emit the target's most likely token at every position, among equals the lowest id; return the emitted ids.

    ``prompt_ids`` has at least one id, ``max_new_tokens`` is at least 1. The text includes the stop id that ends it.
    """
    device = next(target.parameters()).device
    given = {cache_argument(target): transformers.DynamicCache()}
    emitted: list[int] = []
    new_ids = prompt_ids
    position = 0
    while True:
        logits = target(
            input_ids=torch.tensor([new_ids], device=device),
            position_ids=torch.arange(position, position + len(new_ids), device=device)[None],
            use_cache=True,
            **given,
        ).logits
        position += len(new_ids)
        tokens, reason = cut_emission([int(logits[0, -1].argmax())], stop_ids, max_new_tokens - len(emitted))
        emitted += tokens
        if reason is not None:
            return emitted
        new_ids = tokens
