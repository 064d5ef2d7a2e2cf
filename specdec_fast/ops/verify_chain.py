"""The op ``verify_chain``: which draft tokens, of a chain or a tree, the target itself would have emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.ops.checks import FLOATS, expect, expect_offsets, expect_tensor
from specdec_fast.ops.registry import Case, Op
from specdec_fast.ops.sampling import INVALID_TOKEN, sampled_tokens

__all__ = ["INVALID_TOKEN", "verify_chain"]


def verify_chain(
    logits: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    sampling: Sampling | None = None,
    parents: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compare every draft token with the target's own choice.

    Sequence b has rows ``cu_seqlens[b]:cu_seqlens[b + 1]``: its last committed token, then its draft tokens. The logits
    of row j determine the target's token after that row, which is compared with the draft token in row j + 1.

    In a tree, the target's token after a row is compared with the tokens of the row's children. The first child that
    equals it is accepted, and its own children are next. A row's depth takes the place of j, in the noise too.

    Without ``sampling``, the target's token is the most likely one, among equals the lowest id. With ``sampling``,
    every row chooses in float64 by these rules:

    1. the logits of seen tokens are divided by the repetition penalty (negative ones are multiplied), each token once;
       seen tokens are the sequence's ``seen_ids`` and its tokens in rows 0 to j (in a tree, those on the path to j);
    2. at temperature 0, or if the largest logit is infinite, the largest logit wins;
    3. scores are the differences to the largest logit, divided by the temperature;
    4. ``top_k``, then ``top_p``, then ``min_p`` keep scores down to a threshold, equal scores together;
    5. the largest sum of a kept score and its noise (``ops/sampling.py``) wins, among equals the lowest id.

    Args:
        logits: ``[T, vocab_size]`` of fp32, fp16 or bf16.
        token_ids: ``[T]`` int64, the token of each row.
        cu_seqlens: ``[B + 1]`` int32; every sequence has at least one row.
        sampling: how each sequence chooses its tokens; None: all greedily.
        parents: ``[T]`` int32, for trees: of each row its parent, an earlier row of its sequence, counted from the
            sequence's first row, which has -1. None: every row's parent is the row before it.

    Returns:
        ``target_tokens [T]`` int64: the choice of each row, -1 if the row holds a NaN; ``num_accepted [B]`` int32:
        draft tokens equal to the target's, up to the first that differs; ``next_tokens [B]`` int64: the target's token
        after these (correction or bonus; -1 if NaN); with ``parents`` also ``accepted_rows [T]`` int32: from each
        sequence's first row on, the accepted rows, counted from that row, in the order of their depth; then -1.
    """
    if sampling is None:
        best = logits.argmax(dim=-1)  # torch returns the first of equal maxima
        target_tokens = torch.where(logits.isnan().any(dim=-1), INVALID_TOKEN, best)
    else:
        target_tokens = sampled_tokens(logits, token_ids, cu_seqlens, sampling, parents)
    row_tokens = token_ids.tolist()
    wanted = target_tokens.tolist()
    num_accepted, next_tokens, accepted_rows = _accepted(row_tokens, wanted, cu_seqlens, parents)
    outputs = (
        target_tokens,
        torch.tensor(num_accepted, dtype=torch.int32, device=logits.device),
        torch.tensor(next_tokens, dtype=torch.int64, device=logits.device),
    )
    if parents is None:
        return outputs
    return (*outputs, torch.tensor(accepted_rows, dtype=torch.int32, device=logits.device))


def _accepted(
    row_tokens: list[int], wanted: list[int], cu_seqlens: Tensor, parents: Tensor | None
) -> tuple[list[int], list[int], list[int]]:
    num_accepted = []
    next_tokens = []
    accepted_rows = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        above = range(-1, stop - start - 1) if parents is None else parents[start:stop].tolist()
        path = _accepted_path(row_tokens[start:stop], wanted[start:stop], above)
        num_accepted.append(len(path))
        next_tokens.append(wanted[start + (path[-1] if path else 0)])
        accepted_rows += [*path, *[-1] * (stop - start - len(path))]
    return num_accepted, next_tokens, accepted_rows


