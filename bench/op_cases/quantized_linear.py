"""Arguments of ``quantized_linear``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from specdec_fast.quantization.packed_weight import (
    FLOAT8,
    INT8,
    SUPER_GROUP,
    TABLE,
    PackedWeight,
    pack,
    with_super_scales,
)
from specdec_fast.quantization.rounding import ROUNDINGS, rounded

# Values of 4-bit codes: e2m1 of mxfp4, in halves; and numbers that are not whole, as nf4 has.
E2M1 = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0]
WHOLE = [float(value) for value in range(16)]
CURVED = [-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]


def _draw(
    shape: tuple[int, int, int],
    quantization: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    has_bias: bool = False,
) -> dict[str, Any]:
    """Draw normal numbers and round the weights; ``shape``: rows, in_features, out_features."""
    num_rows, in_features, out_features = shape
    rows = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    return {"rows": rows, "weight": rounded(weight, ROUNDINGS[quantization]), "bias": bias}


@dataclass(frozen=True)
class Format:
    """A checkpoint's kind of codes."""

    kind: str
    group_size: int
    table: list[float] | None = None
    has_mins: bool = False
    rounds_rows: bool = False
    scale_dtype: torch.dtype = torch.float32  # int8: with fp16 super-scales


def _draw_codes(
    shape: tuple[int, int, int], form: Format, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Any]:
    """Draw codes; rows are a slice, so that they have any alignment."""
    num_rows, in_features, out_features = shape
    rows = torch.randn(num_rows, in_features + 3, generator=generator).to(dtype)[:, 1 : in_features + 1]
    weight = drawn_weight(in_features, out_features, form, generator)
    return {"rows": rows, "weight": weight, "bias": torch.randn(out_features, generator=generator).to(dtype)}


def drawn_weight(in_features: int, out_features: int, form: Format, generator: torch.Generator) -> PackedWeight:
    """Draw a weight with any codes; products with normal numbers are about 1."""
    num_codes = 256 if form.table is None else 16
    codes = torch.randint(0, num_codes, (out_features, in_features), generator=generator, dtype=torch.uint8)
    if form.kind == FLOAT8:  # no NaNs: 0x7f and 0xff
        codes = torch.where((codes & 127) == 127, codes - 1, codes)
    largest = {INT8: 128.0, FLOAT8: 448.0, TABLE: max(map(abs, form.table or [1.0]))}[form.kind]
    num_groups = -(-in_features // form.group_size)
    scales = torch.rand(out_features, num_groups, generator=generator) / (largest * in_features**0.5)
    mins = torch.randn(out_features, num_groups, generator=generator) / in_features**0.5
    supers = None
    if form.scale_dtype == torch.int8:
        scales, mins = (torch.randint(0, 64, scales.shape, generator=generator) for _ in range(2))
        shape = (2, out_features, -(-in_features // SUPER_GROUP))
        drawn = torch.rand(shape, generator=generator) / (largest * 64 * in_features**0.5)
        supers = (drawn * torch.tensor([1.0, -largest])[:, None, None]).half()
    weight = pack(
        codes,
        scales.to(form.scale_dtype),
        mins.to(form.scale_dtype) if form.has_mins else None,
        None if form.table is None else torch.tensor(form.table),
        form.group_size,
        form.kind,
        form.rounds_rows,
    )
    if supers is not None:
        weight = with_super_scales(weight, supers[0], supers[1] if form.has_mins else None)
    return weight


def _bytes_moved(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> int:
    elements = rows.numel() + len(rows) * weight.out_features + (0 if bias is None else bias.numel())
    return elements * rows.element_size() + weight.nbytes


_BENCHMARKED = (
    ("", (4096, 12_288), "an MLP of Qwen3-8B, whose weights fit into no cache"),
    ("_small", (1024, 3072), "an MLP of Qwen3-0.6B, whose weights fit into the last cache"),
)


def _benchmarks_of_rows(counts: Iterable[int]) -> tuple[Case, ...]:
    return tuple(
        Case(f"quantized_{kind}{suffix}_{num_rows}", f"{kind}, {what}", partial(_draw, (num_rows, *features), kind))
        for suffix, features, what in _BENCHMARKED
        for kind in ROUNDINGS
        for num_rows in counts
    )


MXFP4 = Format(TABLE, 32, E2M1, scale_dtype=torch.bfloat16)
Q4_K = Format(TABLE, 32, WHOLE, has_mins=True, scale_dtype=torch.int8)
Q6_K = Format(INT8, 16, scale_dtype=torch.int8)
AWQ_A8 = Format(TABLE, 128, WHOLE, has_mins=True, rounds_rows=True, scale_dtype=torch.float16)

OP_CASES = OpCases(
    cases=(
        Case("int4_one_row", "plain decoding", partial(_draw, (1, 96, 64), "int4")),
        Case("int8_one_row", "plain decoding", partial(_draw, (1, 96, 64), "int8")),
        Case("int4_a8_one_row", "plain decoding", partial(_draw, (1, 96, 64), "int4-a8")),
        Case("int8_a8_one_row", "plain decoding", partial(_draw, (1, 96, 64), "int8-a8")),
        Case("int4_rows", "partial block, panel and set of rows", partial(_draw, (13, 167, 70), "int4", has_bias=True)),
        Case("int8_rows", "partial block, panel and set of rows", partial(_draw, (13, 167, 70), "int8", has_bias=True)),
        Case("int4_a8_rows", "the same, rounded", partial(_draw, (13, 167, 70), "int4-a8", has_bias=True)),
        Case("int8_a8_rows", "the same, rounded", partial(_draw, (13, 167, 70), "int8-a8", has_bias=True)),
        Case("int4_narrow", "less than one block, a single output", partial(_draw, (3, 7, 1), "int4")),
        Case("int4_a8_threads", "enough outputs for several threads", partial(_draw, (6, 512, 515), "int4-a8")),
        Case("int8_threads", "enough outputs for several threads", partial(_draw, (6, 512, 515), "int8")),
        Case("quantized_no_rows", "an empty batch", partial(_draw, (0, 32, 16), "int4", has_bias=True)),
        Case("float8", "fp8 of a checkpoint", partial(_draw_codes, (5, 130, 33), Format(FLOAT8, 128))),
        Case("mxfp4", "a table, bf16 scales", partial(_draw_codes, (2, 64, 20), MXFP4)),
        Case("mxfp4_a8", "rounded rows", partial(_draw_codes, (9, 64, 20), replace(MXFP4, rounds_rows=True))),
        Case("curved", "a table of fractions", partial(_draw_codes, (3, 96, 40), Format(TABLE, 64, CURVED))),
        Case("mins", "minima in fp32", partial(_draw_codes, (7, 256, 48), Format(TABLE, 32, WHOLE, has_mins=True))),
        Case("q4_k", "minima, two levels", partial(_draw_codes, (7, 800, 48), Q4_K)),
        Case("q4_k_a8", "rounded", partial(_draw_codes, (3, 256, 20), replace(Q4_K, rounds_rows=True))),
        Case("awq_a8", "minima, long groups, rounded rows", partial(_draw_codes, (4, 256, 17), AWQ_A8)),
        Case("q6_k", "short blocks, two levels", partial(_draw_codes, (5, 592, 31), Q6_K)),
        Case("q6_k_a8", "rounded", partial(_draw_codes, (6, 80, 31), replace(Q6_K, rounds_rows=True))),
    ),
    benchmarks=_benchmarks_of_rows((1, 8, 48)),  # plain decoding, a batch, batch 8 with K 5
    bytes_moved=_bytes_moved,
    benchmarks_of_rows=_benchmarks_of_rows,
)
