"""Sampled acceptance: that of keyed noise, compared with rejection sampling on the same texts.

Rejection sampling (Leviathan et al., arXiv 2211.17192, section 2.3) accepts a draft token with probability
``sum(min(target_probs, draft_probs))``, and no rule that keeps the target's distribution accepts more. Keyed noise
accepts if target and draft sample the same token with the same noise. The difference is the cost of the guarantee that
one seed gives one text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.common.measurement import Tokens

_REPEATS = 200  # simulated runs of rejection sampling over every text


def compare_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Tokens,
    texts: Tokens,
    num_draft_tokens: int,
    measured: float,
) -> dict[str, Any]:
    """Compare a measured acceptance length at temperature 1 with rejection sampling's on the same texts.

    Args:
        target: the target, in the dtype in which it decoded.
        draft: the draft model, in the same dtype.
        prompts: token ids of each prompt.
        texts: ids that the target emitted, sampled at temperature 1 without filters.
        num_draft_tokens: K.
        measured: tokens per step of the run that emitted them.

    """
    overlaps = [_overlaps(target, draft, *pair) for pair in zip(prompts, texts, strict=True)]
    rejection = _tokens_per_step(overlaps, num_draft_tokens)
    return {
        "num_draft_tokens": num_draft_tokens,
        "tokens": sum(map(len, texts)),
        "keyed_noise_tokens_per_step": measured,
        "rejection_tokens_per_step": rejection,
        "ratio": measured / rejection,
        "rejection_acceptance_per_token": float(np.concatenate(overlaps).mean()),
    }


@torch.inference_mode()
def _overlaps(target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int], text: list[int]) -> np.ndarray:
    """Return ``sum(min(target_probs, draft_probs))`` at every emitted token: ``[len(text)]``."""
    token_ids = torch.tensor([prompt + text[:-1]])

    def probs(model: PreTrainedModel) -> Tensor:
        return model(token_ids).logits[0, len(prompt) - 1 :].double().softmax(dim=-1)

    return torch.minimum(probs(target), probs(draft)).sum(dim=-1).numpy()


def _tokens_per_step(overlaps: list[np.ndarray], num_draft_tokens: int) -> float:
    """Simulate steps along every text, because parts with low acceptance take more steps in any kind of speculation.

    As in ``mean_acceptance_length``, steps without draft tokens do not count: those of the first and the last token.
    """
    generator, num_tokens, num_steps = np.random.default_rng(0), 0, 0
    for overlap in overlaps * _REPEATS:
        accepts = generator.random(len(overlap)) < overlap
        at = 1
        while at < len(overlap) - 1:
            drafted = accepts[at : at + min(num_draft_tokens, len(overlap) - at - 1)]
            num_emitted = 1 + (len(drafted) if drafted.all() else int(drafted.argmin()))
            at += num_emitted
            num_tokens += num_emitted
            num_steps += 1
    return num_tokens / num_steps
