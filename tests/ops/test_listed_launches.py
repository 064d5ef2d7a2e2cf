"""Launchers ask for no compilation that the kernel files do not list; kernels are replaced by recorders for that."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.quantization.packed_weight import INT8, TABLE, PackedWeight
from specdec_fast.triton_kernels import kernel_modules
from support.grids import each_value_once
from support.op_cases import make
from support.op_checks import TRITON_FUNCTIONS

pytest.importorskip("triton")


def append_args(heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    keys, values = (torch.empty(3, 4, heads, dim, dtype=dtype) for dim in (head_dim, value_dim))
    new = [torch.empty(2, heads, dim, dtype=dtype) for dim in (head_dim, value_dim)]
    slots = torch.tensor([4, 5], dtype=torch.int32)
    return {"key_cache": keys, "value_cache": values, "key": new[0], "value": new[1], "slot_mapping": slots}


def verify_args(vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    return {
        "logits": torch.empty(2, vocab_size, dtype=dtype),
        "token_ids": torch.zeros(2, dtype=torch.int64),
        "cu_seqlens": offsets,
    }


def sampled_args(vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    numbers = {"temperatures": one, "top_p": one, "min_p": one, "repetition_penalties": one, "top_k": zero.int()}
    sampling = Sampling(**numbers, seeds=zero, positions=zero, seen_ids=zero, cu_seen=offsets)
    return {**verify_args(vocab_size, dtype), "sampling": sampling}


def edited_args(case: str, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    args = make("verify_chain", case, dtype)
    logits = torch.empty(len(args["logits"]), vocab_size, dtype=dtype)
    allowed = torch.empty(len(logits), -(-vocab_size // 32), dtype=torch.int32)
    sampling = replace(args["sampling"], allowed=None if args["sampling"].allowed is None else allowed)
    return {**args, "logits": logits, "sampling": sampling}


def compact_args(page_size: int, heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    args = make("compact_kv_", "accepted_path", dtype)
    return {**args, "kv_cache": torch.empty(2, 2, 9, page_size, heads, head_dim, dtype=dtype)}


def realign_args(head_dim: int, offset: int, dtype: torch.dtype) -> dict[str, Any]:
    size = (5, 2, 101, head_dim)
    tensor = torch.empty(5 * 2 * 101 * head_dim + offset, dtype=dtype)[offset:].view(size)
    return {**make("realign_kv_", "step", dtype), "layers": [(tensor, tensor)] * 2}


def linear_args(in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    rows, weight = torch.empty(2, in_features, dtype=dtype), torch.empty(out_features, in_features, dtype=dtype)
    return {"rows": rows, "weight": weight, "bias": torch.empty(out_features, dtype=dtype) if has_bias else None}


def grouped_args(in_features: int, choices: tuple[int, int], layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """``choices``: vectors of each row, and experts of each row."""
    out_features = 33 if "odd" in layout else 64
    weight = torch.empty(8, out_features, in_features, dtype=dtype)
    return {
        "rows": torch.empty(2, choices[0], in_features, dtype=dtype),
        "expert_ids": torch.zeros(2, choices[1], dtype=torch.int64),
        "weight": weight.mT.contiguous().mT if "transposed" in layout else weight,
        "bias": torch.empty(8, out_features, dtype=dtype) if "bias" in layout else None,
    }


def quantized_args(out_features: int, form: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    words = 4 if form["kind"] == TABLE else 8
    panels = out_features // 16
    scales = torch.empty(panels, 128, 16, dtype=form.get("scale_dtype", torch.float16))
    weight = PackedWeight(
        codes=torch.empty(panels, 128, words, 16, dtype=torch.int32),
        scales=scales,
        mins=scales if "has_mins" in form else None,
        table=torch.empty(16) if form["kind"] == TABLE else None,
        in_features=4096,
        out_features=out_features,
        group_size=32,
        kind=form["kind"],
        rounds_rows="rounds_rows" in form,
    )
    if scales.dtype == torch.int8:
        supers = torch.empty(panels, 16, 16, dtype=torch.float16)
        weight = replace(weight, super_scales=supers, super_mins=None if weight.mins is None else supers)
    return {"rows": torch.empty(2, 4096, dtype=dtype), "weight": weight}


def grouped_quantized_args(num_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    codes = torch.empty(128, 96, 64, 4, 16, dtype=torch.int32)
    scales = torch.empty(128, 96, 64, 16, dtype=torch.float16)
    return {
        "rows": torch.empty(num_rows, 1, 2048, dtype=dtype),
        "expert_ids": torch.zeros(num_rows, 8, dtype=torch.int64),
        "weight": PackedWeight(codes, scales, None, torch.empty(16), 2048, 1536, 32, TABLE),
    }


def conv_args(kernel: int, has_bias: bool, activation: str | None, dtype: torch.dtype) -> dict[str, Any]:
    args = make("conv_rows_", "mixed", dtype)
    weight = torch.empty(24, kernel, dtype=dtype)
    return {**args, "weight": weight, "bias": args["bias"] if has_bias else None, "activation": activation}


def attention_args(case: str, key_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    args = make("linear_attention_rows_", case, dtype)
    states, kept = args["pools"]
    log_decay = args["log_decay"]
    if log_decay.dim() == 3:  # a factor for each key channel
        log_decay = torch.empty(*log_decay.shape[:2], key_dim)
    return {**args, "log_decay": log_decay, "pools": (torch.empty(*states.shape[:2], key_dim, value_dim), kept)}


# The sizes that the kernels' variants() name, where the sizes are part of a compilation.
LAUNCHES: dict[str, list[Callable[[torch.dtype], dict[str, Any]]]] = {
    "append_kv_": [
        lambda dtype, sizes=sizes: append_args(*sizes, dtype) for sizes in ((8, 128, 128), (3, 20, 20), (16, 192, 128))
    ],
    "verify_chain": [
        lambda dtype, v=v, args=args: args(v, dtype)
        for args in (verify_args, sampled_args)
        for v in (32_000, 151_936, 262_144)
    ]
    + [lambda dtype, case=case: edited_args(case, 151_936, dtype) for case in ("masked", "adjusted", "edited_trees")],
    "linear": [
        lambda dtype, i=i, o=o, bias=bias: linear_args(i, o, bias, dtype)
        for i, o, bias in (
            (2048, 1024, False),
            (896, 896, True),
            (1024, 3072, False),
            (1024, 151_936, False),
            (67, 33, True),
        )
    ],
    "grouped_linear": [
        lambda dtype, i=i, c=c, layout=layout: grouped_args(i, c, layout, dtype)
        for i, c, layout in (
            (2048, (1, 8), ""),
            (768, (8, 8), ""),
            (2880, (1, 4), "transposed bias"),
            (67, (2, 2), "odd bias"),
        )
    ],
    "quantized_linear": [
        lambda dtype, o=o, form=form: quantized_args(o, form, dtype)
        for o, form in (
            (4096, {"kind": TABLE}),
            (4096, {"kind": INT8, "rounds_rows": True}),
            (4096, {"kind": TABLE, "has_mins": True, "scale_dtype": torch.float32}),
            (4096, {"kind": TABLE, "has_mins": True, "scale_dtype": torch.int8}),
        )
    ],
    "grouped_quantized_linear": [lambda dtype: grouped_quantized_args(1, dtype)],
    "noise_words": [lambda dtype, case=case: make("noise_words", case, dtype) for case in ("level", "wide")],
    "compact_kv_": [lambda dtype: compact_args(16, 8, 128, dtype), lambda dtype: compact_args(4, 3, 20, dtype)],
    "realign_kv_": [
        lambda dtype, d=d, o=o: realign_args(d, o, dtype) for d, o in ((128, 0), (64, 0), (20, 0), (128, 1))
    ],
    "conv_rows_": [
        lambda dtype, sizes=sizes: conv_args(*sizes, dtype)
        for sizes in ((4, False, "silu"), (4, True, "silu"), (3, False, None), (4, True, None))
    ],
    "linear_attention_rows_": [
        lambda dtype, sizes=sizes: attention_args(*sizes, dtype)
        for sizes in (
            ("gated_delta", 128, 128),
            ("delta_per_channel", 128, 128),
            ("mamba", 128, 64),
            ("mamba", 256, 64),
            ("lightning", 128, 128),
            ("gated_delta", 96, 192),
        )
    ],
    "selective_scan_rows_": [
        lambda dtype, case=case: make("selective_scan_rows_", case, dtype) for case in ("mixed", "wide")
    ],
}


class Recorder:
    """Replaces a kernel, and notes what it is launched with instead of running."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        assert all(axis > 0 for axis in grid)
        assert all(axis <= 65535 for axis in grid[1:]), "only the first axis of a grid may be long"

        def launch(*args: Any, **options: Any) -> None:
            self.launches.append((self.kernel, dict(zip(self.kernel.arg_names, args, strict=False)) | options))

        return launch


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    launches: list[tuple[Any, dict[str, Any]]] = []
    for module in kernel_modules():  # all of them: a launcher may call another file's
        kernels = {id(variant.kernel) for variant in module.variants()}
        for name, value in list(vars(module).items()):
            if id(value) in kernels:
                monkeypatch.setattr(module, name, Recorder(value, launches))
    return launches


