"""The law of sampling: what speculation emits is distributed as the target's own text, over several steps together.

Seeds are 0, 1, 2, ..., so a test that passes once always passes. Every check is shown to reject mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.ops import all_ops
from support.chi_squared import SIGNIFICANCE, p_value
from support.grids import grid
from support.op_checks import INTERPRETED, device_for
from support.sampling_by_hand import NEUTRAL, target_probs_by_hand

OP = all_ops()["verify_chain"]
BACKENDS = list(OP.implementations)
# Every processor alone, then together; each changes the law of the chain below by far more than chance does.
RULES = {
    "plain": NEUTRAL,
    "temperature": {**NEUTRAL, "temperature": 0.6},
    "top_k": {**NEUTRAL, "top_k": 2},
    "top_p": {**NEUTRAL, "top_p": 0.7},
    "min_p": {**NEUTRAL, "min_p": 0.3},
    "penalty": {**NEUTRAL, "penalty": 1.8},
    "together": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "penalty": 1.3},
}


def trials(backend: str) -> int:
    """50,000 where compiled code draws; the oracle's loops and interpreted kernels take hundreds of times as long."""
    return 200 if backend in INTERPRETED else 1_500 if backend == "torch" else 50_000


class Chain:
    """Texts whose next token depends on the last one: a target and a draft that are tables of logits."""

    vocab_size, num_tokens, num_draft_tokens = 5, 4, 2

    def __init__(self, rule: dict[str, float]) -> None:
        g = torch.Generator().manual_seed(3)
        self.rule = rule
        self.target = 1.2 * torch.randn(self.vocab_size, self.vocab_size, generator=g)
        self.draft = self.target + 0.8 * torch.randn(self.vocab_size, self.vocab_size, generator=g)

    def probs(self) -> Tensor:
        """The probability of every text of four tokens after token 0, by enumeration."""
        found = []
        for text in product(range(self.vocab_size), repeat=self.num_tokens):
            probability, before = 1.0, [0]
            for token in text:
                logits = self.target[before[-1]].tolist()
                probability *= target_probs_by_hand(logits, set(before), self.rule)[token]
                before.append(token)
            found.append(probability)
        return torch.tensor(found, dtype=torch.float64)

    def outcomes(self, texts: Tensor) -> Tensor:
        powers = self.vocab_size ** torch.arange(self.num_tokens - 1, -1, -1)
        return (texts[:, 1 : 1 + self.num_tokens] * powers).sum(dim=1)

    def sampling(self, texts: Tensor, lengths: Tensor) -> Sampling:
        n, rule = len(texts), self.rule
        columns = {
            "temperatures": (rule["temperature"], torch.float64),
            "top_k": (int(rule["top_k"]), torch.int32),
            "top_p": (rule["top_p"], torch.float64),
            "min_p": (rule["min_p"], torch.float64),
            "repetition_penalties": (rule["penalty"], torch.float64),
        }
        committed = torch.arange(texts.shape[1]) < lengths[:, None]
        return Sampling(
            **{name: torch.full((n,), value, dtype=dtype) for name, (value, dtype) in columns.items()},
            seeds=torch.arange(n),
            positions=lengths.clone(),
            seen_ids=texts[committed],
            cu_seen=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        )

    def decode(self, num_texts: int, verify: Callable[..., Any], speculate: bool = True) -> Tensor:
        """Emit at least four tokens of every text by steps of draft, verify and commit, all texts in one batch."""
        k = self.num_draft_tokens if speculate else 0
        texts = torch.zeros(num_texts, 1 + self.num_tokens + k, dtype=torch.int64)
        lengths = torch.ones(num_texts, dtype=torch.int64)
        each = torch.arange(num_texts)
        while int(lengths.min()) < 1 + self.num_tokens:
            lengths.clamp_(max=1 + self.num_tokens - 1)  # a text that is complete decodes its last token again
            fed = [texts[each, lengths - 1]]
            for ahead in range(k):
                sampling = replace(self.sampling(texts, lengths), positions=lengths + ahead)
                one_each = torch.arange(num_texts + 1, dtype=torch.int32)
                fed.append(verify(self.draft[fed[-1]], fed[-1], one_each, sampling)[0])
            token_ids = torch.stack(fed, dim=1).flatten()
            cu_seqlens = torch.arange(0, len(token_ids) + 1, k + 1, dtype=torch.int32)
            sampling = self.sampling(texts, lengths)
            targets, accepted, following = verify(self.target[token_ids], token_ids, cu_seqlens, sampling)
            for i, tokens in enumerate(targets.view(num_texts, k + 1).T):
                emits = accepted > i
                texts[each[emits], lengths[emits] + i] = tokens[emits]
            texts[each, lengths + accepted] = following
            lengths = lengths + accepted + 1
        return texts


