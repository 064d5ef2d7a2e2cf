"""Hypothesis strategies for sampled calls of ``verify_chain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from specdec_fast.batch.sampling_batch import Sampling
from support.strategies import SEEDS, CallSizes, VerifyCall, generator, verify_calls


@dataclass(frozen=True)
class Rule:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalty: float
    num_seen: int
    position: int


@dataclass(frozen=True)
class SampledCall:
    call: VerifyCall
    rules: tuple[Rule, ...]  # sequence b has the b-th; if there are fewer, they are repeated
    seed: int

    def make(self, device: torch.device) -> dict[str, Any]:
        args, g = self.call.make(device), generator(self.seed)
        rules = [self.rules[b % len(self.rules)] for b in range(len(self.call.counts))]
        seen = torch.tensor([0, *(rule.num_seen for rule in rules)])

        def each(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([getattr(rule, name) for rule in rules], dtype=dtype)

        sampling = {
            "temperatures": each("temperature", torch.float64),
            "top_k": each("top_k", torch.int32),
            "top_p": each("top_p", torch.float64),
            "min_p": each("min_p", torch.float64),
            "repetition_penalties": each("penalty", torch.float64),
            "seeds": torch.randint(-(2**63), 2**63 - 1, (len(rules),), generator=g),
            "positions": each("position", torch.int64),
            "seen_ids": torch.randint(-1, self.call.vocab_size + 2, (int(seen.sum()),), generator=g),
            "cu_seen": seen.cumsum(0).int(),
        }
        return {**args, "sampling": Sampling(**{name: tensor.to(device) for name, tensor in sampling.items()})}


RULES = st.builds(
    Rule,
    temperature=st.sampled_from((0.0, 1.0)) | st.floats(1e-3, 20),
    top_k=st.sampled_from((0, 1, 2**31 - 1)) | st.integers(1, 60),
    top_p=st.sampled_from((1.0, 1e-9)) | st.floats(0.01, 1),
    min_p=st.sampled_from((0.0, 1.0)) | st.floats(0, 1),
    penalty=st.sampled_from((1.0, 1.2)) | st.floats(0.2, 5),
    num_seen=st.integers(0, 9),
    position=st.integers(0, 300) | st.integers(2**32 - 3, 2**32 + 3),
)


def sampled_calls(limits: CallSizes, vocab_sizes: st.SearchStrategy[int], batch: int) -> st.SearchStrategy[SampledCall]:
    rules = st.lists(RULES, min_size=1, max_size=3).map(tuple)
    return st.builds(SampledCall, verify_calls(limits, vocab_sizes, batch), rules, SEEDS)