def as_listed(value: Any) -> Any:
    """Return a run-time argument's type as a signature spells it; compile-time values stay."""
    names = {
        torch.float64: "fp64",
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.int8: "i8",
        torch.int32: "i32",
        torch.int64: "i64",
    }
    return f"*{names[value.dtype]}" if isinstance(value, Tensor) else value


def listed() -> Iterator[tuple[Any, dict[str, Any]]]:
    for variant in (variant for module in kernel_modules() for variant in module.variants()):
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.max_registers}
        # integers are of no fixed width in a launch: the compiler takes the narrowest that holds the value
        pointers = {name: kind for name, kind in variant.signature.items() if kind.startswith("*")}
        yield variant.kernel, {**pointers, **variant.constexprs, **options}


@each_value_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("op", "index"), [(op, index) for op, all_ in LAUNCHES.items() for index in range(len(all_))])
def test_launchers_ask_for_nothing_that_is_not_listed(op, index, dtype, monkeypatch):
    name, function = TRITON_FUNCTIONS[op]
    module = importlib.import_module(name)
    known = list(listed())
    launches = recorded(monkeypatch)
    getattr(module, function)(**LAUNCHES[op][index](dtype))
    assert launches
    assert_listed(launches, known)


def test_sampling_launches_every_kernel_that_it_lists(monkeypatch):
    sampling = importlib.import_module("specdec_fast.triton_kernels.sampling")
    known, kernels = list(listed()), {id(variant.kernel) for variant in sampling.variants()}
    launches = recorded(monkeypatch)
    sampling.philox4x32((torch.zeros(5, dtype=torch.int64),) * 4, (0, 2**32 - 1))
    name, function = TRITON_FUNCTIONS["verify_chain"]
    getattr(importlib.import_module(name), function)(**sampled_args(32_000, torch.float16))
    assert kernels <= {id(kernel) for kernel, _ in launches}
    assert_listed(launches, known)


def test_launch_check_rejects_another_tile(monkeypatch):
    module = importlib.import_module(TRITON_FUNCTIONS["compact_kv_"][0])
    known = list(listed())
    launches = recorded(monkeypatch)
    monkeypatch.setattr(module, "_TILE_BYTES", 8192)
    module.compact_kv_(**LAUNCHES["compact_kv_"][0](torch.float16))
    with pytest.raises(AssertionError):
        assert_listed(launches, known)


def assert_listed(launches: list[tuple[Any, dict[str, Any]]], known: list[tuple[Any, dict[str, Any]]]) -> None:
    for kernel, given in launches:
        assert set(given) <= {*kernel.arg_names, "num_warps", "num_stages", "maxnreg", "launch_pdl"}
        asked = {"maxnreg": None} | {name: as_listed(value) for name, value in given.items()}
        same_kernel = [options for other, options in known if other is kernel]
        assert any(all(asked[name] == value for name, value in options.items()) for options in same_kernel), asked
