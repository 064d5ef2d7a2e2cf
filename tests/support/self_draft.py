"""A drafter that shares the target's KV pages: an unrounded copy, its codes, and NaN behind all committed entries."""

from __future__ import annotations

import copy

import torch

from specdec_fast.drafters.self_draft.drafter import SelfDrafter
from specdec_fast.models.quantized_linears import PackedModule
from support.invariants import slots_of


class UnroundedDrafter(SelfDrafter):
    """Drafts with the target's own weights, so that every draft token that a program computes is accepted."""

    quantization = "unrounded"

    def _copied(self, model):
        return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class Poisoned:
    """Fills every KV entry that no committed token owns with NaN: before and after each proposal, and after each step.

    Args:
        engine: made with a ``SelfDrafter``.
        committed: number of entries that stay, of a sequence.

    """

    def __init__(self, engine, committed=lambda sequence: sequence.target_kv_length):
        self.core = engine.core
        self.committed = committed
        self.num_proposals = 0
        self._propose, engine.drafter.propose = engine.drafter.propose, self.propose
        self._finish, self.core._finish = self.core._finish, self.finish

    def propose(self, sequences, limits):
        self.poison()
        draft = self._propose(sequences, limits)
        self.poison()
        self.num_proposals += 1
        return draft

    def finish(self, step):
        emitted = self._finish(step)
        self.poison()
        return emitted

    def poison(self):
        pool = self.core.pool
        owned = [slot for s in pool._pages_of for slot in slots_of(pool, s, self.committed(s))]
        keep = torch.zeros((pool.num_pages + 1) * pool.page_size, dtype=torch.bool)
        keep[owned] = True
        for tensor in pool.tensors:
            tensor.flatten(2, 3)[:, :, ~keep] = float("nan")


def codes_of(engine):
    """Return the numbers of a copy's codes and scales by name."""
    modules = engine.drafter.model.model.named_modules()
    packed = {name: module.packed.tensors for name, module in modules if isinstance(module, PackedModule)}
    return {name: [tensor.tolist() for tensor in tensors] for name, tensors in packed.items()}
