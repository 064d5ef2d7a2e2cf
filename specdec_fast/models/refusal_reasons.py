"""Finds out why a model computes other logits on a paged KV cache than by itself, for the message of its refusal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Computes the logits ``[n, vocab_size]`` of one sequence from ``[n]`` token ids, and positions if they are not None.
DenseLogits = Callable[[Tensor, Tensor | None], Tensor]


def why_not_reproduced(
    dense_logits: DenseLogits,
    token_ids: Tensor,
    bound: float,
    is_recurrent: bool = False,
    embeddings: nn.Module | None = None,
) -> str:
    """Return what differs from a decoder that pages can serve, as a clause whose subject is the model.

    ``dense_logits`` runs the unmodified model over a text, ``[n]`` int64. ``bound`` is the relative distance from which
    logits differ by more than rounding. A model with recurrent layers may need no positions. ``embeddings`` is the
    module that embeds its tokens.
    """
    positions = torch.arange(len(token_ids), device=token_ids.device)
    half = len(token_ids) // 2
    try:
        expected = dense_logits(token_ids, None)
        if reason := _why_fewer_bits(dense_logits, token_ids, expected, bound):
            return reason
        if embeddings is not None and (reason := _why_rounding(dense_logits, token_ids, expected, bound, embeddings)):
            return reason
        if _distance(dense_logits(token_ids[:half], None), expected[:half]) > bound:
            return "a token attends to later tokens: it is an encoder (some configs need is_decoder=True)"
        if not is_recurrent and torch.equal(dense_logits(token_ids, positions.flip(0)), expected):
            return "it ignores position_ids, so the rows of a batch cannot have positions of their own"
        if _distance(dense_logits(token_ids, positions), expected) > bound:
            return "it computes other logits from position_ids 0, 1, 2, ... than without position_ids"
    except Exception:  # the model's own code may raise anything; the reason is the last one then
        pass
    own = "keeps recurrent states of its own, " if is_recurrent else ""
    return (
        f"it {own}attends by other means than transformers' AttentionInterface, adds terms of its own to the scores, "
        "or computes a row with the others of its forward (as dynamic quantisation does)"
    )


def _why_fewer_bits(dense_logits: DenseLogits, token_ids: Tensor, expected: Tensor, bound: float) -> str:
    """Return why the model multiplies fp32 numbers in fewer bits, which some processors do; empty if it does not."""
    precision = torch.get_float32_matmul_precision()
    if precision == "highest":
        return ""
    torch.set_float32_matmul_precision("highest")
    try:
        distance = _distance(dense_logits(token_ids, None), expected)
    finally:
        torch.set_float32_matmul_precision(precision)
    if distance <= bound:
        return ""
    return (
        f"torch.set_float32_matmul_precision({precision!r}) makes PyTorch multiply its fp32 numbers in fewer bits; set "
        "'highest', or load it in bfloat16"
    )


def _why_rounding(
    dense_logits: DenseLogits, token_ids: Tensor, expected: Tensor, bound: float, embeddings: nn.Module
) -> str:
    """Return that rounding alone changes the logits by more than ``bound``; empty if it does not."""
    eps = torch.finfo(expected.dtype).eps
    hook = embeddings.register_forward_hook(lambda module, given, rows: rows * (1 + eps))
    try:
        distance = _distance(dense_logits(token_ids, None), expected)
    finally:
        hook.remove()
    if not distance > bound:
        return ""
    return (
        f"rounding changes them as much, so nothing can be said in {str(expected.dtype).removeprefix('torch.')} (by "
        f"{distance:.1e}, where its embeddings change in the last bit); load it in a wider dtype"
    )


def _distance(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected.float()).norm() / expected.float().norm())
