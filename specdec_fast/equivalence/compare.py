"""Is every token that of plain decoding? Reference runs, comparisons, and the places where texts diverge."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_fast.models.loading import eos_token_ids
from specdec_fast.request.stopping import cut_emission


@dataclass(frozen=True)
class Divergence:
    """The first difference of one output."""

    index: int
    # 0-based index of the first differing emitted token; the shorter length if one is a prefix of the other
    position: int
    # the reference's two best logits there. If they are nearly equal, rounding decided; if they are far apart,
    # something is wrong (in sampled texts noise decides, too).
    best_logits: tuple[float, float]

    @property
    def gap(self) -> float:
        """The difference of the two best logits."""
        return self.best_logits[0] - self.best_logits[1]


@dataclass(frozen=True)
class Setting:
    """How outputs were made."""

    method: str  # name of a scheduler, "autoregressive" (the engine without a draft) or "transformers"
    batch_size: int  # sequences decoded together
    num_draft_tokens: int | str | None = None  # K, or the name of a length policy; None if nothing is drafted
    drafter: str = "none"  # name of the draft model or of the drafter, or "none"
    dtype: str = "float32"  # dtype of both models
    sampling: str = "greedy"  # "greedy", or the sampling parameters
    deterministic: bool = True  # whether forwards were padded to row counts at which bits do not depend on the batch
    enforce_eager: bool = False  # whether PyTorch ran the forwards instead of programs or graphs


@dataclass(frozen=True)
class Comparison:
    """How the outputs of one setting compare with the reference."""

    setting: Setting  # how the outputs were made
    exact_match: float  # fraction of outputs with the same tokens as the reference
    partial_match: float  # fraction of the reference's tokens before the first difference of their output
    divergences: list[Divergence]  # the first difference of every output that differs
    # fraction of those tokens whose log-probability has the same bits as the reference's. Below 1, rounding differs and
    # may change a token elsewhere. None if log-probabilities are not known.
    equal_logprobs: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self.setting), **{k: v for k, v in asdict(self).items() if k != "setting"}}


@torch.inference_mode()
def transformers_greedy(model: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """Decode one prompt greedily with ``generate()`` of ``transformers``; return the emitted ids."""
    return transformers_greedy_batch(model, [prompt_ids], max_new_tokens)[0]


@torch.inference_mode()
def transformers_greedy_batch(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, **options: Any
) -> list[list[int]]:
    """Decode prompts together with ``generate(**options)``, left-padded as users do; return each one's emitted ids."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    stop_ids = eos_token_ids(model)
    pad = next(iter(stop_ids), 0)
    token_ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    # Overrides the model's own sampling defaults, because the comparison is of the argmax of the logits.
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
        **options,
    )
    emitted = sequences[:, longest:].tolist()
    return [cut_emission(tokens, stop_ids, max_new_tokens)[0] for tokens in emitted]


def compare(
    setting: Setting,
    model: PreTrainedModel,
    prompts: list[list[int]],
    outputs: list[list[int]],
    expected: list[list[int]],
    logprobs: tuple[list[list[float]], list[list[float]]] | None = None,
) -> Comparison:
    """Compare emitted ids with the reference's; compute the two best logits where they diverge.

    ``setting`` says how the outputs were made; ``model`` is the stock model that made the reference. ``logprobs`` are
    those of the outputs and of the reference, one per token; None if not known.
    """
    divergences = []
    equal_tokens = 0
    equal_logprobs = 0
    for index, (prompt, got, want) in enumerate(zip(prompts, outputs, expected, strict=True)):
        position = next(
            (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want))
        )
        equal_tokens += position
        if logprobs is not None:
            pairs = zip(logprobs[0][index][:position], logprobs[1][index][:position], strict=True)
            equal_logprobs += sum(a == b for a, b in pairs)
        if got != want:
            divergences.append(Divergence(index, position, best_logits(model, prompt + want[:position])))
    exact = 1 - len(divergences) / max(1, len(prompts))
    partial = equal_tokens / max(1, sum(map(len, expected)))
    bits = equal_logprobs / max(1, equal_tokens)
    return Comparison(setting, exact, partial, divergences, None if logprobs is None else bits)


@torch.inference_mode()
def best_logits(model: PreTrainedModel, token_ids: list[int]) -> tuple[float, float]:
    """Return the two best logits after ``token_ids``, computed by one dense forward."""
    logits = model(torch.tensor([token_ids], device=next(model.parameters()).device)).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return best, second
