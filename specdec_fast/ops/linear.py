"""The op ``linear``: rows times a weight matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.registry import Case, Op


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by weights, as ``torch.nn.functional.linear`` does: ``[T, out_features]`` in the dtype of ``rows``.

    Sums are in fp32 and rounded once. The C++ and Triton implementations add an output's products in one order,
    whatever the number of rows, so a row has the same bits alone and among others. This implementation is PyTorch's
    own, which does not promise that.

    Args:
        rows: ``[T, in_features]`` of fp32, fp16 or bf16.
        weight: ``[out_features, in_features]``, contiguous, of the same dtype.
        bias: ``[out_features]`` of the same dtype, or None.
    """
    return torch.nn.functional.linear(rows, weight, bias)


def _check(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expect_tensor("rows", rows, (None, None), FLOATS, rows.device)
    expect_tensor("weight", weight, (None, rows.shape[1]), (rows.dtype,), rows.device)
    expect(rows.shape[1] > 0, "rows have no features.")
    expect(weight.is_contiguous(), "weight must be contiguous.")
    if bias is not None:
        expect_tensor("bias", bias, (weight.shape[0],), (rows.dtype,), rows.device)
        expect(bias.is_contiguous(), "bias must be contiguous.")


def _make(
    shape: tuple[int, int, int],
    has_bias: bool,
    layout: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Make normal numbers; ``shape``: rows, in_features, out_features."""
    num_rows, in_features, out_features = shape
    rows = torch.randn(num_rows, in_features + 3, generator=generator, device="cpu").to(dtype)
    rows = rows[:, 1 : in_features + 1] if layout == "sliced" else rows[:, :in_features].contiguous()
    weight = (torch.randn(out_features, in_features, generator=generator, device="cpu") / in_features**0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator, device="cpu").to(dtype) if has_bias else None
    return {"rows": rows.to(device), "weight": weight.to(device), "bias": None if bias is None else bias.to(device)}


def _cases() -> Iterator[Case]:
    grid: tuple[tuple[str, str, tuple[int, int, int], bool, str], ...] = (
        ("linear_one_row", "plain decoding", (1, 96, 64), False, "contiguous"),
        ("linear_rows", "several blocks of rows, and a partial block of outputs", (13, 160, 70), True, "contiguous"),
        ("linear_odd", "features after the last full vector; rows of any alignment", (5, 67, 33), True, "sliced"),
        ("linear_narrow", "less than one vector, a single output", (3, 7, 1), True, "contiguous"),
        ("linear_long", "sums of several chunks and a tail", (2, 2100, 20), False, "contiguous"),
        ("linear_threads", "enough outputs for several threads", (6, 512, 515), True, "contiguous"),
        ("linear_no_rows", "an empty batch", (0, 32, 16), True, "contiguous"),
    )  # fmt: skip
    for name, why, shape, has_bias, layout in grid:
        yield Case(name, why, partial(_make, shape, has_bias, layout))


_BENCHMARKED = (
    ("", (4096, 12_288), "an MLP of Qwen3-8B, whose weights fit into no cache"),
    ("_small", (1024, 3072), "an MLP of Qwen3-0.6B, whose weights fit into the last cache"),
    ("_tiny", (128, 352), "an MLP of the bundled target, whose weights fit into the first caches"),
)


def _benchmarks_of_rows(counts: Iterable[int]) -> Iterator[Case]:
    for suffix, features, what in _BENCHMARKED:
        for num_rows in counts:
            make = partial(_make, (num_rows, *features), False, "contiguous")
            yield Case(f"linear{suffix}_{num_rows}", what, make)


def _benchmarks() -> Iterator[Case]:
    """Plain decoding, a batch, batch 8 with K 5, a prompt, a long prompt."""
    return _benchmarks_of_rows((1, 8, 48, 256, 1024))


def _bytes_moved(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    outputs = rows.shape[0] * weight.shape[0]
    elements = rows.numel() + weight.numel() + outputs + (0 if bias is None else bias.numel())
    return elements * rows.element_size()


OP = Op(
    name="linear",
    implementations={
        "torch": "specdec_fast.ops.linear:linear",
        "cpp": "specdec_fast.ops.cpp:linear",
        "triton": "specdec_fast.triton_kernels.linear:linear",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    benchmarks_of_rows=_benchmarks_of_rows,
    bytes_moved=_bytes_moved,
    exact=False,
    invariant=frozenset({"cpp", "triton"}),
    # The Triton kernel computes fp32 without tensor cores; on an H100 it took 5 times as long as cuBLAS for one row.
    preference={("cuda", torch.float32): ("torch",)},
)
