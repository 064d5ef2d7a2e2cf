"""Requests with every restriction, bias, penalty and processor, and what transformers' own operations make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

import specdec_fast as sd
from specdec_fast.model_arguments import cache_argument
from support.models import VOCAB_SIZE
from support.sampling_by_hand import token_by_hand

NEW_TOKENS = 14
PROMPTS = [[3, 4], [5, 6, 7, 5, 6], [8], [70, 20, 71, 9, 10, 11, 12]]
PAIRS = [(a, b) for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if (7 * a + b) % 5 < 2]


def against_the_last(token_ids: list[int], logits: Tensor) -> Tensor:
    """Depends on every token of the path and on its length; changes its argument."""
    logits[token_ids[-1]] -= 3.0
    logits[sum(token_ids) % len(logits)] += 1.5 * (len(token_ids) % 5)
    return logits


# What each parameter is, alone; the values change most texts of a tiny random model.
KINDS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {token: 0.75 * (token % 7 - 3) for token in range(0, VOCAB_SIZE, 2)}},
    "allowed": {"allowed_token_ids": tuple(token for token in range(VOCAB_SIZE) if token % 3)},
    "bad_words": {"bad_words": [[3], [40], (5, 6, 7), *PAIRS]},
    "min_tokens": {"min_tokens": 11, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 5))},
    "processors": {"logits_processors": (against_the_last, NoRepeatNGramLogitsProcessor(2))},
}
RULES = ({}, {"temperature": 0.9, "top_p": 0.95}, {"temperature": 1.3, "top_k": 20, "min_p": 0.02})


def params_of(*kinds: str, **others: Any) -> list[sd.SamplingParams]:
    """Parameters of each of ``PROMPTS``: greedy and sampled requests of some kinds."""
    given = {name: value for kind in kinds for name, value in KINDS[kind].items()}
    base = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **given, **others}
    return [sd.SamplingParams(seed=40 + i, **(RULES[i % 3] | base)) for i in range(len(PROMPTS))]


class Processors:
    """The edits of one request, made by transformers' processors, and by torch where it has none."""

    def __init__(self, params: sd.SamplingParams, num_prompt: int) -> None:
        self._params = params
        self._num_prompt = num_prompt
        self._edits: list[Any] = [
            processor for processor in params.logits_processors if processor is not against_the_last
        ]
        if params.allowed_token_ids is not None:
            others = sorted(set(range(VOCAB_SIZE)) - set(params.allowed_token_ids))
            self._edits.append(SuppressTokensLogitsProcessor(others, device="cpu"))
        if params.bad_words:
            self._edits.append(NoBadWordsLogitsProcessor(list(map(list, params.bad_words))))
        if params.min_tokens:
            stop_ids = list(params.stop_token_ids)
            self._edits.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, stop_ids, "cpu"))
        if params.logit_bias:
            biases = {(token,): bias for token, bias in params.logit_bias.items()}
            self._edits.append(SequenceBiasLogitsProcessor(biases))
        if params.repetition_penalty != 1:
            self._edits.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))

    def __call__(self, scores: Tensor, token_ids: list[int]) -> Tensor:
        """Edit logits ``[1, vocab_size]`` float64."""
        params = self._params
        if against_the_last in params.logits_processors:
            scores = against_the_last(token_ids, scores[0].clone())[None]
        for edit in self._edits:
            scores = edit(torch.tensor([token_ids]), scores)
        counts = torch.tensor(token_ids[self._num_prompt :], dtype=torch.int64).bincount(minlength=scores.shape[1])
        scores = scores - params.frequency_penalty * counts.double()
        return scores - params.presence_penalty * (counts > 0)


@torch.inference_mode()
def texts_by_transformers(model: nn.Module, params: list[sd.SamplingParams]) -> list[list[int]]:
    """Token by token, from the logits of transformers' dense cache."""
    texts = []
    for prompt, own in zip(PROMPTS, params, strict=True):
        rule = {name: getattr(own, name) for name in ("temperature", "top_k", "top_p", "min_p")} | {"penalty": 1.0}
        edit = Processors(own, len(prompt))
        cache = {cache_argument(model): DynamicCache()}
        token_ids, fed = list(prompt), list(prompt)
        while len(token_ids) < len(prompt) + own.max_new_tokens:
            logits = model(torch.tensor([fed]), use_cache=True, **cache).logits[0, -1].double()[None]
            scores = edit(logits, token_ids)[0].tolist()
            fed = [token_by_hand(scores, set(), rule, own.seed or 0, len(token_ids))]
            token_ids += fed
            if fed[0] in own.stop_token_ids:
                break
        texts.append(token_ids[len(prompt) :])
    return texts
