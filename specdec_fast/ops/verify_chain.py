"""The op ``verify_chain``: which draft tokens, of a chain or a tree, the target itself would have emitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.ops.checks import FLOATS, expect, expect_offsets, expect_tensor
from specdec_fast.ops.registry import Op
from specdec_fast.ops.sampling import INVALID_TOKEN, sampled_tokens
from specdec_fast.request.token_masks import num_words

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

    1. tokens that the row's bitmask does not allow get the logit -inf;
    2. the sequence's biases are added;
    3. the logits of seen tokens are divided by the repetition penalty (negative ones are multiplied), each token once;
       seen tokens are the sequence's ``seen_ids`` and its tokens in rows 0 to j (in a tree, those on the path to j);
    4. of emitted tokens, the frequency penalty is subtracted as often as each was emitted, then the presence penalty
       once; emitted tokens are the ``seen_ids`` after the prompt's, which end with row 0's token, and the tokens in
       rows 1 to j;
    5. at temperature 0, or if the largest logit is infinite, the largest logit wins;
    6. scores are the differences to the largest logit, divided by the temperature;
    7. ``top_k``, then ``top_p``, then ``min_p`` keep scores down to a threshold, equal scores together;
    8. the largest sum of a kept score and its noise (``ops/sampling.py``) wins, among equals the lowest id.

    Args:
        logits: ``[T, vocab_size]`` of fp32, fp16 or bf16.
        token_ids: ``[T]`` int64, the token of each row.
        cu_seqlens: ``[B + 1]`` int32; every sequence has at least one row.
        sampling: how each sequence chooses its tokens; None: all greedily.
        parents: ``[T]`` int32, for trees: of each row its parent, an earlier row of its sequence, counted from the
            sequence's first row, which has -1. None: every row's parent is the row before it.

    Returns:
        ``target_tokens [T]`` int64: the choice of each row, -1 if the row holds a NaN, or its bitmask forbids a token
        and no token is left whose logit is above -inf; ``num_accepted [B]`` int32: draft tokens equal to the target's,
        up to the first that differs; ``next_tokens [B]`` int64: the target's token after these (correction or bonus; -1
        if there is none); with ``parents`` also ``accepted_rows [T]`` int32: from each sequence's first row on, the
        accepted rows, counted from that row, in the order of their depth; then -1.
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
_ADJUSTMENT_DTYPES = {
    "presence_penalties": torch.float64,
    "frequency_penalties": torch.float64,
    "num_prompt": torch.int32,
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
        _check_sampling(sampling, cu_seqlens.numel() - 1, logits)
    if parents is not None:
        expect_tensor("parents", parents, (rows,), (torch.int32,), device)
        expect(parents.is_contiguous(), "parents must be contiguous.")
        _check_parents(parents, cu_seqlens)


def _check_parents(parents: Tensor, cu_seqlens: Tensor) -> None:
    """Check that parents precede their children; only on the CPU, because on a device it would wait."""
    if parents.device.type != "cpu":
        return
    for start, stop in pairwise(cu_seqlens.tolist()):
        above = parents[start:stop].tolist()
        is_tree = above[0] == -1 and all(0 <= parent < row for row, parent in enumerate(above[1:], start=1))
        expect(is_tree, f"parents of a sequence are {above}; expected -1, and then earlier rows of that sequence.")


def _check_sampling(sampling: Sampling, batch_size: int, logits: Tensor) -> None:
    device = logits.device
    for name, dtype in _SAMPLING_DTYPES.items():
        expect_tensor(name, getattr(sampling, name), (batch_size,), (dtype,), device)
    expect_tensor("seen_ids", sampling.seen_ids, (None,), (torch.int64,), device)
    expect_tensor("cu_seen", sampling.cu_seen, (batch_size + 1,), (torch.int32,), device)
    tensors = [value for value in vars(sampling).values() if isinstance(value, Tensor)]
    if sampling.allowed is not None:
        words = num_words(logits.shape[1])
        expect_tensor("allowed", sampling.allowed, (logits.shape[0], words), (torch.int32,), device)
    if (added := sampling.adjustments) is not None:
        for name, dtype in _ADJUSTMENT_DTYPES.items():
            expect_tensor(name, getattr(added, name), (batch_size,), (dtype,), device)
        expect_tensor("bias_ids", added.bias_ids, (None,), (torch.int64,), device)
        expect_tensor("bias_values", added.bias_values, (added.bias_ids.numel(),), (torch.float64,), device)
        expect_tensor("cu_bias", added.cu_bias, (batch_size + 1,), (torch.int32,), device)
        expect_offsets("cu_bias", added.cu_bias, added.bias_ids.numel(), strictly=False)
        tensors += vars(added).values()
    expect(all(tensor.is_contiguous() for tensor in tensors), "sampling's tensors must be contiguous.")
    expect_offsets("cu_seen", sampling.cu_seen, sampling.seen_ids.numel(), strictly=False)
    if added is not None:
        _check_prompts(added.num_prompt, sampling.cu_seen)


def _check_prompts(num_prompt: Tensor, cu_seen: Tensor) -> None:
    """Check that prompts are no longer than the seen tokens; only on the CPU, because on a device it would wait."""
    if num_prompt.device.type == "cpu":
        fits = (num_prompt >= 0) & (num_prompt <= cu_seen.diff())
        expect(bool(fits.all()), f"num_prompt is {num_prompt.tolist()}; expected at most the numbers of seen_ids.")


OP = Op(
    name="verify_chain",
    implementations={
        "torch": "specdec_fast.ops.verify_chain:verify_chain",
        "cpp": "specdec_fast.ops.cpp:verify_chain",
        "triton": "specdec_fast.triton_kernels.verify_chain:verify_chain",
    },
    check=_check,
)
