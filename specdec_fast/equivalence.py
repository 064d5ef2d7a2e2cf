"""Is every token the one plain decoding gives? Reference runs, comparison, and where texts part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_fast.emission import cut_emission
from specdec_fast.loading import eos_token_ids


@dataclass(frozen=True)
class Divergence:
    """The first difference of one output.

    Attributes:
        index: the prompt.
        position: of the first differing emitted token, 0-based; the shorter length if one is a prefix of the other.
        gap: between the reference's two best logits there: near zero, rounding chose; large, something is wrong.

    """

    index: int
    position: int
    gap: float


@dataclass(frozen=True)
class Comparison:
    """How the outputs of one setting compare with the reference.

    Attributes:
        method: what produced them.
        batch_size: sequences decoded together.
        num_draft_tokens: K; None where nothing is drafted.
        exact_match: fraction of outputs that are identical, every token.
        divergences: of the others.

    """

    method: str
    batch_size: int
    num_draft_tokens: int | None
    exact_match: float
    divergences: list[Divergence]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@torch.inference_mode()
def transformers_greedy(model: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """Decode one prompt with ``transformers``' own ``generate()``, greedily; return the emitted ids."""
    return transformers_greedy_batch(model, [prompt_ids], max_new_tokens)[0]


@torch.inference_mode()
def transformers_greedy_batch(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Decode prompts together with ``generate()``, left-padded as its users do; return each one's emitted ids."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    stop_ids = eos_token_ids(model)
    pad = next(iter(stop_ids), 0)
    token_ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    # The model's own sampling defaults are overridden: what is compared is the argmax of the logits.
    sequences = model.generate(
        token_ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=None,
        top_k=None,
        top_p=None,
        pad_token_id=pad,
    )
    emitted = sequences[:, longest:].tolist()
    return [cut_emission(tokens, stop_ids, max_new_tokens)[0] for tokens in emitted]


def compare(
    setting: tuple[str, int, int | None],
    model: PreTrainedModel,
    prompts: list[list[int]],
    outputs: list[list[int]],
    expected: list[list[int]],
) -> Comparison:
    """Compare outputs with the reference; look up the two best logits where they part.

    Args:
        setting: (method, batch_size, num_draft_tokens), for the report.
        model: the stock model that made the reference.
        prompts: token ids of each prompt.
        outputs: emitted ids to judge.
        expected: the reference's emitted ids.

    """
    divergences = []
    for index, (prompt, got, want) in enumerate(zip(prompts, outputs, expected, strict=True)):
        if got != want:
            position = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
            position = min(len(got), len(want)) if position is None else position
            divergences.append(Divergence(index, position, logit_gap(model, prompt + want[:position])))
    return Comparison(*setting, 1 - len(divergences) / max(1, len(prompts)), divergences)


@torch.inference_mode()
def logit_gap(model: PreTrainedModel, token_ids: list[int]) -> float:
    """Return the difference of the two best logits after ``token_ids``."""
    logits = model(torch.tensor([token_ids], device=next(model.parameters()).device)).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return best - second
