"""The law of sampling, for whole engines: with every kind of drafter, texts are distributed as the target's own.

Seeds are 0, 1, 2, ..., so a test that passes once always passes. The check is shown to reject a mistake.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import specdec_fast as sd
from support.chi_squared import SIGNIFICANCE, p_value
from support.grids import grid
from support.models import tiny_model, truncated_copy
from support.sampling_by_hand import NEUTRAL, target_probs_by_hand

NUM_TEXTS, TOP_K, NEW_TOKENS = 3_000, 4, 3
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


@pytest.mark.parametrize("drafter", grid(["model", "ngram", "self", "branches", "none"], keep=["branches"]))
def test_engine_follows_the_law(pair, drafter):
    branches = Branches(text_probs(pair[0], PROMPT)) if drafter == "branches" else None
    draft = {"model": pair[1], "ngram": "ngram", "self": "self", "branches": branches, "none": None}[drafter]
    assert engine_p_value(pair, draft) > SIGNIFICANCE


def test_engine_that_forgets_the_position_is_rejected(pair, monkeypatch):
    from specdec_fast.runner import verification

    right = verification.sampling_of
    monkeypatch.setattr(
        verification,
        "sampling_of",
        lambda *args, **masks: replace(right(*args, **masks), positions=torch.zeros_like(right(*args).positions)),
    )
    assert engine_p_value(pair, None) < 1e-12
