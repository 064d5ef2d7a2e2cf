"""Hypothesis strategies for trees of draft tokens in calls of ``verify_chain``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from specdec_fast.ops import all_ops
from support.strategies import SEEDS, generator


@dataclass(frozen=True)
class TreeCall:
    call: Any  # a call for chains
    breadth: int  # a row's parent is one of so many rows before it
    agreement: float  # of rows that hold the token that their parent chooses
    seed: int

    def make(self, device: torch.device) -> dict[str, Any]:
        args, g = self.call.make(device), generator(self.seed)
        parents: list[int] = []
        above: list[int] = []  # counted in the batch
        for start, stop in pairwise(args["cu_seqlens"].tolist()):
            back = torch.randint(1, self.breadth + 1, (stop - start,), generator=g).tolist()
            own = [max(0, row - back[row]) if row else -1 for row in range(stop - start)]
            parents += own
            above += [start + max(0, parent) for parent in own]
        args["parents"] = torch.tensor(parents, dtype=torch.int32, device=device)
        chosen = all_ops()["verify_chain"].load("torch")(**args)[0].clamp(min=0)
        agrees = (torch.rand(len(above), generator=g) < self.agreement).to(device)
        of_parent = chosen[torch.tensor(above, dtype=torch.int64, device=device)]
        return {**args, "token_ids": torch.where(agrees, of_parent, args["token_ids"])}


def tree_calls(calls: st.SearchStrategy[Any]) -> st.SearchStrategy[TreeCall]:
    return st.builds(TreeCall, calls, breadth=st.integers(1, 9), agreement=st.sampled_from((0.3, 0.7, 1.0)), seed=SEEDS)