def _accepted_path(row_tokens: list[int], wanted: list[int], parents: Sequence[int]) -> list[int]:
    path = []
    row = 0
    for child in range(1, len(row_tokens)):  # parents precede their children
        if parents[child] == row and row_tokens[child] == wanted[row]:
            path.append(child)
            row = child
    return path


_SAMPLING_DTYPES = {
    "temperatures": torch.float64,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "repetition_penalties": torch.float64,
    "seeds": torch.int64,
    "positions": torch.int64,
}


def _check(
    logits: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    sampling: Sampling | None = None,
    parents: Tensor | None = None,
) -> None:
    rows = logits.shape[0]
    device = logits.device
    expect_tensor("logits", logits, (None, None), FLOATS, device)
    expect_tensor("token_ids", token_ids, (rows,), (torch.int64,), device)
    expect_tensor("cu_seqlens", cu_seqlens, (None,), (torch.int32,), device)
    expect(logits.shape[1] > 0, "logits has an empty vocabulary.")
    expect(token_ids.is_contiguous() and cu_seqlens.is_contiguous(), "token_ids and cu_seqlens must be contiguous.")
    expect_offsets("cu_seqlens", cu_seqlens, rows, strictly=True)
    if sampling is not None:
        _check_sampling(sampling, cu_seqlens.numel() - 1, device)
    if parents is not None:
        expect_tensor("parents", parents, (rows,), (torch.int32,), device)
        expect(parents.is_contiguous(), "parents must be contiguous.")
        _check_parents(parents, cu_seqlens)


def _check_parents(parents: Tensor, cu_seqlens: Tensor) -> None:
    """Check that parents precede their children; only on the CPU, because on a device it would wait."""
    if parents.device.type != "cpu":
        return
    for start, stop in pairwise(cu_seqlens.tolist()):
        own = parents[start:stop].tolist()
        is_tree = own[0] == -1 and all(0 <= parent < row for row, parent in enumerate(own[1:], start=1))
        expect(is_tree, f"parents of a sequence are {own}; expected -1, and then earlier rows of that sequence.")


def _check_sampling(sampling: Sampling, batch_size: int, device: torch.device) -> None:
    for name, dtype in _SAMPLING_DTYPES.items():
        expect_tensor(name, getattr(sampling, name), (batch_size,), (dtype,), device)
    expect_tensor("seen_ids", sampling.seen_ids, (None,), (torch.int64,), device)
    expect_tensor("cu_seen", sampling.cu_seen, (batch_size + 1,), (torch.int32,), device)
    expect(all(tensor.is_contiguous() for tensor in vars(sampling).values()), "sampling's tensors must be contiguous.")
    expect_offsets("cu_seen", sampling.cu_seen, sampling.seen_ids.numel(), strictly=False)