# Compiled code draws by every rule; the oracle, which it equals token by token, by all of them at once.
@pytest.mark.parametrize(
    ("backend", "rule", "speculate"),
    grid(
        [*(("cpp", rule, True) for rule in RULES), ("cpp", "together", False), ("torch", "together", True)],
        keep=[("cpp", "together", True)],
    ),
)
def test_texts_follow_the_law(backend, rule, speculate):
    device_for(OP, backend)
    chain = Chain(RULES[rule])
    texts = chain.decode(trials(backend), OP.load(backend), speculate)
    assert p_value(chain.outcomes(texts), chain.probs()) > SIGNIFICANCE


@pytest.mark.grid
@pytest.mark.parametrize("rule", grid(RULES, keep=["together"]))
def test_speculation_draws_the_very_same_texts(rule):
    chain, verify = Chain(rule), OP.load("torch")
    texts = [chain.decode(80, verify, speculate)[:, : 1 + chain.num_tokens] for speculate in (True, False)]
    assert torch.equal(*texts)


@pytest.mark.grid
@pytest.mark.parametrize("backend", grid(BACKENDS, keep=set(BACKENDS) - INTERPRETED))
def test_single_draws_follow_the_law(backend):
    """One position with many seeds, and one seed with many positions; other logits than in the tables above."""
    device, logits = device_for(OP, backend), torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 0.25])
    n = trials(backend)
    probs = torch.tensor(target_probs_by_hand(logits.tolist(), set(), NEUTRAL), dtype=torch.float64)
    base = Chain(NEUTRAL).sampling(torch.zeros(n, 1, dtype=torch.int64), torch.ones(n, dtype=torch.int64))
    for keys in ({"seeds": torch.arange(n)}, {"seeds": torch.full((n,), 7), "positions": torch.arange(n)}):
        sampling = replace(base, **keys, seen_ids=base.seen_ids[:0], cu_seen=torch.zeros(n + 1, dtype=torch.int32))
        sampling = Sampling(
            **{name: tensor.to(device) for name, tensor in vars(sampling).items() if tensor is not None}
        )
        cu_seqlens = torch.arange(n + 1, dtype=torch.int32, device=device)
        token_ids = torch.zeros(n, dtype=torch.int64, device=device)
        rows = logits.expand(n, -1).contiguous().to(device)
        tokens = OP.load(backend)(rows, token_ids, cu_seqlens, sampling)[0]
        assert p_value(tokens.cpu(), probs) > SIGNIFICANCE


def fastest() -> Callable[..., Any]:
    return OP.load("torch" if OP.why_unavailable("cpp") else "cpp")


def temperature_forgotten(*args: Any) -> Any:
    *others, sampling = args
    return fastest()(*others, replace(sampling, temperatures=torch.ones_like(sampling.temperatures)))


def noise_keyed_by_row(*args: Any) -> Any:
    """By the row within its forward, in place of the position in the text."""
    *others, sampling = args
    return fastest()(*others, replace(sampling, positions=torch.zeros_like(sampling.positions)))


def noise_without_a_seed(*args: Any) -> Any:
    *others, sampling = args
    return fastest()(*others, replace(sampling, seeds=torch.zeros_like(sampling.seeds)))


def draft_token_kept(logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Sampling) -> Any:
    """The first draft token is emitted, whatever the target says."""
    targets, accepted, following = fastest()(logits, token_ids, cu_seqlens, sampling)
    first = cu_seqlens[:-1].long()
    rejected = (accepted == 0) & (cu_seqlens.diff() > 1)
    return targets, accepted, torch.where(rejected, token_ids[(first + 1).clamp(max=len(token_ids) - 1)], following)


MISTAKES = (temperature_forgotten, noise_keyed_by_row, noise_without_a_seed, draft_token_kept)


@pytest.mark.parametrize("wrong", MISTAKES)
def test_law_rejects_mistakes(wrong):
    chain = Chain(RULES["temperature"])
    assert p_value(chain.outcomes(chain.decode(3_000, wrong)), chain.probs()) < 1e-12


# A decoder that forgets one setting must fail: the rules differ by more than chance does.
@pytest.mark.parametrize("forgotten", ["top_k", "top_p", "min_p", "penalty"])
def test_law_sees_every_setting(forgotten):
    chain, without = Chain(RULES[forgotten]), Chain(NEUTRAL)
    texts = without.decode(3_000, fastest())
    assert p_value(chain.outcomes(texts), chain.probs()) < 1e-12
