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

import specdec_fast as sd
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.ops import all_ops
from specdec_fast.oracle import sampling as oracle_sampling
from support.grids import grid
from support.models import tiny_model, truncated_copy
from support.op_checks import INTERPRETED, device_for
from support.sampling_by_hand import noise_by_hand, philox_by_hand, target_probs_by_hand

OP = all_ops()["verify_chain"]
BACKENDS = list(OP.implementations)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
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
SIGNIFICANCE = 1e-4  # p-values of right results lie above it; those of every mistake below are 0 in float64


def p_value(outcomes: Tensor, probs: Tensor) -> float:
    """Pearson's chi-squared test of outcome numbers; outcomes expected fewer than five times are counted as one."""
    counts = torch.bincount(outcomes, minlength=len(probs)).double()
    expected = probs * len(outcomes)
    if bool(counts[probs == 0].any()):
        return 0.0
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    return float(torch.special.gammaincc((kept.sum() - 1).double() / 2, statistic / 2))


def trials(backend: str) -> int:
    """200,000 where compiled code draws; the oracle's loops and interpreted kernels take a thousand times as long."""
    return 200 if backend in INTERPRETED else 1_500 if backend == "torch" else 200_000


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
        keep=lambda setting: setting[:2] == ("cpp", "together"),
    ),
)
def test_texts_follow_the_law(backend, rule, speculate):
    device_for(OP, backend)
    chain = Chain(RULES[rule])
    texts = chain.decode(trials(backend), OP.load(backend), speculate)
    assert p_value(chain.outcomes(texts), chain.probs()) > SIGNIFICANCE


@pytest.mark.parametrize("rule", grid(RULES, keep=["together"]))
def test_speculation_draws_the_very_same_texts(rule):
    chain, verify = Chain(rule), OP.load("torch")
    texts = [chain.decode(200, verify, speculate)[:, : 1 + chain.num_tokens] for speculate in (True, False)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("backend", grid(BACKENDS, keep=set(BACKENDS) - INTERPRETED))
def test_single_draws_follow_the_law(backend):
    """One position with many seeds, and one seed with many positions; other logits than in the tables above."""
    device, logits = device_for(OP, backend), torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 0.25])
    n = trials(backend)
    probs = torch.tensor(target_probs_by_hand(logits.tolist(), set(), NEUTRAL), dtype=torch.float64)
    base = Chain(NEUTRAL).sampling(torch.zeros(n, 1, dtype=torch.int64), torch.ones(n, dtype=torch.int64))
    for keys in ({"seeds": torch.arange(n)}, {"seeds": torch.full((n,), 7), "positions": torch.arange(n)}):
        sampling = replace(base, **keys, seen_ids=base.seen_ids[:0], cu_seen=torch.zeros(n + 1, dtype=torch.int32))
        sampling = Sampling(**{name: tensor.to(device) for name, tensor in vars(sampling).items()})
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


NUM_TEXTS, TOP_K, NEW_TOKENS = 6_000, 4, 3
PROMPT = [5, 17, 3]


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("qwen3")
    return target, truncated_copy(target, 2)


@torch.inference_mode()
def text_probs(model: torch.nn.Module, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Every text of three tokens and its probability, from the logits that ``transformers`` computes."""
    rule = {**NEUTRAL, "temperature": 3.0, "top_k": TOP_K}  # the distributions of these models are narrow
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW_TOKENS):
        longer = {}
        for text, probability in texts.items():
            logits = model(torch.tensor([prompt + list(text)])).logits[0, -1].double().tolist()
            probs = target_probs_by_hand(logits, set(), rule)
            longer |= {(*text, token): probability * p for token, p in enumerate(probs) if p > 0}
        texts = longer
    return texts


def engine_p_value(pair: Any, draft: Any) -> float:
    probs = text_probs(pair[0], PROMPT)
    params = [
        sd.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=3.0, top_k=TOP_K, seed=seed)
        for seed in range(NUM_TEXTS)
    ]
    engine = sd.Engine(pair[0], draft, max_batch_size=256, num_draft_tokens=2, method="eqspec")
    outputs = engine.generate([PROMPT] * NUM_TEXTS, params, progress=False)
    numbers = {text: i for i, text in enumerate(probs)}
    outcomes = [numbers.get(tuple(output.token_ids), len(numbers)) for output in outputs]
    return p_value(torch.tensor(outcomes), torch.tensor([*probs.values(), 0.0], dtype=torch.float64))


class Branches(sd.TreeDrafter):
    """Proposes three of the four tokens that can come next, and three behind each of them."""

    name, max_nodes = "branches", 12

    def __init__(self, texts: Any) -> None:
        self.texts = texts

    def following(self, text: tuple[int, ...]) -> list[int]:
        return sorted({other[len(text)] for other in self.texts if other[: len(text)] == text})[:3]

    def propose_trees(self, sequences: Any, limits: Any, node_limits: Any) -> sd.Draft:
        tokens: list[int] = []
        parents: list[int] = []
        counts = []
        for sequence, limit in zip(sequences, limits, strict=True):
            text, first = tuple(sequence.emitted_ids), len(tokens)
            for token in self.following(text) if limit else []:
                tokens.append(token)
                parents.append(-1)
                behind = self.following((*text, token)) if limit > 1 else []
                parents += [len(tokens) - 1 - first] * len(behind)
                tokens += behind
            counts.append(len(tokens) - first)
        return sd.Draft(torch.tensor(tokens), counts, torch.tensor(parents, dtype=torch.int32))


@pytest.mark.parametrize("drafter", ["model", "ngram", "branches", "none"])
def test_engine_follows_the_law(pair, drafter):
    branches = Branches(text_probs(pair[0], PROMPT)) if drafter == "branches" else None
    draft = {"model": pair[1], "ngram": "ngram", "branches": branches, "none": None}[drafter]
    assert engine_p_value(pair, draft) > SIGNIFICANCE


def test_engine_that_forgets_the_position_is_rejected(pair, monkeypatch):
    from specdec_fast.models import verify_step

    right = verify_step.sampling_of
    monkeypatch.setattr(
        verify_step,
        "sampling_of",
        lambda *args: replace(right(*args), positions=torch.zeros_like(right(*args).positions)),
    )
    assert engine_p_value(pair, None) < 1e-12


# The known answers of the paper's own code (Random123, kat_vectors).
VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of(backend: str) -> Callable[..., list[int]]:
    if backend == "hand":
        return philox_by_hand
    device_for(OP, backend)
    if backend == "cpp":
        from specdec_fast import _C

        return _C.philox4x32
    if backend == "triton":
        from specdec_fast.triton_kernels.sampling import philox4x32
    else:
        philox4x32 = oracle_sampling.philox4x32
    device = device_for(OP, backend)
    return lambda c, k: [int(w) for w in philox4x32(tuple(torch.tensor([x], device=device) for x in c), k)]


@pytest.mark.parametrize("backend", ["hand", *BACKENDS])
@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_has_the_published_values(backend, counter, key, words):
    assert tuple(philox_of(backend)(counter, key)) == words


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 2**32 + 5), (2**63 - 1, 17)])
def test_noise(seed, position):
    noise = oracle_sampling.gumbel_noise(11, seed, position, torch.device("cpu"))
    torch.testing.assert_close(noise, torch.tensor(noise_by_hand(11, seed, position), dtype=torch.float64))