def _make(
    counts: list[int],
    vocab_size: int,
    special: float | None,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Make random logits that accept some of the draft tokens; one in 64 logits is ``special``."""
    rows = sum(counts)
    # few distinct values, so that ties at the maximum are frequent
    logits = torch.randint(-40, 40, (rows, vocab_size), generator=generator, device="cpu").to(dtype) / 4
    if special == 0:
        # so that a few zeros are the largest, and the first of them is as often positive as negative
        is_zero = torch.rand(rows, vocab_size, generator=generator, device="cpu") < 1 / 64
        logits = torch.where(is_zero, 0, -1 - logits.abs())
    if special is not None:
        hit = torch.rand(rows, vocab_size, generator=generator, device="cpu") < 1 / 64
        logits = logits.masked_fill(hit, special)
    best = logits.argmax(dim=-1).roll(1)  # the token that is accepted in every row, except a sequence's first
    guess = torch.randint(0, vocab_size, (rows,), generator=generator, device="cpu")
    token_ids = torch.where(torch.rand(rows, generator=generator, device="cpu") < 0.7, best, guess)
    cu_seqlens = torch.tensor([0, *counts], dtype=torch.int32, device="cpu").cumsum(0).to(torch.int32)
    return {
        "logits": logits.to(device),
        "token_ids": token_ids.to(device),
        "cu_seqlens": cu_seqlens.to(device),
    }


# temperature, top_k, top_p, min_p, repetition penalty
_Rule = tuple[float, int, float, float, float]
_GREEDY: _Rule = (0.0, 0, 1.0, 0.0, 1.0)
_PLAIN: _Rule = (1.0, 0, 1.0, 0.0, 1.0)
_RULES: tuple[_Rule, ...] = (
    _PLAIN,
    (0.7, 0, 0.9, 0.0, 1.0),
    (1.3, 20, 1.0, 0.0, 1.0),
    (1.0, 0, 1.0, 0.05, 1.0),
    (0.8, 40, 0.95, 0.01, 1.2),
    _GREEDY,
    (0.0, 3, 0.5, 0.5, 1.3),  # greedy: the penalty has an effect, the filters have none
    (5.0, 0, 1.0, 0.0, 0.7),
    (1e-3, 1, 0.1, 1.0, 1.0),
)


def _make_sampled(
    counts: list[int],
    vocab_size: int,
    rules: tuple[_Rule, ...],
    special: float | None,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Make logits as above; sequence b samples by rule ``b % len(rules)``. Most drafts are what the oracle samples."""
    args = _make(counts, vocab_size, special, generator, dtype, device)
    batch_size = len(counts)
    chosen = [rules[b % len(rules)] for b in range(batch_size)]
    numbers = list(_SAMPLING_DTYPES.items())[:5]
    seen = torch.randint(0, 30, (batch_size,), generator=generator, device="cpu")
    sampling = {
        **{
            name: torch.tensor([rule[i] for rule in chosen], dtype=kind, device="cpu")
            for i, (name, kind) in enumerate(numbers)
        },
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator, device="cpu"),
        "positions": torch.randint(0, 2**34, (batch_size,), generator=generator, device="cpu"),
        # some ids twice, and some outside the vocabulary, as with a draft model whose vocabulary is larger
        "seen_ids": torch.randint(vocab_size + vocab_size // 8, (int(seen.sum()),), generator=generator, device="cpu"),
        "cu_seen": torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), seen.cumsum(0)]).int(),
    }
    args["sampling"] = Sampling(**{name: tensor.to(device) for name, tensor in sampling.items()})
    agrees = (torch.rand(sum(counts), generator=generator, device="cpu") < 0.7).to(device)
    args["token_ids"] = torch.where(agrees, sampled_tokens(**args).clamp(min=0).roll(1), args["token_ids"])
    return args


