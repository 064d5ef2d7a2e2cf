"""Arguments of ``verify_chain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from specdec_fast.batch.sampling_batch import Adjustments, Sampling
from specdec_fast.ops.sampling import sampled_tokens

# temperature, top_k, top_p, min_p, repetition penalty
_Rule = tuple[float, int, float, float, float]
_PLAIN: _Rule = (1.0, 0, 1.0, 0.0, 1.0)
_GREEDILY: _Rule = (0.0, 0, 1.0, 0.0, 1.0)
_RULES: tuple[_Rule, ...] = (
    _PLAIN,
    (0.7, 0, 0.9, 0.0, 1.0),
    (1.3, 20, 1.0, 0.0, 1.0),
    (1.0, 0, 1.0, 0.05, 1.0),
    (0.8, 40, 0.95, 0.01, 1.2),
    _GREEDILY,
    (0.0, 3, 0.5, 0.5, 1.3),  # greedy: the penalty has an effect, the filters have none
    (5.0, 0, 1.0, 0.0, 0.7),
    (1e-3, 1, 0.1, 1.0, 1.0),
)


def _draw(
    counts: list[int], vocab_size: int, special: float | None, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Any]:
    """Draw logits that accept some of the draft tokens; one in 64 logits is ``special``."""
    rows = sum(counts)
    # few distinct values, so that ties at the maximum are frequent
    logits = torch.randint(-40, 40, (rows, vocab_size), generator=generator).to(dtype) / 4
    if special == 0:
        # so that a few zeros are the largest, and the first of them is as often positive as negative
        is_zero = torch.rand(rows, vocab_size, generator=generator) < 1 / 64
        logits = torch.where(is_zero, 0, -1 - logits.abs())
    if special is not None:
        logits = logits.masked_fill(torch.rand(rows, vocab_size, generator=generator) < 1 / 64, special)
    best = logits.argmax(dim=-1).roll(1)  # the token that is accepted in every row, except a sequence's first
    guess = torch.randint(0, vocab_size, (rows,), generator=generator)
    token_ids = torch.where(torch.rand(rows, generator=generator) < 0.7, best, guess)
    cu_seqlens = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    return {"logits": logits, "token_ids": token_ids, "cu_seqlens": cu_seqlens}


def _draw_sampled(
    counts: list[int],
    vocab_size: int,
    rules: tuple[_Rule, ...],
    special: float | None,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Draw as above; sequence b samples by rule ``b % len(rules)``. Most drafts are what the oracle samples."""
    args = _draw(counts, vocab_size, special, generator, dtype)
    batch_size = len(counts)
    columns = torch.tensor([rules[b % len(rules)] for b in range(batch_size)], dtype=torch.float64).view(-1, 5).T
    temperatures, top_k, top_p, min_p, penalties = columns.contiguous()
    seen = torch.randint(0, 30, (batch_size,), generator=generator)
    args["sampling"] = Sampling(
        temperatures=temperatures,
        top_k=top_k.int(),
        top_p=top_p,
        min_p=min_p,
        repetition_penalties=penalties,
        seeds=torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator),
        positions=torch.randint(0, 2**34, (batch_size,), generator=generator),
        # some ids twice, and some outside the vocabulary, as with a draft model whose vocabulary is larger
        seen_ids=torch.randint(vocab_size + vocab_size // 8, (int(seen.sum()),), generator=generator),
        cu_seen=torch.cat([torch.zeros(1, dtype=torch.int64), seen.cumsum(0)]).int(),
    )
    agrees = torch.rand(sum(counts), generator=generator) < 0.7
    args["token_ids"] = torch.where(agrees, sampled_tokens(**args).clamp(min=0).roll(1), args["token_ids"])
    return args


