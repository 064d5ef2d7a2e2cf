"""What a SpecBlock drafter is trained towards (Shi et al., arXiv 2605.07243, section 3.4 and appendix B)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from specdec_fast.drafters.specblock.checkpoint import NUM_CLASSES, NUM_FEATURES
from specdec_fast.drafters.specblock.module import SpecBlockModule
from specdec_fast.training.drafter_loss import STEP_DISCOUNT, TeacherOutput

_CLASS_BUDGET = 10  # positions of a class and slot that count in full
_STRIDE = 4  # one of so many positions gets a second block, because these attend without a fused kernel


def block_loss(module: SpecBlockModule, token_ids: Tensor, output: TeacherOutput, num_steps: int) -> Tensor:
    """Return the loss of the true blocks and of blocks behind them, each with that of the rank head.

    A slot is trained where all slots before it have drafted the text's own tokens (the *valid prefix*): elsewhere a
    draft ends before it. That is not asked of the slot behind which a block follows. This slot, and the positions with
    a second block, depend on the batch alone, so a training that is resumed goes on with the same ones.

    The arguments are those of ``loss_of``; ``num_steps`` slots of the true blocks are trained.
    """
    hidden, key_values = module.true_blocks(output.features, token_ids)
    positions = torch.arange(hidden.shape[1], device=token_ids.device)
    loss = _slots_loss(module, hidden[:, :, :num_steps], token_ids, output, positions + 1)
    generator = torch.Generator(device="cpu").manual_seed(int(token_ids.sum()))
    slot, first = (int(torch.randint(most, (), generator=generator, device="cpu")) for most in (num_steps, _STRIDE))
    end = max(first, token_ids.shape[1] - 2 - slot)  # of short texts no position may have a second block
    positions = torch.arange(first, end, _STRIDE, device=token_ids.device)
    if num_steps < module.num_slots or not len(positions):
        return loss
    behind = module.blocks_behind(hidden, key_values, token_ids, positions, slot)
    return loss + _slots_loss(module, behind, token_ids, output, positions + slot + 2)


def _slots_loss(
    module: SpecBlockModule, hidden: Tensor, token_ids: Tensor, output: TeacherOutput, starts: Tensor
) -> Tensor:
    """Return the loss of blocks ``[B, N, K, H]`` whose slot k drafts the token behind position ``starts + k``."""
    last = token_ids.shape[1] - 1
    num_slots = hidden.shape[2]
    places = starts[:, None] + torch.arange(num_slots, device=starts.device)
    at = places.clamp(max=last)  # the last position counts nowhere
    normed = module.norm(hidden)
    logits = module.lm_head(normed).float()
    drafted = logits.detach().argmax(-1)
    best = output.best[:, at]
    text = module.draft_ids_of(token_ids)[:, (at + 1).clamp(max=last)]
    valid = torch.cat([torch.ones_like(text[..., :1]), (drafted == text).long().cumprod(-1)[..., :-1]], dim=-1) > 0
    learnt = valid & output.counts[:, at] & (best >= 0)
    slots = torch.arange(num_slots, device=starts.device).expand_as(learnt)[learnt]
    if not len(slots):
        return logits.sum() * 0.0
    rows = logits[learnt]
    wanted = output.probabilities[:, at][learnt]
    losses = rows.logsumexp(-1) - (wanted * rows).sum(-1)
    counts = torch.bincount(slots, minlength=num_slots).clamp(min=1)
    weights = STEP_DISCOUNT ** torch.arange(num_slots, device=starts.device)
    loss = (losses * (weights / counts)[slots]).sum() / weights.sum()
    return loss + _rank_loss(module, normed[learnt].detach(), rows.detach(), best[learnt], slots)


def _rank_loss(module: SpecBlockModule, normed: Tensor, logits: Tensor, best: Tensor, slots: Tensor) -> Tensor:
    """Return the loss of the classes that the rank head predicts for ``[N]`` slots, given the target's choice there.

    The target of class t is spread over the classes c by ``1 / (1 + |c - t| + max(t - c, 0)) ** 2``; a prediction p
    weighs ``1 + |t - p| + max(t - p, 0)``, and a class of n positions of a slot ``min(1, 10 / n)``. So a rank that is
    taken for a better one costs most: the target's token is missed then.
    """
    top, ids = logits.topk(NUM_FEATURES, dim=-1)
    predicted = module.rank_head(torch.cat([normed, rank_features(top).to(normed.dtype)], dim=-1)).float()
    labels = rank_labels(ids, best)
    classes = torch.arange(NUM_CLASSES, device=labels.device)
    missed = labels[:, None] - classes
    wanted = (1 + missed.abs() + missed.clamp(min=0)).float() ** -2
    wanted = wanted / wanted.sum(-1, keepdim=True)
    off = labels - predicted.argmax(-1)
    counts = one_hot(labels + NUM_CLASSES * slots, NUM_CLASSES * module.num_slots).sum(0)
    frequency = (_CLASS_BUDGET / counts.clamp(min=1)).clamp(max=1.0)[labels + NUM_CLASSES * slots]
    losses = -(wanted * predicted.log_softmax(-1)).sum(-1) * (1 + off.abs() + off.clamp(min=0))
    return (losses * frequency).sum() / frequency.sum()


def rank_features(top: Tensor) -> Tensor:
    """Return what the rank head reads beside the hidden state.

    Args:
        top: ``[..., 20]`` fp32, the largest logits, falling.

    Returns:
        ``[..., 15]``: ten log-probabilities among the 20, the gaps from the first logit to the second, third and fifth,
        the probability of the first, and the entropy.
    """
    log_probs = top.log_softmax(dim=-1)
    probabilities = log_probs.exp()
    gaps = top[..., :1] - top[..., [1, 2, 4]]
    entropy = -(probabilities * log_probs).nan_to_num(0.0).sum(-1, keepdim=True)
    return torch.cat([log_probs[..., :10], gaps, probabilities[..., :1], entropy], dim=-1)


def rank_labels(ids: Tensor, best: Tensor) -> Tensor:
    """Return the class of each row ``[N]``: where ``best`` is among ``ids [N, 20]``, the likeliest first.

    0: it is the first; 1: of ranks 2 to 4; 2: of ranks 5 to 10; 3: beyond.
    """
    is_best = ids[:, :10] == best[:, None]
    rank = torch.where(is_best.any(-1), is_best.int().argmax(-1), ids.shape[1])
    return (rank > 0).long() + (rank > 3).long() + (rank > 9).long()
