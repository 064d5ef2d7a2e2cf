"""Every Triton kernel compiles to machine code for every target, without spills; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from bench.aot import modules_named
from bench.aot_.machine_code import Figures, worse
from specdec_fast.triton_kernels import kernel_modules
from support.compiler import Compiler
from support.op_checks import TRITON_FUNCTIONS
from support.source_tree import ROOT

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(3600)  # the first test waits for the compiler
# The slice is a few variants of every file for one target, without generated kernels, which take long.
FEW = {
    "append_kv": r"bf16_(8x128|within_3x20)",
    "compact_kv": "bf16_",
    "conv_rows": "bf16_4_bias_silu",
    "grouped_linear": "bf16_768",
    "grouped_quantized_linear": "bf16_int4_32x8",
    "linear": "bf16_1024x151936_64x16",
    "linear_attention_rows": "bf16_mamba_128x64",
    "noise_words": "tokens",
    "paged_attention": "bf16_dim128_group4$",
    "quantized_linear": r"bf16_(int4_16x8|int8_a8_16x8)",
    "realign_kv": r"16bit_dim128$",
    "sampling": r"(rows_trees|pick_50_tiles)",
    "sampling_edits": r"(widen_bf16_masked|bias|penalties)$",
    "selective_scan_rows": "bf16_16_skip",
    "verify_chain": r"(chunk_bf16_|accept_19_chunks|walk)",
}
SLICE = "|".join(rf"{file}\.{names}" for file, names in FEW.items())
# Disassembling takes half a second for each.
DISASSEMBLED = r"paged_attention\.|linear\.bf16_1024x|linear_attention_rows\.|(grouped_)?quantized_linear\."
QUANTIZED = r"(grouped_)?quantized_linear\."
ALL_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
KERNEL_FILES = [module.__name__ for module in kernel_modules()]
REPORTS = [
    pytest.param((("sm_90",), KERNEL_FILES, SLICE, DISASSEMBLED), id="slice", marks=pytest.mark.grid),
    pytest.param((ALL_TARGETS, KERNEL_FILES, QUANTIZED, ""), id="quantized", marks=pytest.mark.grid),
    pytest.param((ALL_TARGETS, [], rf"(?!{QUANTIZED})", ""), id="others", marks=pytest.mark.grid),
]
BASELINE = ROOT / "bench/results/aot.json"


def run_aot(compiler: Compiler, *options: str) -> tuple[int, dict[str, Any]]:
    """Run ``bench.aot``; return its exit status and its report."""
    status, printed, errors = compiler.result("import sys; from bench.aot import main; sys.exit(main())", *options)
    assert printed, errors
    return status, json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="session", params=REPORTS)
def report(request: pytest.FixtureRequest, compiler: Compiler) -> dict[str, Any]:
    """One run over all kernels, compared with the committed one if that is of this Triton."""
    targets, modules, kernels, instructions = request.param
    jobs = "1" if kernels == SLICE else str(os.cpu_count() or 1)  # few are compiled sooner than a process starts
    options = ["--targets", ",".join(targets), "--kernels", kernels, "--instructions", instructions, "--jobs", jobs]
    options += ["--modules", ",".join(modules)] if modules else []
    if json.loads(BASELINE.read_text())["triton"] == triton.__version__:
        options += ["--baseline", str(BASELINE)]
    returncode, result = run_aot(compiler, *options)
    assert returncode == 0, (failing(result), result["got_worse"])
    return result


def need_others(report: dict[str, Any]) -> None:
    """Skip a test of kernels that the report of quantised linears does not have."""
    if all(re.match(QUANTIZED, row["kernel"]) for row in report["kernels"]):
        pytest.skip("kernels of the other report")


def failing(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the compilations that fail a report; spills on AMD are reported only."""
    return [row for row in result["kernels"] if row["error"] or (row["spill_bytes"] and row["target"][:3] == "sm_")]


@pytest.mark.grid
def test_the_committed_report_has_every_kernel():
    """If not: ``python -m bench.aot --json bench/results/aot.json``. Without its row, a kernel may get worse."""
    known = {(row["kernel"], row["target"]) for row in json.loads(BASELINE.read_text())["kernels"]}
    kernels = [
        f"{module.__name__.rpartition('.')[2]}.{variant.name}"
        for module in modules_named()
        for variant in module.variants()
    ]
    assert known == {(kernel, target) for kernel in kernels for target in ALL_TARGETS}


def test_every_kernel_file_is_compiled_for_every_target(report, request):
    compiled = {(row["kernel"].split(".")[0], row["target"]) for row in report["kernels"]}
    files = {module.rpartition(".")[2] for module, _ in TRITON_FUNCTIONS.values()}
    files |= {"sampling", "sampling_edits"}  # parts of verify_chain
    quantized = {file for file in files if re.match(QUANTIZED, f"{file}.")}
    assert quantized
    if request.node.callspec.id == "quantized":
        files = quantized
    elif request.node.callspec.id == "others":
        files = files - quantized
    assert compiled == {(file, target) for file in files for target in report["targets"]}


def test_nothing_spills_or_fails(report):
    assert report["failures"] == 0
    assert failing(report) == []


def test_kernels_use_no_local_memory_and_multiply_on_tensor_cores(report):
    """Of those that are disassembled. fp32 is multiplied without tensor cores on NVIDIA, to keep its precision."""
    rows = [row for row in report["kernels"] if row["target"].startswith("sm_") and row["local_accesses"] is not None]
    assert rows
    assert [row for row in rows if row["local_accesses"]] == []
    dots = [
        row
        for row in rows
        if row["kernel"].startswith(("linear.", "paged_attention.", "quantized_", "grouped_quantized_"))
        and "path" not in row
    ]
    dots = [row for row in dots if re.match(r"\w+\.(bf16|fp16)_(?!.*_merge|round)", row["kernel"])]
    assert dots
    assert [row for row in dots if not row["tensor_instructions"]] == []
    narrow = ("unaligned", "2100", "quantized_")  # its smallest tiles are 8 bytes for each thread
    aligned = [row for row in dots if not any(part in row["kernel"] for part in narrow)]
    assert [row for row in aligned if not row["wide_loads"]] == []


def test_moves_in_place_wait_between_loading_and_storing(report):
    """The interpreter has one thread per program, so only the machine code shows a missing barrier."""
    need_others(report)
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
    need_others(report)
    rows = [row for row in report["kernels"] if row["kernel"].startswith(file) and row["target"].startswith("sm_")]
    usual = [row for row in rows if not row["kernel"].endswith(NARROW)]
    assert usual
    assert [row for row in usual if row["widest_access"] != 16] == []
    unaligned = [row for row in rows if row["kernel"].endswith(("unaligned", "odd_vocabulary"))]
    assert [row for row in unaligned if row["widest_access"] > 8] == [], "a vector that is not aligned is a fault"


@pytest.mark.grid
def test_report_rejects_a_spill_and_what_does_not_compile_or_got_worse(compiler, tmp_path):
    before = {"kernel": "spilling_kernel.within", "target": "sm_90", "registers": 1, "spill_bytes": 0, "wide_loads": 9}
    baseline = tmp_path / "before.json"
    baseline.write_text(json.dumps({"triton": triton.__version__, "kernels": [before]}))
    options = ("--modules", "support.spilling_kernel", "--targets", "sm_90", "--baseline", str(baseline))
    returncode, result = run_aot(compiler, *options)
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