def _draw_trees(
    counts: list[int],
    rules: tuple[_Rule, ...] | None,
    breadth: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Draw trees in which half of the rows hold the token that their parent chooses; siblings may hold the same one.

    ``counts`` are the rows of each sequence; ``rules``: by which sequences sample, None: all are greedy. A row's parent
    is one of ``breadth`` rows before it; 1 makes chains.
    """
    if rules is None:
        args = _draw(counts, 97, None, generator, dtype)
    else:
        args = _draw_sampled(counts, 97, rules, None, generator, dtype)
    back = torch.randint(1, breadth + 1, (sum(counts),), generator=generator)
    rows = torch.cat([torch.arange(count) for count in counts]) if counts else back
    args["parents"] = torch.where(rows > 0, (rows - back).clamp(min=0), -1).int()
    above = torch.arange(len(rows)) - rows + args["parents"].clamp(min=0)  # counted in the batch
    chosen = sampled_tokens(**args) if rules else args["logits"].argmax(dim=-1)
    agrees = torch.rand(sum(counts), generator=generator) < 0.5
    args["token_ids"] = torch.where(agrees, chosen.clamp(min=0)[above], args["token_ids"])
    return args


def _edited(
    draw: Callable[[torch.Generator, torch.dtype], dict[str, Any]],
    edits: str,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Draw as ``draw`` does, with bitmasks, biases and penalties: those that ``edits`` names.

    A third of the rows have a bitmask that forbids nothing, and a few have one that allows nothing.
    """
    args = draw(generator, dtype)
    sampling = args["sampling"]
    rows, vocab_size = args["logits"].shape
    batch_size = len(sampling.seeds)
    if "mask" in edits:
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=generator).int()
        kind = torch.rand(rows, 1, generator=generator)
        words = words.where(kind > 1 / 3, -1).where(kind < 0.9, 0)
        sampling = replace(sampling, allowed=words)
    if "adjust" in edits:
        num_seen = sampling.cu_seen.diff()
        num_biases = torch.randint(0, 5, (batch_size,), generator=generator).clamp(max=vocab_size)
        ids = [torch.randperm(vocab_size + 1, generator=generator)[:count] for count in num_biases.tolist()]
        choices = torch.tensor([0.0, 0.5, -0.7, 2.0], dtype=torch.float64)
        adjustments = Adjustments(
            presence_penalties=choices[torch.randint(4, (batch_size,), generator=generator)],
            frequency_penalties=choices[torch.randint(4, (batch_size,), generator=generator)],
            num_prompt=(torch.rand(batch_size, generator=generator) * (num_seen + 1)).int(),
            bias_ids=torch.cat([torch.zeros(0, dtype=torch.int64), *ids]),
            bias_values=4 * torch.randn(int(num_biases.sum()), generator=generator, dtype=torch.float64),
            cu_bias=torch.cat([torch.zeros(1, dtype=torch.int64), num_biases.cumsum(0)]).int(),
        )
        sampling = replace(sampling, adjustments=adjustments)
    args["sampling"] = sampling
    agrees = torch.rand(rows, generator=generator) < 0.7
    if "parents" not in args:
        args["token_ids"] = torch.where(agrees, sampled_tokens(**args).clamp(min=0).roll(1), args["token_ids"])
    return args


