"""Every Triton kernel compiles to machine code for every target, without spills; no GPU is needed for that."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.aot_.machine_code import Figures, worse
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.ops import all_ops
from specdec_fast.triton_kernels import kernel_modules
from support.op_cases import make
from support.source_tree import ROOT

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(3600)  # the first test waits for the compiler
# ``make test`` compiles every kernel for one target and one type of numbers, and the slow ones in few variants.
SLOW = r"paged_attention\.|sampling\.threshold_|linear\."
FEW_LINEARS = r"linear\.bf16_(1024x151936_[48]|896x896_128_128_bias_4|unaligned)$"
SLICE = rf"(?!{SLOW}|.*(fp16|fp32|32bit)_)|paged_attention\.bf16_dim128_group4$|sampling\.threshold_bf16_32_"
SLICE += rf"|{FEW_LINEARS}"
DISASSEMBLED = r"paged_attention\.|linear\.bf16_1024x"  # takes half a second for each
REPORTS = [
    pytest.param((("sm_90",), SLICE, DISASSEMBLED), id="slice"),
    pytest.param((("sm_80", "sm_90", "sm_100", "gfx942"), "", ""), id="all", marks=pytest.mark.grid),
]
BASELINE = ROOT / "bench/results/aot.json"
KERNELS = {
    op.name: op.implementations["triton"].split(":") for op in all_ops().values() if "triton" in op.implementations
}


def run_aot(*options: str) -> tuple[int, dict[str, Any]]:
    """Run ``bench.aot`` in a process of its own, because this one has the interpreter instead of the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    command = [sys.executable, "-m", "bench.aot", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session", params=REPORTS)
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One run over all kernels, compared with the committed one if that is of this Triton."""
    targets, kernels, instructions = request.param
    jobs = "1" if kernels else str(os.cpu_count() or 1)  # few are compiled sooner than a process starts
    options = ["--targets", ",".join(targets), "--kernels", kernels, "--instructions", instructions, "--jobs", jobs]
    if json.loads(BASELINE.read_text())["triton"] == triton.__version__:
        options += ["--baseline", str(BASELINE)]
    returncode, result = run_aot(*options)
    assert returncode == 0, (failing(result), result["got_worse"])
    return result


def failing(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the compilations that fail a report; spills on AMD are reported only."""
    return [row for row in result["kernels"] if row["error"] or (row["spill_bytes"] and row["target"][:3] == "sm_")]


@pytest.mark.grid
def test_the_committed_report_has_every_kernel():
    """If not: ``python -m bench.aot --json bench/results/aot.json``. Without its row, a kernel may get worse."""
    known = {(row["kernel"], row["target"]) for row in json.loads(BASELINE.read_text())["kernels"]}
    kernels = [
        f"{module.__name__.rpartition('.')[2]}.{variant.name}"
        for module in kernel_modules()
        for variant in module.variants()
    ]
    assert known == {(kernel, target) for kernel in kernels for target in ("sm_80", "sm_90", "sm_100", "gfx942")}


def test_every_kernel_file_is_compiled_for_every_target(report):
    compiled = {(row["kernel"].split(".")[0], row["target"]) for row in report["kernels"]}
    files = {module.rpartition(".")[2] for module, _ in KERNELS.values()} | {"sampling"}  # it is part of verify_chain
    assert compiled == {(file, target) for file in files for target in report["targets"]}


def test_nothing_spills_or_fails(report):
    assert report["failures"] == 0
    assert failing(report) == []


def test_kernels_use_no_local_memory_and_multiply_on_tensor_cores(report):
    """Of those that are disassembled. fp32 is multiplied without tensor cores on NVIDIA, to keep its precision."""
    rows = [row for row in report["kernels"] if row["target"].startswith("sm_") and row["local_accesses"] is not None]
    assert rows
    assert [row for row in rows if row["local_accesses"]] == []
    dots = [row for row in rows if row["kernel"].startswith(("linear.", "paged_attention.")) and "path" not in row]
    dots = [row for row in dots if re.match(r"\w+\.(bf16|fp16)_(?!.*_merge)", row["kernel"])]
    assert dots
    assert [row for row in dots if not row["tensor_instructions"]] == []
    aligned = [row for row in dots if "unaligned" not in row["kernel"] and "2100" not in row["kernel"]]
    assert [row for row in aligned if not row["wide_loads"]] == []


def test_moves_in_place_wait_between_loading_and_storing(report):
    """The interpreter has one thread per program, so only the machine code shows a missing barrier."""
    moving = [row for row in report["kernels"] if row["kernel"].startswith(("compact_kv.", "realign_kv."))]
    assert moving
    assert [row for row in moving if row["barriers"] < 1] == []


# Vectors of 16 bytes need addresses and strides that are multiples of 16 bytes; in these sizes they are not.
NARROW = ("x20", "entry60", "dim20", "unaligned", "odd_vocabulary")


@pytest.mark.parametrize("file", ["append_kv.", "compact_kv.", "realign_kv.", "verify_chain.chunk"])
def test_copies_and_scans_use_the_widest_access(report, file):
    """A missing hint for the compiler costs half the bandwidth, and no test of values would notice.

    On NVIDIA: AMD's warps are twice as wide, and small tiles leave each of their threads less than 16 bytes.
    """
    rows = [row for row in report["kernels"] if row["kernel"].startswith(file) and row["target"].startswith("sm_")]
    usual = [row for row in rows if not row["kernel"].endswith(NARROW)]
    assert usual
    assert [row for row in usual if row["widest_access"] != 16] == []
    unaligned = [row for row in rows if row["kernel"].endswith(("unaligned", "odd_vocabulary"))]
    assert [row for row in unaligned if row["widest_access"] > 8] == [], "a vector that is not aligned is a fault"


def test_report_rejects_a_spill_and_what_does_not_compile_or_got_worse(tmp_path):
    before = {"kernel": "spilling_kernel.within", "target": "sm_90", "registers": 1, "spill_bytes": 0, "wide_loads": 9}
    baseline = tmp_path / "before.json"
    baseline.write_text(json.dumps({"triton": triton.__version__, "kernels": [before]}))
    options = ("--modules", "support.spilling_kernel", "--targets", "sm_90", "--baseline", str(baseline))
    returncode, result = run_aot(*options)
    rows = {row["kernel"].split(".")[1]: row for row in result["kernels"]}
    assert returncode == 1
    assert result["failures"] == 3
    (got_worse,) = result["got_worse"].values()
    assert [figure.split()[0] for figure in got_worse] == ["registers", "wide_loads"]
    assert rows["within"]["spill_bytes"] == 0
    assert rows["hoards"]["spill_bytes"] > 0
    assert rows["hoards"]["local_accesses"] > 0
    assert rows["within"]["local_accesses"] == 0
    assert rows["broken"]["error"]


FIGURES = {"registers": 40, "spill_bytes": 0, "local_accesses": 0, "wide_loads": 8, "tensor_instructions": 4}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"registers": 39, "wide_loads": 9}, []),
        ({"registers": 41}, ["registers 40 -> 41"]),
        ({"spill_bytes": 8, "local_accesses": 2}, ["spill_bytes 0 -> 8", "local_accesses 0 -> 2"]),
        ({"tensor_instructions": 0}, ["tensor_instructions 4 -> 0"]),
        ({"wide_loads": None}, []),
    ],
)
def test_worse_is_more_of_what_costs_and_less_of_what_helps(change, found):
    assert worse(Figures(**FIGURES | change), FIGURES) == found


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


