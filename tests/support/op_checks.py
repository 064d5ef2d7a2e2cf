"""Checks of an op's implementations: against the oracle, for the same bits, and for rows computed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.common import recurrences
from bench.common.correctness_gate import exact_part, rounded_part
from bench.common.references import grouped_quantized_linear_in_float64, quantized_linear_in_float64
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.ops import BACKENDS, Op, all_ops, registry
from support.op_cases import attention_in_fp64

# Backends whose kernels run as NumPy, a hundred times slower.
INTERPRETED = {"triton"} if registry.INTERPRETING else set()
# The launchers in Triton: each op's module and function.
TRITON_FUNCTIONS = {
    op.name: op.implementations["triton"].split(":") for op in all_ops().values() if "triton" in op.implementations
}


def device_for(op: Op, backend: str) -> torch.device:
    """Return the device to run it on here; skips with the reason if there is none."""
    reason = op.why_unavailable(backend)
    here = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    served = [name for name in BACKENDS[backend].device_types if name in here] if reason is None else []
    if not served:
        pytest.skip(reason or f"{backend} serves {BACKENDS[backend].device_types}, not {sorted(here)}")
    return torch.device(served[0])


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield from tensors(list(vars(value).values()))
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def same_bits(first: Any, second: Any) -> bool:
    """torch.equal, but for NaNs (equal to themselves) and signed zeros (not equal)."""

    def described(value: Any) -> list[tuple[Any, ...]]:
        # a clone, because contiguous() leaves an empty tensor the strides that view() then refuses
        each = [tensor.cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors(value)]
        return [(t.dtype, t.shape, t.flatten().view(torch.uint8).numpy().tobytes()) for t in each]

    return described(first) == described(second)


# An op that is not exact needs its definition in fp64 here, so that the oracle's own error is known.
def linear_in_float64(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    products = rows.cpu().double() @ weight.cpu().double().T
    return products if bias is None else products + bias.cpu().double()


def grouped_linear_in_float64(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    ids = expert_ids.cpu()
    lines = rows.cpu().double().expand(-1, ids.shape[1], -1)
    products = torch.einsum("tci,tcoi->tco", lines, weight.cpu().double()[ids])
    return products if bias is None else products + bias.cpu().double()[ids]


REFERENCES: dict[str, Callable[..., Any]] = {
    "paged_attention": attention_in_fp64,
    "linear": linear_in_float64,
    "quantized_linear": lambda **args: quantized_linear_in_float64(**args).cpu(),
    "grouped_linear": grouped_linear_in_float64,
    "grouped_quantized_linear": lambda **args: grouped_quantized_linear_in_float64(**args).cpu(),
    "conv_rows_": recurrences.conv_in_float64,
    "linear_attention_rows_": recurrences.linear_attention_in_float64,
    "selective_scan_rows_": recurrences.scan_in_float64,
}


Make = Callable[[], dict[str, Any]]


def assert_implementation_agrees(op: Op, run: Callable[..., Any], make: Make, make_plain: Make | None = None) -> None:
    """``run`` agrees with the oracle on the arguments of ``make``, also in what it writes to them.

    ``make_plain`` makes the same numbers for the oracle, if they have another layout for ``run``.
    """
    make_plain = make_plain or make
    args, oracle_args = make(), make_plain()
    got, oracle = run(**args), op.load("torch")(**oracle_args)
    assert same_bits(exact_part(op, args), exact_part(op, oracle_args)), "the arguments were changed in another way"
    if not op.exact:
        got, oracle, oracle_args = rounded_part(op, got, args), rounded_part(op, oracle, oracle_args), make_plain()
    assert_agrees(op, got, oracle, oracle_args)


def assert_agrees(op: Op, got: Any, oracle: Any, args: dict[str, Any]) -> None:
    """Exact ops bit by bit; others within twice the oracle's own error against fp64 plus one rounding unit."""
    if op.exact:
        assert same_bits(got, oracle)
        return
    for own, other, truth in zip(*map(tensors, (got, oracle, REFERENCES[op.name](**args))), strict=True):
        assert (own.dtype, own.shape) == (other.dtype, other.shape)
        exact = truth.cpu()
        error, oracle_error, largest = map(largest_of, (own.cpu() - exact, other.cpu() - exact, exact))
        assert error <= 2 * oracle_error + torch.finfo(other.dtype).eps * largest


def largest_of(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def assert_rows_independent(attention: Callable[..., Tensor], args: dict[str, Any], chunk: int) -> None:
    """``chunk`` rows of one sequence alone have the bits they have in the whole batch."""
    whole, batch = attention(**args), args["batch"]
    starts = batch.cu_seqlens_q.tolist()
    for b, context in enumerate(batch.seqused_k.tolist()):
        for first in range(starts[b], starts[b + 1], chunk):
            last = min(first + chunk, starts[b + 1])
            seen = context - (starts[b + 1] - last)
            part = PagedBatch(
                block_table=batch.block_table[b : b + 1],
                cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
                seqused_k=torch.tensor([seen], dtype=torch.int32),
                max_seqlen_q=last - first,
                max_seqlen_k=seen,
            )
            alone = attention(**{**args, "query": args["query"][first:last], "batch": part})
            assert same_bits(alone, whole[first:last])


def long_prefill(dtype: torch.dtype) -> dict[str, Any]:
    """A prompt of 203 rows beside one of 70: several tiles and tasks of the kernel, none filled evenly."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 40, 8, 2, 24, generator=generator).to(dtype)
    return {
        "query": torch.randn(273, 4, 24, generator=generator).to(dtype),
        "kv": (kv[0], kv[1]),
        "batch": PagedBatch(
            block_table=torch.cat([torch.arange(1, 27), torch.arange(9, 35)]).int().view(2, 26),
            cu_seqlens_q=torch.tensor([0, 203, 273], dtype=torch.int32),
            seqused_k=torch.tensor([203, 70], dtype=torch.int32),
            max_seqlen_q=203,
            max_seqlen_k=203,
        ),
        "params": AttentionParams(24**-0.5),
    }