def _draw_normal(counts: list[int], rule: _Rule, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    """Draw logits that are spread like those of language models: ten tokens share most of the mass."""
    args = _draw_sampled(counts, 2, (rule,), None, generator, dtype)
    logits = 2.5 * torch.randn(sum(counts), 151_936, generator=generator)
    logits[:, :10] += 12
    return {**args, "logits": logits.to(dtype)}


def _bytes_moved(logits: Tensor, **others: Any) -> int:
    return logits.numel() * logits.element_size()


# name, defect, rows of each sequence, size of the vocabulary, special logit
_GREEDY: tuple[tuple[str, str, list[int], int, float | None], ...] = (
    ("plain_decoding", "one row per sequence, nothing to accept", [1] * 8, 1000, None),
    ("ragged", "a different number of draft tokens per sequence", [1, 6, 2, 9, 4], 1024, None),
    ("no_sequences", "an empty batch", [], 1024, None),
    ("tiny_vocabulary", "less than one vector; ties everywhere", [4, 4], 2, None),
    ("odd_vocabulary", "a tail after the last full vector and block", [3, 3], 4097, None),
    ("large_vocabulary", "several blocks, and several threads", [6] * 8, 151_936, None),
    ("nan", "rows with a NaN must be reported, not chosen", [5, 5, 5], 97, float("nan")),
    ("positive_infinity", "the first infinity wins", [5, 5], 130, float("inf")),
    ("negative_infinity", "masked tokens never win", [5, 5], 130, float("-inf")),
    ("negative_zero", "-0 and +0 are equal", [5, 5], 130, -0.0),
)
_SAMPLED: tuple[tuple[str, str, list[int], int, float | None], ...] = (
    ("sampled", "every filter and penalty, beside greedy sequences", [3, 1, 6, 2, 4, 1, 3, 2, 5], 1000, None),
    ("sampled_tiny_vocabulary", "fewer tokens than a counter has words; filters that keep one", [2] * 9, 3, None),
    ("sampled_odd_vocabulary", "a tail after the last full block, with the last counter's words", [1] * 9, 4099, None),
    ("sampled_nan", "rows with a NaN must be reported, not sampled", [3] * 9, 97, float("nan")),
    ("sampled_positive_infinity", "the first infinity wins, whatever the noise", [3] * 9, 130, float("inf")),
    ("sampled_negative_infinity", "masked tokens are never sampled", [3] * 9, 130, float("-inf")),
    ("sampled_no_sequences", "an empty batch", [], 1024, None),
)
# name, defect, rows of each sequence, rules, breadth
_TREES: tuple[tuple[str, str, list[int], tuple[_Rule, ...] | None, int], ...] = (
    ("trees", "children of several rows, some with one token", [12, 1, 7, 2, 20, 2, 3], None, 4),
    ("deep_trees", "paths of more rows than a block of the walk", [150, 3], None, 2),
    ("chains_with_parents", "a chain, described as a tree", [6, 1, 3], None, 1),
    ("bushes", "most rows are children of the first one", [9, 70], None, 60),
    ("sampled_trees", "noise and penalty follow a row's path", [9, 1, 6, 2, 14, 1, 3, 8, 5], _RULES, 3),
    ("no_trees", "an empty batch", [], None, 2),
)


# name, defect, how the other arguments are drawn, what is edited
_EDITED: tuple[tuple[str, str, Callable[..., dict[str, Any]], str], ...] = (
    (
        "masked",
        "bitmasks of rows, beside rows that have none",
        partial(_draw_sampled, [3, 1, 6, 2, 4, 1, 3, 2, 5], 1000, _RULES, None),
        "mask",
    ),
    (
        "adjusted",
        "biases, and counts of emitted tokens along each chain",
        partial(_draw_sampled, [3, 1, 6, 2, 4, 1, 3, 2, 5], 97, _RULES, None),
        "adjust",
    ),
    (
        "edited_trees",
        "counts follow a row's path, and nothing beside it",
        partial(_draw_trees, [9, 1, 6, 2, 14, 1, 3, 8, 5], _RULES, 3),
        "mask, adjust",
    ),
    (
        "edited_nan",
        "a NaN is reported even if a bitmask forbids its token",
        partial(_draw_sampled, [3] * 9, 97, _RULES, float("nan")),
        "mask, adjust",
    ),
    (
        "edited_negative_infinity",
        "a mask that leaves nothing but -inf leaves no token",
        partial(_draw_sampled, [3] * 9, 33, _RULES, float("-inf")),
        "mask, adjust",
    ),
    (
        "edited_no_sequences",
        "an empty batch",
        partial(_draw_sampled, [], 1024, _RULES, None),
        "mask, adjust",
    ),
)


def _cases() -> Iterator[Case]:
    for name, why, counts, vocab_size, special in _GREEDY:
        yield Case(name, why, partial(_draw, counts, vocab_size, special))
    for name, why, counts, vocab_size, special in _SAMPLED:
        yield Case(name, why, partial(_draw_sampled, counts, vocab_size, _RULES, special))
    for name, why, counts, rules, breadth in _TREES:
        yield Case(name, why, partial(_draw_trees, counts, rules, breadth))
    for name, why, draw, edits in _EDITED:
        yield Case(name, why, partial(_edited, draw, edits))


_STEP = "batch 8, K 5, the vocabulary of Qwen3"

OP_CASES = OpCases(
    cases=tuple(_cases()),
    benchmarks=(
        Case("verify", _STEP, partial(_draw, [6] * 8, 151_936, None)),
        Case("sample", f"{_STEP}, at temperature 1", partial(_draw_normal, [6] * 8, _PLAIN)),
        Case("sample_top_p", f"{_STEP}, top_p 0.9", partial(_draw_normal, [6] * 8, _RULES[1])),
        Case("sample_top_k", f"{_STEP}, top_k 20", partial(_draw_normal, [6] * 8, _RULES[2])),
        Case(
            "masked", f"{_STEP}, greedy, bitmasks", partial(_edited, partial(_draw_normal, [6] * 8, _GREEDILY), "mask")
        ),
    ),
    bytes_moved=_bytes_moved,
)