def _make_trees(
    counts: list[int],
    vocab_size: int,
    rules: tuple[_Rule, ...] | None,
    breadth: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Make trees in which half of the rows hold the token that their parent chooses; siblings may hold the same one.

    ``counts`` are the rows of each sequence; ``rules``: by which sequences sample, None: all are greedy. A row's parent
    is one of ``breadth`` rows before it; 1 makes chains.
    """
    if rules is None:
        args = _make(counts, vocab_size, None, generator, dtype, device)
    else:
        args = _make_sampled(counts, vocab_size, rules, None, generator, dtype, device)
    back = torch.randint(1, breadth + 1, (sum(counts),), generator=generator, device="cpu")
    rows = torch.cat([torch.arange(count, device="cpu") for count in counts]) if counts else back
    parents = torch.where(rows > 0, (rows - back).clamp(min=0), -1).int()
    above = torch.arange(len(rows), device="cpu") - rows + parents.clamp(min=0)  # counted in the batch
    args["parents"] = parents.to(device)
    chosen = sampled_tokens(**args) if rules else args["logits"].argmax(dim=-1)
    agrees = (torch.rand(sum(counts), generator=generator, device="cpu") < 0.5).to(device)
    args["token_ids"] = torch.where(agrees, chosen.clamp(min=0)[above.to(device)], args["token_ids"])
    return args


def _make_normal(
    counts: list[int],
    vocab_size: int,
    rule: _Rule,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Make logits that are spread like those of language models: ten tokens share most of the mass."""
    args = _make_sampled(counts, 2, (rule,), None, generator, dtype, device)
    logits = 2.5 * torch.randn(sum(counts), vocab_size, generator=generator, device="cpu")
    logits[:, :10] += 12
    return {**args, "logits": logits.to(dtype).to(device)}


_SAMPLED_CASES: tuple[tuple[str, str, list[int], int, float | None], ...] = (
    ("sampled", "every filter and penalty, beside greedy sequences", [3, 1, 6, 2, 4, 1, 3, 2, 5], 1000, None),
    (
        "sampled_tiny_vocabulary",
        "fewer tokens than a noise counter has words; filters that keep all or one",
        [2] * 9,
        3,
        None,
    ),
    ("sampled_odd_vocabulary", "a tail after the last full block, with the last counter's words", [1] * 9, 4099, None),
    ("sampled_nan", "rows with a NaN must be reported, not sampled", [3] * 9, 97, float("nan")),
    ("sampled_positive_infinity", "the first infinity wins, whatever the noise", [3] * 9, 130, float("inf")),
    ("sampled_negative_infinity", "masked tokens are never sampled", [3] * 9, 130, float("-inf")),
    ("sampled_no_sequences", "an empty batch", [], 1024, None),
)


_TREE_CASES: tuple[tuple[str, str, list[int], tuple[_Rule, ...] | None, int], ...] = (
    ("trees", "children of several rows, some with one token", [12, 1, 7, 2, 20, 2, 3], None, 4),
    ("deep_trees", "paths of more rows than a block of the walk", [150, 3], None, 2),
    ("chains_with_parents", "a chain, described as a tree", [6, 1, 3], None, 1),
    ("bushes", "most rows are children of the first one", [9, 70], None, 60),
    ("sampled_trees", "noise and penalty follow a row's path", [9, 1, 6, 2, 14, 1, 3, 8, 5], _RULES, 3),
    ("no_trees", "an empty batch", [], None, 2),
)


def _cases() -> Iterator[Case]:
    grid: tuple[tuple[str, str, list[int], int, float | None], ...] = (
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
    for name, why, counts, vocab_size, special in grid:
        yield Case(name, why, partial(_make, counts, vocab_size, special))
    for name, why, counts, vocab_size, special in _SAMPLED_CASES:
        yield Case(name, why, partial(_make_sampled, counts, vocab_size, _RULES, special))
    for name, why, counts, rules, breadth in _TREE_CASES:
        yield Case(name, why, partial(_make_trees, counts, 97, rules, breadth))


def _benchmarks() -> Iterator[Case]:
    why = "batch 8, K 5, the vocabulary of Qwen3"
    yield Case("verify", why, partial(_make, [6] * 8, 151_936, None))
    yield Case("sample", f"{why}, at temperature 1", partial(_make_normal, [6] * 8, 151_936, _PLAIN))
    yield Case("sample_top_p", f"{why}, top_p 0.9", partial(_make_normal, [6] * 8, 151_936, _RULES[1]))
    yield Case("sample_top_k", f"{why}, top_k 20", partial(_make_normal, [6] * 8, 151_936, _RULES[2]))


def _bytes_moved(logits: Tensor, *_: Any, **__: Any) -> int:
    return logits.numel() * logits.element_size()


OP = Op(
    name="verify_chain",
    implementations={
        "torch": "specdec_fast.ops.verify_chain:verify_chain",
        "cpp": "specdec_fast.ops.cpp:verify_chain",
        "triton": "specdec_fast.triton_kernels.verify_chain:verify_chain",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
)
