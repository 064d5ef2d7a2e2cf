"""What a drafter is trained towards: the target's own distributions, over several drafted tokens in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec_fast.drafters.shared.trainable import DrafterModule, Drafts

STEP_DISCOUNT = 0.8  # weight of a step's loss over that of the step before (SpecForge, vLLM's speculators)


@dataclass(frozen=True)
class TeacherOutput:
    """What the target computes for one batch of texts."""

    features: Tensor  # [B, L, taps * hidden size], the residual streams at the tap layers
    probabilities: Tensor  # [B, L, draft_vocab_size] fp32, the target's softmax over the ids that can be proposed
    best: Tensor  # [B, L] int64, the target's most likely id, as a draft id; -1 if it cannot be proposed
    counts: Tensor  # [B, L] bool, the positions whose next token is part of the text


class Teacher:
    """The target as a teacher: features and distributions for whole texts.

    Its weights stay as they are. Tap l is the residual stream after l layers. ``draft_ids [draft_vocab_size]`` int64
    are the ids that can be proposed, rising; None: all.
    """

    def __init__(self, target: PreTrainedModel, tap_layers: tuple[int, ...], draft_ids: Tensor | None) -> None:
        self._target = target
        self._tap_layers = tap_layers
        self._draft_ids = draft_ids
        self._draft_id_of: Tensor | None = None
        if draft_ids is not None:
            vocab_size = target.config.get_text_config(decoder=True).vocab_size
            self._draft_id_of = torch.full((vocab_size,), -1, device=draft_ids.device)
            self._draft_id_of[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)

    def identity(self) -> dict[str, Any]:
        """Return what decides its output: a training that goes on needs the same."""
        return {
            "target": getattr(self._target.config, "_name_or_path", ""),
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "tap_layers": list(self._tap_layers),
        }

    @torch.no_grad()
    def output(self, token_ids: Tensor, lengths: Tensor) -> TeacherOutput:
        """Run the target over ``[B, L]`` texts, padded at the end to the same length."""
        computed = self._target(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([computed.hidden_states[layer] for layer in self._tap_layers], dim=-1).float()
        logits = computed.logits
        best = logits.argmax(-1)
        if self._draft_ids is not None and self._draft_id_of is not None:
            logits = logits[..., self._draft_ids]
            best = self._draft_id_of[best]
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        return TeacherOutput(features, logits.float().softmax(-1), best, positions < lengths[:, None] - 1)


def loss_of(module: DrafterModule, token_ids: Tensor, output: TeacherOutput, num_steps: int) -> Tensor:
    """Return the soft cross-entropy to the target's distribution, averaged over positions and weighted by step.

    Positions whose most likely token cannot be proposed teach nothing: the draft would be rejected there in any case.

    Args:
        module: the drafter.
        token_ids: ``[B, L]`` int64.
        output: the teacher's, for the same texts.
        num_steps: number of unrolled steps.
    """
    return cross_entropy(module.drafts(output.features, token_ids, num_steps), output)


def cross_entropy(drafts: Drafts, output: TeacherOutput) -> Tensor:
    """Return the loss of ``loss_of`` for results of ``DrafterModule.drafts``."""
    total = output.features.new_zeros(())
    weights = 0.0
    for step, (drafted, rows) in enumerate(drafts):
        learnt = (output.counts & (output.best >= 0))[:, rows]
        if not learnt.any():
            continue
        logits = drafted.float()
        wanted = output.probabilities[:, rows]
        loss = logits.logsumexp(-1) - (wanted * logits).sum(-1)
        total = total + STEP_DISCOUNT**step * loss[learnt].mean()
        weights += STEP_DISCOUNT**step
    return total / max(weights, 1.0)


@torch.no_grad()
def agreement(module: DrafterModule, token_ids: Tensor, output: TeacherOutput, num_steps: int) -> Tensor:
    """Count where the module's most likely token is the target's.

    Returns:
        ``[num_steps, 2]`` int64: per step, positions that agree, and all positions.
    """
    counts = torch.zeros(num_steps, 2, dtype=torch.int64, device="cpu")
    for step, (logits, rows) in enumerate(module.drafts(output.features, token_ids, num_steps)):
        valid = output.counts[:, rows]
        agrees = (logits.argmax(-1) == output.best[:, rows]) & valid
        counts[step, 0] = agrees.sum()
        counts[step, 1] = valid.sum()
    return counts


def padded(texts: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return texts as a batch for ``Teacher.output``: ``[B, L]`` ids, padded at the end, and the lengths ``[B]``."""
    lengths = torch.tensor([len(text) for text in texts], device=device)
    return pad_sequence(texts, batch_first=True).to(device), lengths