# The sizes that the kernels' variants() name, where the sizes are part of a compilation.
LAUNCHES: dict[str, list[Callable[[torch.dtype], dict[str, Any]]]] = {
    "append_kv_": [
        lambda dtype, sizes=sizes: append_args(*sizes, dtype) for sizes in ((8, 128, 128), (3, 20, 20), (16, 192, 128))
    ],
    "verify_chain": [
        lambda dtype, v=v, args=args: args(v, dtype)
        for args in (verify_args, sampled_args)
        for v in (32_000, 151_936, 262_144)
    ],
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
    "compact_kv_": [lambda dtype: compact_args(16, 8, 128, dtype), lambda dtype: compact_args(4, 3, 20, dtype)],
    "realign_kv_": [
        lambda dtype, d=d, o=o: realign_args(d, o, dtype) for d, o in ((128, 0), (64, 0), (20, 0), (128, 1))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("op", "index"), [(op, index) for op, all_ in LAUNCHES.items() for index in range(len(all_))])
def test_launchers_ask_for_nothing_that_is_not_listed(op, index, dtype, monkeypatch):
    name, function = KERNELS[op]
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
    name, function = KERNELS["verify_chain"]
    getattr(importlib.import_module(name), function)(**sampled_args(32_000, torch.float16))
    assert kernels <= {id(kernel) for kernel, _ in launches}
    assert_listed(launches, known)


def test_launch_check_rejects_another_tile(monkeypatch):
    module = importlib.import_module(KERNELS["compact_kv_"][0])
    known = list(listed())
    launches = recorded(monkeypatch)
    monkeypatch.setattr(module, "_TILE_BYTES", 8192)
    module.compact_kv_(**LAUNCHES["compact_kv_"][0](torch.float16))
    with pytest.raises(AssertionError):
        assert_listed(launches, known)


def assert_listed(launches: list[tuple[Any, dict[str, Any]]], known: list[tuple[Any, dict[str, Any]]]) -> None:
    for kernel, given in launches:
        assert set(given) <= {*kernel.arg_names, "num_warps", "num_stages", "maxnreg"}
        asked = {"maxnreg": None} | {name: as_listed(value) for name, value in given.items()}
        same_kernel = [options for other, options in known if other is kernel]
        assert any(all(asked[name] == value for name, value in options.items()) for options in same_kernel), asked
