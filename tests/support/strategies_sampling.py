"""Hypothesis strategies for sampled calls of ``verify_chain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from specdec_fast.batch.sampling_batch import Adjustments, Sampling
from support.strategies import SEEDS, CallSizes, VerifyCall, generator, verify_calls


@dataclass(frozen=True)
class Rule:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalty: float
    num_seen: int
    num_prompt: int
    presence: float
    frequency: float
    position: int


@dataclass(frozen=True)
class SampledCall:
    call: VerifyCall
    rules: tuple[Rule, ...]  # sequence b has the b-th; if there are fewer, they are repeated
    is_masked: bool
    is_adjusted: bool
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
        if self.is_masked:
            sampling["allowed"] = self._masks(len(args["logits"]), g)
        own = {name: tensor.to(device) for name, tensor in sampling.items()}
        return {**args, "sampling": Sampling(**own, adjustments=self._adjustments(g, device))}

    def _masks(self, num_rows: int, g: torch.Generator) -> torch.Tensor:
        words = torch.randint(-(2**31), 2**31, (num_rows, -(-self.call.vocab_size // 32)), generator=g).int()
        kind = torch.rand(num_rows, 1, generator=g)
        return words.where(kind > 0.3, -1).where(kind < 0.9, 0).contiguous()

    def _adjustments(self, g: torch.Generator, device: torch.device) -> Adjustments | None:
        if not self.is_adjusted:
            return None
        rules = [self.rules[b % len(self.rules)] for b in range(len(self.call.counts))]
        num_biases = torch.randint(0, 4, (len(rules),), generator=g).clamp(max=self.call.vocab_size)
        ids = [torch.randperm(self.call.vocab_size + 2, generator=g)[:count] for count in num_biases.tolist()]
        added = {
            "presence_penalties": torch.tensor([rule.presence for rule in rules], dtype=torch.float64),
            "frequency_penalties": torch.tensor([rule.frequency for rule in rules], dtype=torch.float64),
            "num_prompt": torch.tensor([min(rule.num_prompt, rule.num_seen) for rule in rules], dtype=torch.int32),
            "bias_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *ids]),
            "bias_values": 3 * torch.randn(int(num_biases.sum()), generator=g, dtype=torch.float64),
            "cu_bias": torch.tensor([0, *num_biases.tolist()]).cumsum(0).int(),
        }
        return Adjustments(**{name: tensor.to(device) for name, tensor in added.items()})


RULES = st.builds(
    Rule,
    temperature=st.sampled_from((0.0, 1.0)) | st.floats(1e-3, 20),
    top_k=st.sampled_from((0, 1, 2**31 - 1)) | st.integers(1, 60),
    top_p=st.sampled_from((1.0, 1e-9)) | st.floats(0.01, 1),
    min_p=st.sampled_from((0.0, 1.0)) | st.floats(0, 1),
    penalty=st.sampled_from((1.0, 1.2)) | st.floats(0.2, 5),
    num_seen=st.integers(0, 9),
    num_prompt=st.integers(0, 9),
    presence=st.sampled_from((0.0, 0.5)) | st.floats(-2, 2),
    frequency=st.sampled_from((0.0, 0.5)) | st.floats(-2, 2),
    position=st.integers(0, 300) | st.integers(2**32 - 3, 2**32 + 3),
)


def sampled_calls(limits: CallSizes, vocab_sizes: st.SearchStrategy[int], batch: int) -> st.SearchStrategy[SampledCall]:
    rules = st.lists(RULES, min_size=1, max_size=3).map(tuple)
    return st.builds(SampledCall, verify_calls(limits, vocab_sizes, batch), rules, st.booleans(), st.booleans(), SEEDS)
