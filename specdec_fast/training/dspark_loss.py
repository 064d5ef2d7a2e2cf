"""What a DSpark drafter is trained towards: the loss of EAGLE-3, and that of its confidence head (arXiv 2607.05147)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specdec_fast.drafters.dflash.module import DFlashModule
from specdec_fast.training.drafter_loss import STEP_DISCOUNT, TeacherOutput, cross_entropy


def dspark_loss(module: DFlashModule, token_ids: Tensor, output: TeacherOutput, num_steps: int) -> Tensor:
    """Return the loss of the drafted tokens, and of the estimates that they are the target's.

    The estimate of a step is trained towards whether the likeliest draft token is the target's likeliest. The paper
    trains it towards the share of tokens that rejection sampling accepts; here a token is accepted if it is the
    target's own.

    The arguments are those of ``loss_of``; the module has a confidence head.
    """
    drafts, scored = module.scored_drafts(output.features, token_ids, num_steps)
    total = output.features.new_zeros(())
    weights = 0.0
    for step, ((logits, rows), estimates) in enumerate(zip(drafts, scored, strict=True)):
        valid = output.counts[:, rows]
        if valid.any():
            hits = (logits.argmax(-1) == output.best[:, rows])[valid].float()
            total = total + STEP_DISCOUNT**step * binary_cross_entropy_with_logits(estimates[valid].float(), hits)
            weights += STEP_DISCOUNT**step
    return cross_entropy(drafts, output) + total / max(weights, 1.0)


@torch.no_grad()
def confidence_report(module: DFlashModule, token_ids: Tensor, output: TeacherOutput, num_steps: int) -> Tensor:
    """Compare estimates with what they estimate.

    Returns:
        ``[num_steps, 4]`` fp64: per step, the sum of the estimated probabilities, of the tokens that are the target's,
        of the squared differences, and the number of positions.
    """
    report = torch.zeros(num_steps, 4, dtype=torch.float64, device="cpu")
    drafts, scored = module.scored_drafts(output.features, token_ids, num_steps)
    for step, ((logits, rows), estimates) in enumerate(zip(drafts, scored, strict=True)):
        valid = output.counts[:, rows]
        hits = (logits.argmax(-1) == output.best[:, rows])[valid].double()
        probabilities = estimates[valid].double().sigmoid()
        sums = probabilities.sum(), hits.sum(), (probabilities - hits).square().sum(), valid.sum()
        report[step] = torch.stack([each.double() for each in sums]).cpu()
    return report
