"""A drafter that proposes the tokens of a script."""

from __future__ import annotations

import torch

import specdec_fast as sd


class Scripted(sd.Drafter):
    """Proposes what a function of (sequence, limit) returns."""

    name = "scripted"

    def __init__(self, script):
        self.script = script

    def propose(self, sequences, limits):
        proposals = [self.script(s, limit) for s, limit in zip(sequences, limits, strict=True)]
        token_ids = [token for proposal in proposals for token in proposal]
        return sd.Draft(torch.tensor(token_ids, dtype=torch.int64), [len(p) for p in proposals])
